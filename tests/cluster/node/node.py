"""One node: its namespaces, containerd and kubelet."""

from tests.cluster.api import KubernetesApi
from tests.cluster.control_plane import ControlPlane
from tests.cluster.images.image import Image
from tests.cluster.images.unpacking import link_unpacked
from tests.cluster.node.cgroups import make_cgroup
from tests.cluster.node.containerd import containerd
from tests.cluster.node.kubelet import kubelet
from tests.cluster.node.layout import NodeLayout
from tests.cluster.node.namespaces import namespaces
from tests.cluster.node.network import make_bridge, write_pod_network
from tests.cluster.node.waiting import wait_until
from tests.cluster.processes import Process


class Node:
    """A node. Initially nothing of it exists or runs.

    Attributes:
        name: name of the node.
        address: address of the node.
    """

    _namespaces: Process
    _kubelet: Process

    def __init__(self, layout: NodeLayout) -> None:
        self.name = layout.name
        self.address = layout.address
        self._layout = layout
        self._started: list[Process] = []

    def make(self) -> None:
        """Create its directories, network and cgroup."""
        self._layout.state.mkdir()
        self._layout.run.mkdir()
        make_cgroup(self._layout.cgroup)
        make_bridge(self._layout)
        write_pod_network(self._layout)

    def start_runtime(self, pause: Image) -> None:
        """Start containerd with all images that are built; it needs no API server yet.

        Args:
            pause: image that holds a pod's network.
        """
        link_unpacked(pause.layout.parent, self._layout.images)
        self._namespaces = self._start(namespaces(self._layout))
        self._start(containerd(self._layout, self._namespaces, pause_image=pause.reference))

    def join(self, cluster: ControlPlane) -> None:
        """Start the kubelet, which registers the node."""
        self._kubelet = self._start(kubelet(cluster, self._layout, self._namespaces))

    def start_kubelet(self) -> None:
        """Start the kubelet after it was stopped."""
        self._kubelet.start()

    def stop_kubelet(self) -> None:
        """Stop the kubelet; pods continue to run."""
        self._kubelet.stop()

    def restart_kubelet(self, api: KubernetesApi) -> None:
        """Restart the kubelet, and return when it has renewed its lease."""
        self.stop_kubelet()
        before = _last_heartbeat(api, self.name)
        self.start_kubelet()
        wait_until(lambda: _last_heartbeat(api, self.name) != before, f"{self.name} lives", lambda: before, within_s=60)

    def stop(self) -> None:
        """Stop everything that runs on the node, including pods."""
        for each in self._started:
            # The first process of a PID namespace receives only SIGKILL from outside.
            each.stop(timeout_s=0)

    def _start(self, process: Process) -> Process:
        self._started.append(process)
        process.start()
        return process


def _last_heartbeat(api: KubernetesApi, name: str) -> str:
    """Return the time of the kubelet's last heartbeat."""
    lease = api.find("coordination.k8s.io/v1", "Lease", name, "kube-node-lease")
    return str(lease and lease["spec"]["renewTime"])
