"""What a RayJob's status and its waiting pods mean for a batch. Pure.

Source of the words: https://github.com/ray-project/kuberay/blob/v1.6.1/ray-operator/apis/ray/v1/rayjob_types.go
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import Any, Final

from ray_job.contract.rayjobs import NODE_LIMIT_ANNOTATION, STUCK_LIMIT_ANNOTATION
from service.adapters.ray_jobs_launcher import last_words
from service.ports import JobState, JobStatus

_RUNNING_STATES: Final = {"": JobState.PENDING, "PENDING": JobState.PENDING}
_COMPLETE_STATES: Final = {
    "SUCCEEDED": JobState.SUCCEEDED,
    "STOPPED": JobState.STOPPED,
    "FAILED": JobState.FAILED,
}
_REFUSED: Final = "ValidationFailed"
# How long a finished RayJob is kept whose template does not say so.
_DEFAULT_KEEP_S: Final = 3_600
_DEFAULT_STUCK_LIMIT_S: Final = 300


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
    )


def version_number(resource_version: str) -> int:
    """A ``resourceVersion`` as a number, 0 where it is none. Numbers can be compared.

    Source: https://kubernetes.io/docs/reference/using-api/api-concepts/#resource-versions
    """
    return int(resource_version) if resource_version.isascii() and resource_version.isdecimal() else 0


def _cluster_problem(cluster_status: Mapping[str, Any]) -> str:
    for condition in cluster_status.get("conditions") or ():
        if condition.get("type") == "ReplicaFailure" and condition.get("status") == "True":
            return str(condition.get("message") or condition.get("reason") or "")
    return ""


def _keep_s(spec: Mapping[str, Any]) -> int:
    rules = (spec.get("deletionStrategy") or {}).get("deletionRules") or ()
    kept = [rule["condition"].get("ttlSeconds", 0) for rule in rules if rule.get("policy") == "DeleteSelf"]
    return max(kept, default=_DEFAULT_KEEP_S)


def job_status(view: RayJobView, waiting: str, *, is_stuck: bool = False) -> JobStatus:
    """The state of a RayJob's batch.

    Args:
        view: the RayJob.
        waiting: why pods of its cluster wait, or waited when last seen; empty when none do.
        is_stuck: it has waited too long for what waiting does not bring.
    """
    match view.deployment:
        case "Running":
            # Ray's word for the end comes first; KubeRay then still has to notice.
            state = JobState.RUNNING if is_stuck else _RUNNING_STATES.get(view.job, JobState.RUNNING)
            return JobStatus(state=state, message=waiting, is_stuck=is_stuck)
        case "Complete":
            return _ended(_COMPLETE_STATES.get(view.job, JobState.STOPPED), view)
        case "Failed":
            return JobStatus(state=JobState.FAILED, message=_why_failed(view, waiting))
        case "ValidationFailed":
            return JobStatus(
                state=JobState.FAILED,
                message=f"KubeRay refused the RayJob; deploy templates that fit its version: {view.message}",
            )
        case _:
            return JobStatus(state=JobState.PENDING, message=view.cluster_problem or waiting, is_stuck=is_stuck)


def _ended(state: JobState, view: RayJobView) -> JobStatus:
    return JobStatus(state=state, message=last_words(view.message) if state is JobState.FAILED else "")


def _why_failed(view: RayJobView, waiting: str) -> str:
    match view.reason:
        case "PreRunningDeadlineExceeded":
            why = view.cluster_problem or waiting or "its pods did not become ready; look at them with kubectl"
            return f"the Ray cluster was not ready within {view.start_limit_s} s: {why}"
        case "DeadlineExceeded":
            return "the job ran longer than its time limit, jobs.deadline_h of the stack"
        case _:
            return last_words(view.message) or f"KubeRay gave up the RayJob: {view.reason or 'no reason given'}"


Place = tuple[str, str]
"""A Ray cluster, and the group of its pods."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WaitingPod:
    """A pod of a Ray cluster that waits.

    ``why`` is in words; ``is_stuck``: for something that waiting alone does not bring.
    """

    place: Place
    why: str
    is_stuck: bool


def waiting_pods(pods: Iterable[Mapping[str, Any]], now: datetime) -> list[WaitingPod]:
    """Those of the pods that wait for a reason, in the same order."""
    found = []
    for pod in pods:
        reason, why = _why_waiting(pod)
        if reason:
            place = place_of(pod)
            told = f"{place[1] or 'a'} pod {pod['metadata']['name']}: {why}"
            is_stuck = reason in _STUCK or (reason == _UNSCHEDULABLE and _lacks_node(pod, why, now))
            found.append(WaitingPod(place=place, why=told, is_stuck=is_stuck))
    return found


def _lacks_node(pod: Mapping[str, Any], why: str, now: datetime) -> bool:
    """Whether the pod's pool has had no node for longer than it may; a pool that is full or cordoned has some."""
    limit_s = (pod["metadata"].get("annotations") or {}).get(NODE_LIMIT_ANNOTATION)
    if limit_s is None or any(words in why for words in _SOME_NODE):
        return False
    return now - datetime.fromisoformat(pod["metadata"]["creationTimestamp"]) > timedelta(seconds=int(limit_s))


def place_of(pod: Mapping[str, Any]) -> Place:
    """Where a pod belongs."""
    labels = pod["metadata"].get("labels") or {}
    return labels.get("ray.io/cluster", ""), labels.get("ray.io/group", "")


# A container that waits for one of these is only being made.
_ON_ITS_WAY: Final = frozenset({"ContainerCreating", "PodInitializing"})
# Somebody has to change something. A registry that is away for a moment looks the same, so there is a time for it.
_STUCK: Final = frozenset(
    {
        "ErrImagePull",
        "ImagePullBackOff",
        "ErrImageNeverPull",
        "InvalidImageName",
        "CreateContainerConfigError",
        "CreateContainerError",
    }
)
_UNSCHEDULABLE: Final = "Unschedulable"
# What the scheduler says of a node that the pod could have: it is full, or it takes no pods for now.
_SOME_NODE: Final = ("Insufficient ", "Too many pods", "were unschedulable")
_ADVICE: Final = {
    "ErrImagePull": "check the image's reference, the mirror and the pull secret",
    "ImagePullBackOff": "check the image's reference, the mirror and the pull secret",
    "InvalidImageName": "check the image's reference",
    "CreateContainerConfigError": "a Secret or ConfigMap that the pod names is missing",
    "CrashLoopBackOff": "read the container's log with kubectl logs --previous",
    _UNSCHEDULABLE: "no node has room for it, or none has the pool's label and a taint that it tolerates",
}


def _why_waiting(pod: Mapping[str, Any]) -> tuple[str, str]:
    """Kubernetes' word for why a pod waits, and a sentence; both empty where it need not be told."""
    status = pod.get("status") or {}
    for container in (*(status.get("initContainerStatuses") or ()), *(status.get("containerStatuses") or ())):
        waiting = (container.get("state") or {}).get("waiting") or {}
        if waiting.get("reason") and waiting["reason"] not in _ON_ITS_WAY:
            return waiting["reason"], _told(waiting["reason"], waiting.get("message", ""))
    for condition in status.get("conditions") or ():
        if condition.get("type") == "PodScheduled" and condition.get("status") == "False":
            reason = condition.get("reason") or _UNSCHEDULABLE
            return reason, _told(reason, condition.get("message", ""))
    return "", ""


def _told(reason: str, message: str) -> str:
    advice = f" ({_ADVICE[reason]})" if reason in _ADVICE else ""
    return f"{reason}{advice}: {message}".removesuffix(": ")[:500]
