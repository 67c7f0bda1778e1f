"""The pods of API, reconciler and migrations. Pure: dicts that may hold Pulumi outputs as values."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Final

import pulumi

from infra import credentials
from infra.access import API, MIGRATIONS, RECONCILER
from infra.naming import StackNames
from infra.network import API_PORT, RECONCILER_PORT
from infra.pod_security import container_security_context, pod_security_context, resources, temporary_volume

MODELS: Final = "models"
"""The ConfigMap with the model catalogue."""
TEMPLATES: Final = "ray-job-templates"
"""The ConfigMap with the RayJob of each model."""
DATABASE_CA: Final = "database-ca"
"""The ConfigMap with the certificate of the database's authority, where there is one."""

_MODELS_DIRECTORY: Final = "/etc/cloister/models"
_TEMPLATES_DIRECTORY: Final = "/etc/cloister/ray-jobs"
_CA_DIRECTORY: Final = "/etc/cloister/database-ca"
_TMP: Final = "/tmp"  # noqa: S108 - a volume of the pod's own
_SECONDS_TO_LEAVE: Final = 5


@dataclass(frozen=True, slots=True, kw_only=True)
class ServiceSettings:
    """What API and reconciler are told, and where they run.

    Attributes:
        names: the stack.
        image: of the service, by digest.
        pull_secret: the name of the pull secret; empty for none.
        placement: ``nodeSelector``, ``tolerations`` and ``priorityClassName``.
        database_url: of the owner's role, without a password.
        job_database_url: of the jobs' role, without a password.
        job_role: the jobs' role.
        has_database_ca: whether the ConfigMap ``database-ca`` is there.
        object_store_url: ``s3://bucket/prefix?endpoint_url=…&region=…``.
        max_running_jobs: jobs that run at the same time.
        retention_days: how long files and ended batches are kept, in days.
        workspace_gib: disk of each pod where uploads are spooled and results assembled, in GiB.
        log_level: the least important level that is logged.
        configuration_digest: of all that the pods read from ConfigMaps: a change rolls them.
        credentials_digest: of all that they read from Secrets.
    """

    names: StackNames
    image: str
    pull_secret: str
    placement: Mapping[str, Any]
    database_url: pulumi.Input[str]
    job_database_url: pulumi.Input[str]
    job_role: str
    has_database_ca: bool
    object_store_url: pulumi.Input[str]
    max_running_jobs: int
    retention_days: int
    workspace_gib: int
    log_level: str
    configuration_digest: str
    credentials_digest: pulumi.Input[str]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Part:
    """How one of the three differs from the others."""

    name: str
    command: list[str]
    environment: Mapping[str, pulumi.Input[str]]
    resources: Mapping[str, Any]
    directories: Mapping[str, str] = field(default_factory=dict)
    more: Mapping[str, Any] = field(default_factory=dict)
    tmp: str = "64Mi"


def api_pod(settings: ServiceSettings) -> dict[str, Any]:
    """The template of the API's pods."""
    part = _Part(
        name=API,
        command=["python", "-m", "service.api"],
        environment=_service_environment(settings) | {"CLOISTER_PORT": str(API_PORT)},
        directories={MODELS: _MODELS_DIRECTORY},
        resources=resources(cpu="250m", cpu_limit="2", memory="1Gi", ephemeral_storage=_disk(settings)),
        more=_served(API_PORT),
        tmp=f"{settings.workspace_gib}Gi",
    )
    return _template(settings, part)


def reconciler_pod(settings: ServiceSettings) -> dict[str, Any]:
    """The template of the reconciler's pods: the only ones with a token for the Kubernetes API."""
    environment = _service_environment(settings) | {
        "CLOISTER_HEALTH_PORT": str(RECONCILER_PORT),
        "CLOISTER_LAUNCHER": "kuberay",
        "CLOISTER_KUBERNETES_NAMESPACE": settings.names.jobs_namespace,
        "CLOISTER_RAY_JOB_TEMPLATES": _TEMPLATES_DIRECTORY,
        "CLOISTER_WORKSPACE_GIB": str(settings.workspace_gib),
    }
    part = _Part(
        name=RECONCILER,
        command=["python", "-m", "service.reconciler"],
        environment=environment,
        directories={MODELS: _MODELS_DIRECTORY, TEMPLATES: _TEMPLATES_DIRECTORY},
        # It waits most of the time. A system node of two CPUs holds the whole service, also while it is rolled.
        resources=resources(cpu="100m", cpu_limit="2", memory="1Gi", ephemeral_storage=_disk(settings)),
        more=_served(RECONCILER_PORT),
        tmp=f"{settings.workspace_gib}Gi",
    )
    template = _template(settings, part)
    template["spec"]["automountServiceAccountToken"] = True
    return template


def migrations_pod(settings: ServiceSettings) -> dict[str, Any]:
    """The template of the job that brings the schema up to date."""
    part = _Part(
        name=MIGRATIONS,
        command=["python", "-m", "service.db"],
        environment={"CLOISTER_DATABASE_URL": settings.database_url, "CLOISTER_JOB_ROLE": settings.job_role},
        resources=resources(cpu="100m", cpu_limit="1", memory="256Mi", ephemeral_storage="256Mi"),
    )
    template = _template(settings, part, object_store=False)
    # What is served has no part in it: another model would be another Job, and everything would wait for that.
    template["metadata"].pop("annotations")
    template["spec"]["restartPolicy"] = "OnFailure"
    return template


def _disk(settings: ServiceSettings) -> str:
    return f"{settings.workspace_gib + 1}Gi"  # with the container's log


def _service_environment(settings: ServiceSettings) -> dict[str, pulumi.Input[str]]:
    return {
        "CLOISTER_DATABASE_URL": settings.database_url,
        "CLOISTER_JOB_DATABASE_URL": settings.job_database_url,
        "CLOISTER_OBJECT_STORE": settings.object_store_url,
        "CLOISTER_MODELS": f"{_MODELS_DIRECTORY}/models.yaml",
        "CLOISTER_HOST": "0.0.0.0",  # noqa: S104 - of the pod; network policies say who reaches it
        "CLOISTER_MAX_RUNNING_JOBS": str(settings.max_running_jobs),
        "CLOISTER_RETENTION_DAYS": str(settings.retention_days),
        "CLOISTER_LOG_LEVEL": settings.log_level,
    }


def _served(port: int) -> dict[str, Any]:
    """Port and probes of a container that answers /healthz and /readyz."""
    live = {"httpGet": {"path": "/healthz", "port": "http"}, "timeoutSeconds": 5}
    # It waits up to 5 s for a connection to the database before it says that there is none.
    ready = {"httpGet": {"path": "/readyz", "port": "http"}, "timeoutSeconds": 10}
    return {
        "ports": [{"name": "http", "containerPort": port}],
        "startupProbe": live | {"periodSeconds": 1, "failureThreshold": 120},
        "livenessProbe": live | {"periodSeconds": 10, "failureThreshold": 6},
        "readinessProbe": ready | {"periodSeconds": 10, "failureThreshold": 3},
        # Until every proxy knows that this pod leaves, it still gets requests.
        "lifecycle": {"preStop": {"exec": {"command": ["sleep", str(_SECONDS_TO_LEAVE)]}}},
    }


def _template(settings: ServiceSettings, part: _Part, *, object_store: bool = True) -> dict[str, Any]:
    names = settings.names
    maps = dict(part.directories) | ({DATABASE_CA: _CA_DIRECTORY} if settings.has_database_ca else {})
    return {
        "metadata": {
            "labels": names.labels(part.name),
            "annotations": {
                "cloister.dev/configuration": settings.configuration_digest,
                "cloister.dev/credentials": settings.credentials_digest,
            },
        },
        "spec": {
            **settings.placement,
            "serviceAccountName": part.name,
            "automountServiceAccountToken": False,
            "enableServiceLinks": False,
            "terminationGracePeriodSeconds": 60,
            **({"imagePullSecrets": [{"name": settings.pull_secret}]} if settings.pull_secret else {}),
            "securityContext": pod_security_context(),
            "topologySpreadConstraints": [_spread(names, part.name)],
            "initContainers": [credentials.init_container(settings.image, object_store=object_store)],
            "containers": [_container(settings.image, part, maps)],
            "volumes": [
                temporary_volume("tmp", size=part.tmp),
                *credentials.volumes(object_store=object_store),
                *({"name": name, "configMap": {"name": name, "defaultMode": 0o444}} for name in maps),
            ],
        },
    }


def _container(image: str, part: _Part, maps: Mapping[str, str]) -> dict[str, Any]:
    environment = {"TMPDIR": _TMP, **credentials.ENVIRONMENT, **part.environment}
    return {
        "name": part.name,
        "image": image,
        "command": part.command,
        "env": [{"name": name, "value": value} for name, value in environment.items()],
        **part.more,
        "resources": part.resources,
        "securityContext": container_security_context(),
        "volumeMounts": [
            {"name": "tmp", "mountPath": _TMP},
            credentials.volume_mount(),
            *({"name": name, "mountPath": path, "readOnly": True} for name, path in maps.items()),
        ],
    }


def _spread(names: StackNames, component: str) -> dict[str, Any]:
    return {
        "maxSkew": 1,
        "topologyKey": "kubernetes.io/hostname",
        # A cluster with one system node still runs both.
        "whenUnsatisfiable": "ScheduleAnyway",
        "labelSelector": {"matchLabels": names.selector(component)},
    }
