"""Where everything of the cluster is: two fixed directories, so that it is found again after a crash."""

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
# Every network device and cgroup of a node begins with it.
PREFIX: Final = "cloister"
# Of what is called as a program: containerd, kubelet and kube-proxy call others in turn.
PATH: Final = "/usr/sbin:/usr/bin:/sbin:/bin"


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeLayout:
    """What belongs to one node.

    Attributes:
        name: of the node.
        number: from 1; its networks and devices have it.
    """

    name: str
    number: int

    @property
    def state(self) -> Path:
        """On the disk."""
        return STATE / self.name

    @property
    def images(self) -> Path:
        """Images and the root directories of containers."""
        return self.state / "containerd"

    @property
    def run(self) -> Path:
        """In memory."""
        return RUN / self.name

    @property
    def socket(self) -> Path:
        """Of containerd."""
        return self.run / "containerd.sock"

    @property
    def bridge(self) -> str:
        """The network device that its pods are on."""
        return f"{PREFIX}{self.number}"

    @property
    def address(self) -> str:
        """The node's, which is that of the bridge."""
        return f"10.201.{self.number}.1"

    @property
    def pod_network(self) -> str:
        """The addresses of its pods."""
        return f"10.201.{self.number}.0/24"

    @property
    def cgroup(self) -> str:
        """Below which all of its pods are."""
        return f"{PREFIX}-{self.name}"


NODES: Final = (NodeLayout(name="node-1", number=1), NodeLayout(name="node-2", number=2))
