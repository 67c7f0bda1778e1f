"""Network flows of a stack, and the network policies that allow them.

The namespaces of a stack deny every connection in both directions. A flow allows connections from one peer to the
ports of another. Where both peers are pods of the stack, the policies of both allow it (``network_policies``). The
launcher creates the policy of flows within one job, with the job (``service.adapters.rayjob_templates``). It is a plain
NetworkPolicy with every network plugin: its peers are pods of one namespace. docs/network.md is generated from the same
flows (``infra.rendering.network_drawing``).
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Final, Literal

import pulumi

from infra.kubernetes.naming import StackNames
from infra.stack_file.cluster_sections import NetworkPlugin
from ray_job.contract.cluster import (
    API_PORT,
    COORDINATOR_METRICS_PORT,
    COORDINATOR_PORT,
    RAY_METRICS_PORT,
    RECONCILER_PORT,
)

DNS_PORT: Final = 53
RAY_DASHBOARD_PORT: Final = 8265
_HTTPS: Final = 443
_HTTP: Final = 80
_CLOUDNATIVE_PG_STATUS: Final = 8000
_SERVICE: Final = ("api", "reconciler", "coordinator", "migrations", "audit-export")


@dataclass(frozen=True, slots=True, kw_only=True)
class Pods:
    """Pods of one namespace as an end of a flow.

    Attributes:
        name: name in docs/network.md and, for pods of the stack, of their policy.
        namespace: the namespace.
        labels: labels of the pods; empty for all pods of a namespace outside the stack.
        is_outside: whether pods with labels are outside the stack, which has no policy for them.
    """

    name: str
    namespace: pulumi.Input[str]
    labels: Mapping[str, str] = field(default_factory=dict, hash=False)
    is_outside: bool = False

    @property
    def is_of_stack(self) -> bool:
        """Return whether they are pods of the stack."""
        return bool(self.labels) and not self.is_outside

    def selectors(self) -> list[dict[str, Any]]:
        """Return the peers of a NetworkPolicy rule."""
        selector: dict[str, Any] = {
            "namespaceSelector": {"matchLabels": {"kubernetes.io/metadata.name": self.namespace}}
        }
        return [selector | {"podSelector": {"matchLabels": dict(self.labels)}} if self.labels else selector]


@dataclass(frozen=True, slots=True, kw_only=True)
class Networks:
    """Addresses in CIDR notation as an end of a flow; no pods."""

    name: str
    cidrs: tuple[str, ...]

    def selectors(self) -> list[dict[str, Any]]:
        """Return the peers of a NetworkPolicy rule."""
        return [{"ipBlock": {"cidr": cidr}} for cidr in self.cidrs]


@dataclass(frozen=True, slots=True, kw_only=True)
class Entities:
    """Peers that Cilium identifies by their role, as an end of a flow.

    Source: https://docs.cilium.io/en/v1.20/security/policy/layer3/#entities-based
    """

    name: str
    entities: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Hosts:
    """Host names as the target of a flow. Cilium allows the addresses that its DNS proxy saw in answers for them.

    Source: https://docs.cilium.io/en/v1.20/security/policy/layer3/#dns-based
    """

    name: str
    hosts: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class KubernetesService:
    """Endpoints of a Service as the target of a flow. Calico takes addresses and ports from its EndpointSlices.

    Source: https://docs.tigera.io/calico/latest/network-policy/policy-rules/service-policy (3.32)
    """

    name: str
    service: str
    namespace: str


Peer = Pods | Networks | Entities | Hosts | KubernetesService


@dataclass(frozen=True, slots=True, kw_only=True)
class Flow:
    """Connections that are allowed.

    Attributes:
        source: the peer that opens connections.
        target: the peer that accepts them.
        ports: the target's ports; empty for all ports.
        why: purpose, in a few words.
        protocols: protocols of the ports.
        is_within_job: whether both ends are pods of one job. No policy of the program allows it.
        resolves_hosts: whether Cilium's DNS proxy reads the answers, for the addresses of ``Hosts``.
    """

    source: Peer
    target: Peer
    ports: tuple[int, ...]
    why: str
    protocols: tuple[Literal["TCP", "UDP"], ...] = ("TCP",)
    is_within_job: bool = False
    resolves_hosts: bool = False

    def port_list(self) -> dict[str, Any]:
        """Return the ``ports`` field of a NetworkPolicy rule; no field for all ports."""
        ports = [{"port": port, "protocol": protocol} for port in self.ports for protocol in self.protocols]
        return {"ports": ports} if ports else {}


@dataclass(frozen=True, slots=True, kw_only=True)
class NetworkArgs:
    """The facts that determine a stack's flows.

    Attributes:
        names: names of the stack.
        database: Postgres.
        object_store: the S3 server.
        object_store_port: its port.
        plugin: the network plugin of the cluster.
        kubernetes_api: networks of the cluster's API server, which plain NetworkPolicies name.
        database_port: port of Postgres.
        cloudnative_pg_namespace: namespace of CloudNativePG's operator; empty without it.
        has_database_backups: whether CloudNativePG writes backups to the object store.
        object_store_setup: the pod that creates the bucket of the bundled object store.
        kubernetes_api_port: port of the API server in these networks.
        kuberay_namespace: namespace of KubeRay's operator.
        dns_namespace: namespace of the cluster's DNS.
        dns_networks: addresses of a DNS cache that is not a pod, such as one on each node.
        ingress_namespace: namespace of the ingress controller or of the gateway's data plane; empty for none.
        ingress_networks: addresses of controllers on the network of their nodes, which no namespace selects.
        ingress_by_cilium: whether Cilium itself is the ingress controller or the gateway.
        client_namespaces: namespaces whose pods call the API inside the cluster.
        prometheus: pods that may read metrics; None for no pod.
        oidc_networks: addresses of the public keys of the OpenID Connect issuer.
        oidc_hosts: host names of the same, with Cilium.
        webhook_networks: networks of webhook receivers.
        webhook_hosts: host names of webhook receivers, with Cilium.
        syslog_networks: addresses of the syslog server that receives the audit log; empty for no export.
        syslog_port: its port.
        tracing_networks: addresses of the OpenTelemetry collector; empty for no traces.
        tracing_port: its port.
        endpoint_networks: networks of the http engine's endpoints.
        endpoint_ports: ports of these endpoints.
        identity_networks: address of the agent on each node that gives pods credentials of a cloud; empty without it.
        secret_networks: addresses of the cloud's store of secrets; empty without it.
    """

    names: StackNames
    database: Pods | Networks
    object_store: Pods | Networks
    object_store_port: int
    kubernetes_api: tuple[str, ...] = ()
    plugin: NetworkPlugin = "kubernetes"
    database_port: int = 5432
    cloudnative_pg_namespace: str = ""
    has_database_backups: bool = False
    object_store_setup: Pods | None = None
    kubernetes_api_port: int = 6443
    kuberay_namespace: pulumi.Input[str] = "kuberay-system"
    dns_namespace: str = "kube-system"
    dns_networks: tuple[str, ...] = ()
    ingress_namespace: str = ""
    ingress_networks: tuple[str, ...] = ()
    ingress_by_cilium: bool = False
    client_namespaces: tuple[str, ...] = ()
    prometheus: Pods | None = None
    oidc_networks: tuple[str, ...] = ()
    oidc_hosts: tuple[str, ...] = ()
    webhook_networks: tuple[str, ...] = ()
    webhook_hosts: tuple[str, ...] = ()
    syslog_networks: tuple[str, ...] = ()
    syslog_port: int = 6514
    tracing_networks: tuple[str, ...] = ()
    tracing_port: int = 4318
    endpoint_networks: tuple[str, ...] = ()
    endpoint_ports: tuple[int, ...] = ()
    identity_networks: tuple[str, ...] = ()
    secret_networks: tuple[str, ...] = ()


def flows(args: NetworkArgs) -> tuple[Flow, ...]:
    """Return all flows of a stack; every other connection is denied."""
    pods = _stack_pods(args)
    api, reconciler, coordinator = pods["api"], pods["reconciler"], pods["coordinator"]
    outside = "requests from outside the cluster"
    found = [Flow(source=peer, target=api, ports=(API_PORT,), why=outside) for peer in _ingress_controllers(args)]
    for namespace in args.client_namespaces:
        clients = Pods(name=f"clients in {namespace}", namespace=namespace)
        found.append(Flow(source=clients, target=api, ports=(API_PORT,), why="requests from inside the cluster"))
    if args.prometheus:
        found += [
            Flow(source=args.prometheus, target=target, ports=(port,), why="metrics")
            for target, port in (
                (api, API_PORT),
                (reconciler, RECONCILER_PORT),
                (coordinator, COORDINATOR_METRICS_PORT),
                (pods["ray"], RAY_METRICS_PORT),
            )
        ]
    if args.oidc_networks:
        issuer = Networks(name="OpenID Connect issuer", cidrs=args.oidc_networks)
        found.append(Flow(source=api, target=issuer, ports=(_HTTPS,), why="public keys of tokens"))
    if args.oidc_hosts:
        issuer_hosts = Hosts(name="OpenID Connect issuer by name", hosts=args.oidc_hosts)
        found.append(Flow(source=api, target=issuer_hosts, ports=(_HTTPS,), why="public keys of tokens"))
    if args.webhook_hosts:
        webhook_hosts = Hosts(name="webhook receivers by name", hosts=args.webhook_hosts)
        found.append(Flow(source=reconciler, target=webhook_hosts, ports=(_HTTPS,), why="webhooks"))
    if args.webhook_networks:
        webhooks = Networks(name="webhook receivers", cidrs=args.webhook_networks)
        found.append(Flow(source=reconciler, target=webhooks, ports=(_HTTPS,), why="webhooks"))
    leases = "leases and commits, with the job's token"
    found.append(Flow(source=pods["ray-head"], target=coordinator, ports=(COORDINATOR_PORT,), why=leases))
    if args.tracing_networks:
        # No pod of a job: times of jobs reach the collector through the coordinator.
        collector = Networks(name="OpenTelemetry collector", cidrs=args.tracing_networks)
        found += [
            Flow(source=each, target=collector, ports=(args.tracing_port,), why="traces without content")
            for each in (api, reconciler, coordinator)
        ]
    database_clients: dict[Pods, str] = {
        api: "files, batches, keys",
        reconciler: "states of batches",
        coordinator: "leases and commits",
        pods["migrations"]: "the schema",
    }
    if args.syslog_networks:
        export, syslog = pods["audit-export"], Networks(name="syslog server", cidrs=args.syslog_networks)
        found.append(Flow(source=export, target=syslog, ports=(args.syslog_port,), why="the audit log"))
        database_clients[export] = "the audit log"
    store_clients: dict[Pods, str] = {
        api: "uploads and downloads",
        reconciler: "validation, plans and results",
        coordinator: "prompt rules of models",
        pods["ray"]: "lines in and parts out, by URLs that expire; weights",
    }
    if args.object_store_setup:
        store_clients[args.object_store_setup] = "the bucket"
    for client, why in database_clients.items():
        found.append(Flow(source=client, target=args.database, ports=(args.database_port,), why=why))
    for client, why in store_clients.items():
        found.append(Flow(source=client, target=args.object_store, ports=(args.object_store_port,), why=why))
    if args.identity_networks:
        agent = Networks(name="agent of pod identities", cidrs=args.identity_networks)
        found += [
            Flow(source=client, target=agent, ports=(_HTTP,), why="credentials of its role")
            for client in database_clients
        ]
    if args.secret_networks:
        secrets = Networks(name="store of secrets", cidrs=args.secret_networks)
        found.append(Flow(source=pods["migrations"], target=secrets, ports=(_HTTPS,), why="the owner's password"))
    return (*found, *_cluster_flows(args))


def _ingress_controllers(args: NetworkArgs) -> list[Peer]:
    """Return the peers that forward requests from outside the cluster."""
    found: list[Peer] = []
    if args.ingress_namespace:
        found.append(Pods(name="ingress controller", namespace=args.ingress_namespace))
    if args.ingress_networks:
        name = "ingress controller on nodes"
        # Cilium matches no node by address.
        on_nodes = Entities(name=name, entities=("host", "remote-node"))
        found.append(on_nodes if args.plugin == "cilium" else Networks(name=name, cidrs=args.ingress_networks))
    if args.ingress_by_cilium:
        # https://docs.cilium.io/en/v1.20/network/servicemesh/ingress/
        found.append(Entities(name="ingress or gateway of Cilium", entities=("ingress",)))
    return found


def _cluster_flows(args: NetworkArgs) -> list[Flow]:
    """Return the flows of RayJobs and of CloudNativePG, and those to the cluster's DNS."""
    stack_pods = _stack_pods(args)
    head, ray = stack_pods["ray-head"], stack_pods["ray"]
    server = api_server(args.plugin, args.kubernetes_api)
    operator = Pods(name="KubeRay operator", namespace=args.kuberay_namespace)
    api_port = (args.kubernetes_api_port,)
    found = [
        Flow(
            source=stack_pods["reconciler"],
            target=server,
            ports=api_port,
            why="one RayJob and one network policy for each job",
        ),
        Flow(source=head, target=server, ports=api_port, why="Ray's autoscaler sets the number of workers"),
        Flow(source=operator, target=head, ports=(RAY_DASHBOARD_PORT,), why="submits the job and reads its status"),
        Flow(
            source=ray,
            target=ray,
            ports=(),
            why="Ray's ports, chosen at run time; pods of the same job only; they require a token",
            is_within_job=True,
        ),
    ]
    if args.endpoint_networks:
        endpoints = Networks(name="endpoints of the http engine", cidrs=args.endpoint_networks)
        found.append(
            Flow(source=ray, target=endpoints, ports=args.endpoint_ports, why="lines of models with the http engine")
        )
    if args.cloudnative_pg_namespace:
        instances, ports = args.database, (args.database_port, _CLOUDNATIVE_PG_STATUS)
        cloudnative_pg = Pods(name="CloudNativePG operator", namespace=args.cloudnative_pg_namespace)
        found += [
            Flow(source=cloudnative_pg, target=instances, ports=ports, why="manages the instances"),
            Flow(source=instances, target=instances, ports=ports, why="replication"),
            Flow(source=instances, target=server, ports=api_port, why="which instance is the primary"),
        ]
        if args.has_database_backups:
            store_port = (args.object_store_port,)
            found.append(Flow(source=instances, target=args.object_store, ports=store_port, why="backups"))
    service = [stack_pods[component] for component in _SERVICE if component != "audit-export" or args.syslog_networks]
    data = [end for end in (args.database, args.object_store, args.object_store_setup) if isinstance(end, Pods)]
    dns: list[Peer] = [Pods(name="cluster DNS", namespace=args.dns_namespace)]
    if args.dns_networks:
        dns.append(Networks(name="DNS cache", cidrs=args.dns_networks))
        if args.plugin == "cilium":
            # The cache of each node has an address of the node, which no network matches.
            dns.append(Entities(name="DNS cache of the node", entities=("host",)))
    by_name = {"api": bool(args.oidc_hosts), "reconciler": bool(args.webhook_hosts)}
    found += [
        Flow(
            source=pods,
            target=resolver,
            ports=(DNS_PORT,),
            protocols=("UDP", "TCP"),
            why="names",
            resolves_hosts=by_name.get(pods.name, False),
        )
        for pods in (*service, ray, *data)
        for resolver in dns
    ]
    return found


def api_server(plugin: NetworkPlugin, networks: tuple[str, ...]) -> Networks | Entities | KubernetesService:
    """Return the cluster's API server as the network plugin selects it.

    Cilium matches no node by address unless ``policy-cidr-match-mode`` includes ``nodes``, and API servers often run on
    nodes. Its entity ``kube-apiserver`` covers servers on nodes, in pods and outside the cluster, so that ``host`` and
    ``remote-node``, which allow all nodes, are not needed. Sources: https://docs.cilium.io/en/v1.20/security/policy/layer3/,
    https://github.com/cilium/cilium/issues/20550

    Args:
        plugin: the network plugin.
        networks: the server's addresses, for plain NetworkPolicies.
    """
    name = "Kubernetes API"
    if plugin == "cilium":
        return Entities(name=name, entities=("kube-apiserver",))
    if plugin == "calico":
        return KubernetesService(name=name, service="kubernetes", namespace="default")
    return Networks(name=name, cidrs=networks)


def _stack_pods(args: NetworkArgs) -> dict[str, Pods]:
    """Return the pods of service and jobs by name."""
    service, jobs = args.names.service_namespace, args.names.jobs_namespace
    return {
        **{name: Pods(name=name, namespace=service, labels=args.names.selector(name)) for name in _SERVICE},
        # KubeRay sets these labels itself, so a template cannot omit them.
        "ray": Pods(name="ray", namespace=jobs, labels={"ray.io/is-ray-node": "yes"}),
        "ray-head": Pods(name="ray-head", namespace=jobs, labels={"ray.io/node-type": "head"}),
    }
