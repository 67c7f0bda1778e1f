"""Pods of a job's Ray cluster: head and workers, with the restricted profile. Pure."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Final

from infra.capacity.job_sizes import AUTOSCALER_MIB, GroupSize
from infra.capacity.pools import NodePool, RayImage, placement
from infra.jobs.weights import PodWeights
from infra.kubernetes.images import PULL_SECRET
from infra.kubernetes.naming import StackNames
from infra.kubernetes.pod_spec import (
    NO_GPU,
    container_security_context,
    pod_security_context,
    resources,
    secret_volume,
)
from infra.stack_file.sections import JobsSection, ModelWeightsSection
from infra.tenancy import credentials
from infra.tenancy.trust import with_ca_bundle
from ray_job.contract.accelerators import ImageVariant
from ray_job.contract.job_spec import ENVIRONMENT_VARIABLE, ObjectStoreLocation
from ray_job.contract.leases import TOKEN_FILE_VARIABLE
from ray_job.contract.ray_environment import RAY_ENVIRONMENT
from ray_job.contract.rayjobs import TOKEN_KEY, TOKEN_VOLUME

COMPONENT: Final = "ray-job"
_TMP: Final = "/tmp"  # noqa: S108 - a volume of the pod
_HTTP_ENGINE_DIRECTORY: Final = "/run/cloister/http-engine"
_TOKEN_DIRECTORY: Final = "/run/cloister/job-token"  # noqa: S105 - a path
_SHARED_MEMORY: Final = "shared-memory"
_API_TOKEN: Final = "autoscaler-token"  # noqa: S105 - a name
_API_TOKEN_DIRECTORY: Final = "/var/run/secrets/kubernetes.io/serviceaccount"  # noqa: S105 - where Ray looks
# KubeRay starts Ray in a shell, which forwards no signals: a longer period would only block the node's GPUs.
_GRACE_PERIOD_S: Final = 5
# Karpenter and the Cluster Autoscaler must not evict a running job, because its engine would start again elsewhere.
_NO_EVICTION: Final = {"karpenter.sh/do-not-disrupt": "true", "cluster-autoscaler.kubernetes.io/safe-to-evict": "false"}

# No usage reports, and no downloads from a hub.
OFFLINE: Final = {
    "RAY_USAGE_STATS_ENABLED": "0",
    "VLLM_NO_USAGE_STATS": "1",
    "DO_NOT_TRACK": "1",
    "HF_HUB_OFFLINE": "1",
    "TRANSFORMERS_OFFLINE": "1",
    "HF_HUB_DISABLE_TELEMETRY": "1",
}
# The root file system is read-only, so libraries write to the pod's volume.
_WRITABLE: Final = {
    "TMPDIR": _TMP,
    "HOME": _TMP,
    "XDG_CACHE_HOME": f"{_TMP}/cache",
    "HF_HOME": f"{_TMP}/cache/huggingface",
    # torch names a directory after the user; the image may have no account with this id.
    "USER": "cloister",
    "LOGNAME": "cloister",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class RayJobArgs:
    """Settings of the job templates of a stack.

    Attributes:
        names: names of the stack.
        images: images by variant, for the accelerators of the models.
        pools: pools by name; ``cpu`` and those with the models' accelerators.
        weights: source of the models' directories.
        object_store: the stack's object store.
        times: time limits.
        has_pull_secret: whether the jobs' namespace has the pull secret.
        has_http_engine_key: whether the jobs' namespace has the API key of the http engine's endpoints.
        has_ca_bundle: whether the jobs' namespace has the ConfigMap with private certificate authorities.
        priority_class: priority class of the pods; empty for none.
    """

    names: StackNames
    images: Mapping[ImageVariant, RayImage]
    pools: Mapping[str, NodePool]
    weights: ModelWeightsSection
    object_store: ObjectStoreLocation
    times: JobsSection = field(default_factory=JobsSection)
    has_pull_secret: bool = False
    has_http_engine_key: bool = False
    has_ca_bundle: bool = False
    priority_class: str = ""


def head_pod(args: RayJobArgs, image: str, size: GroupSize, weights: PodWeights) -> dict[str, Any]:
    """Return the pod of the head: Ray's services, the job's process, and the autoscaler that KubeRay adds.

    Its only credential is the job's token; Ray schedules no actors to it. Only the autoscaler has a token of the
    Kubernetes API. The launcher sets the variable of the job spec, which is empty here, and the name of the token's
    Secret.
    """
    environment = {ENVIRONMENT_VARIABLE: "", TOKEN_FILE_VARIABLE: f"{_TOKEN_DIRECTORY}/{TOKEN_KEY}"}
    pod = _pod(args, image, size, args.pools["cpu"], weights=weights, environment=environment)
    spec = pod["spec"]
    spec["volumes"] += [secret_volume(TOKEN_VOLUME, secret="set-by-the-launcher")]  # noqa: S106 - a name
    spec["containers"][0]["volumeMounts"] += [{"name": TOKEN_VOLUME, "mountPath": _TOKEN_DIRECTORY, "readOnly": True}]
    # The token that Kubernetes would mount into every container, for the autoscaler's container only.
    sources: list[dict[str, Any]] = [
        {"serviceAccountToken": {"path": "token", "expirationSeconds": 3_600}},
        {"configMap": {"name": "kube-root-ca.crt", "items": [{"key": "ca.crt", "path": "ca.crt"}]}},
        {"downwardAPI": {"items": [{"path": "namespace", "fieldRef": {"fieldPath": "metadata.namespace"}}]}},
    ]
    spec["volumes"] += [{"name": _API_TOKEN, "projected": {"defaultMode": 0o440, "sources": sources}}]
    return pod


def worker_pod(
    args: RayJobArgs,
    image: str,
    size: GroupSize,
    pool: NodePool,
    *,
    weights: PodWeights,
    environment: Mapping[str, str] | None = None,
    http_engine: bool = False,
) -> dict[str, Any]:
    """Return the pod of a worker, which reaches the object store, but neither the service nor the Kubernetes API.

    It has no credential, with one exception: a worker of a model with the http engine reads the API key of its
    endpoint. A stack without one has no Secret; a pod of another stack waits for it.
    """
    variables = dict(environment or {})
    has_key = http_engine and args.has_http_engine_key
    if has_key:
        variables["CLOISTER_HTTP_ENGINE_API_KEY_FILE"] = f"{_HTTP_ENGINE_DIRECTORY}/api_key"
    pod = _pod(args, image, size, pool, weights=weights, environment=variables)
    if has_key:
        secret = credentials.HTTP_ENGINE_LOGIN
        source = {"secretName": secret, "defaultMode": 0o440}
        pod["spec"]["volumes"] += [{"name": secret, "secret": source}]
        pod["spec"]["containers"][0]["volumeMounts"] += [
            {"name": secret, "mountPath": _HTTP_ENGINE_DIRECTORY, "readOnly": True}
        ]
    return pod


def _pod(
    args: RayJobArgs,
    image: str,
    size: GroupSize,
    pool: NodePool,
    *,
    weights: PodWeights,
    environment: Mapping[str, str],
) -> dict[str, Any]:
    no_gpu = {} if size.gpus else NO_GPU
    variables = {**pool.environment, **OFFLINE, **RAY_ENVIRONMENT, **_WRITABLE, **no_gpu, **environment}
    container = {
        "name": "ray",
        "image": image,
        "imagePullPolicy": "IfNotPresent",
        "env": [{"name": name, "value": value} for name, value in variables.items()],
        # Without ports: KubeRay adds those of a head, and that of the metrics, where none is declared.
        "resources": resources(
            cpu=f"{size.cpu_m}m",
            memory=f"{size.memory_mib}Mi",
            ephemeral_storage=f"{size.disk_gib + weights.disk_gib + 1}Gi",
            extended={size.gpu_resource: size.gpus} if size.gpus else None,
        ),
        "securityContext": container_security_context(),
        "volumeMounts": [
            {"name": "tmp", "mountPath": _TMP},
            # KubeRay's default is as large as all memory.
            {"name": _SHARED_MEMORY, "mountPath": "/dev/shm"},  # noqa: S108
            *weights.mounts,
        ],
    }
    spec: dict[str, Any] = {
        **placement(pool),
        **({"runtimeClassName": pool.runtime_class} if pool.runtime_class and size.gpus else {}),
        # Autoscaler v2 mistakes a restarted pod for a new one.
        "restartPolicy": "Never",
        "automountServiceAccountToken": False,
        # Kubernetes would set variables with the prefix RAY_ for services with such names.
        "enableServiceLinks": False,
        "terminationGracePeriodSeconds": _GRACE_PERIOD_S,
        "securityContext": pod_security_context(),
        **({"priorityClassName": args.priority_class} if args.priority_class else {}),
        **({"imagePullSecrets": [{"name": PULL_SECRET}]} if args.has_pull_secret else {}),
        "initContainers": [*weights.init_containers],
        "containers": [container],
        "volumes": [
            {"name": "tmp", "emptyDir": {"sizeLimit": f"{size.disk_gib}Gi"}},
            {"name": _SHARED_MEMORY, "emptyDir": {"medium": "Memory", "sizeLimit": f"{size.shared_mib}Mi"}},
            *weights.volumes,
        ],
    }
    return {
        "metadata": {
            # KubeRay's services select pods by this name.
            "labels": {**args.names.labels(COMPONENT), "app.kubernetes.io/name": "kuberay"},
            "annotations": dict(_NO_EVICTION),
        },
        "spec": with_ca_bundle(spec) if args.has_ca_bundle else spec,
    }


def autoscaler_options(cpu_m: int, idle_timeout_s: int) -> dict[str, Any]:
    """Return the options of Ray's autoscaler, version 2, which KubeRay runs in the head's pod."""
    return {
        "version": "v2",
        "upscalingMode": "Default",
        "idleTimeoutSeconds": idle_timeout_s,
        "imagePullPolicy": "IfNotPresent",
        "resources": resources(cpu=f"{cpu_m}m", memory=f"{AUTOSCALER_MIB}Mi", ephemeral_storage="256Mi"),
        "securityContext": container_security_context(),
        "env": [{"name": name, "value": value} for name, value in {**OFFLINE, **_WRITABLE, **NO_GPU}.items()],
        "volumeMounts": [
            {"name": "tmp", "mountPath": _TMP},
            {"name": _API_TOKEN, "mountPath": _API_TOKEN_DIRECTORY, "readOnly": True},
        ],
    }
