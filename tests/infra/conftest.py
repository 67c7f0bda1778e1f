"""Fixtures of all tests of the Pulumi program: no network, and recordings of the example stacks.

A test runs a program or a single component with ``record(lambda: MyComponent(...))`` and examines the recorded
resources::

    recording = record(lambda: Database("database", args))
    secret = recording.named("database-credentials")
    assert secret.secrets == {("stringData", "password")}
"""

from collections.abc import Iterator
from pathlib import Path

import pytest
from pytest_socket import disable_socket, enable_socket

from infra.rendering.recording import Recording
from tests.infra.previewed_stacks import FILES, STACKS, preview


@pytest.fixture(params=FILES, ids=STACKS)
def stack_file(request: pytest.FixtureRequest) -> Path:
    """Each stack file of the repository: the one in the root and the examples of the docs."""
    path: Path = request.param
    return path


@pytest.fixture
def example(stack_file: Path) -> Recording:
    """The resources that the program requests for each stack file of the repository."""
    return preview(STACKS[FILES.index(stack_file)])


@pytest.fixture(autouse=True)
def _no_network(request: pytest.FixtureRequest) -> Iterator[None]:
    # asyncio's own event loop needs a socket pair.
    if request.node.get_closest_marker("local_network") is None:
        disable_socket(allow_unix_socket=True)
    yield
    enable_socket()
