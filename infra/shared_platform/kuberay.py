"""KubeRay's operator, installed with its own Helm chart from the repository that the stack file names."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

import pulumi
from pulumi_kubernetes import helm

from infra.kubernetes.images import PULL_SECRET, ImageReference
from infra.kubernetes.naming import StackNames
from infra.kubernetes.pod_spec import container_security_context, resources
from infra.shared_platform.namespace import platform_namespace
from infra.stack_file.cluster_sections import NetworkPlugin
from infra.tenancy.network import DNS_PORT, RAY_DASHBOARD_PORT, Entities, Flow, Networks, Pods, api_server

CHART: Final = "kuberay-operator"
COMPONENT: Final = "kuberay"
# The operator reconciles each running job every three seconds; one at a time is too slow for a hundred jobs.
_CONCURRENCY: Final = 10


@dataclass(frozen=True, slots=True, kw_only=True)
class KubeRayArgs:
    """Chart and placement of the operator. Exactly one stack of a cluster installs it.

    Attributes:
        names: names of the stack.
        repository: repository of the chart, ``https://…`` or ``oci://…``.
        version: version of the chart.
        skip_crds: whether the custom resource definitions exist already and belong to nobody's stack.
        namespace: namespace of the operator; the component creates it.
        image: image of the operator.
        placement: ``nodeSelector`` or ``affinity``, and ``tolerations``.
        jobs_namespaces: the namespaces of jobs, which exist; the operator watches them only. Without any, it watches
            its own.
        network_plugin: the network plugin of the cluster.
        kubernetes_api: networks of the cluster's API server, which plain NetworkPolicies name.
        kubernetes_api_port: port of the API server in these networks.
        dns_namespace: namespace of the cluster's DNS.
        dns_networks: addresses of a DNS cache that is not a pod.
        docker_config: content of the pull secret; None if the registry requires no login.
    """

    names: StackNames
    repository: str
    version: str
    skip_crds: bool = False
    namespace: str
    image: ImageReference
    placement: Mapping[str, Any]
    jobs_namespaces: tuple[str, ...]
    network_plugin: NetworkPlugin = "kubernetes"
    kubernetes_api: tuple[str, ...] = ()
    kubernetes_api_port: int = 6443
    dns_namespace: str = "kube-system"
    dns_networks: tuple[str, ...] = ()
    docker_config: pulumi.Input[str] | None = None


def operator_values(args: KubeRayArgs) -> dict[str, Any]:
    """Return the chart's values.

    Source: https://github.com/ray-project/kuberay/blob/v1.6.1/helm-chart/kuberay-operator/values.yaml
    """
    watched = args.jobs_namespaces or (args.namespace,)
    algorithm, _, digest = args.image.digest.partition(":")
    owner = {name: value for name, value in args.names.labels(COMPONENT).items() if name.startswith("cloister.dev/")}
    return {
        # The chart joins repository and tag with a colon. Split after the algorithm, the result is a digest reference.
        "image": {"repository": f"{args.image.registry}/{args.image.name}@{algorithm}", "tag": digest},
        **({"imagePullSecrets": [{"name": PULL_SECRET}]} if args.docker_config is not None else {}),
        "labels": owner,
        "nodeSelector": dict(args.placement.get("nodeSelector", {})),
        "affinity": dict(args.placement.get("affinity", {})),
        "tolerations": list(args.placement.get("tolerations", [])),
        "resources": resources(cpu="500m", memory="1Gi", ephemeral_storage="256Mi"),
        "podSecurityContext": {"runAsNonRoot": True, "seccompProfile": {"type": "RuntimeDefault"}},
        "securityContext": container_security_context(),
        # A role in each watched namespace, instead of a cluster role that reads all Secrets.
        "watchNamespace": list(watched),
        "singleNamespaceInstall": True,
        "rbacEnable": True,
        "crNamespacedRbacEnable": True,
        "leaderElectionEnabled": True,
        "reconcileConcurrency": _CONCURRENCY,
        "featureGates": [
            {"name": "RayClusterStatusConditions", "enabled": True},
            # Without this gate no RayJob and no Ray cluster is ever deleted.
            {"name": "RayJobDeletionPolicy", "enabled": True},
        ],
    }


def operator_egress(args: KubeRayArgs) -> list[dict[str, Any]]:
    """Return the operator's egress rules: API server, DNS, and the dashboards of Ray heads in all namespaces.

    A policy of the network plugin allows the API server where a NetworkPolicy cannot (``operator_plugin_egress``).
    """
    heads = {"namespaceSelector": {}, "podSelector": {"matchLabels": {"ray.io/node-type": "head"}}}
    dns = {"namespaceSelector": {"matchLabels": {"kubernetes.io/metadata.name": args.dns_namespace}}}
    caches = [{"ipBlock": {"cidr": cidr}} for cidr in args.dns_networks]
    rules = [
        {"to": [heads], "ports": [{"port": RAY_DASHBOARD_PORT, "protocol": "TCP"}]},
        {"to": [dns, *caches], "ports": [{"port": DNS_PORT, "protocol": protocol} for protocol in ("UDP", "TCP")]},
    ]
    server = api_server(args.network_plugin, args.kubernetes_api)
    if isinstance(server, Networks):
        rules.insert(0, {"to": server.selectors(), "ports": [{"port": args.kubernetes_api_port, "protocol": "TCP"}]})
    return rules


def operator_plugin_egress(args: KubeRayArgs) -> list[Flow]:
    """Return the operator's flows that only a policy of the network plugin can express."""
    server = api_server(args.network_plugin, args.kubernetes_api)
    if isinstance(server, Networks):
        return []
    operator = Pods(name=COMPONENT, namespace=args.namespace)
    found = [Flow(source=operator, target=server, ports=(args.kubernetes_api_port,), why="RayJobs")]
    if args.dns_networks and isinstance(server, Entities):
        cache = Entities(name="DNS cache of the node", entities=("host",))
        found.append(Flow(source=operator, target=cache, ports=(DNS_PORT,), protocols=("UDP", "TCP"), why="names"))
    return found


class KubeRay(pulumi.ComponentResource):
    """The operator's namespace and its chart.

    The custom resource definitions of the chart are 4 MB in Pulumi's state, and most of the time of a preview. If they
    are part of the stack, its destruction deletes the RayJobs of all stacks with them.
    """

    resources: tuple[pulumi.Resource, ...]

    def __init__(self, name: str, args: KubeRayArgs, opts: pulumi.ResourceOptions | None = None) -> None:
        super().__init__("cloister:kuberay:KubeRay", name, None, opts)
        namespace = platform_namespace(
            args.namespace,
            names=args.names,
            component=COMPONENT,
            profile="restricted",
            docker_config=args.docker_config,
            egress=operator_egress(args),
            plugin_egress=operator_plugin_egress(args),
            parent=self,
        )
        # A chart is below the path of an OCI registry, or has a name in a chart repository.
        source: dict[str, Any] = {"chart": CHART, "repository_opts": {"repo": args.repository}}
        if args.repository.startswith("oci://"):
            source = {"chart": f"{args.repository.rstrip('/')}/{CHART}"}
        chart = helm.v4.Chart(
            CHART,
            **source,
            name=CHART,
            version=args.version,
            skip_crds=args.skip_crds,
            namespace=args.namespace,
            values=operator_values(args),
            opts=pulumi.ResourceOptions(parent=self, depends_on=namespace),
        )
        self.resources = (*namespace, chart)
        self.register_outputs({})
