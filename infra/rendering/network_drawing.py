"""Generate docs/network.md from the network flows: ``python -m infra.rendering.network_drawing [--check]``."""

import sys
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Final

from infra.kubernetes.naming import StackNames
from infra.rendering.generated_page import write_or_check
from infra.tenancy.network import Entities, Flow, Hosts, NetworkArgs, Networks, Peer, Pods, flows

PAGE: Final = Path(__file__).parents[2] / "docs" / "network.md"

_HEAD: Final = """\
# Network flows

The namespaces of a stack deny every connection in both directions. The flows on this page are allowed. Where both ends
are pods of the stack, the policies of both allow the flow.

`python -m infra.rendering.network_drawing` generates this page from the flows in `infra/tenancy/network.py`, which are
also the source of the network policies. A test compares the two. Names and addresses are examples.

Every pod of the stack can query the cluster's DNS; the drawings omit that. The namespaces of KubeRay's operator and of
NVIDIA's device plugin, if a stack deploys them, deny everything else too: the operator reaches the API server, Ray
heads and DNS; the plugin reaches nothing.

## Network plugins

`network.plugin` names the cluster's network plugin. All policies are plain NetworkPolicies, except where these cannot
express a flow:

| plugin | flow | policy |
|---|---|---|
| `kubernetes` | none | NetworkPolicy; the API server by its addresses |
| `calico` | to the API server | NetworkPolicy of `projectcalico.org/v3`, for the Service `kubernetes` |
| `cilium` | to the API server | CiliumNetworkPolicy, entity `kube-apiserver` |
| `cilium` | from a controller on the network of its nodes | CiliumNetworkPolicy, entities `host` and `remote-node` |
| `cilium` | from Cilium's own ingress or gateway | CiliumNetworkPolicy, entity `ingress` |
| `cilium` | to named hosts | CiliumNetworkPolicy, `toFQDNs`, and DNS rules for the pods that use them |

By default Cilium matches no node and no pod by CIDR (`policy-cidr-match-mode`), so `dns_networks` also opens port 53 of
the pod's own node (entity `host`). The default deny and the policy of each job are plain NetworkPolicies with every
plugin. If Cilium's `labels` setting limits the labels that identify pods, it must include those of `cloister.dev`,
`ray.io`, `app.kubernetes.io` and `cnpg.io`.

No test runs on Calico or Cilium, or with a Gateway. A real API server checks the policies of Cilium 1.20 and the
HTTPRoute of Gateway API 1.4 against their definitions. The policies of Calico follow the documentation of 3.32 only.
Run `cloister doctor` on your cluster.
"""


_NAMES: Final = StackNames(customer="acme", environment="prod")
_KUBERNETES_API: Final = ("10.0.0.10/32",)
_CUSTOMER_S3: Final = Networks(name="customer's S3", cidrs=("10.30.0.10/32",))

BUNDLED: Final = NetworkArgs(
    names=_NAMES,
    database=Pods(name="database", namespace=_NAMES.service_namespace, labels=_NAMES.selector("database")),
    object_store=Pods(name="object-store", namespace=_NAMES.service_namespace, labels=_NAMES.selector("object-store")),
    object_store_port=7070,
    object_store_setup=Pods(
        name="object-store-setup",
        namespace=_NAMES.service_namespace,
        labels=_NAMES.selector("object-store-setup"),
    ),
    kubernetes_api=_KUBERNETES_API,
    ingress_namespace="traefik",
    prometheus=Pods(
        name="Prometheus",
        namespace="monitoring",
        labels={"app.kubernetes.io/name": "prometheus"},
        is_outside=True,
    ),
)
CLOUDNATIVE_PG: Final = NetworkArgs(
    names=_NAMES,
    database=Pods(name="database", namespace=_NAMES.service_namespace, labels={"cnpg.io/cluster": "database"}),
    cloudnative_pg_namespace="cnpg-system",
    has_database_backups=True,
    object_store=_CUSTOMER_S3,
    object_store_port=443,
    kubernetes_api=_KUBERNETES_API,
    client_namespaces=("acme-etl",),
    oidc_networks=("10.60.0.10/32",),
    webhook_networks=("10.40.0.0/16",),
    syslog_networks=("10.70.0.10/32",),
    tracing_networks=("10.80.0.10/32",),
    endpoint_networks=("10.50.0.10/32",),
    endpoint_ports=(8000,),
)
EXTERNAL: Final = NetworkArgs(
    names=_NAMES,
    database=Networks(name="customer's Postgres", cidrs=("10.20.0.5/32",)),
    object_store=_CUSTOMER_S3,
    object_store_port=443,
    kubernetes_api=_KUBERNETES_API,
    ingress_namespace="traefik",
)
CILIUM: Final = NetworkArgs(
    names=_NAMES,
    plugin="cilium",
    database=Networks(name="customer's Postgres", cidrs=("10.20.0.5/32",)),
    object_store=_CUSTOMER_S3,
    object_store_port=443,
    ingress_namespace="traefik",
    dns_networks=("169.254.20.10/32",),
    oidc_hosts=("login.acme.example",),
    webhook_hosts=("hooks.acme.example",),
)
CALICO: Final = replace(EXTERNAL, plugin="calico", kubernetes_api=())
EXAMPLES: Final[Mapping[str, NetworkArgs]] = {
    "Everything in the cluster: bundled database and object store, an ingress, metrics": BUNDLED,
    "CloudNativePG with backups to the customer's S3, clients inside the cluster, webhooks, export of the audit log, "
    "traces, the http engine": (CLOUDNATIVE_PG),
    "The customer's own Postgres and S3": EXTERNAL,
    "Cilium: the customer's own Postgres and S3, webhooks and OpenID Connect by host name": CILIUM,
}
"""The examples of the page, by title."""


def page() -> str:
    """Return the whole page, with a section for each example."""
    lines = [_HEAD]
    for title, args in EXAMPLES.items():
        shown = [flow for flow in flows(args) if flow.why != "names"]
        lines += [
            f"## {title}\n",
            "```mermaid",
            *drawing(args.names, shown),
            "```\n",
            "| from | to | port | why |",
            "|---|---|---|---|",
            *(
                f"| {flow.source.name} | {flow.target.name} | {', '.join(map(str, flow.ports)) or 'all'} | {flow.why} |"
                for flow in shown
            ),
            "",
        ]
    return "\n".join(lines)


def drawing(names: StackNames, shown: Iterable[Flow]) -> Iterator[str]:
    """Yield the lines of a Mermaid flow chart: a box for each namespace of the stack, an arrow for each flow."""
    shown = list(shown)
    peers = list(dict.fromkeys(peer for flow in shown for peer in (flow.source, flow.target)))
    ids = {peer: f"p{number}" for number, peer in enumerate(peers)}

    def node(peer: Peer) -> str:
        match peer:
            case Networks(cidrs=found) | Hosts(hosts=found) | Entities(entities=found):
                return f'{ids[peer]}["{peer.name}<br>{", ".join(found)}"]'
            case _:
                return f'{ids[peer]}["{peer.name}"]'

    own = [peer for peer in peers if isinstance(peer, Pods) and peer.is_of_stack]
    yield "flowchart LR"
    for namespace in (names.service_namespace, names.jobs_namespace):
        yield f'  subgraph {namespace}["{namespace}"]'
        yield from (f"    {node(peer)}" for peer in own if peer.namespace == namespace)
        yield "  end"
    yield from (f"  {node(peer)}" for peer in peers if peer not in own)
    for flow in shown:
        yield f"  {ids[flow.source]} -->|{', '.join(map(str, flow.ports)) or 'all'}| {ids[flow.target]}"


if __name__ == "__main__":
    sys.exit(write_or_check(PAGE, page(), sys.argv[1:], module="infra.rendering.network_drawing"))
