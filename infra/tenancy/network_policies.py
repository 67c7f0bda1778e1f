"""Network policies of a stack: plain NetworkPolicies, and policies of Cilium or Calico for what those cannot express.

The default deny is always a plain NetworkPolicy. Policies of all kinds add up: a connection that one of them allows is
allowed. Sources: https://docs.cilium.io/en/v1.20/network/kubernetes/policy/,
https://docs.tigera.io/calico/latest/network-policy/policy-rules/service-policy (3.32)
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, Final

import pulumi
from pulumi_kubernetes import apiextensions, meta, networking

from infra.tenancy.network import Entities, Flow, Hosts, KubernetesService, NetworkArgs, Networks, Peer, Pods, flows
from ray_job.contract.cluster import DEFAULT_DENY

CILIUM: Final = "cilium.io/v2"
CALICO: Final = "projectcalico.org/v3"
_PLAIN: Final = "networking.k8s.io/v1"


def policies(args: NetworkArgs) -> tuple[dict[str, Any], ...]:
    """Return the manifests: a policy that denies everything for each namespace, then those of each kind of pod."""
    names, all_flows = args.names, [flow for flow in flows(args) if not flow.is_within_job]
    labels = names.labels("network")
    ends = dict.fromkeys(end for flow in all_flows for end in (flow.source, flow.target))
    return (
        *(
            _plain_policy(Pods(name=DEFAULT_DENY, namespace=namespace), labels, [], [])
            for namespace in (names.service_namespace, names.jobs_namespace)
        ),
        *(
            manifest
            for pods in ends
            if isinstance(pods, Pods) and pods.is_of_stack
            for manifest in pod_policies(pods, all_flows, labels)
        ),
    )


def pod_policies(pods: Pods, all_flows: Iterable[Flow], labels: Mapping[str, str]) -> Iterator[dict[str, Any]]:
    """Yield the policies of one kind of pod: the plain one, and that of the network plugin if a flow needs it.

    Args:
        pods: the pods; without labels, all of their namespace.
        all_flows: flows from and to these pods, and others.
        labels: labels of the policies.
    """
    ingress = [flow for flow in all_flows if flow.target == pods]
    egress = [flow for flow in all_flows if flow.source == pods]
    yield _plain_policy(
        pods, labels, [flow for flow in ingress if _is_plain(flow)], [flow for flow in egress if _is_plain(flow)]
    )
    yield from plugin_policies(pods, [*ingress, *egress], labels)


def plugin_policies(pods: Pods, all_flows: Iterable[Flow], labels: Mapping[str, str]) -> Iterator[dict[str, Any]]:
    """Yield the policy of Cilium or Calico for the flows of some pods that a plain NetworkPolicy cannot express.

    Args:
        pods: the pods; without labels, all of their namespace.
        all_flows: flows from and to these pods.
        labels: labels of the policy.
    """
    ours = [flow for flow in all_flows if not _is_plain(flow)]
    services = [flow.target for flow in ours if isinstance(flow.target, KubernetesService)]
    if services:
        yield _manifest(CALICO, "NetworkPolicy", pods, labels, _calico_spec(pods, services))
    elif ours:
        yield _manifest(CILIUM, "CiliumNetworkPolicy", pods, labels, _cilium_spec(pods, ours))


def _is_plain(flow: Flow) -> bool:
    """Return whether plain NetworkPolicies can express a flow.

    They must not allow DNS to pods whose answers Cilium reads: a rule without DNS rules on the same port takes their
    effect away. Source: https://docs.cilium.io/en/v1.20/security/policy/layer7/
    """
    return not flow.resolves_hosts and all(isinstance(end, Pods | Networks) for end in (flow.source, flow.target))


def _plain_policy(
    pods: Pods, labels: Mapping[str, str], ingress: Sequence[Flow], egress: Sequence[Flow]
) -> dict[str, Any]:
    def rules(side: str, peers: Iterable[tuple[Peer, Flow]]) -> list[dict[str, Any]]:
        return [
            {side: peer.selectors(), **flow.port_list()} for peer, flow in peers if isinstance(peer, Pods | Networks)
        ]

    spec = {
        "podSelector": {"matchLabels": dict(pods.labels)} if pods.labels else {},
        "policyTypes": ["Ingress", "Egress"],
        "ingress": rules("from", ((flow.source, flow) for flow in ingress)),
        "egress": rules("to", ((flow.target, flow) for flow in egress)),
    }
    return _manifest(_PLAIN, "NetworkPolicy", pods, labels, spec)


def _cilium_spec(pods: Pods, all_flows: Sequence[Flow]) -> dict[str, Any]:
    """Return the spec of a CiliumNetworkPolicy. A direction without a rule is left out, and so stays as it was."""
    spec: dict[str, Any] = {"endpointSelector": {"matchLabels": dict(pods.labels)} if pods.labels else {}}
    directions = (
        ("ingress", "from", [(flow.source, flow) for flow in all_flows if flow.target == pods]),
        ("egress", "to", [(flow.target, flow) for flow in all_flows if flow.source == pods]),
    )
    for direction, side, peers in directions:
        if peers:
            spec[direction] = [_cilium_peer(side, peer) | _cilium_ports(flow) for peer, flow in peers]
    return spec


def _cilium_peer(side: str, peer: Peer) -> dict[str, Any]:
    match peer:
        case Entities(entities=entities):
            return {f"{side}Entities": list(entities)}
        case Hosts(hosts=hosts):
            return {f"{side}FQDNs": [{"matchName": host} for host in hosts]}
        case Networks(cidrs=cidrs):
            return {f"{side}CIDR": list(cidrs)}
        case Pods(namespace=namespace, labels=labels):
            selected = {"k8s:io.kubernetes.pod.namespace": namespace}
            selected |= {f"k8s:{name}": value for name, value in labels.items()}
            return {f"{side}Endpoints": [{"matchLabels": selected}]}
        case KubernetesService(name=name):
            raise ValueError(f"a policy of Cilium cannot select the Service of {name}")


def _cilium_ports(flow: Flow) -> dict[str, Any]:
    ports = [{"port": str(port), "protocol": protocol} for port in flow.ports for protocol in flow.protocols]
    answers = {"rules": {"dns": [{"matchPattern": "*"}]}} if flow.resolves_hosts else {}
    return {"toPorts": [{"ports": ports, **answers}]}


def _calico_spec(pods: Pods, services: Sequence[KubernetesService]) -> dict[str, Any]:
    """Return the spec of a policy of Calico. A rule of a Service states no ports: they are those of its endpoints."""
    return {
        "selector": " && ".join(f"{name} == '{value}'" for name, value in pods.labels.items()) or "all()",
        "types": ["Egress"],
        "egress": [
            {
                "action": "Allow",
                "destination": {"services": {"name": service.service, "namespace": service.namespace}},
            }
            for service in services
        ],
    }


def _manifest(
    api_version: str, kind: str, pods: Pods, labels: Mapping[str, str], spec: dict[str, Any]
) -> dict[str, Any]:
    metadata = {"name": pods.name, "namespace": pods.namespace, "labels": dict(labels)}
    return {"apiVersion": api_version, "kind": kind, "metadata": metadata, "spec": spec}


def policy_resource(manifest: Mapping[str, Any], opts: pulumi.ResourceOptions) -> pulumi.Resource:
    """Create the resource of a policy of any kind."""
    metadata: meta.v1.ObjectMetaArgsDict = manifest["metadata"]
    name = f"{manifest['metadata']['namespace']}-{manifest['metadata']['name']}"
    if manifest["apiVersion"] == _PLAIN:
        plain: pulumi.Resource = networking.v1.NetworkPolicy(name, metadata=metadata, spec=manifest["spec"], opts=opts)
        return plain
    of_plugin: pulumi.Resource = apiextensions.CustomResource(
        f"{name}-{manifest['apiVersion'].partition('.')[0]}",
        api_version=manifest["apiVersion"],
        kind=manifest["kind"],
        metadata=metadata,
        spec=manifest["spec"],
        opts=opts,
    )
    return of_plugin


class Network(pulumi.ComponentResource):
    """The network policies of both namespaces."""

    def __init__(self, name: str, args: NetworkArgs, opts: pulumi.ResourceOptions | None = None) -> None:
        super().__init__("cloister:network:Network", name, None, opts)
        for manifest in policies(args):
            policy_resource(manifest, pulumi.ResourceOptions(parent=self))
        self.register_outputs({})
