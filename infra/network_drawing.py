"""docs/network.md, drawn from the flows that the network policies are made of: ``python -m infra.network_drawing``."""

import sys
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Final

from infra.generated_page import write_or_check
from infra.naming import StackNames
from infra.network import Database, NetworkArgs, ObjectStore, flows
from infra.network_peers import Flow, Networks, Peer, Pods

PAGE: Final = Path(__file__).parents[1] / "docs" / "network.md"

_HEAD: Final = """\
# Who talks to whom

Both namespaces of a stack deny every connection, in and out. These flows are open, each in both policies where both
ends are pods of the stack. Made from the flows in `infra/network.py`, from which the policies are made too, by
`python -m infra.network_drawing`; a test compares them. Names and addresses are examples. Every pod of the stack may
ask the cluster's DNS; that is left out of the drawings. The namespaces of KubeRay's operator and of NVIDIA's
device plugin, where a stack makes them, deny everything too: the operator reaches the API server, Ray heads and DNS,
the plugin nothing.
"""


def bundled_example() -> NetworkArgs:
    """Everything in the cluster: bundled database and object store, an ingress, metrics."""
    names = StackNames(customer="acme", environment="prod")
    return NetworkArgs(
        names=names,
        database=Database(peer=_pods(names, "database")),
        object_store=ObjectStore(
            peer=_pods(names, "object-store"), port=7070, setup=_pods(names, "object-store-setup")
        ),
        kubernetes_api=("10.0.0.10/32",),
        ingress_namespace="ingress-nginx",
        monitoring_namespace="monitoring",
    )


def cloudnative_pg_example() -> NetworkArgs:
    """CloudNativePG with backups to the customer's S3, clients inside the cluster, webhooks, the http lane."""
    names = StackNames(customer="acme", environment="prod")
    database = Pods(name="database", namespace=names.service_namespace, labels={"cnpg.io/cluster": "database"})
    return NetworkArgs(
        names=names,
        database=Database(peer=database, operator_namespace="cnpg-system", has_backups=True),
        object_store=ObjectStore(peer=Networks(name="customer's S3", cidrs=("10.30.0.10/32",)), port=443),
        kubernetes_api=("10.0.0.10/32",),
        client_namespaces=("acme-etl",),
        webhook_networks=("10.40.0.0/16",),
        endpoint_networks=("10.50.0.10/32",),
        endpoint_ports=(8000,),
    )


def external_example() -> NetworkArgs:
    """The customer's own Postgres and S3."""
    return NetworkArgs(
        names=StackNames(customer="acme", environment="prod"),
        database=Database(peer=Networks(name="customer's Postgres", cidrs=("10.20.0.5/32",))),
        object_store=ObjectStore(peer=Networks(name="customer's S3", cidrs=("10.30.0.10/32",)), port=443),
        kubernetes_api=("10.0.0.10/32",),
        ingress_namespace="ingress-nginx",
    )


def _pods(names: StackNames, component: str) -> Pods:
    return Pods(name=component, namespace=names.service_namespace, labels=names.selector(component))


def page() -> str:
    """The whole page."""
    return "\n".join([_HEAD, *(line for example in _EXAMPLES for line in _example(example))])


_EXAMPLES: Final = (bundled_example, cloudnative_pg_example, external_example)


def _example(example: Callable[[], NetworkArgs]) -> Iterator[str]:
    args = example()
    yield f"## {(example.__doc__ or '').strip().rstrip('.')}\n"
    shown = [flow for flow in flows(args) if flow.why != "names"]
    yield "```mermaid"
    yield from drawing(args.names, shown)
    yield "```\n"
    yield "| from | to | port | why |"
    yield "|---|---|---|---|"
    for flow in shown:
        yield f"| {flow.source.name} | {flow.target.name} | {_ports(flow)} | {flow.why} |"
    yield ""


def drawing(names: StackNames, shown: Iterable[Flow]) -> Iterator[str]:
    """The lines of a Mermaid flow chart: a box for each namespace of the stack, an arrow for each flow."""
    shown = list(shown)
    peers = list(dict.fromkeys(peer for flow in shown for peer in (flow.source, flow.target)))
    ids = {peer: f"p{number}" for number, peer in enumerate(peers)}
    yield "flowchart LR"
    for namespace in (names.service_namespace, names.jobs_namespace):
        yield f'  subgraph {namespace}["{namespace}"]'
        yield from (
            f"    {_node(ids, peer)}" for peer in peers if isinstance(peer, Pods) and peer.namespace == namespace
        )
        yield "  end"
    yield from (f"  {_node(ids, peer)}" for peer in peers if not isinstance(peer, Pods))
    for flow in shown:
        yield f"  {ids[flow.source]} -->|{_ports(flow)}| {ids[flow.target]}"


def _node(ids: dict[Peer, str], peer: Peer) -> str:
    where = f"<br>{', '.join(peer.cidrs)}" if isinstance(peer, Networks) else ""
    return f'{ids[peer]}["{peer.name}{where}"]'


def _ports(flow: Flow) -> str:
    return ", ".join(map(str, flow.ports)) or "all"


def main(arguments: list[str]) -> int:
    """Writes the page; with ``--check`` tells whether it is the one that is there, by the exit status."""
    return write_or_check(PAGE, page(), arguments, module="infra.network_drawing")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
