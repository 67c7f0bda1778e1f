"""What a RayJob's status and its waiting pods mean for a batch. Pure.

Source of the words: https://github.com/ray-project/kuberay/blob/v1.6.1/ray-operator/apis/ray/v1/rayjob_types.go
"""

import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import Any, Final

from ray_job.contract.exit_codes import EXIT_NO_MODEL
from ray_job.contract.rayjobs import HOSTS_ANNOTATION, NODE_LIMIT_ANNOTATION, STUCK_LIMIT_ANNOTATION
from service.adapters.ray_jobs_launcher import last_words
from service.ports import JobState, JobStatus

_RUNNING_STATES: Final = {"": JobState.PENDING, "PENDING": JobState.PENDING}
_COMPLETE_STATES: Final = {
    "SUCCEEDED": JobState.SUCCEEDED,
    "STOPPED": JobState.STOPPED,
}
_REFUSED: Final = "ValidationFailed"
# How long a finished RayJob is kept whose template does not say so.
_DEFAULT_KEEP_S: Final = 3_600
_DEFAULT_STUCK_LIMIT_S: Final = 300
_GPU_RESOURCE: Final = "nvidia.com/gpu"
# How Ray begins to tell of a job whose process failed; the end of the job's log follows.
_EXIT_CODE: Final = re.compile(r"Job entrypoint command failed with exit code (\d+)\b")
# Each pod that is refused has another name, and is refused for the same reason.
_POD_NAME: Final = re.compile(r'pods "[^"]*"')


@dataclass(frozen=True, slots=True, kw_only=True)
class RayJobView:
    """What of a RayJob matters here; the rest, two pod templates and more, is not kept.

    Attributes:
        name: its name.
        version: grows with every change of any RayJob; 0 where the API server's versions are no numbers.
        cluster: the name of its Ray cluster; empty before there is one.
        deployment: KubeRay's ``jobDeploymentStatus``; empty when KubeRay has not looked at it yet.
        job: Ray's ``jobStatus``; empty before the job is submitted.
        reason: KubeRay's word for why it failed.
        message: KubeRay's or Ray's sentence; of a job that ran, the end of its log.
        cluster_problem: why KubeRay cannot make a pod of the cluster; empty when it can.
        start_limit_s: ``preRunningDeadlineSeconds``; None for none.
        is_deleting: its deletion has begun.
        ended_at: when it reached its last state; None before.
        keep_s: how long after that it is kept.
        stuck_limit_s: for how long a pod of it may be stuck before it is given up.
        gpu_groups: the groups whose pods hold GPUs.
    """

    name: str
    version: int
    cluster: str
    deployment: str
    job: str
    reason: str
    message: str
    cluster_problem: str
    start_limit_s: int | None
    is_deleting: bool
    ended_at: datetime | None
    keep_s: int
    stuck_limit_s: int
    gpu_groups: frozenset[str]

    @property
    def is_over(self) -> bool:
        """Whether nothing can come after its state."""
        return self.deployment in ("Complete", "Failed", _REFUSED)


def view_of(rayjob: Mapping[str, Any]) -> RayJobView:
    """The view of a RayJob as the API server gives it. KubeRay leaves out what is empty."""
    metadata, spec, status = rayjob["metadata"], rayjob.get("spec") or {}, rayjob.get("status") or {}
    deployment = status.get("jobDeploymentStatus", "")
    # KubeRay sets no end time where it refused the RayJob.
    ended = status.get("endTime") or (metadata.get("creationTimestamp") if deployment == _REFUSED else None)
    return RayJobView(
        name=metadata["name"],
        version=version_number(metadata.get("resourceVersion", "")),
        cluster=status.get("rayClusterName", ""),
        deployment=deployment,
        job=status.get("jobStatus", ""),
        reason=status.get("reason", ""),
        message=status.get("message", ""),
        cluster_problem=_cluster_problem(status.get("rayClusterStatus") or {}),
        start_limit_s=spec.get("preRunningDeadlineSeconds"),
        is_deleting="deletionTimestamp" in metadata,
        ended_at=datetime.fromisoformat(ended).astimezone(UTC) if ended else None,
        keep_s=_keep_s(spec),
        stuck_limit_s=int((metadata.get("annotations") or {}).get(STUCK_LIMIT_ANNOTATION, _DEFAULT_STUCK_LIMIT_S)),
        gpu_groups=frozenset(_gpu_groups(spec.get("rayClusterSpec") or {})),
    )


def version_number(resource_version: str) -> int:
    """A ``resourceVersion`` as a number, 0 where it is none. Numbers can be compared.

    Source: https://kubernetes.io/docs/reference/using-api/api-concepts/#resource-versions
    """
    return int(resource_version) if resource_version.isascii() and resource_version.isdecimal() else 0


def _cluster_problem(cluster_status: Mapping[str, Any]) -> str:
    for condition in cluster_status.get("conditions") or ():
        if condition.get("type") == "ReplicaFailure" and condition.get("status") == "True":
            return _POD_NAME.sub("a pod", str(condition.get("message") or condition.get("reason") or ""))
    return ""


def _gpu_groups(cluster: Mapping[str, Any]) -> Iterator[str]:
    for group in cluster.get("workerGroupSpecs") or ():
        for container in group["template"]["spec"]["containers"]:
            if _GPU_RESOURCE in ((container.get("resources") or {}).get("limits") or {}):
                yield group["groupName"]


def _keep_s(spec: Mapping[str, Any]) -> int:
    rules = (spec.get("deletionStrategy") or {}).get("deletionRules") or ()
    kept = [rule["condition"].get("ttlSeconds", 0) for rule in rules if rule.get("policy") == "DeleteSelf"]
    return max(kept, default=_DEFAULT_KEEP_S)


def job_status(view: RayJobView, waiting: str, *, is_stuck: bool = False, is_working: bool = True) -> JobStatus:
    """The state of a RayJob's batch.

    Args:
        view: the RayJob.
        waiting: why pods of its cluster wait, or waited when last seen; empty when none do.
        is_stuck: it has waited too long for what waiting does not bring.
        is_working: it needs no GPUs, or a pod with some has a node.
    """
    # What KubeRay cannot make has no pod that waits. KubeRay keeps its word for that current while the job runs.
    message = waiting if is_stuck else view.cluster_problem or waiting
    match view.deployment:
        case "Running":
            # Ray's word for the end comes first; KubeRay then still has to notice.
            state = _RUNNING_STATES.get(view.job, JobState.RUNNING)
            return JobStatus(state=state, message=message, is_stuck=is_stuck, is_working=is_working)
        case "Complete" if view.job != "FAILED":
            return JobStatus(state=_COMPLETE_STATES.get(view.job, JobState.STOPPED))
        case "Complete" | "Failed":
            return JobStatus(state=JobState.FAILED, message=_why_failed(view, waiting), is_final=_has_no_model(view))
        case "ValidationFailed":
            return JobStatus(
                state=JobState.FAILED,
                message=f"KubeRay refused the RayJob; deploy templates that fit its version: {view.message}",
            )
        case _:
            return JobStatus(state=JobState.PENDING, message=message, is_stuck=is_stuck)


def _why_failed(view: RayJobView, waiting: str) -> str:
    match view.reason:
        case "PreRunningDeadlineExceeded":
            why = view.cluster_problem or waiting or "its pods did not become ready; look at them with kubectl"
            return f"the Ray cluster was not ready within {view.start_limit_s} s: {why}"
        case "DeadlineExceeded":
            return "the job ran longer than its time limit, jobs.deadline_h of the stack"
        case _:
            return last_words(view.message) or f"KubeRay gave up the RayJob: {view.reason or 'no reason given'}"


def _has_no_model(view: RayJobView) -> bool:
    exit_code = _EXIT_CODE.match(view.message)
    return exit_code is not None and int(exit_code[1]) == EXIT_NO_MODEL


Place = tuple[str, str]
"""A Ray cluster, and the group of its pods."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WaitingPod:
    """A pod of a Ray cluster that waits.

    Attributes:
        place: where it belongs.
        why: in words.
        is_stuck: it waits for something that waiting alone does not bring.
        limit_s: for how long it may be stuck; None where the RayJob says it.
        hosts: how many of its group must run for the job to get on without it.
    """

    place: Place
    why: str
    is_stuck: bool
    limit_s: int | None
    hosts: int


def waiting_pods(pods: Iterable[Mapping[str, Any]], now: datetime) -> list[WaitingPod]:
    """Those of the pods that wait for a reason, in the same order."""
    found = []
    for pod in pods:
        reason, message = _why_waiting(pod, now)
        if reason:
            place = place_of(pod)
            annotations = pod["metadata"].get("annotations") or {}
            limit_s = annotations.get(NODE_LIMIT_ANNOTATION) if _lacks_node(reason, message) else None
            found.append(
                WaitingPod(
                    place=place,
                    why=f"{place[1] or 'a'} pod {pod['metadata']['name']}: {_told(reason, message)}",
                    is_stuck=reason in _STUCK or limit_s is not None,
                    limit_s=None if limit_s is None else int(limit_s),
                    hosts=int(annotations.get(HOSTS_ANNOTATION, 1)),
                )
            )
    return found


def _lacks_node(reason: str, message: str) -> bool:
    """Whether the scheduler knows no node of the pod's pool; a pool that is full or cordoned has some."""
    return reason == _UNSCHEDULABLE and not any(words in message for words in _SOME_NODE)


def place_of(pod: Mapping[str, Any]) -> Place:
    """Where a pod belongs."""
    labels = pod["metadata"].get("labels") or {}
    return labels.get("ray.io/cluster", ""), labels.get("ray.io/group", "")


# A container that waits for one of these is only being made.
_ON_ITS_WAY: Final = frozenset({"ContainerCreating", "PodInitializing"})
_UNSCHEDULABLE: Final = "Unschedulable"
# The scheduler's word for it is no other than for a full node; its message tells.
_NO_CLAIM: Final = "PersistentVolumeClaimNotFound"
_MISSING_CLAIM: Final = re.compile(r'persistentvolumeclaim "[^"]*" not found')
# A condition of a pod: True once its node has mounted all volumes and made the network. Pulling images comes after.
_NOT_SET_UP: Final = "PodReadyToStartContainers"
# That takes seconds. A pod that only starts waits for nothing that is worth telling.
_SET_UP_WITHIN: Final = timedelta(minutes=1)
# Somebody has to change something. A registry that is away for a moment looks the same, so there is a time for it.
_STUCK: Final = frozenset(
    {
        "ErrImagePull",
        "ImagePullBackOff",
        "ErrImageNeverPull",
        "InvalidImageName",
        "CreateContainerConfigError",
        "CreateContainerError",
        _NO_CLAIM,
        _NOT_SET_UP,
    }
)
# What the scheduler says of a node that the pod could have: it is full, or it takes no pods for now. Since Kubernetes
# 1.35 it names no taints, and a node that is not ready looks like one of others: there the limit alone has patience.
_SOME_NODE: Final = ("Insufficient ", "Too many pods", "were unschedulable", "untolerated taint {node.kubernetes.io/")
_ADVICE: Final = {
    "ErrImagePull": "check the image's reference, the mirror and the pull secret",
    "ImagePullBackOff": "check the image's reference, the mirror and the pull secret",
    "InvalidImageName": "check the image's reference",
    "CreateContainerConfigError": "a Secret or ConfigMap that the pod names is missing",
    "CrashLoopBackOff": "read the container's log with kubectl logs --previous",
    _NO_CLAIM: "the volume that the pod names is missing",
    _NOT_SET_UP: "its node cannot mount a Secret, ConfigMap or volume, most often because there is none, or has no "
    "network for it; the pod's events tell which",
    _UNSCHEDULABLE: "no node has room for it, or none has the pool's label and a taint that it tolerates",
}


def _why_waiting(pod: Mapping[str, Any], now: datetime) -> tuple[str, str]:
    """Kubernetes' word for why a pod waits, and its message; both empty where it need not be told."""
    status = pod.get("status") or {}
    if "deletionTimestamp" in pod["metadata"]:
        return "", ""
    for container in (*(status.get("initContainerStatuses") or ()), *(status.get("containerStatuses") or ())):
        waiting = (container.get("state") or {}).get("waiting") or {}
        if waiting.get("reason") and waiting["reason"] not in _ON_ITS_WAY:
            return waiting["reason"], waiting.get("message", "")
    missing = {each["type"]: each for each in status.get("conditions") or () if each.get("status") == "False"}
    if scheduled := missing.get("PodScheduled"):
        message = scheduled.get("message", "")
        reason = scheduled.get("reason") or _UNSCHEDULABLE
        return _NO_CLAIM if _MISSING_CLAIM.search(message) else reason, message
    since = missing.get(_NOT_SET_UP, {}).get("lastTransitionTime")
    if since and now - datetime.fromisoformat(since) > _SET_UP_WITHIN:
        return _NOT_SET_UP, ""
    return "", ""


def _told(reason: str, message: str) -> str:
    advice = f" ({_ADVICE[reason]})" if reason in _ADVICE else ""
    return f"{reason}{advice}: {message}".removesuffix(": ")[:500]
