"""Fixtures with a real control plane; `make test-cluster` runs the tests of this directory."""

import os
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import NoReturn

import pytest

from ray_job.demo_model import make_demo_model
from tests.cluster.api import KubernetesApi
from tests.cluster.build import CHECKOUT, DEFAULT_OUTPUT
from tests.cluster.control_plane import ControlPlane, control_plane
from tests.cluster.definitions import install_definitions
from tests.cluster.deployed import Deployed, deployed_stack
from tests.cluster.images.build import build_images
from tests.cluster.images.image import Image
from tests.cluster.kuberay import install_crds
from tests.cluster.node.host import HostError
from tests.cluster.node.real_cluster import RealCluster, real_cluster
from tests.cluster.nodes import add_node, deleted_pods_end, wait_until_untainted
from tests.cluster.playground import check, check_parts
from tests.cluster.running_batches import RunningBatches
from tests.cluster.whole_stack import WholeStack, namespaces_left, running_stack

# Building the programs takes minutes, so other test runs do not collect these tests.
collect_ignore_glob = [] if os.environ.get("CLOISTER_CLUSTER_TESTS") else ["test_*.py"]


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark tests that need root, and put tests on the real cluster last.

    A machine can have one real cluster only, and some tests start their own.
    """
    ours = [item for item in items if isinstance(item, pytest.Function) and item.get_closest_marker("cluster")]
    for item in ours:
        if "root" in item.fixturenames:
            item.add_marker("nodes")
    items.sort(key=lambda item: item in ours and "whole_cluster" in getattr(item, "fixturenames", ()))


@pytest.fixture(scope="session")
def programs() -> Path:
    """Directory above ``bin``."""
    return DEFAULT_OUTPUT


@pytest.fixture(scope="session")
def cluster(programs: Path) -> Iterator[ControlPlane]:
    """Cluster with the definitions of KubeRay, Cilium and Gateway API, and the two nodes of ``Pulumi.dev.yaml``."""
    with (
        tempfile.TemporaryDirectory(prefix="cluster-") as directory,
        control_plane(programs / "bin", Path(directory)) as running,
        KubernetesApi(running.kubeconfig) as api,
    ):
        install_crds(api)
        install_definitions(api)
        for name in ("node-1", "node-2"):
            add_node(api, name, {"cpu": "8", "memory": "32Gi"})
            wait_until_untainted(api, name)
        with deleted_pods_end(api):
            yield running


def _leave_out(reason: str) -> NoReturn:
    """Skip the test, or fail it where the environment requires real nodes."""
    if os.environ.get("CLOISTER_NODES_REQUIRED"):
        pytest.fail(reason)
    pytest.skip(reason)


@pytest.fixture(scope="session")
def root(programs: Path) -> None:
    """Skip tests on a machine that cannot run real nodes."""
    try:
        check(programs)
    except HostError as error:
        _leave_out(str(error))


@pytest.fixture(scope="session")
def images(programs: Path) -> Mapping[str, Image]:
    """All images by name; tests are skipped on a machine that cannot build them."""
    try:
        check_parts(programs)
    except HostError as error:
        _leave_out(str(error))
    return build_images(programs / "images", programs / "bin")


@pytest.fixture(scope="session")
def whole_cluster(root: None, programs: Path, images: Mapping[str, Image]) -> Iterator[RealCluster]:
    """Cluster with two real nodes; the run fails if anything of it remains afterwards."""
    del root
    with real_cluster(programs / "bin", images) as running:
        yield running


@pytest.fixture(scope="session")
def node_api(whole_cluster: RealCluster) -> Iterator[KubernetesApi]:
    """API server of the cluster with real nodes, with administrator rights."""
    with KubernetesApi(whole_cluster.control_plane.kubeconfig) as opened:
        yield opened


@pytest.fixture(scope="session")
def demo_model() -> Path:
    """Demo model, created once per checkout (or CLOISTER_TEST_MODEL)."""
    directory = Path(os.environ.get("CLOISTER_TEST_MODEL", CHECKOUT / "build" / "demo_model"))
    make_demo_model(directory)
    return directory


@pytest.fixture(scope="session")
def whole_stack(
    whole_cluster: RealCluster,
    images: Mapping[str, Image],
    programs: Path,
    demo_model: Path,
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[WholeStack]:
    """Running stack ``dev``; destroyed at the end without leaving namespaces."""
    directory = tmp_path_factory.mktemp("pulumi")
    with running_stack(whole_cluster, images, programs, directory, demo_model) as running:
        yield running
    with KubernetesApi(whole_cluster.control_plane.kubeconfig) as opened:
        assert namespaces_left(opened) == []


@pytest.fixture(scope="session")
def batches(whole_stack: WholeStack) -> RunningBatches:
    """Source of batches that are being worked on."""
    return RunningBatches(whole_stack)


@pytest.fixture(scope="session")
def api(cluster: ControlPlane) -> Iterator[KubernetesApi]:
    """API server with administrator rights."""
    with KubernetesApi(cluster.kubeconfig) as opened:
        yield opened


@pytest.fixture(scope="module")
def deployed(cluster: ControlPlane, api: KubernetesApi) -> Iterator[Deployed]:
    """Stack ``dev`` without its pods."""
    with deployed_stack(cluster, api) as stack:
        yield stack
