"""kube-proxy: rules that lead from a Service's address to its pods. One process serves all nodes of the machine."""

from service.local.ray_head import free_ports
from tests.cluster.access import PROXY
from tests.cluster.control_plane import ControlPlane
from tests.cluster.node.layout import PATH, POD_NETWORKS, NodeLayout
from tests.cluster.ports import LOOPBACK, answers
from tests.cluster.processes import Process


def kube_proxy(cluster: ControlPlane, node: NodeLayout) -> Process:
    """Return kube-proxy as a process.

    Args:
        cluster: cluster in which the node is registered.
        node: node that it runs as.
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
        # Keep the machine's settings.
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
