"""Fixtures of all tests of the Pulumi program: no network, and recordings of the example stacks.

A test runs a program or a single component with ``record(lambda: MyComponent(...))`` and examines the recorded
resources::

    recording = record(lambda: Database("database", args))
    secret = recording.named("database-credentials")
    assert secret.secrets == {("stringData", "password")}
"""

import functools
from collections.abc import Iterator
from pathlib import Path

import pytest
from pytest_socket import disable_socket, enable_socket

from infra.rendering.recording import Recording
from infra.rendering.render import record_stack

ROOT = Path(__file__).parents[2]
STACK_FILES = sorted((ROOT / "Pulumi.dev.yaml", *(ROOT / "docs/stacks").glob("Pulumi.*.yaml")))


@functools.cache
def _recorded(stack_file: Path) -> Recording:
    return record_stack(stack_file)


@pytest.fixture(params=STACK_FILES, ids=[path.stem.removeprefix("Pulumi.") for path in STACK_FILES])
def stack_file(request: pytest.FixtureRequest) -> Path:
    """Each stack file of the repository: the one in the root and the examples of the docs."""
    path: Path = request.param
    return path


@pytest.fixture
def example(stack_file: Path) -> Recording:
    """The resources that the program requests for each stack file of the repository."""
    return _recorded(stack_file)


@pytest.fixture(autouse=True)
def _no_network(request: pytest.FixtureRequest) -> Iterator[None]:
    # asyncio's own event loop needs a socket pair.
    if request.node.get_closest_marker("local_network") is None:
        disable_socket(allow_unix_socket=True)
    yield
    enable_socket()
