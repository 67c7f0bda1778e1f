"""Batch service of a stack: API, reconciler, coordinator, and the migrations that run before each rollout."""

from collections.abc import Mapping, Sequence
from typing import Any, Final

import pulumi
from pulumi_kubernetes import apiextensions, apps, autoscaling, batch, core, meta, networking, policy

from infra.batch_service.external_access import CONTROLLERS, http_route, ingress
from infra.batch_service.pods import (
    MODELS,
    ServiceSettings,
    api_pod,
    audit_export_pod,
    coordinator_pod,
    migrations_pod,
    reconciler_pod,
)
from infra.kubernetes.naming import StackNames
from infra.stack_file.sections import AuditExportSection, GatewaySection, IngressSection
from infra.tenancy.rbac import AUDIT_EXPORT, MIGRATIONS
from ray_job.contract.cluster import API, API_SERVICE_PORT, COORDINATOR, COORDINATOR_PORT, RECONCILER

_RECONCILERS: Final = 2  # a leader and a standby
_COORDINATORS: Final = 1  # jobs repeat their requests
_CPU_PERCENT: Final = 70
_MIGRATIONS_S: Final = 1_800
_AUDIT_EXPORT_SCHEDULE: Final = "*/5 * * * *"
_AUDIT_EXPORT_S: Final = 3_600


class BatchService(pulumi.ComponentResource):
    """Deployments of API, reconciler and coordinator, with Services for API and coordinator.

    They tolerate the loss of a node: jobs continue with what they have while the coordinator moves.

    Args:
        name: logical name of the component.
        settings: settings of its pods.
        models_yaml: the model catalogue.
        ray_job_templates: job template of each model, as JSON, by ConfigMap and file name.
        replicas: lowest number of API pods.
        max_replicas: highest number of API pods.
        external_access: Ingress or Gateway; None for an API inside the cluster only.
        audit_export: None for no export of the audit log.
        before_migrations: resources to create before the database is migrated.
        opts: options of the component.

    Attributes:
        api_address: base URL for clients: outside the cluster with an Ingress or a Gateway, otherwise inside.
    """

    api_address: str

    def __init__(
        self,
        name: str,
        *,
        settings: ServiceSettings,
        models_yaml: str,
        ray_job_templates: Mapping[str, Mapping[str, str]],
        replicas: int,
        max_replicas: int,
        external_access: IngressSection | GatewaySection | None,
        audit_export: AuditExportSection | None,
        before_migrations: Sequence[pulumi.Resource],
        opts: pulumi.ResourceOptions | None = None,
    ) -> None:
        super().__init__("cloister:batch_service:BatchService", name, None, opts)
        names = settings.names
        child = pulumi.ResourceOptions(parent=self)
        config_maps = [
            core.v1.ConfigMap(config_map, metadata=_metadata(names, "service", config_map), data=dict(data), opts=child)
            for config_map, data in (
                (MODELS, {"models.yaml": models_yaml}),
                *ray_job_templates.items(),
            )
        ]
        migrations = self._migrations(settings, [*config_maps, *before_migrations])
        after = [*config_maps, migrations]
        # The autoscaler changes the number of API pods, so `up` must not reset it.
        self._deployment(names, API, replicas, api_pod(settings), after=after, ignore_changes=["spec.replicas"])
        self._deployment(names, RECONCILER, _RECONCILERS, reconciler_pod(settings), after=after)
        self._deployment(names, COORDINATOR, _COORDINATORS, coordinator_pod(settings), after=after)
        if audit_export:
            self._audit_export(settings, audit_export, after)
        autoscaler: dict[str, Any] = {
            "scaleTargetRef": {"apiVersion": "apps/v1", "kind": "Deployment", "name": API},
            "minReplicas": replicas,
            "maxReplicas": max_replicas,
            "metrics": [
                {
                    "type": "Resource",
                    "resource": {"name": "cpu", "target": {"type": "Utilization", "averageUtilization": _CPU_PERCENT}},
                }
            ],
            # An upload takes minutes, so a pod that has just become idle is kept for a while.
            "behavior": {"scaleDown": {"stabilizationWindowSeconds": 600}},
        }
        autoscaling.v2.HorizontalPodAutoscaler(API, metadata=_metadata(names, API, API), spec=autoscaler, opts=child)
        for component, port in ((API, API_SERVICE_PORT), (COORDINATOR, COORDINATOR_PORT)):
            service: dict[str, Any] = {
                "type": "ClusterIP",
                "ipFamilyPolicy": "PreferDualStack",
                "selector": names.selector(component),
                "ports": [{"name": "http", "port": port, "targetPort": "http", "appProtocol": "http"}],
            }
            core.v1.Service(component, metadata=_metadata(names, component, component), spec=service, opts=child)
        self.api_address = f"http://{API}.{names.service_namespace}.svc:{API_SERVICE_PORT}/v1"
        if external_access:
            self.api_address = f"https://{external_access.host}/v1"
            self._expose(names, external_access)
        self.register_outputs({})

    def _expose(self, names: StackNames, section: IngressSection | GatewaySection) -> None:
        child = pulumi.ResourceOptions(parent=self)
        if isinstance(section, GatewaySection):
            apiextensions.CustomResource(
                API,
                api_version="gateway.networking.k8s.io/v1",
                kind="HTTPRoute",
                metadata=_metadata(names, API, API),
                spec=http_route(section),
                opts=child,
            )
            return
        if advice := CONTROLLERS[section.controller].advice:
            pulumi.info(f"api.ingress.controller: {advice}")
        annotations, spec = ingress(section)
        typed: Any = spec
        networking.v1.Ingress(API, metadata=_metadata(names, API, API, annotations), spec=typed, opts=child)

    def _migrations(self, settings: ServiceSettings, after: Sequence[pulumi.Resource]) -> batch.v1.Job:
        # A Job is immutable: another image results in another Job, and Pulumi waits until it has succeeded.
        name = f"{MIGRATIONS}-{settings.image.partition('@sha256:')[2][:12]}"
        spec: dict[str, Any] = {
            "backoffLimit": 6,
            "activeDeadlineSeconds": _MIGRATIONS_S,
            "template": migrations_pod(settings),
        }
        return batch.v1.Job(
            MIGRATIONS,
            metadata=_metadata(settings.names, MIGRATIONS, name),
            spec=spec,
            opts=pulumi.ResourceOptions(
                parent=self,
                depends_on=list(after),
                delete_before_replace=True,
                replace_on_changes=["spec"],
                custom_timeouts=pulumi.CustomTimeouts(create=f"{_MIGRATIONS_S + 60}s"),
            ),
        )

    def _audit_export(
        self, settings: ServiceSettings, args: AuditExportSection, after: Sequence[pulumi.Resource]
    ) -> None:
        template = audit_export_pod(settings, f"{args.syslog_host}:{args.syslog_port}")
        spec: dict[str, Any] = {
            "schedule": _AUDIT_EXPORT_SCHEDULE,
            # Each run sends everything that is new, so one at a time is enough, and a failed one is not repeated.
            "concurrencyPolicy": "Forbid",
            "successfulJobsHistoryLimit": 1,
            "failedJobsHistoryLimit": 3,
            "jobTemplate": {
                "metadata": {"labels": settings.names.labels(AUDIT_EXPORT)},
                "spec": {"backoffLimit": 0, "activeDeadlineSeconds": _AUDIT_EXPORT_S, "template": template},
            },
        }
        batch.v1.CronJob(
            AUDIT_EXPORT,
            metadata=_metadata(settings.names, AUDIT_EXPORT, AUDIT_EXPORT),
            spec=spec,
            opts=pulumi.ResourceOptions(parent=self, depends_on=list(after)),
        )

    def _deployment(
        self,
        names: StackNames,
        name: str,
        replicas: int,
        template: Mapping[str, Any],
        *,
        after: Sequence[pulumi.Resource],
        ignore_changes: Sequence[str] = (),
    ) -> None:
        spec: dict[str, Any] = {
            "replicas": replicas,
            "selector": {"matchLabels": names.selector(name)},
            "strategy": {"type": "RollingUpdate", "rollingUpdate": {"maxSurge": 1, "maxUnavailable": 0}},
            "progressDeadlineSeconds": 600,
            "revisionHistoryLimit": 5,
            "template": template,
        }
        apps.v1.Deployment(
            name,
            metadata=_metadata(names, name, name),
            spec=spec,
            opts=pulumi.ResourceOptions(parent=self, depends_on=list(after), ignore_changes=list(ignore_changes)),
        )
        budget: dict[str, Any] = {
            "maxUnavailable": 1,
            "selector": {"matchLabels": names.selector(name)},
            # A pod that is not ready serves no requests, so it does not block the drain of a node.
            "unhealthyPodEvictionPolicy": "AlwaysAllow",
        }
        policy.v1.PodDisruptionBudget(
            name, metadata=_metadata(names, name, name), spec=budget, opts=pulumi.ResourceOptions(parent=self)
        )


def _metadata(
    names: StackNames, component: str, name: str, annotations: Mapping[str, str] | None = None
) -> meta.v1.ObjectMetaArgs:
    return meta.v1.ObjectMetaArgs(
        name=name,
        namespace=names.service_namespace,
        labels=names.labels(component),
        annotations=dict(annotations) if annotations else None,
    )
