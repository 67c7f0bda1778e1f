"""Network plugins: how to recognize them, and how each enforces network policies."""

from dataclasses import dataclass
from typing import Final

from service.doctor.cluster_api import ClusterApi

_GENERAL: Final = "Use a network plugin that enforces NetworkPolicy, such as Calico or Cilium, or enable it in this one"


@dataclass(frozen=True, slots=True, kw_only=True)
class NetworkPlugin:
    """A network plugin.

    Attributes:
        name: its name, with the DaemonSet that runs it.
        to_enforce: how to make it enforce network policies.
        to_reach_nodes: how to make an ``ipBlock`` select the API server, if that differs from other plugins.
    """

    name: str
    to_enforce: str = _GENERAL
    to_reach_nodes: str = ""


# Names of DaemonSets, with the remedies. A plugin that only enforces policies comes before the one that it completes.
# Cilium: an ipBlock selects no node unless policyCIDRMatchMode has `nodes`:
# https://github.com/cilium/cilium/pull/28421
# Amazon's plugin: https://docs.aws.amazon.com/eks/latest/userguide/cni-network-policy-configure.html
# Flannel: https://github.com/flannel-io/flannel ("Flannel does not control how containers are networked to the host")
_PLUGINS: Final = (
    (
        "cilium",
        NetworkPlugin(
            name="Cilium",
            to_reach_nodes="Set `network.plugin: cilium`: Cilium selects nodes by `ipBlock` only with "
            "`policyCIDRMatchMode: nodes`",
        ),
    ),
    ("calico-node", NetworkPlugin(name="Calico")),
    ("rke2-canal", NetworkPlugin(name="Canal")),
    ("canal", NetworkPlugin(name="Canal")),
    ("antrea-agent", NetworkPlugin(name="Antrea")),
    ("kube-router", NetworkPlugin(name="kube-router")),
    ("weave-net", NetworkPlugin(name="Weave Net")),
    ("ovnkube-node", NetworkPlugin(name="OVN-Kubernetes")),
    ("azure-npm", NetworkPlugin(name="Azure NPM")),
    ("kindnet", NetworkPlugin(name="kindnet")),
    (
        "aws-node",
        NetworkPlugin(
            name="the Amazon VPC CNI", to_enforce="Set `enableNetworkPolicy` to `true` in the add-on `vpc-cni`"
        ),
    ),
    (
        "kube-flannel-ds",
        NetworkPlugin(
            name="Flannel",
            to_enforce="Flannel enforces none: add a plugin that does, or replace it by Calico or Cilium",
        ),
    ),
)


def find_network_plugin(api: ClusterApi) -> NetworkPlugin:
    """Return the network plugin, by its DaemonSet; on k3s, which runs it in the node's process, by the nodes."""
    names = {each["metadata"]["name"]: each["metadata"]["namespace"] for each in api.items("/apis/apps/v1/daemonsets")}
    for daemon_set, plugin in _PLUGINS:
        if daemon_set in names:
            place = f"{plugin.name} (DaemonSet {daemon_set} of {names[daemon_set]})"
            return NetworkPlugin(name=place, to_enforce=plugin.to_enforce, to_reach_nodes=plugin.to_reach_nodes)
    versions = [node["status"].get("nodeInfo", {}).get("kubeletVersion", "") for node in api.items("/api/v1/nodes")]
    if any("+k3s" in version for version in versions):
        return NetworkPlugin(
            name="the network of k3s", to_enforce="Start the servers of k3s without `--disable-network-policy`"
        )
    return NetworkPlugin(name="the network plugin of this cluster")
