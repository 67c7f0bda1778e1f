"""Network of the cluster, from test pods: enforcement of policies, DNS, API server, clocks, and egress.

Before the first `pulumi up` the test pods are in a temporary namespace with the policies that a stack gets for DNS and
for the API server. Once there is a stack, its own pods try the connections, and test pods with the labels of Ray's pods
in its namespace of jobs.
"""

import json
import secrets
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Final

from ray_job.contract.cluster import (
    API,
    API_SERVICE_PORT,
    COORDINATOR,
    COORDINATOR_PORT,
    DEFAULT_DENY,
    JOB_TEMPLATES,
    RECONCILER,
    jobs_namespace,
)
from service.doctor.cluster_api import JsonObject
from service.doctor.findings import Finding
from service.doctor.preflight.egress import Destination, Expected, Row, egress_findings, parse_destination, write_report
from service.doctor.preflight.plugins import NetworkPlugin, find_network_plugin
from service.doctor.preflight.stack_facts import StackFacts
from service.doctor.preflight.temporary_pods import PORT, PROBE, PULL_SECRET, Cluster, PodError, TestPod

HEAD: Final = "ray-head"
WORKER: Final = "ray-worker"
_RAY_LABELS: Final[Mapping[str, Mapping[str, str]]] = {
    # KubeRay sets them; the policies select by them.
    HEAD: {"ray.io/is-ray-node": "yes", "ray.io/node-type": "head"},
    WORKER: {"ray.io/is-ray-node": "yes", "ray.io/node-type": "worker"},
}
_SERVICE: Final = (API, RECONCILER, COORDINATOR)
_REACH_KUBERNETES: Final = (HEAD, RECONCILER)
_CONTROL: Final = "peer"
_DNS_NAME: Final = "kubernetes.default.svc"
_KUBELET_PORT: Final = 10250
# Pods for these checks are small; the image is that of the service.
_START_LIMIT_S: Final = 300.0
# Plugins take seconds to program a new policy.
_SETTLE_S: Final = 15.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Source:
    """A pod that tries connections.

    Attributes:
        role: ``api``, ``reconciler``, ``coordinator``, ``ray-head`` or ``ray-worker``.
        namespace: its namespace.
        pod: its name.
        address: its address.
        node_address: address of its node.
    """

    role: str
    namespace: str
    pod: str
    address: str
    node_address: str

    @classmethod
    def of(cls, role: str, pod: JsonObject) -> "Source":
        """Return a running pod as the Kubernetes API returns it."""
        metadata, status = pod["metadata"], pod["status"]
        return cls(
            role=role,
            namespace=str(metadata["namespace"]),
            pod=str(metadata["name"]),
            address=str(status["podIP"]),
            node_address=str(status.get("hostIP", "")),
        )


def check_network(
    cluster: Cluster,
    facts: StackFacts,
    *,
    peers: str,
    sources: str,
    external: Sequence[str],
    report: Path | None,
    settle_s: float = _SETTLE_S,
) -> Iterator[Finding]:
    """Check the network, and write the report of egress.

    Args:
        cluster: the cluster.
        facts: values of the stack file.
        peers: temporary namespace for the pod without policies.
        sources: temporary namespace for pods with the labels of a stack's pods.
        external: destinations outside of the cluster, ``host:port``.
        report: directory of the report; None for no report.
        settle_s: how long the network plugin may take to enforce a new policy, in seconds.
    """
    plugin = find_network_plugin(cluster.api)
    secret = (PULL_SECRET,) if facts.registry else ()
    cluster.start(peers, TestPod(name=_CONTROL, image=facts.service_image, pull_secrets=secret))
    roles = (HEAD, WORKER, *_SERVICE)
    for role in roles:
        labels = _RAY_LABELS.get(role) or _service_labels(facts, role)
        pod = TestPod(name=role, image=facts.service_image, labels=labels, pull_secrets=secret)
        cluster.start(sources, pod)
    peer = Source.of(_CONTROL, cluster.wait_until_running(peers, _CONTROL, limit_s=_START_LIMIT_S))
    tried = [Source.of(role, cluster.wait_until_running(sources, role, limit_s=_START_LIMIT_S)) for role in roles]
    kubernetes = _kubernetes(cluster)
    yield from _check_before_policies(cluster, tried[0], peer, kubernetes)
    for body in stack_policies(facts):
        cluster.api.create(policies_path(body, sources), body)
    yield from check_policies(cluster, tried[0], peer, plugin=plugin, settle_s=settle_s)
    yield from check_under_policies(cluster, facts, tried[0], kubernetes, plugin)
    outside = [parse_destination(each) for each in external]
    with _sources_of_stack(cluster, facts) as deployed:
        rows = _try_all(cluster, deployed or tried, peer, [kubernetes], outside, in_stack=bool(deployed), facts=facts)
    yield from egress_findings(rows)
    if report:
        own = f"{facts.namespace} and {jobs_namespace(facts.namespace)}"
        where = own if deployed else f"{sources}, a namespace with the policies of a stack"
        try:
            file = write_report(report, rows, cluster=cluster.api.server, namespace=where, now=datetime.now(UTC))
        except OSError as error:
            yield Finding.failed("report of egress", f"{report}: {error.strerror}. Name another directory: --report")
        else:
            yield Finding.ok(
                "report of egress", f"{file} and {file.with_suffix('.json').name}: {len(rows)} connections"
            )


def _service_labels(facts: StackFacts, component: str) -> dict[str, str]:
    return {
        "app.kubernetes.io/name": "cloister",
        "app.kubernetes.io/instance": facts.instance,
        "app.kubernetes.io/component": component,
    }


def _kubernetes(cluster: Cluster) -> Destination:
    spec = cluster.api.read("/api/v1/namespaces/default/services/kubernetes")["spec"]
    port = next((each["port"] for each in spec.get("ports", [])), 443)
    return Destination(name="the Kubernetes API", host=str(spec["clusterIP"]), port=int(port))


def stack_policies(facts: StackFacts) -> list[JsonObject]:
    """Return the policies of a stack for DNS and for the API server, and the one that denies everything else."""
    resolvers: list[JsonObject] = [
        {"namespaceSelector": {"matchLabels": {"kubernetes.io/metadata.name": facts.dns_namespace}}},
        *({"ipBlock": {"cidr": network}} for network in facts.dns_networks),
    ]
    dns = {"to": resolvers, "ports": [{"port": 53, "protocol": protocol} for protocol in ("UDP", "TCP")]}
    server = {
        "to": [{"ipBlock": {"cidr": network}} for network in facts.api_networks],
        "ports": [{"port": facts.api_port, "protocol": "TCP"}],
    }
    is_plain = facts.network_plugin == "kubernetes"

    def policy(name: str, labels: Mapping[str, str], egress: list[JsonObject]) -> JsonObject:
        selector = {"matchLabels": dict(labels)} if labels else {}
        spec = {"podSelector": selector, "policyTypes": ["Ingress", "Egress"], "ingress": [], "egress": egress}
        metadata = {"name": name}
        return {"apiVersion": "networking.k8s.io/v1", "kind": "NetworkPolicy", "metadata": metadata, "spec": spec}

    callers = {HEAD: {"ray.io/node-type": "head"}, RECONCILER: _service_labels(facts, RECONCILER)}
    return [
        policy(DEFAULT_DENY, {}, [dns]),
        *(policy(name, labels, [server] if is_plain else []) for name, labels in callers.items()),
        *_plugin_policies(facts, callers),
    ]


def _plugin_policies(facts: StackFacts, callers: Mapping[str, Mapping[str, str]]) -> Iterator[JsonObject]:
    """Yield the policies of Cilium or Calico that a stack gets for the API server, and for a DNS cache of the node."""
    if facts.network_plugin == "calico":
        services = {"services": {"name": "kubernetes", "namespace": "default"}}
        for name, labels in callers.items():
            selector = " && ".join(f"{label} == '{value}'" for label, value in labels.items())
            egress = [{"action": "Allow", "destination": services}]
            spec: JsonObject = {"selector": selector, "types": ["Egress"], "egress": egress}
            yield {
                "apiVersion": "projectcalico.org/v3",
                "kind": "NetworkPolicy",
                "metadata": {"name": name},
                "spec": spec,
            }
    if facts.network_plugin == "cilium":
        server = {"ports": [{"port": str(facts.api_port), "protocol": "TCP"}]}
        dns = {"ports": [{"port": "53", "protocol": protocol} for protocol in ("UDP", "TCP")]}
        rules = [(name, labels, "kube-apiserver", server) for name, labels in callers.items()]
        rules += [(DEFAULT_DENY, {}, "host", dns)] if facts.dns_networks else []
        for name, labels, entity, ports in rules:
            spec = {
                "endpointSelector": {"matchLabels": dict(labels)} if labels else {},
                "egress": [{"toEntities": [entity], "toPorts": [ports]}],
            }
            yield {
                "apiVersion": "cilium.io/v2",
                "kind": "CiliumNetworkPolicy",
                "metadata": {"name": name},
                "spec": spec,
            }


def policies_path(policy: JsonObject, namespace: str) -> str:
    """Return the path of the Kubernetes API that lists and creates policies of this kind."""
    plural = "ciliumnetworkpolicies" if policy["kind"] == "CiliumNetworkPolicy" else "networkpolicies"
    return f"/apis/{policy['apiVersion']}/namespaces/{namespace}/{plural}"


def _connect(cluster: Cluster, source: Source, targets: Sequence[Destination]) -> Any:
    request: dict[str, Any] = {"targets": [[each.host, each.port] for each in targets], "clock": []}
    return cluster.python(source.namespace, source.pod, PROBE, "connect", json.dumps(request))


def _listener(source: Source) -> Destination:
    return Destination(name=f"pod {source.pod} of another namespace", host=source.address, port=PORT)


def _check_before_policies(cluster: Cluster, ray: Source, peer: Source, kubernetes: Destination) -> Iterator[Finding]:
    name = Destination(name="DNS", host=_DNS_NAME, port=kubernetes.port)
    reached, resolved = _connect(cluster, ray, [_listener(peer), name])["results"]
    back = _connect(cluster, peer, [_listener(ray)])["results"][0]
    if {reached["found"], back["found"]} != {"open"}:
        yield Finding.failed(
            "connections between pods",
            f"without a policy, {ray.pod} and {peer.pod} at {peer.address}: {reached['found']}, and back: "
            f"{back['found']}. Repair the network plugin, or remove cluster-wide policies that apply to new namespaces",
        )
    if resolved["address"]:
        yield Finding.ok("DNS from a pod", f"{_DNS_NAME} is {resolved['address']}")
    else:
        yield Finding.failed(
            "DNS from a pod", f"{_DNS_NAME} has no address, without any policy: check the pods of the cluster's DNS"
        )


def check_policies(
    cluster: Cluster, ray: Source, peer: Source, *, plugin: NetworkPlugin, settle_s: float
) -> Iterator[Finding]:
    """Try the connections of a Ray pod in both directions until the policies close them.

    Args:
        cluster: the cluster.
        ray: a pod under the policies.
        peer: a pod without policies.
        plugin: the network plugin.
        settle_s: how long it may take, in seconds.
    """
    end = time.monotonic() + settle_s
    while True:
        out = _connect(cluster, ray, [_listener(peer)])["results"][0]["found"]
        back = _connect(cluster, peer, [_listener(ray)])["results"][0]["found"]
        if "open" not in (out, back) or time.monotonic() > end:
            break
    check = "network policies"
    if still := [name for name, found in (("egress", out), ("ingress", back)) if found == "open"]:
        yield Finding.failed(
            check,
            f"{plugin.name} does not enforce them: {' and '.join(still)} of a pod with a Ray pod's labels stays open "
            f"under {DEFAULT_DENY}. {plugin.to_enforce}",
        )
    else:
        yield Finding.ok(check, f"{plugin.name} enforces them in both directions for a pod with a Ray pod's labels")


def check_under_policies(
    cluster: Cluster, facts: StackFacts, head: Source, kubernetes: Destination, plugin: NetworkPlugin
) -> Iterator[Finding]:
    """Check that the API server and the cluster's DNS stay open for a pod that the policies allow to reach them.

    Args:
        cluster: the cluster.
        facts: values of the stack file, of which the policies were made.
        head: a pod with the labels of a Ray head.
        kubernetes: the API server, as pods reach it.
        plugin: the network plugin.
    """
    name = Destination(name="DNS", host=_DNS_NAME, port=kubernetes.port)
    server, resolved = _connect(cluster, head, [kubernetes, name])["results"]
    check, allowed = "Kubernetes API under the policies", f"`network.plugin: {facts.network_plugin}` allows it"
    if facts.network_plugin == "kubernetes":
        allowed = f"`network.kubernetes_api` allows {', '.join(facts.api_networks)}"
    if server["found"] == "open":
        yield Finding.ok(check, f"{kubernetes.place} answers; {allowed}")
    else:
        remedy = "Enter the addresses and the port of `kubectl get endpointslices --namespace default`. "
        remedy += plugin.to_reach_nodes
        if facts.network_plugin != "kubernetes":
            remedy = (
                f"Enter the cluster's network plugin, which is {plugin.name}, in `network.plugin`, and the port of "
                "`kubectl get endpointslices --namespace default` in `network.kubernetes_api.port`"
            )
        yield Finding.failed(
            check,
            f"{kubernetes.place}: {server['found']}, though {allowed}, port {facts.api_port}. Reconciler and Ray's "
            f"autoscaler would be cut off. {remedy}".strip(),
        )
    if not resolved["address"]:
        yield Finding.failed(
            "DNS under the policies",
            f"{_DNS_NAME} has no address: enter the namespace of the cluster's DNS in `network.dns_namespace` (now "
            f"{facts.dns_namespace}), and the `nameserver` of a pod's /etc/resolv.conf in `network.dns_networks`",
        )


@contextmanager
def _sources_of_stack(cluster: Cluster, facts: StackFacts) -> Iterator[list[Source]]:
    """Yield pods of the deployed stack, with test pods for Ray's; none before there is a stack."""
    service, jobs = facts.namespace, jobs_namespace(facts.namespace)
    templates = cluster.api.find(f"/api/v1/namespaces/{service}/configmaps/{JOB_TEMPLATES}")
    if templates is None:
        yield []
        return
    sources = []
    for role in _SERVICE:
        selector = ",".join(f"{name}={value}" for name, value in _service_labels(facts, role).items())
        running = [
            pod
            for pod in cluster.api.items(f"/api/v1/namespaces/{service}/pods", labelSelector=selector)
            if pod.get("status", {}).get("phase") == "Running" and "deletionTimestamp" not in pod["metadata"]
        ]
        if not running:
            raise PodError(f"no pod of {role} runs in {service}: its egress is not checked")
        sources.append(Source.of(role, running[0]))
    head = json.loads(next(iter(templates["data"].values())))["spec"]["rayClusterSpec"]["headGroupSpec"]
    pull_secrets = tuple(each["name"] for each in head["template"]["spec"].get("imagePullSecrets", []))
    path, made = f"/api/v1/namespaces/{jobs}/pods", []
    try:
        for role, labels in _RAY_LABELS.items():
            pod = TestPod(
                name=f"doctor-{role}-{secrets.token_hex(3)}",
                image=facts.service_image,
                labels=labels,
                pull_secrets=pull_secrets,
            )
            cluster.start(jobs, pod)
            made.append(pod.name)
        for role, name in zip(_RAY_LABELS, made, strict=True):
            sources.append(Source.of(role, cluster.wait_until_running(jobs, name, limit_s=_START_LIMIT_S)))
        yield sources
    finally:
        for name in made:
            cluster.api.delete(f"{path}/{name}")


def _try_all(
    cluster: Cluster,
    sources: Sequence[Source],
    peer: Source,
    kubernetes: Sequence[Destination],
    outside: Sequence[Destination],
    *,
    in_stack: bool,
    facts: StackFacts,
) -> list[Row]:
    """Try all destinations from all sources, and from the pod without policies."""
    nodes = {
        each["address"]: int(node["status"].get("daemonEndpoints", {}).get("kubeletEndpoint", {}).get("Port", 10250))
        for node in cluster.api.items("/api/v1/nodes")
        for each in node["status"].get("addresses", [])
        if each["type"] == "InternalIP"
    }

    def plan(source: Source) -> list[tuple[Destination, Expected]]:
        other = next((address for address in nodes if address != source.node_address), "")
        listed = [source.node_address, *([other] if other else [])]
        kubelets = [
            Destination(
                name="the kubelet of its own node" if address == source.node_address else "the kubelet of another node",
                host=address,
                port=nodes.get(address, _KUBELET_PORT),
                on_own_node=address == source.node_address,
            )
            for address in listed
        ]
        reaches_kubernetes: Expected = "open" if source.role in _REACH_KUBERNETES else "closed"
        planned: list[tuple[Destination, Expected]] = [
            *((each, "closed") for each in outside),
            (_listener(peer), "closed"),
            *((each, reaches_kubernetes) for each in kubernetes),
            *((each, "closed") for each in kubelets),
        ]
        if in_stack and source.role in _RAY_LABELS:
            coordinator = Destination(
                name="the coordinator", host=f"{COORDINATOR}.{facts.namespace}.svc", port=COORDINATOR_PORT
            )
            api = Destination(name="the API of the stack", host=f"{API}.{facts.namespace}.svc", port=API_SERVICE_PORT)
            planned += [(coordinator, "open" if source.role == HEAD else "closed"), (api, "closed")]
        return planned

    def rows(source: Source) -> list[Row]:
        planned = plan(source)
        targets = [target for target, _ in planned]
        answers = _connect(cluster, source, targets)["results"]
        now = datetime.now(UTC)
        controls = _connect(cluster, peer, targets)["results"]
        return [
            Row(
                source=source.role,
                destination=target,
                expected=expected,
                found=answer["found"],
                without_policies=control["found"],
                address=answer["address"],
                seconds=answer["seconds"],
                time=now,
            )
            for (target, expected), answer, control in zip(planned, answers, controls, strict=True)
        ]

    with ThreadPoolExecutor(max_workers=len(sources)) as pool:
        return [row for found in pool.map(rows, sources) for row in found]
