"""Pod templates of API, reconciler, coordinator, migrations and the export of the audit log.

Pure: dicts whose values may be Pulumi outputs.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import pulumi

from infra.data.database import DATABASE_CA
from infra.kubernetes.naming import StackNames
from infra.kubernetes.pod_spec import container_security_context, pod_security_context, resources
from infra.tenancy import credentials
from infra.tenancy.rbac import AUDIT_EXPORT, MIGRATIONS
from ray_job.contract.cluster import (
    API,
    API_PORT,
    COORDINATOR,
    COORDINATOR_METRICS_PORT,
    COORDINATOR_PORT,
    JOB_TEMPLATES,
    RECONCILER,
    RECONCILER_PORT,
)

MODELS: Final = "models"
"""ConfigMap with the model catalogue."""

_MODELS_DIRECTORY: Final = "/etc/cloister/models"
_TEMPLATES_DIRECTORY: Final = "/etc/cloister/ray-jobs"
_CA_DIRECTORY: Final = "/etc/cloister/database-ca"
_TMP: Final = "/tmp"  # noqa: S108 - a volume of the pod
_PRE_STOP_S: Final = 5
_LOGINS: Final = (credentials.SERVICE_LOGIN, credentials.OBJECT_STORE_LOGIN)


@dataclass(frozen=True, slots=True, kw_only=True)
class ServiceSettings:
    """Settings and placement of API, reconciler and coordinator.

    Attributes:
        names: names of the stack.
        image: image of the service, by digest.
        pull_secret: name of the pull secret; empty for none.
        placement: ``nodeSelector`` or ``affinity``, ``tolerations`` and ``priorityClassName``.
        database_url: URL of the service's role, without a password.
        database_owner_url: URL of the role that owns the database, without a password; for the migrations.
        database_service_role: the service's role; empty if the service logs in as the owner.
        database_ca: the volume with the CA certificate of the database; None without one.
        has_ca_bundle: whether the ConfigMap ``ca-bundle`` exists.
        object_store_url: ``s3://bucket/prefix?endpoint_url=…&region=…``.
        max_running_jobs: jobs that run at the same time on each accelerator.
        job_slots: the same for accelerators where that would be too many.
        retention_days: retention of files and ended batches, in days.
        usage_retention_days: retention of usage and costs by day, in days.
        workspace_gib: disk of each pod of API and reconciler for uploads and for results that are being assembled, in
            GiB.
        max_key_days: days after which any API key expires; None for no limit.
        trusted_proxies: networks of the proxies that may state a client's address.
        oidc: the section ``oidc`` as JSON; empty without it.
        webhook_networks: networks of webhook receivers.
        otlp_endpoint: URL of the collector of traces; empty for none.
        trace_segments: share of the segments with spans.
        log_level: lowest level that is logged.
        job_templates: ConfigMaps with the job templates.
        configuration_digest: digest of everything that the pods read from ConfigMaps; a change rolls them.
        credentials_digest: keyed digest of everything that the pods read from Secrets.
        absent_secrets: logins that the stack has no Secret of, because pods log in by their identity.
    """

    names: StackNames
    image: str
    pull_secret: str
    placement: Mapping[str, Any]
    database_url: pulumi.Input[str]
    database_owner_url: pulumi.Input[str]
    database_service_role: str
    database_ca: Mapping[str, Any] | None
    has_ca_bundle: bool
    object_store_url: pulumi.Input[str]
    max_running_jobs: int
    job_slots: Mapping[str, int]
    retention_days: int
    usage_retention_days: int
    workspace_gib: int
    max_key_days: int | None
    trusted_proxies: tuple[str, ...]
    oidc: str
    webhook_networks: tuple[str, ...]
    otlp_endpoint: str
    trace_segments: float
    log_level: str
    job_templates: tuple[str, ...]
    configuration_digest: str
    credentials_digest: pulumi.Input[str]
    absent_secrets: frozenset[str] = frozenset()


def api_pod(settings: ServiceSettings) -> dict[str, Any]:
    """Return the pod template of the API."""
    environment = {"CLOISTER_PORT": str(API_PORT), "CLOISTER_WORKSPACE_GIB": str(settings.workspace_gib)}
    if settings.trusted_proxies:
        environment["CLOISTER_TRUSTED_PROXIES"] = ",".join(settings.trusted_proxies)
    if settings.oidc:
        environment["CLOISTER_OIDC"] = settings.oidc
    return _server_pod(
        settings,
        API,
        port=API_PORT,
        environment=environment,
        cpu="250m",
        memory="1Gi",
        tmp=f"{settings.workspace_gib}Gi",
        disk=f"{settings.workspace_gib + 1}Gi",
        secrets=(*_LOGINS, credentials.ENCRYPTION_KEYS, credentials.RECEIPT_KEY),
    )


def reconciler_pod(settings: ServiceSettings) -> dict[str, Any]:
    """Return the pod template of the reconciler, whose pods alone have a token of the Kubernetes API."""
    environment = {
        "CLOISTER_HEALTH_PORT": str(RECONCILER_PORT),
        "CLOISTER_USAGE_RETENTION_DAYS": str(settings.usage_retention_days),
        "CLOISTER_LAUNCHER": "kuberay",
        "CLOISTER_KUBERNETES_NAMESPACE": settings.names.jobs_namespace,
        "CLOISTER_RAY_JOB_TEMPLATES": _TEMPLATES_DIRECTORY,
        "CLOISTER_COORDINATOR_URL": f"http://{COORDINATOR}.{settings.names.service_namespace}.svc:{COORDINATOR_PORT}",
        "CLOISTER_WORKSPACE_GIB": str(settings.workspace_gib),
    }
    template = _server_pod(
        settings,
        RECONCILER,
        port=RECONCILER_PORT,
        environment=environment,
        # It is idle most of the time. A system node with two CPUs holds the whole service, also during a rollout.
        cpu="100m",
        memory="1Gi",
        tmp=f"{settings.workspace_gib}Gi",
        disk=f"{settings.workspace_gib + 1}Gi",
        secrets=(*_LOGINS, credentials.ENCRYPTION_KEYS, credentials.RECEIPT_KEY),
    )
    spec = template["spec"]
    spec["automountServiceAccountToken"] = True
    sources = [{"configMap": {"name": name}} for name in settings.job_templates]
    spec["volumes"].append({"name": JOB_TEMPLATES, "projected": {"defaultMode": 0o444, "sources": sources}})
    mount = {"name": JOB_TEMPLATES, "mountPath": _TEMPLATES_DIRECTORY, "readOnly": True}
    spec["containers"][0]["volumeMounts"].append(mount)
    return template


def coordinator_pod(settings: ServiceSettings) -> dict[str, Any]:
    """Return the pod template of the coordinator, which leases work to jobs and signs URLs of the object store."""
    environment = {
        "CLOISTER_COORDINATOR_PORT": str(COORDINATOR_PORT),
        "CLOISTER_COORDINATOR_METRICS_PORT": str(COORDINATOR_METRICS_PORT),
    }
    template = _server_pod(
        settings,
        COORDINATOR,
        port=COORDINATOR_PORT,
        environment=environment,
        cpu="100m",
        memory="512Mi",
        tmp="64Mi",
        disk="1Gi",
        secrets=_LOGINS,
    )
    # Not the port of jobs, which must not learn about each other.
    template["spec"]["containers"][0]["ports"] += [{"name": "metrics", "containerPort": COORDINATOR_METRICS_PORT}]
    return template


def migrations_pod(settings: ServiceSettings) -> dict[str, Any]:
    """Return the pod template of the Job that migrates the database schema, the only pod with the owner's login."""
    role = settings.database_service_role
    template = _pod(
        settings,
        MIGRATIONS,
        {
            "command": ["python", "-m", "service.db"],
            "env": {
                "CLOISTER_DATABASE_URL": settings.database_owner_url,
                **({"CLOISTER_DATABASE_SERVICE_ROLE": role} if role else {}),
            },
            "resources": resources(cpu="100m", cpu_limit="1", memory="256Mi", ephemeral_storage="256Mi"),
        },
        tmp="64Mi",
        config_maps={},
        secrets=(credentials.OWNER_LOGIN, credentials.ENCRYPTION_KEYS),
    )
    # Migrations do not depend on the digests: another model must not replace the Job, which all pods wait for.
    template["metadata"].pop("annotations")
    template["spec"]["restartPolicy"] = "OnFailure"
    return template


def audit_export_pod(settings: ServiceSettings, syslog_server: str) -> dict[str, Any]:
    """Return the pod template that sends new entries of the audit log to ``host:port`` of a syslog server."""
    template = _pod(
        settings,
        AUDIT_EXPORT,
        {
            "command": ["cloister", "audit", "export", "--syslog-tls", syslog_server],
            "env": {"CLOISTER_DATABASE_URL": settings.database_url},
            "resources": resources(cpu="100m", cpu_limit="1", memory="256Mi", ephemeral_storage="256Mi"),
        },
        tmp="64Mi",
        config_maps={},
        secrets=(credentials.SERVICE_LOGIN,),
    )
    # The next run continues where this one stopped.
    template["spec"]["restartPolicy"] = "Never"
    return template


def _server_pod(
    settings: ServiceSettings,
    component: str,
    *,
    port: int,
    environment: Mapping[str, str],
    cpu: str,
    memory: str,
    tmp: str,
    disk: str,
    secrets: Sequence[str],
) -> dict[str, Any]:
    """Return the pod template of a server: ``service.<component>``, which answers /healthz and /readyz."""
    shared: dict[str, pulumi.Input[str]] = {
        "CLOISTER_DATABASE_URL": settings.database_url,
        "CLOISTER_OBJECT_STORE": settings.object_store_url,
        "CLOISTER_MODELS": f"{_MODELS_DIRECTORY}/models.yaml",
        # The pod's addresses of both families; network policies limit its clients.
        "CLOISTER_HOST": "::",
        "CLOISTER_MAX_RUNNING_JOBS": str(settings.max_running_jobs),
        "CLOISTER_MAX_RUNNING_JOBS_BY_ACCELERATOR": ",".join(
            f"{name}={slots}" for name, slots in settings.job_slots.items()
        ),
        "CLOISTER_RETENTION_DAYS": str(settings.retention_days),
        "CLOISTER_LOG_LEVEL": settings.log_level,
    }
    if settings.max_key_days:
        shared["CLOISTER_MAX_KEY_DAYS"] = str(settings.max_key_days)
    if settings.webhook_networks:
        shared["CLOISTER_WEBHOOK_NETWORKS"] = ",".join(settings.webhook_networks)
    if settings.otlp_endpoint:
        shared["CLOISTER_OTLP_ENDPOINT"] = settings.otlp_endpoint
        shared["CLOISTER_TRACE_SEGMENTS"] = str(settings.trace_segments)
    live = {"httpGet": {"path": "/healthz", "port": "http"}, "timeoutSeconds": 5}
    # The server waits up to 5 s for a database connection before it reports a failure.
    ready = {"httpGet": {"path": "/readyz", "port": "http"}, "timeoutSeconds": 10}
    container = {
        "command": ["python", "-m", f"service.{component}"],
        "env": {**shared, **environment},
        "ports": [{"name": "http", "containerPort": port}],
        "startupProbe": live | {"periodSeconds": 1, "failureThreshold": 120},
        "livenessProbe": live | {"periodSeconds": 10, "failureThreshold": 6},
        "readinessProbe": ready | {"periodSeconds": 10, "failureThreshold": 3},
        # A terminating pod still receives requests until every proxy has removed it.
        "lifecycle": {"preStop": {"exec": {"command": ["sleep", str(_PRE_STOP_S)]}}},
        # The disk is for the temporary files and the container's log.
        "resources": resources(cpu=cpu, cpu_limit="2", memory=memory, ephemeral_storage=disk),
    }
    return _pod(settings, component, container, tmp=tmp, config_maps={MODELS: _MODELS_DIRECTORY}, secrets=secrets)


def _pod(
    settings: ServiceSettings,
    component: str,
    container: Mapping[str, Any],
    *,
    tmp: str,
    config_maps: Mapping[str, str],
    secrets: Sequence[str],
) -> dict[str, Any]:
    """Return a pod template; ``container`` has the fields in which its container differs, with ``env`` as a mapping."""
    present = [secret for secret in secrets if secret not in settings.absent_secrets]
    environment = {"TMPDIR": _TMP, **credentials.ENVIRONMENT, **container["env"]}
    for secret in present:
        environment |= credentials.ENVIRONMENT_OF[secret]
    copy_credentials, credentials_volumes = credentials.pod_fields(
        settings.image, present, has_ca_bundle=settings.has_ca_bundle
    )
    if settings.has_ca_bundle:
        environment |= credentials.CA_BUNDLE_ENVIRONMENT
    mounts = [
        {"name": "tmp", "mountPath": _TMP},
        credentials.VOLUME_MOUNT,
        *({"name": name, "mountPath": path, "readOnly": True} for name, path in config_maps.items()),
        *([{"name": DATABASE_CA, "mountPath": _CA_DIRECTORY, "readOnly": True}] if settings.database_ca else []),
    ]
    spread = {
        "maxSkew": 1,
        "topologyKey": "kubernetes.io/hostname",
        # Not DoNotSchedule, so that a cluster with one system node runs both pods.
        "whenUnsatisfiable": "ScheduleAnyway",
        "labelSelector": {"matchLabels": settings.names.selector(component)},
    }
    return {
        "metadata": {
            "labels": settings.names.labels(component),
            "annotations": {
                "cloister.dev/configuration": settings.configuration_digest,
                "cloister.dev/credentials": settings.credentials_digest,
            },
        },
        "spec": {
            **settings.placement,
            "serviceAccountName": component,
            "automountServiceAccountToken": False,
            "enableServiceLinks": False,
            "terminationGracePeriodSeconds": 60,
            **({"imagePullSecrets": [{"name": settings.pull_secret}]} if settings.pull_secret else {}),
            "securityContext": pod_security_context(),
            "topologySpreadConstraints": [spread],
            "initContainers": copy_credentials,
            "containers": [
                {
                    "name": component,
                    "image": settings.image,
                    **container,
                    "env": [{"name": name, "value": value} for name, value in environment.items()],
                    "securityContext": container_security_context(),
                    "volumeMounts": mounts,
                }
            ],
            "volumes": [
                {"name": "tmp", "emptyDir": {"sizeLimit": tmp}},
                *credentials_volumes,
                *({"name": name, "configMap": {"name": name, "defaultMode": 0o444}} for name in config_maps),
                *([settings.database_ca] if settings.database_ca else []),
            ],
        },
    }
