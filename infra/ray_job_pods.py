"""The pods of a batch's Ray cluster: head and workers, under the restricted profile. Pure."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import PurePosixPath
from typing import Any, Final

from infra import credentials
from infra.database import CA_FILE
from infra.images import PULL_SECRET
from infra.naming import StackNames
from infra.pod_security import container_security_context, pod_security_context, resources, temporary_volume
from infra.pools import GPU_RESOURCE, PoolName, placement
from infra.ray_job_sizes import AUTOSCALER_MIB, PodSize
from infra.service_pods import DATABASE_CA
from infra.weights import WeightsParts
from ray_job.contract.job_spec import ENVIRONMENT_VARIABLE

COMPONENT: Final = "ray-job"
_TMP: Final = "/tmp"  # noqa: S108 - a volume of the pod's own
# The API key of the endpoints of the http lane, where they ask for one: a Secret that the customer makes.
HTTP_LANE: Final = "http-lane"
_HTTP_LANE_DIRECTORY: Final = "/run/cloister/http-lane"
_SHARED_MEMORY: Final = "shared-memory"
_API_TOKEN: Final = "autoscaler-token"  # noqa: S105 - a name
_API_TOKEN_DIRECTORY: Final = "/var/run/secrets/kubernetes.io/serviceaccount"  # noqa: S105 - where Ray looks
# KubeRay starts Ray below a shell, which passes no signal on: a longer time would only hold the node's GPUs.
_SECONDS_TO_LEAVE: Final = 5
# A job that runs is not moved to make a cluster smaller: its engine would start again elsewhere. The words of Karpenter
# and of the Cluster Autoscaler.
_STAY: Final = {"karpenter.sh/do-not-disrupt": "true", "cluster-autoscaler.kubernetes.io/safe-to-evict": "false"}

# Nothing is reported to anybody, and nothing is fetched from a hub.
QUIET: Final = {
    "RAY_USAGE_STATS_ENABLED": "0",
    "VLLM_NO_USAGE_STATS": "1",
    "DO_NOT_TRACK": "1",
    "HF_HUB_OFFLINE": "1",
    "TRANSFORMERS_OFFLINE": "1",
    "HF_HUB_DISABLE_TELEMETRY": "1",
}
# The root file system is read-only: what libraries write goes to the pod's own volume.
_WRITABLE: Final = {
    "TMPDIR": _TMP,
    "HOME": _TMP,
    "XDG_CACHE_HOME": f"{_TMP}/cache",
    "HF_HOME": f"{_TMP}/cache/huggingface",
    # torch asks for the user's name to name a directory; the image may have no account of this number.
    "USER": "cloister",
    "LOGNAME": "cloister",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class PodArgs:
    """What all pods of a job have in common.

    Attributes:
        names: the stack.
        image: of the lane, by digest.
        has_pull_secret: whether the registry asks for one.
        priority_class: of the pods.
        has_database_ca: whether the ConfigMap with the database's authority is in the jobs' namespace.
    """

    names: StackNames
    image: str
    has_pull_secret: bool = False
    priority_class: str = ""
    has_database_ca: bool = False


def head_pod(args: PodArgs, size: PodSize, weights: WeightsParts) -> dict[str, Any]:
    """The head: Ray's services, the job's own process, and the autoscaler that KubeRay adds.

    The autoscaler alone has a token for the Kubernetes API; the job's process has none. The job spec's variable is
    empty: the launcher fills it in.
    """
    environment = {ENVIRONMENT_VARIABLE: "", **credentials.ENVIRONMENT}
    pod = _pod(args, size, "cpu", weights=weights, environment=environment, database=True)
    spec = pod["spec"]
    spec["volumes"] += [_api_token_volume()]
    if args.has_database_ca:
        spec["volumes"] += [{"name": DATABASE_CA, "configMap": {"name": DATABASE_CA, "defaultMode": 0o444}}]
        spec["containers"][0]["volumeMounts"] += [
            {"name": DATABASE_CA, "mountPath": str(PurePosixPath(CA_FILE).parent), "readOnly": True}
        ]
    return pod


def worker_pod(
    args: PodArgs,
    size: PodSize,
    pool: PoolName,
    *,
    weights: WeightsParts,
    environment: Mapping[str, str] | None = None,
) -> dict[str, Any]:
    """A worker. It reaches the object store, and neither Postgres nor the Kubernetes API."""
    aws = {name: value for name, value in credentials.ENVIRONMENT.items() if name.startswith("AWS_")}
    return _pod(args, size, pool, weights=weights, environment={**aws, **(environment or {})}, database=False)


def with_http_lane_key(pod: dict[str, Any]) -> dict[str, Any]:
    """The same worker, for a model of the http lane: with the key of its endpoint, if there is one."""
    source = {"secretName": HTTP_LANE, "defaultMode": 0o440, "optional": True}
    container = pod["spec"]["containers"][0]
    file = {"name": "CLOISTER_HTTP_LANE_API_KEY_FILE", "value": f"{_HTTP_LANE_DIRECTORY}/api_key"}
    mount = {"name": HTTP_LANE, "mountPath": _HTTP_LANE_DIRECTORY, "readOnly": True}
    with_key = {**container, "env": [*container["env"], file], "volumeMounts": [*container["volumeMounts"], mount]}
    volumes = [*pod["spec"]["volumes"], {"name": HTTP_LANE, "secret": source}]
    return {**pod, "spec": {**pod["spec"], "containers": [with_key], "volumes": volumes}}


def _pod(
    args: PodArgs,
    size: PodSize,
    pool: PoolName,
    *,
    weights: WeightsParts,
    environment: Mapping[str, str],
    database: bool,
) -> dict[str, Any]:
    return {
        "metadata": {"labels": pod_labels(args.names), "annotations": dict(_STAY)},
        "spec": {
            **placement(pool),
            # Autoscaler v2 takes a pod that starts again for a new one.
            "restartPolicy": "Never",
            "automountServiceAccountToken": False,
            # Kubernetes would set RAY_… variables of its own for services of such names.
            "enableServiceLinks": False,
            "terminationGracePeriodSeconds": _SECONDS_TO_LEAVE,
            "securityContext": pod_security_context(),
            **({"priorityClassName": args.priority_class} if args.priority_class else {}),
            **({"imagePullSecrets": [{"name": PULL_SECRET}]} if args.has_pull_secret else {}),
            "initContainers": [
                credentials.init_container(args.image, database=database),
                *weights.init_containers,
            ],
            "containers": [_ray_container(args.image, size, weights, {**QUIET, **_WRITABLE, **environment})],
            "volumes": [
                temporary_volume("tmp", size=f"{size.disk_gib}Gi"),
                {"name": _SHARED_MEMORY, "emptyDir": {"medium": "Memory", "sizeLimit": f"{size.shared_mib}Mi"}},
                *credentials.volumes(database=database),
                *weights.volumes,
            ],
        },
    }


def pod_labels(names: StackNames) -> dict[str, str]:
    """The labels of a pod. Its name is KubeRay's own word: by that its services find the pods."""
    return {**names.labels(COMPONENT), "app.kubernetes.io/name": "kuberay"}


def _ray_container(image: str, size: PodSize, weights: WeightsParts, environment: Mapping[str, str]) -> dict[str, Any]:
    return {
        "name": "ray",
        "image": image,
        "imagePullPolicy": "IfNotPresent",
        "env": [{"name": name, "value": value} for name, value in environment.items()],
        "resources": resources(
            cpu=f"{size.cpu_m}m",
            memory=f"{size.memory_mib}Mi",
            ephemeral_storage=f"{size.disk_gib + weights.disk_gib + 1}Gi",
            extended={GPU_RESOURCE: size.gpus} if size.gpus else None,
        ),
        "securityContext": container_security_context(),
        "volumeMounts": [
            {"name": "tmp", "mountPath": _TMP},
            # KubeRay's own would be as large as all memory.
            {"name": _SHARED_MEMORY, "mountPath": "/dev/shm"},  # noqa: S108
            credentials.volume_mount(),
            *weights.mounts,
        ],
    }


def _api_token_volume() -> dict[str, Any]:
    """What Kubernetes would mount into every container, for one of them."""
    sources: Sequence[dict[str, Any]] = (
        {"serviceAccountToken": {"path": "token", "expirationSeconds": 3_600}},
        {"configMap": {"name": "kube-root-ca.crt", "items": [{"key": "ca.crt", "path": "ca.crt"}]}},
        {"downwardAPI": {"items": [{"path": "namespace", "fieldRef": {"fieldPath": "metadata.namespace"}}]}},
    )
    return {"name": _API_TOKEN, "projected": {"defaultMode": 0o440, "sources": list(sources)}}


def autoscaler_options(cpu_m: int, idle_timeout_s: int) -> dict[str, Any]:
    """Ray's autoscaler, version 2, as KubeRay runs it beside the head."""
    return {
        "version": "v2",
        "upscalingMode": "Default",
        "idleTimeoutSeconds": idle_timeout_s,
        "imagePullPolicy": "IfNotPresent",
        "resources": resources(cpu=f"{cpu_m}m", memory=f"{AUTOSCALER_MIB}Mi", ephemeral_storage="256Mi"),
        "securityContext": container_security_context(),
        "env": [{"name": name, "value": value} for name, value in {**QUIET, **_WRITABLE}.items()],
        "volumeMounts": [
            {"name": "tmp", "mountPath": _TMP},
            {"name": _API_TOKEN, "mountPath": _API_TOKEN_DIRECTORY, "readOnly": True},
        ],
    }
