"""kube-proxy: the rules by which a Service's address leads to its pods. One serves all nodes of the machine."""

from tests.cluster.access import PROXY
from tests.cluster.control_plane import ControlPlane
from tests.cluster.node.layout import PATH, POD_NETWORKS, NodeLayout
from tests.cluster.ports import LOOPBACK, answers, free_ports
from tests.cluster.processes import Process


def kube_proxy(cluster: ControlPlane, node: NodeLayout) -> Process:
    """The process.

    Args:
        cluster: with the node registered.
        node: as which it runs.
    """
    health, metrics = free_ports(2)
    kubeconfig = cluster.access.kubeconfig(cluster.server, cluster.ca_file, user=PROXY)
    command = [
        str(cluster.bin / "kube-proxy"),
        f"--kubeconfig={kubeconfig}",
        "--proxy-mode=iptables",
        f"--hostname-override={node.name}",
        f"--cluster-cidr={POD_NETWORKS}",
        f"--healthz-bind-address={LOOPBACK}:{health}",
        f"--metrics-bind-address={LOOPBACK}:{metrics}",
        # The machine's own settings stay as they are.
        "--conntrack-max-per-core=0",
        "--conntrack-tcp-timeout-established=0",
        "--conntrack-tcp-timeout-close-wait=0",
        "--iptables-localhost-nodeports=false",
    ]
    return Process(
        command,
        log=cluster.directory / "kube-proxy.log",
        environment={"PATH": PATH},
        is_ready=answers(f"http://{LOOPBACK}:{health}/healthz"),
        detached=True,
    )
