"""A complete ``cloister local`` with the demo model."""

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from ray_job.demo_model import make_demo_model
from tests.acceptance.local_stack import LocalStack

REPOSITORY = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def stack(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalStack]:
    """A stack that runs during the tests of a module."""
    model = Path(os.environ.get("CLOISTER_TEST_MODEL", REPOSITORY / "build" / "demo_model"))
    make_demo_model(model)
    stack = LocalStack(Path(tmp_path_factory.mktemp("stack")), model)
    try:
        stack.start()
        yield stack
    finally:
        stack.stop()
