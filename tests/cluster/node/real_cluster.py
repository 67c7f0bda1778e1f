"""A whole Kubernetes with two real nodes on this machine."""

from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

from tests.cluster.api import KubernetesApi
from tests.cluster.control_plane import control_plane_parts
from tests.cluster.images.image import Image
from tests.cluster.node.dns import dns_manifests
from tests.cluster.node.host import HostError, missing_programs, prepare, remove_everything, why_not
from tests.cluster.node.kube_proxy import kube_proxy
from tests.cluster.node.layout import CONTROL_PLANE, NODES
from tests.cluster.node.network import allow_forwarding
from tests.cluster.node.node import Node
from tests.cluster.node.storage import make_volumes
from tests.cluster.node.waiting import wait_until_available, wait_until_node_ready

_SYSTEM = NODES[0]


class RealCluster:
    """A running cluster.

    Attributes:
        control_plane: control plane of the cluster.
        nodes: nodes by name; ``node-1`` has the volumes and DNS.
    """

    def __init__(self, programs: Path) -> None:
        CONTROL_PLANE.mkdir()
        self.nodes: Mapping[str, Node] = {layout.name: Node(layout) for layout in NODES}
        self.control_plane, self._processes = control_plane_parts(
            programs, CONTROL_PLANE, address=_SYSTEM.address, nodes=[*self.nodes]
        )

    def start(self, images: Mapping[str, Image]) -> None:
        """Start all processes, and return when pods can run."""
        for node in self.nodes.values():
            node.make()
        allow_forwarding(_SYSTEM)
        with ThreadPoolExecutor() as pool:
            runtimes = [pool.submit(node.start_runtime, images["pause"]) for node in self.nodes.values()]
            for each in self._processes:
                each.start()
            for runtime in runtimes:
                runtime.result()
        for node in self.nodes.values():
            node.join(self.control_plane)
        with KubernetesApi(self.control_plane.kubeconfig) as api:
            for name in self.nodes:
                wait_until_node_ready(api, name)
            proxy = kube_proxy(self.control_plane, _SYSTEM)
            self._processes.append(proxy)
            proxy.start()
            for body in (*make_volumes(_SYSTEM), *dns_manifests(_SYSTEM, images["coredns"].reference)):
                api.create(body)
            wait_until_available(api, "coredns", "kube-system")

    def stop(self) -> None:
        """Stop all processes; their files stay."""
        for node in self.nodes.values():
            node.stop()
        for each in reversed(self._processes):
            each.stop()


@contextmanager
def real_cluster(programs: Path, images: Mapping[str, Image]) -> Iterator[RealCluster]:
    """Run a new cluster, ready for pods, and remove it afterwards.

    Args:
        programs: the ``bin`` directory of ``build.py``.
        images: result of ``build_images``. Pods can use these images and no others.

    Raises:
        HostError: the cluster cannot run here; the message contains what to do.
    """
    cluster = start_cluster(programs, images)
    try:
        yield cluster
    finally:
        cluster.stop()
        remove_everything()


def start_cluster(programs: Path, images: Mapping[str, Image]) -> RealCluster:
    """Start a cluster that outlives this process, until ``remove_everything``; otherwise as ``real_cluster``."""
    if reason := why_not() or missing_programs(programs):
        raise HostError(reason)
    prepare()
    cluster = RealCluster(programs)
    try:
        cluster.start(images)
    except BaseException:
        cluster.stop()
        remove_everything()
        raise
    return cluster
