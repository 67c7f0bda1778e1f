"""The state of a job, from the status of its RayJob and its waiting pods. Pure.

Source of the states and reasons:
https://github.com/ray-project/kuberay/blob/v1.6.1/ray-operator/apis/ray/v1/rayjob_types.go
"""

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import Any, Final, Self

from ray_job.contract.exit_codes import EXIT_NO_MODEL
from ray_job.contract.rayjobs import HOSTS_ANNOTATION, NODE_LIMIT_ANNOTATION, STUCK_LIMIT_ANNOTATION
from service.adapters.ray_jobs_launcher import last_words
from service.ports import JobState, JobStatus

_RUNNING_STATES: Final = {"": JobState.PENDING, "PENDING": JobState.PENDING}
_COMPLETE_STATES: Final = {"SUCCEEDED": JobState.SUCCEEDED, "STOPPED": JobState.STOPPED}
_REFUSED: Final = "ValidationFailed"
# How long a finished RayJob is kept if its template sets no time.
_DEFAULT_KEEP_S: Final = 3_600
_DEFAULT_STUCK_LIMIT_S: Final = 300
# Begins Ray's message about a job whose process failed; the end of the job's log follows.
_EXIT_CODE: Final = re.compile(r"Job entrypoint command failed with exit code (\d+)\b")
# Each refused pod has another name, but the same reason.
_POD_NAME: Final = re.compile(r'pods "[^"]*"')


@dataclass(frozen=True, slots=True, kw_only=True)
class RayJobView:
    """The fields of a RayJob that matter here. The rest, such as its pod templates, is not kept.

    Attributes:
        name: its name.
        version: grows with every change of any RayJob; 0 if the API server's versions are not numbers.
        cluster: the name of its Ray cluster; empty before it has one.
        deployment: KubeRay's ``jobDeploymentStatus``; empty before KubeRay has processed it.
        job: Ray's ``jobStatus``; empty before the job is submitted.
        reason: KubeRay's reason for a failure, one word.
        message: KubeRay's or Ray's message; for a job that ran, the end of its log.
        cluster_problem: why KubeRay cannot create a pod of the cluster; empty if it can.
        start_limit_s: ``preRunningDeadlineSeconds``; None for no limit.
        is_deleting: whether its deletion has begun.
        ended_at: when it reached its last state; None before.
        keep_s: how long it is kept after that.
        stuck_limit_s: how long a pod may be stuck before the RayJob is given up.
        gpu_groups: the groups whose pods have GPUs.
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

    @classmethod
    def parse(cls, rayjob: Mapping[str, Any]) -> Self:
        """Parse a RayJob as the API server sends it. KubeRay omits empty fields."""
        metadata, spec, status = rayjob["metadata"], rayjob.get("spec") or {}, rayjob.get("status") or {}
        deployment = status.get("jobDeploymentStatus", "")
        # KubeRay sets no end time on a RayJob that it refused.
        ended = status.get("endTime") or (metadata.get("creationTimestamp") if deployment == _REFUSED else None)
        cluster_problem = ""
        for condition in (status.get("rayClusterStatus") or {}).get("conditions") or ():
            if condition.get("type") == "ReplicaFailure" and condition.get("status") == "True":
                cluster_problem = _POD_NAME.sub("a pod", str(condition.get("message") or condition.get("reason") or ""))
                break
        rules = (spec.get("deletionStrategy") or {}).get("deletionRules") or ()
        kept_s = [rule["condition"].get("ttlSeconds", 0) for rule in rules if rule.get("policy") == "DeleteSelf"]
        return cls(
            name=metadata["name"],
            version=version_number(metadata.get("resourceVersion", "")),
            cluster=status.get("rayClusterName", ""),
            deployment=deployment,
            job=status.get("jobStatus", ""),
            reason=status.get("reason", ""),
            message=status.get("message", ""),
            cluster_problem=cluster_problem,
            start_limit_s=spec.get("preRunningDeadlineSeconds"),
            is_deleting="deletionTimestamp" in metadata,
            ended_at=datetime.fromisoformat(ended).astimezone(UTC) if ended else None,
            keep_s=max(kept_s, default=_DEFAULT_KEEP_S),
            stuck_limit_s=int((metadata.get("annotations") or {}).get(STUCK_LIMIT_ANNOTATION, _DEFAULT_STUCK_LIMIT_S)),
            gpu_groups=frozenset(
                group["groupName"]
                for group in (spec.get("rayClusterSpec") or {}).get("workerGroupSpecs") or ()
                for container in group["template"]["spec"]["containers"]
                # Names of extended resources have a domain: MIG slices and renamed GPUs are among them.
                if any("/" in name for name in ((container.get("resources") or {}).get("limits") or {}))
            ),
        )

    @property
    def is_over(self) -> bool:
        """True if its state is final."""
        return self.deployment in ("Complete", "Failed", _REFUSED)


def version_number(resource_version: str) -> int:
    """Return a ``resourceVersion`` as a number, or 0 if it is not one. Numbers can be compared.

    Source: https://kubernetes.io/docs/reference/using-api/api-concepts/#resource-versions
    """
    return int(resource_version) if resource_version.isascii() and resource_version.isdecimal() else 0


def job_status(view: RayJobView, waiting: str, *, is_stuck: bool = False, is_working: bool = True) -> JobStatus:
    """Return the state of a RayJob's job.

    Args:
        view: the RayJob.
        waiting: why pods of its cluster wait, or waited when last seen; empty if none does.
        is_stuck: whether it has waited too long for something that waiting does not fix.
        is_working: whether it needs no GPUs, or a pod with GPUs has a node.
    """
    # A pod that KubeRay cannot create is not among the waiting pods. KubeRay keeps this message current.
    message = waiting if is_stuck else view.cluster_problem or waiting
    match view.deployment:
        case "Running":
            # Ray's final state comes first; KubeRay notices it later.
            state = _RUNNING_STATES.get(view.job, JobState.RUNNING)
            return JobStatus(state=state, message=message, is_stuck=is_stuck, is_working=is_working)
        case "Complete" if view.job != "FAILED":
            return JobStatus(state=_COMPLETE_STATES.get(view.job, JobState.STOPPED))
        case "Complete" | "Failed":
            match view.reason:
                case "PreRunningDeadlineExceeded":
                    why = view.cluster_problem or waiting or "its pods did not become ready; inspect them with kubectl"
                    problem = f"the Ray cluster was not ready within {view.start_limit_s} s: {why}"
                case _:
                    reason = f"KubeRay gave up the RayJob: {view.reason or 'no reason given'}"
                    problem = last_words(view.message) or reason
            exit_code = _EXIT_CODE.match(view.message)
            has_no_model = exit_code is not None and int(exit_code[1]) == EXIT_NO_MODEL
            return JobStatus(state=JobState.FAILED, message=problem, is_final=has_no_model)
        case "ValidationFailed":
            return JobStatus(
                state=JobState.FAILED,
                message=f"KubeRay refused the RayJob; deploy templates that fit its version: {view.message}",
            )
        case _:
            return JobStatus(state=JobState.PENDING, message=message, is_stuck=is_stuck)


Place = tuple[str, str]
"""A Ray cluster, and a group of its pods."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WaitingPod:
    """A waiting pod of a Ray cluster.

    Attributes:
        place: its cluster and group.
        why: the reason and the remedy, for users.
        is_stuck: whether it waits for something that waiting alone does not fix.
        limit_s: how long it may be stuck; None if the RayJob's limit applies.
        hosts: how many pods of its group must run for the job to make progress without it.
    """

    place: Place
    why: str
    is_stuck: bool
    limit_s: int | None
    hosts: int


# A container that waits for one of these is being created.
_STARTING: Final = frozenset({"ContainerCreating", "PodInitializing"})
_UNSCHEDULABLE: Final = "Unschedulable"
# The scheduler's reason is the same as for a full node; only its message differs.
_NO_CLAIM: Final = "PersistentVolumeClaimNotFound"
_MISSING_CLAIM: Final = re.compile(r'persistentvolumeclaim "[^"]*" not found')
# A condition of a pod: True once its node has mounted all volumes and set up the network. Images are pulled later.
_NOT_SET_UP: Final = "PodReadyToStartContainers"
# Setting up takes seconds, so a pod that has just started has no reason worth reporting.
_SET_UP_WITHIN: Final = timedelta(minutes=1)
# Someone has to change something. A short outage of a registry looks the same, therefore the time limit.
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
# The scheduler's messages about a suitable node that is full or takes no pods at the moment. Since Kubernetes 1.35 they
# name no taints, so a node that is not ready looks like an unsuitable one: only the time limit helps there.
_SOME_NODE: Final = ("Insufficient ", "Too many pods", "were unschedulable", "untolerated taint {node.kubernetes.io/")
_ADVICE: Final = {
    "ErrImagePull": "check the image's reference, the mirror and the pull secret",
    "ImagePullBackOff": "check the image's reference, the mirror and the pull secret",
    "InvalidImageName": "check the image's reference",
    "CreateContainerConfigError": "a Secret or ConfigMap that the pod names is missing",
    "CrashLoopBackOff": "read the container's log with kubectl logs --previous",
    _NO_CLAIM: "the volume that the pod names is missing",
    _NOT_SET_UP: "its node cannot mount a Secret, ConfigMap or volume, most often because it is missing, or cannot set "
    "up the network; the pod's events have the cause",
    _UNSCHEDULABLE: "no node has room for it, or none has the pool's label and a taint that it tolerates",
}


def waiting_pods(pods: Iterable[Mapping[str, Any]], now: datetime) -> list[WaitingPod]:
    """Return the pods that have a reason to wait, in the same order."""
    found = []
    for pod in pods:
        metadata, status = pod["metadata"], pod.get("status") or {}
        if "deletionTimestamp" in metadata:
            continue
        containers = (*(status.get("initContainerStatuses") or ()), *(status.get("containerStatuses") or ()))
        states = [(each.get("state") or {}).get("waiting") or {} for each in containers]
        waiting = [state for state in states if state.get("reason") and state["reason"] not in _STARTING]
        missing = {each["type"]: each for each in status.get("conditions") or () if each.get("status") == "False"}
        not_set_up_since = missing.get(_NOT_SET_UP, {}).get("lastTransitionTime")
        if waiting:
            reason, message = waiting[0]["reason"], waiting[0].get("message", "")
        elif scheduled := missing.get("PodScheduled"):
            message = scheduled.get("message", "")
            reason = _NO_CLAIM if _MISSING_CLAIM.search(message) else scheduled.get("reason") or _UNSCHEDULABLE
        elif not_set_up_since and now - datetime.fromisoformat(not_set_up_since) > _SET_UP_WITHIN:
            reason, message = _NOT_SET_UP, ""
        else:
            continue
        place, annotations = place_of(pod), metadata.get("annotations") or {}
        # If the scheduler knows a suitable node, its pool is full or cordoned, which may change.
        lacks_node = reason == _UNSCHEDULABLE and not any(words in message for words in _SOME_NODE)
        limit_s = annotations.get(NODE_LIMIT_ANNOTATION) if lacks_node else None
        advice = f" ({_ADVICE[reason]})" if reason in _ADVICE else ""
        details = f"{reason}{advice}: {message}".removesuffix(": ")[:500]
        found.append(
            WaitingPod(
                place=place,
                why=f"{place[1] or 'a'} pod {metadata['name']}: {details}",
                is_stuck=reason in _STUCK or limit_s is not None,
                limit_s=None if limit_s is None else int(limit_s),
                hosts=int(annotations.get(HOSTS_ANNOTATION, 1)),
            )
        )
    return found


def place_of(pod: Mapping[str, Any]) -> Place:
    """Return the cluster and group of a pod."""
    labels = pod["metadata"].get("labels") or {}
    return labels.get("ray.io/cluster", ""), labels.get("ray.io/group", "")
