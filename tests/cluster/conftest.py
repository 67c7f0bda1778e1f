"""A real control plane for the tests of this folder, which run by `make test-cluster` only."""

import os
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.cluster.api import KubernetesApi
from tests.cluster.build import DEFAULT_OUTPUT
from tests.cluster.control_plane import ControlPlane, control_plane
from tests.cluster.deployed import Deployed, deployed_stack
from tests.cluster.kuberay import install_crds
from tests.cluster.nodes import add_node, deleted_pods_end, wait_until_untainted

# The programs take minutes to build, so that an ordinary run of the tests does not even look at these.
collect_ignore_glob = [] if os.environ.get("CLOISTER_CLUSTER_TESTS") else ["test_*.py"]


@pytest.fixture(scope="session")
def programs() -> Path:
    """The directory above ``bin``."""
    return Path(os.environ.get("CLOISTER_CLUSTER_PROGRAMS") or DEFAULT_OUTPUT)


@pytest.fixture(scope="session")
def cluster(programs: Path) -> Iterator[ControlPlane]:
    """A cluster with KubeRay's definitions and the two nodes that ``Pulumi.dev.yaml`` names."""
    with (
        tempfile.TemporaryDirectory(prefix="cluster-") as directory,
        control_plane(programs / "bin", Path(directory)) as running,
        KubernetesApi(running.kubeconfig) as api,
    ):
        install_crds(api)
        for name in ("node-1", "node-2"):
            add_node(api, name, {"cpu": "8", "memory": "32Gi"})
            wait_until_untainted(api, name)
        with deleted_pods_end(api):
            yield running


@pytest.fixture(scope="session")
def api(cluster: ControlPlane) -> Iterator[KubernetesApi]:
    """The API server, as the administrator."""
    with KubernetesApi(cluster.kubeconfig) as opened:
        yield opened


@pytest.fixture(scope="module")
def deployed(cluster: ControlPlane, api: KubernetesApi) -> Iterator[Deployed]:
    """The stack ``dev`` without its pods."""
    with deployed_stack(cluster, api) as stack:
        yield stack
