"""KubeRay's operator by its own Helm chart, from whatever repository the stack names."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

import pulumi
from pulumi_kubernetes import helm

from infra.images import PULL_SECRET, ImageReference
from infra.naming import StackNames
from infra.network import DNS_PORT, RAY_DASHBOARD_PORT
from infra.platform_namespace import PlatformNamespace
from infra.pod_security import container_security_context, resources

CHART: Final = "kuberay-operator"
COMPONENT: Final = "kuberay"
MIN_VERSION: Final = (1, 6)
"""The first version with ``preRunningDeadlineSeconds``."""
# Each running job is looked at every three seconds; one at a time would be late with a hundred of them.
_CONCURRENCY: Final = 10


@dataclass(frozen=True, slots=True, kw_only=True)
class KubeRayArgs:
    """Where the operator comes from and runs. Exactly one stack of a cluster installs it.

    Attributes:
        names: the stack.
        repository: of the chart, ``https://…`` or ``oci://…``.
        version: of the chart.
        namespace: of the operator; the component makes it.
        image: of the operator.
        placement: ``nodeSelector`` and ``tolerations``.
        kubernetes_api: networks of the cluster's API server.
        kubernetes_api_port: its port there.
        dns_namespace: where the cluster's DNS runs.
        dns_networks: where a cache of it answers that is no pod.
        docker_config: of a registry that asks for a login; None for none.
    """

    names: StackNames
    repository: str
    version: str
    namespace: str
    image: ImageReference
    placement: Mapping[str, Any]
    kubernetes_api: tuple[str, ...]
    kubernetes_api_port: int = 6443
    dns_namespace: str = "kube-system"
    dns_networks: tuple[str, ...] = ()
    docker_config: pulumi.Input[str] | None = None


def chart_source(repository: str) -> dict[str, Any]:
    """How Helm finds the chart: an OCI registry has it below its own path, a repository lists it by name."""
    if repository.startswith("oci://"):
        return {"chart": f"{repository.rstrip('/')}/{CHART}"}
    return {"chart": CHART, "repository_opts": {"repo": repository}}


def operator_values(args: KubeRayArgs) -> dict[str, Any]:
    """The chart's values: https://github.com/ray-project/kuberay/blob/v1.6.1/helm-chart/kuberay-operator/values.yaml."""
    algorithm, _, digest = args.image.digest.partition(":")
    owner = {name: value for name, value in args.names.labels(COMPONENT).items() if name.startswith("cloister.dev/")}
    return {
        # The chart writes repository:tag. Split behind the algorithm, that is a reference by digest.
        "image": {"repository": f"{args.image.registry}/{args.image.name}@{algorithm}", "tag": digest},
        **({"imagePullSecrets": [{"name": PULL_SECRET}]} if args.docker_config is not None else {}),
        "labels": owner,
        "nodeSelector": dict(args.placement.get("nodeSelector", {})),
        "tolerations": list(args.placement.get("tolerations", [])),
        "resources": resources(cpu="500m", memory="1Gi", ephemeral_storage="256Mi"),
        "podSecurityContext": {"runAsNonRoot": True, "seccompProfile": {"type": "RuntimeDefault"}},
        "securityContext": container_security_context(),
        "leaderElectionEnabled": True,
        "reconcileConcurrency": _CONCURRENCY,
        "featureGates": [
            {"name": "RayClusterStatusConditions", "enabled": True},
            # Without it no RayJob, and no Ray cluster, would ever be deleted.
            {"name": "RayJobDeletionPolicy", "enabled": True},
        ],
    }


def operator_egress(args: KubeRayArgs) -> list[dict[str, Any]]:
    """What the operator may reach: the API server, names, and the dashboards of Ray heads in all namespaces."""
    heads = {"namespaceSelector": {}, "podSelector": {"matchLabels": {"ray.io/node-type": "head"}}}
    dns = {"namespaceSelector": {"matchLabels": {"kubernetes.io/metadata.name": args.dns_namespace}}}
    caches = [{"ipBlock": {"cidr": cidr}} for cidr in args.dns_networks]
    return [
        {
            "to": [{"ipBlock": {"cidr": cidr}} for cidr in args.kubernetes_api],
            "ports": [{"port": args.kubernetes_api_port, "protocol": "TCP"}],
        },
        {"to": [heads], "ports": [{"port": RAY_DASHBOARD_PORT, "protocol": "TCP"}]},
        {"to": [dns, *caches], "ports": [{"port": DNS_PORT, "protocol": protocol} for protocol in ("UDP", "TCP")]},
    ]


class KubeRay(pulumi.ComponentResource):
    """The operator's namespace and its chart, custom resource definitions included."""

    made: tuple[pulumi.Resource, ...]

    def __init__(self, name: str, args: KubeRayArgs, opts: pulumi.ResourceOptions | None = None) -> None:
        super().__init__("cloister:kuberay:KubeRay", name, None, opts)
        before = PlatformNamespace(
            names=args.names,
            name=args.namespace,
            component=COMPONENT,
            profile="restricted",
            docker_config=args.docker_config,
            egress=operator_egress(args),
        ).make(self)
        chart = helm.v4.Chart(
            CHART,
            **chart_source(args.repository),
            name=CHART,
            version=args.version,
            namespace=args.namespace,
            values=operator_values(args),
            opts=pulumi.ResourceOptions(parent=self, depends_on=before),
        )
        self.made = (*before, chart)
        self.register_outputs({})
