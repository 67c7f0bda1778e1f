"""Who may talk to whom: every flow of a stack as data, and the network policies and the drawing made of it.

Each namespace denies everything both ways. A flow opens one port from one peer to another, on both sides where both
are pods of the stack. docs/network.md is drawn from the same flows (``infra.network_drawing``).
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Final

import pulumi
from pulumi_kubernetes import meta, networking

from infra.naming import StackNames
from infra.network_peers import Flow, Networks, OtherNamespace, Peer, Pods

API_PORT: Final = 8000
RECONCILER_PORT: Final = 8001
DNS_PORT: Final = 53
RAY_DASHBOARD_PORT: Final = 8265
_HTTPS: Final = 443
_POSTGRES: Final = 5432
_CLOUDNATIVE_PG_STATUS: Final = 8000


@dataclass(frozen=True, slots=True, kw_only=True)
class Database:
    """Where Postgres answers. ``operator_namespace``: CloudNativePG's, which looks after its pods; empty without."""

    peer: Pods | Networks
    port: int = _POSTGRES
    operator_namespace: str = ""
    has_backups: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class ObjectStore:
    """Where the S3 server answers, and the pod that makes the bucket, where there is one."""

    peer: Pods | Networks
    port: int
    setup: Pods | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class NetworkArgs:
    """What the flows of a stack follow from.

    Attributes:
        names: the stack.
        database: where Postgres is.
        object_store: where the S3 server is.
        kubernetes_api: networks of the cluster's API server.
        kubernetes_api_port: its port there.
        kuberay_namespace: where KubeRay's operator runs.
        dns_namespace: where the cluster's DNS runs.
        dns_networks: where a cache of it answers that is no pod, such as one on each node.
        ingress_namespace: where the ingress controller runs; empty without an ingress.
        client_namespaces: namespaces whose pods call the API inside the cluster.
        monitoring_namespace: where Prometheus runs; empty for nobody.
        webhook_networks: where webhooks go.
        endpoint_networks: where endpoints of the http lane are.
        endpoint_ports: their ports.
    """

    names: StackNames
    database: Database
    object_store: ObjectStore
    kubernetes_api: tuple[str, ...]
    kubernetes_api_port: int = 6443
    kuberay_namespace: str = "kuberay-system"
    dns_namespace: str = "kube-system"
    dns_networks: tuple[str, ...] = ()
    ingress_namespace: str = ""
    client_namespaces: tuple[str, ...] = ()
    monitoring_namespace: str = ""
    webhook_networks: tuple[str, ...] = ()
    endpoint_networks: tuple[str, ...] = ()
    endpoint_ports: tuple[int, ...] = ()


def flows(args: NetworkArgs) -> tuple[Flow, ...]:
    """Every flow of a stack; what is not here is refused."""
    return (
        *_requests(args),
        *_data(args),
        *_control(args),
        *_database_upkeep(args),
        *(
            Flow(source=pods, target=dns, ports=(DNS_PORT,), protocols=("UDP", "TCP"), why="names")
            for pods in _all_pods(args)
            for dns in _dns(args)
        ),
    )


def _service(args: NetworkArgs, component: str) -> Pods:
    return Pods(name=component, namespace=args.names.service_namespace, labels=args.names.selector(component))


def _ray(args: NetworkArgs, *, only_head: bool = False) -> Pods:
    # KubeRay's own labels: they cannot be left out of a template.
    labels = {"ray.io/node-type": "head"} if only_head else {"ray.io/is-ray-node": "yes"}
    return Pods(name="ray-head" if only_head else "ray", namespace=args.names.jobs_namespace, labels=labels)


def _dns(args: NetworkArgs) -> Iterator[OtherNamespace | Networks]:
    yield OtherNamespace(name="cluster DNS", namespace=args.dns_namespace)
    if args.dns_networks:
        yield Networks(name="DNS cache", cidrs=args.dns_networks)


def _all_pods(args: NetworkArgs) -> Iterator[Pods]:
    yield from (_service(args, component) for component in ("api", "reconciler", "migrations"))
    yield _ray(args)
    for part in (args.database.peer, args.object_store.peer, args.object_store.setup):
        if isinstance(part, Pods):
            yield part


def _requests(args: NetworkArgs) -> Iterator[Flow]:
    api, reconciler = _service(args, "api"), _service(args, "reconciler")
    if args.ingress_namespace:
        controller = OtherNamespace(name="ingress controller", namespace=args.ingress_namespace)
        yield Flow(source=controller, target=api, ports=(API_PORT,), why="requests from outside of the cluster")
    for namespace in args.client_namespaces:
        clients = OtherNamespace(name=f"clients in {namespace}", namespace=namespace)
        yield Flow(source=clients, target=api, ports=(API_PORT,), why="requests from inside the cluster")
    if args.monitoring_namespace:
        prometheus = OtherNamespace(name="Prometheus", namespace=args.monitoring_namespace)
        yield Flow(source=prometheus, target=api, ports=(API_PORT,), why="metrics")
        yield Flow(source=prometheus, target=reconciler, ports=(RECONCILER_PORT,), why="metrics")
    if args.webhook_networks:
        webhooks = Networks(name="webhook receivers", cidrs=args.webhook_networks)
        yield Flow(source=reconciler, target=webhooks, ports=(_HTTPS,), why="webhooks")


def _data(args: NetworkArgs) -> Iterator[Flow]:
    api, reconciler, ray = _service(args, "api"), _service(args, "reconciler"), _ray(args)
    database, store = args.database, args.object_store
    why: dict[Pods, str] = {
        api: "files, batches, keys",
        reconciler: "states of batches",
        _service(args, "migrations"): "the schema",
        _ray(args, only_head=True): "progress, as a role that can do nothing else",
    }
    for source, reason in why.items():
        yield Flow(source=source, target=database.peer, ports=(database.port,), why=reason)
    why = {api: "uploads and downloads", reconciler: "validation and results", ray: "lines in, parts out, weights"}
    if store.setup:
        why[store.setup] = "the bucket"
    for source, reason in why.items():
        yield Flow(source=source, target=store.peer, ports=(store.port,), why=reason)


def _control(args: NetworkArgs) -> Iterator[Flow]:
    server = Networks(name="Kubernetes API", cidrs=args.kubernetes_api)
    head, ray = _ray(args, only_head=True), _ray(args)
    port = (args.kubernetes_api_port,)
    yield Flow(source=_service(args, "reconciler"), target=server, ports=port, why="one RayJob for each batch")
    yield Flow(source=head, target=server, ports=port, why="Ray's autoscaler sets the number of workers")
    operator = OtherNamespace(name="KubeRay operator", namespace=args.kuberay_namespace)
    yield Flow(source=operator, target=head, ports=(RAY_DASHBOARD_PORT,), why="starts the job and asks how it goes")
    yield Flow(source=ray, target=ray, ports=(), why="Ray's own ports, chosen at run time; they ask for a token")
    if args.endpoint_networks:
        endpoints = Networks(name="endpoints of the http lane", cidrs=args.endpoint_networks)
        yield Flow(source=ray, target=endpoints, ports=args.endpoint_ports, why="lines of models in the http lane")


def _database_upkeep(args: NetworkArgs) -> Iterator[Flow]:
    """CloudNativePG's instances copy from each other, tell the API server how they are, and back up."""
    database = args.database.peer
    if not args.database.operator_namespace or not isinstance(database, Pods):
        return
    operator = OtherNamespace(name="CloudNativePG operator", namespace=args.database.operator_namespace)
    server = Networks(name="Kubernetes API", cidrs=args.kubernetes_api)
    ports = (args.database.port, _CLOUDNATIVE_PG_STATUS)
    yield Flow(source=operator, target=database, ports=ports, why="looks after the instances")
    yield Flow(source=database, target=database, ports=ports, why="replication")
    yield Flow(source=database, target=server, ports=(args.kubernetes_api_port,), why="which instance is the primary")
    if args.database.has_backups:
        store = args.object_store
        yield Flow(source=database, target=store.peer, ports=(store.port,), why="backups")


def policies(args: NetworkArgs) -> tuple[dict[str, Any], ...]:
    """The NetworkPolicy manifests: nothing for everyone in both namespaces, and then one for each kind of pod."""
    names = args.names
    denied = tuple(
        _policy(names, namespace, "default-deny", pod_selector={}, ingress=(), egress=())
        for namespace in (names.service_namespace, names.jobs_namespace)
    )
    all_flows = flows(args)
    pods = dict.fromkeys(peer for flow in all_flows for peer in (flow.source, flow.target) if isinstance(peer, Pods))
    return (*denied, *(_pods_policy(names, peer, all_flows) for peer in pods))


def _pods_policy(names: StackNames, pods: Pods, all_flows: Sequence[Flow]) -> dict[str, Any]:
    return _policy(
        names,
        pods.namespace,
        pods.name,
        pod_selector={"matchLabels": dict(pods.labels)},
        ingress=_rules("from", ((flow.source, flow) for flow in all_flows if flow.target == pods)),
        egress=_rules("to", ((flow.target, flow) for flow in all_flows if flow.source == pods)),
    )


def _rules(side: str, peers: Iterable[tuple[Peer, Flow]]) -> tuple[dict[str, Any], ...]:
    return tuple({side: peer.selectors(), **flow.port_list()} for peer, flow in peers)


def _policy(
    names: StackNames,
    namespace: str,
    name: str,
    *,
    pod_selector: dict[str, Any],
    ingress: Sequence[dict[str, Any]],
    egress: Sequence[dict[str, Any]],
) -> dict[str, Any]:
    return {
        "apiVersion": "networking.k8s.io/v1",
        "kind": "NetworkPolicy",
        "metadata": {"name": name, "namespace": namespace, "labels": names.labels("network")},
        "spec": {
            "podSelector": pod_selector,
            "policyTypes": ["Ingress", "Egress"],
            "ingress": list(ingress),
            "egress": list(egress),
        },
    }


class Network(pulumi.ComponentResource):
    """The network policies of both namespaces."""

    def __init__(self, name: str, args: NetworkArgs, opts: pulumi.ResourceOptions | None = None) -> None:
        super().__init__("cloister:network:Network", name, None, opts)
        for policy in policies(args):
            metadata: meta.v1.ObjectMetaArgsDict = policy["metadata"]
            networking.v1.NetworkPolicy(
                f"{policy['metadata']['namespace']}-{policy['metadata']['name']}",
                metadata=metadata,
                spec=policy["spec"],
                opts=pulumi.ResourceOptions(parent=self),
            )
        self.register_outputs({})
