"""The batch service: API, reconciler, and the migrations that run before either is rolled out."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

import pulumi
from pulumi_kubernetes import apps, autoscaling, batch, core, meta, networking, policy

from infra.access import API, MIGRATIONS, RECONCILER
from infra.naming import StackNames
from infra.service_pods import (
    MODELS,
    TEMPLATES,
    ServiceSettings,
    api_pod,
    migrations_pod,
    reconciler_pod,
)

HTTP_PORT: Final = 80
"""The port of the Service ``api``."""
_RECONCILERS: Final = 2  # one leads, the other takes over
_CPU_PERCENT: Final = 70
_MIGRATIONS_S: Final = 1_800
# The largest file that the API takes, and the frame of its multipart form.
_MAX_BODY: Final = "210m"
_UPLOAD_S: Final = "3600"


@dataclass(frozen=True, slots=True, kw_only=True)
class IngressArgs:
    """How the API is reached from outside of the cluster.

    Attributes:
        host: its host name.
        class_name: the ingress class.
        tls_secret: the Secret with the certificate; cert-manager makes it where ``cluster_issuer`` is given.
        cluster_issuer: cert-manager's; empty without.
        annotations: of the Ingress, for controllers other than ingress-nginx.
    """

    host: str
    class_name: str
    tls_secret: str
    cluster_issuer: str = ""
    annotations: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchServiceArgs:
    """What the service is made of.

    Attributes:
        settings: of its pods.
        models_yaml: the model catalogue.
        ray_job_templates: the RayJob of each model, as JSON, by the file's name.
        replicas: API pods at rest.
        max_replicas: the most API pods.
        ingress: None: the API is reached inside the cluster only.
        before_migrations: what must be there before the database can be migrated.
    """

    settings: ServiceSettings
    models_yaml: str
    ray_job_templates: Mapping[str, pulumi.Input[str]]
    replicas: int = 2
    max_replicas: int = 4
    ingress: IngressArgs | None = None
    before_migrations: Sequence[pulumi.Resource] = ()


class BatchService(pulumi.ComponentResource):
    """Deployments of API and reconciler, each ready for the loss of a node, behind one Service."""

    def __init__(self, name: str, args: BatchServiceArgs, opts: pulumi.ResourceOptions | None = None) -> None:
        super().__init__("cloister:batch_service:BatchService", name, None, opts)
        self._names = args.settings.names
        maps = self._config_maps(args)
        migrations = self._migrations(args, [*maps, *args.before_migrations])
        after = [*maps, migrations]
        self._deployment(API, args.replicas, api_pod(args.settings), after, replicas_change=True)
        self._deployment(RECONCILER, _RECONCILERS, reconciler_pod(args.settings), after)
        self._autoscaler(args)
        self._service()
        if args.ingress:
            self._ingress(args.ingress)
        self.register_outputs({})

    def _metadata(
        self, component: str, name: str, annotations: Mapping[str, str] | None = None
    ) -> meta.v1.ObjectMetaArgs:
        return meta.v1.ObjectMetaArgs(
            name=name,
            namespace=self._names.service_namespace,
            labels=self._names.labels(component),
            annotations=dict(annotations) if annotations else None,
        )

    def _child(self, depends_on: Sequence[pulumi.Resource] = ()) -> pulumi.ResourceOptions:
        return pulumi.ResourceOptions(parent=self, depends_on=list(depends_on))

    def _config_maps(self, args: BatchServiceArgs) -> list[pulumi.Resource]:
        contents: dict[str, Mapping[str, pulumi.Input[str]]] = {
            MODELS: {"models.yaml": args.models_yaml},
            TEMPLATES: args.ray_job_templates,
        }
        return [
            core.v1.ConfigMap(name, metadata=self._metadata("service", name), data=dict(data), opts=self._child())
            for name, data in contents.items()
        ]

    def _migrations(self, args: BatchServiceArgs, after: Sequence[pulumi.Resource]) -> pulumi.Resource:
        # A Job cannot be changed: another image is another Job, and Pulumi waits until it has succeeded.
        name = f"{MIGRATIONS}-{args.settings.image.partition('@sha256:')[2][:12]}"
        spec: dict[str, Any] = {
            "backoffLimit": 6,
            "activeDeadlineSeconds": _MIGRATIONS_S,
            "template": migrations_pod(args.settings),
        }
        job: pulumi.Resource = batch.v1.Job(
            MIGRATIONS,
            metadata=self._metadata(MIGRATIONS, name),
            spec=spec,
            opts=pulumi.ResourceOptions(
                parent=self,
                depends_on=list(after),
                delete_before_replace=True,
                replace_on_changes=["spec"],
                custom_timeouts=pulumi.CustomTimeouts(create=f"{_MIGRATIONS_S + 60}s"),
            ),
        )
        return job

    def _deployment(
        self,
        name: str,
        replicas: int,
        template: Mapping[str, Any],
        after: Sequence[pulumi.Resource],
        *,
        replicas_change: bool = False,
    ) -> None:
        spec: dict[str, Any] = {
            "replicas": replicas,
            "selector": {"matchLabels": self._names.selector(name)},
            "strategy": {"type": "RollingUpdate", "rollingUpdate": {"maxSurge": 1, "maxUnavailable": 0}},
            "progressDeadlineSeconds": 600,
            "revisionHistoryLimit": 5,
            "template": template,
        }
        # The autoscaler sets their number from then on.
        ignored = ["spec.replicas"] if replicas_change else []
        apps.v1.Deployment(
            name,
            metadata=self._metadata(name, name),
            spec=spec,
            opts=pulumi.ResourceOptions(parent=self, depends_on=list(after), ignore_changes=ignored),
        )
        disruption: dict[str, Any] = {
            "maxUnavailable": 1,
            "selector": {"matchLabels": self._names.selector(name)},
            # A pod that is not ready serves nobody: a drain need not wait for it.
            "unhealthyPodEvictionPolicy": "AlwaysAllow",
        }
        policy.v1.PodDisruptionBudget(name, metadata=self._metadata(name, name), spec=disruption, opts=self._child())

    def _autoscaler(self, args: BatchServiceArgs) -> None:
        cpu = {"name": "cpu", "target": {"type": "Utilization", "averageUtilization": _CPU_PERCENT}}
        spec: dict[str, Any] = {
            "scaleTargetRef": {"apiVersion": "apps/v1", "kind": "Deployment", "name": API},
            "minReplicas": args.replicas,
            "maxReplicas": args.max_replicas,
            "metrics": [{"type": "Resource", "resource": cpu}],
            # An upload takes minutes: a pod that has just become idle is kept for a while.
            "behavior": {"scaleDown": {"stabilizationWindowSeconds": 600}},
        }
        autoscaling.v2.HorizontalPodAutoscaler(API, metadata=self._metadata(API, API), spec=spec, opts=self._child())

    def _service(self) -> None:
        spec: dict[str, Any] = {
            "type": "ClusterIP",
            "selector": self._names.selector(API),
            "ports": [{"name": "http", "port": HTTP_PORT, "targetPort": "http", "appProtocol": "http"}],
        }
        core.v1.Service(API, metadata=self._metadata(API, API), spec=spec, opts=self._child())

    def _ingress(self, args: IngressArgs) -> None:
        networking.v1.Ingress(
            API,
            metadata=self._metadata(API, API, ingress_annotations(args)),
            spec=ingress_spec(args),
            opts=self._child(),
        )


def ingress_annotations(args: IngressArgs) -> dict[str, str]:
    """What ingress-nginx and cert-manager must be told; other controllers ignore it.

    Source: https://kubernetes.github.io/ingress-nginx/user-guide/nginx-configuration/annotations/
    """
    nginx = {
        "proxy-body-size": _MAX_BODY,
        # A file goes to the API as it comes in, not to the controller's disk first.
        "proxy-request-buffering": "off",
        "proxy-buffering": "off",
        "proxy-read-timeout": _UPLOAD_S,
        "proxy-send-timeout": _UPLOAD_S,
        "force-ssl-redirect": "true",
    }
    return {
        **{f"nginx.ingress.kubernetes.io/{name}": value for name, value in nginx.items()},
        **({"cert-manager.io/cluster-issuer": args.cluster_issuer} if args.cluster_issuer else {}),
        # Controllers on premises often write no address into the status, which Pulumi would wait for.
        "pulumi.com/skipAwait": "true",
        **args.annotations,
    }


def ingress_spec(args: IngressArgs) -> Any:
    """The spec of the Ingress: the paths of OpenAI's API only; probes and metrics stay inside."""
    backend = {"service": {"name": API, "port": {"name": "http"}}}
    return {
        "ingressClassName": args.class_name,
        "tls": [{"hosts": [args.host], "secretName": args.tls_secret}],
        "rules": [{"host": args.host, "http": {"paths": [{"path": "/v1", "pathType": "Prefix", "backend": backend}]}}],
    }


def api_address(names: StackNames, ingress: IngressArgs | None) -> str:
    """The base URL for clients: by the ingress, or inside the cluster."""
    if ingress:
        return f"https://{ingress.host}/v1"
    return f"http://{API}.{names.service_namespace}.svc:{HTTP_PORT}/v1"
