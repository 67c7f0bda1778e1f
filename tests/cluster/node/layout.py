"""Places of all files of the cluster: two fixed directories, so that they can be found after a crash."""

from dataclasses import dataclass
from pathlib import Path
from typing import Final

STATE: Final = Path("/var/lib/cloister-cluster")
RUN: Final = Path("/run/cloister-cluster")
CONTROL_PLANE: Final = STATE / "control-plane"
KUBECONFIG: Final = CONTROL_PLANE / "admin.kubeconfig"
VOLUMES: Final = STATE / "volumes"
POD_NETWORKS: Final = "10.201.0.0/16"
CLUSTER_DNS: Final = "10.96.0.10"
CLUSTER_DOMAIN: Final = "cluster.local"
# Prefix of all network devices and cgroups of nodes.
PREFIX: Final = "cloister"
# PATH of programs that call others: containerd, kubelet and kube-proxy.
PATH: Final = "/usr/sbin:/usr/bin:/sbin:/bin"


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeLayout:
    """Files, network and cgroup of one node.

    Attributes:
        name: name of the node.
        number: from 1; part of its networks and devices.
    """

    name: str
    number: int

    @property
    def state(self) -> Path:
        """Directory on disk."""
        return STATE / self.name

    @property
    def images(self) -> Path:
        """Directory of images and of the root file systems of containers."""
        return self.state / "containerd"

    @property
    def run(self) -> Path:
        """Directory in memory."""
        return RUN / self.name

    @property
    def socket(self) -> Path:
        """Socket of containerd."""
        return self.run / "containerd.sock"

    @property
    def bridge(self) -> str:
        """Network device of its pods."""
        return f"{PREFIX}{self.number}"

    @property
    def address(self) -> str:
        """Address of the node, which is that of the bridge."""
        return f"10.201.{self.number}.1"

    @property
    def pod_network(self) -> str:
        """Addresses of its pods."""
        return f"10.201.{self.number}.0/24"

    @property
    def cgroup(self) -> str:
        """Parent cgroup of all its pods."""
        return f"{PREFIX}-{self.name}"


NODES: Final = (NodeLayout(name="node-1", number=1), NodeLayout(name="node-2", number=2))
