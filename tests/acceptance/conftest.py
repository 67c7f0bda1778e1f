"""A complete ``cloister local`` with the demo model."""

from collections.abc import Iterator

import pytest

from tests.acceptance.local_stack import LocalStack, started


@pytest.fixture(scope="module")
def stack(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalStack]:
    """A stack that runs during the tests of a module."""
    with started(LocalStack, tmp_path_factory.mktemp("stack")) as stack:
        yield stack
