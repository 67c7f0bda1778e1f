"""A complete ``cloister local`` with the demo model."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from ray_job.demo_model import make_demo_model
from tests.acceptance.local_stack import MODEL, LocalStack


@pytest.fixture(scope="module")
def stack(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalStack]:
    """A stack that runs during the tests of a module."""
    make_demo_model(MODEL)
    stack = LocalStack(Path(tmp_path_factory.mktemp("stack")), MODEL)
    try:
        stack.start()
        yield stack
    finally:
        stack.stop()
