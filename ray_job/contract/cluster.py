"""Names, rights and minimum versions of a Kubernetes stack: ``infra`` creates them, ``cloister doctor`` checks them."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

MIN_KUBERNETES: Final = (1, 30)
MIN_KUBERAY: Final = (1, 6)
"""The first version with ``preRunningDeadlineSeconds``. Without it a job whose image is missing waits forever."""
MIN_POSTGRES: Final = 15

POOL_LABEL: Final = "cloister.dev/pool"
"""The node label that assigns a node to a pool."""
CUSTOMER_LABEL: Final = "cloister.dev/customer"
"""The label of all objects of a customer, and the label and taint of nodes that run pods of this customer only."""
GPU_RESOURCE: Final = "nvidia.com/gpu"
"""The extended resource that NVIDIA's device plugin registers, and the key of the taint on GPU nodes."""

API: Final = "api"
"""The name of the API's Deployment, Service, container and service account."""
RECONCILER: Final = "reconciler"
"""The name of the reconciler's Deployment, container and service account."""
COORDINATOR: Final = "coordinator"
"""The name of the coordinator's Deployment, Service, container and service account."""
API_PORT: Final = 8000
API_SERVICE_PORT: Final = 80
RECONCILER_PORT: Final = 8001
COORDINATOR_PORT: Final = 8100
COORDINATOR_METRICS_PORT: Final = 8101
RAY_METRICS_PORT: Final = 8080
"""The port of each Ray node for Prometheus; KubeRay's default."""

JOB_TEMPLATES: Final = "ray-job-templates"
"""The ConfigMap with the job template of each model."""
JOBS_OWNER: Final = "jobs"
"""The ConfigMap in the namespace of jobs that owns all RayJobs. Its deletion ends them before it returns."""
DEFAULT_DENY: Final = "default-deny"
"""The NetworkPolicy in each namespace that denies all traffic which no other policy allows."""
POD_SECURITY_LABEL: Final = "pod-security.kubernetes.io/enforce"
POD_SECURITY_PROFILE: Final = "restricted"


@dataclass(frozen=True, slots=True, kw_only=True)
class Right:
    """Verbs that a role allows on one resource.

    Attributes:
        group: the API group; empty for the core group.
        resource: the resource, such as ``pods`` or ``pods/exec``.
        verbs: the verbs.
        names: names of the only objects that it allows them on; empty for all.
    """

    group: str
    resource: str
    verbs: tuple[str, ...]
    names: tuple[str, ...] = ()


LAUNCHER_RIGHTS: Final = (
    # The launcher creates and deletes one RayJob for each job, and watches its state.
    Right(group="ray.io", resource="rayjobs", verbs=("create", "get", "list", "watch", "delete")),
    # The token of a job. The launcher can write it, but cannot read any Secret.
    Right(group="", resource="secrets", verbs=("create", "update")),
    # Each job's pods may reach each other. An admission policy refuses all other policies.
    Right(group="networking.k8s.io", resource="networkpolicies", verbs=("create",)),
    # The owner of the RayJobs. Clusters that check the right to block its deletion ask for that on its finalizers.
    Right(group="", resource="configmaps", verbs=("get",), names=(JOBS_OWNER,)),
    Right(group="", resource="configmaps/finalizers", verbs=("update",), names=(JOBS_OWNER,)),
    # Waiting pods hold the reason why a job does not start yet: a missing image, no free GPU.
    Right(group="", resource="pods", verbs=("list",)),
)
"""All requests of ``service.adapters.rayjobs_api``, in the namespace of jobs."""


@dataclass(frozen=True, slots=True, kw_only=True)
class IngressController:
    """Ingress class and namespace in the installation guide of an ingress controller; empty without a default."""

    class_name: str = ""
    namespace: str = ""


INGRESS_CONTROLLERS: Final[Mapping[str, IngressController]] = {
    "traefik": IngressController(class_name="traefik", namespace="traefik"),
    "haproxy": IngressController(class_name="haproxy", namespace="haproxy-controller"),
    "nginx": IngressController(class_name="nginx", namespace="ingress-nginx"),
    "contour": IngressController(class_name="contour", namespace="projectcontour"),
    "custom": IngressController(),
}
"""Defaults by the value of ``api.ingress.controller``; ``nginx`` is ingress-nginx."""
GATEWAY_LISTENER: Final = "https"
"""Default name of the listener of a Gateway that serves the API."""


def jobs_namespace(service_namespace: str) -> str:
    """Return the namespace of a stack's Ray clusters: ``cloister-acme-dev-jobs``."""
    return f"{service_namespace}-jobs"


def job_templates_name(number: int) -> str:
    """Return the name of a ConfigMap with job templates, which are numbered from 0."""
    return f"{JOB_TEMPLATES}-{number + 1}" if number else JOB_TEMPLATES
