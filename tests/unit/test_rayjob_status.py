"""The state of a job, from the status of its RayJob and its pods."""

from datetime import UTC, datetime, timedelta
from typing import Any

import pytest

from service.adapters.rayjob_status import RayJobView, job_status, waiting_pods
from service.ports import JobState, JobStatus

FAILED_WITH = "Job entrypoint command failed with exit code"


def state(deployment: str = "", job: str = "", waiting: str = "", **status: Any) -> JobStatus:
    fields = {"jobDeploymentStatus": deployment, "jobStatus": job, **status}
    metadata = {"name": "batch-1-1", "creationTimestamp": "2030-01-01T00:00:00Z"}
    plain = {name: value for name, value in fields.items() if value}  # KubeRay omits empty fields
    rayjob = {"metadata": metadata, "spec": {"preRunningDeadlineSeconds": 900}, "status": plain}
    return job_status(RayJobView.parse(rayjob), waiting)


@pytest.mark.parametrize(
    ("deployment", "job", "expected"),
    [
        ("", "", JobState.PENDING),
        ("Initializing", "", JobState.PENDING),
        ("Waiting", "", JobState.PENDING),
        ("Retrying", "FAILED", JobState.PENDING),
        ("Suspended", "", JobState.PENDING),
        ("Running", "", JobState.PENDING),
        ("Running", "PENDING", JobState.PENDING),
        ("Running", "RUNNING", JobState.RUNNING),
        ("Running", "SUCCEEDED", JobState.RUNNING),
        ("Complete", "SUCCEEDED", JobState.SUCCEEDED),
        ("Complete", "STOPPED", JobState.STOPPED),
        ("Complete", "FAILED", JobState.FAILED),
        ("Failed", "FAILED", JobState.FAILED),
        ("Failed", "RUNNING", JobState.FAILED),
        ("ValidationFailed", "", JobState.FAILED),
    ],
)
def test_state_of_each_pair_of_deployment_and_job_status(deployment: str, job: str, expected: JobState) -> None:
    assert state(deployment, job).state is expected


@pytest.mark.parametrize(
    ("status", "message"),
    [
        ({"reason": "AppFailed", "message": "available logs:\nEngineStartError: no"}, "EngineStartError: no"),
        ({"reason": "PreRunningDeadlineExceeded"}, "not ready within 900 s: worker: no room"),
        ({"reason": "JobStatusCheckTimeoutExceeded"}, "gave up the RayJob: JobStatusCheckTimeoutExceeded"),
        ({}, "no reason given"),
    ],
)
def test_failed_rayjob_has_a_reason(status: dict[str, str], message: str) -> None:
    assert message in state("Failed", waiting="worker: no room", **status).message


def test_refused_rayjob_ended_at_its_creation() -> None:
    rayjob = {
        "metadata": {"name": "a", "creationTimestamp": "2030-01-01T00:00:00Z"},
        "status": {"jobDeploymentStatus": "ValidationFailed", "message": "RayJob name should be no more than 47"},
    }
    view = RayJobView.parse(rayjob)
    assert view.ended_at is not None
    assert "no more than 47" in job_status(view, "").message


def test_failure_to_create_pods_is_a_reason_to_wait() -> None:
    condition = {"type": "ReplicaFailure", "status": "True", "message": "forbidden: exceeded quota: jobs"}
    conditions = {"conditions": [condition]}
    status = state("Initializing", rayClusterStatus=conditions)
    assert status == JobStatus(state=JobState.PENDING, message="forbidden: exceeded quota: jobs")
    status = state("Running", "RUNNING", waiting="another", rayClusterStatus=conditions)
    assert status == JobStatus(state=JobState.RUNNING, message="forbidden: exceeded quota: jobs")


def test_reason_of_refused_pods_omits_their_names() -> None:
    messages = set()
    for name in ("batch-1-1-gpu-worker-2xk9p", "batch-1-1-gpu-worker-w8cfl"):
        message = f'FailedCreateWorkerPod\npods "{name}" is forbidden: exceeded quota: jobs'
        condition = {"type": "ReplicaFailure", "status": "True", "message": message}
        messages.add(state("Running", "RUNNING", rayClusterStatus={"conditions": [condition]}).message)
    assert messages == {"FailedCreateWorkerPod\na pod is forbidden: exceeded quota: jobs"}


@pytest.mark.parametrize(
    ("message", "is_final"),
    [
        (f"{FAILED_WITH} 4, last available logs (truncated to 20,000 chars):\nNoModelError: none", True),
        (f"{FAILED_WITH} 4. No logs available.", True),
        (f"{FAILED_WITH} 1, last available logs (truncated to 20,000 chars):\n{FAILED_WITH} 4.", False),
        (f"{FAILED_WITH} 41. No logs available.", False),
        ("Unexpected error occurred: the actor died", False),
    ],
)
def test_exit_code_of_a_missing_model_is_final(message: str, is_final: bool) -> None:
    assert state("Failed", "FAILED", reason="AppFailed", message=message).is_final == is_final


NOW = datetime(2030, 1, 1, 12, tzinfo=UTC)
NO_MATCH = "node(s) didn't match Pod's node affinity/selector"
# Kubernetes 1.34 and older name the taints.
NOT_READY = "node(s) had untolerated taint {node.kubernetes.io/not-ready: }"
UNREACHABLE = "node(s) had untolerated taint {node.kubernetes.io/unreachable: }"
TAINTS = ", ".join(f"1 node(s) had untolerated taint {{example.com/customer-{n}-dedicated-nodes: }}" for n in range(8))


def pod(cluster: str = "c1", **status: Any) -> dict[str, Any]:
    return {
        "metadata": {"name": "p1", "labels": {"ray.io/cluster": cluster, "ray.io/group": "gpu"}},
        "status": status,
    }


def waits_for(reason: str) -> dict[str, Any]:
    return {"state": {"waiting": {"reason": reason, "message": "details"}}}


@pytest.mark.parametrize(
    ("status", "expected"),
    [
        ({"containerStatuses": [waits_for("ErrImagePull")]}, "gpu pod p1: ErrImagePull (check the image"),
        ({"initContainerStatuses": [waits_for("CreateContainerConfigError")]}, "a Secret or ConfigMap"),
        (
            {"conditions": [{"type": "PodScheduled", "status": "False", "reason": "Unschedulable", "message": "0/5"}]},
            "gpu pod p1: Unschedulable (no node has room for it, or none has the pool's label",
        ),
    ],
)
def test_waiting_pod_has_reason_and_advice(status: dict[str, Any], expected: str) -> None:
    (found,) = waiting_pods([pod(**status)], NOW)
    assert found.place == ("c1", "gpu")
    assert expected in found.why
    assert found.is_stuck == ("Unschedulable" not in expected)


def unschedulable(message: str, **annotations: str) -> dict[str, Any]:
    waiting = pod(
        conditions=[{"type": "PodScheduled", "status": "False", "reason": "Unschedulable", "message": message}]
    )
    waiting["metadata"]["annotations"] = {
        f"cloister.dev/{name.replace('_', '-')}": annotations[name] for name in annotations
    }
    return waiting


@pytest.mark.parametrize(
    ("message", "is_stuck"),
    [
        (f"0/5 nodes are available: 5 {NO_MATCH}.", True),
        (f"0/5 nodes are available: 1 node(s) had untolerated taint(s), 4 {NO_MATCH}.", True),
        (f"0/5 nodes are available: 1 Insufficient nvidia.com/gpu, 4 {NO_MATCH}.", False),
        (f"0/5 nodes are available: 1 node(s) were unschedulable, 4 {NO_MATCH}.", False),
        (
            f"0/5 nodes are available: 1 {NOT_READY}, 4 {NO_MATCH}.",
            False,
        ),
        (
            f"0/5 nodes are available: 1 {UNREACHABLE}, 4 {NO_MATCH}.",
            False,
        ),
        (f"0/16 nodes are available: {TAINTS}, 8 Insufficient nvidia.com/gpu.", False),
    ],
)
def test_pod_without_a_suitable_node_is_stuck_within_its_limit(message: str, is_stuck: bool) -> None:
    (found,) = waiting_pods([unschedulable(message, node_limit_s="1800")], NOW)
    assert (found.is_stuck, found.limit_s) == (is_stuck, 1800 if is_stuck else None)
    (found,) = waiting_pods([unschedulable(message)], NOW)
    assert not found.is_stuck


def test_pod_with_a_missing_claim_is_stuck() -> None:
    message = '0/5 nodes are available: persistentvolumeclaim "weights" not found. preemption: 0/5 nodes are available'
    (found,) = waiting_pods([unschedulable(message, node_limit_s="1800")], NOW)
    assert (found.is_stuck, found.limit_s) == (True, None)


def test_reason_of_a_waiting_pod_is_short() -> None:
    (found,) = waiting_pods([unschedulable(f"0/16 nodes are available: {TAINTS}, 8 Insufficient nvidia.com/gpu.")], NOW)
    assert len(found.why) <= 520


def test_pod_has_the_number_of_hosts_of_its_engine() -> None:
    found = waiting_pods([unschedulable("0/5"), unschedulable("0/5", hosts_per_engine="2")], NOW)
    assert [each.hosts for each in found] == [1, 2]


def without_volumes(seconds: int) -> dict[str, Any]:
    """Return a pod whose Secret is missing, so long after it was scheduled."""
    since = (NOW - timedelta(seconds=seconds)).isoformat()
    return pod(
        conditions=[
            {"type": "PodReadyToStartContainers", "status": "False", "lastTransitionTime": since},
            {"type": "Initialized", "status": "False", "reason": "ContainersNotInitialized"},
            {"type": "PodScheduled", "status": "True"},
        ],
        initContainerStatuses=[waits_for("PodInitializing")],
        containerStatuses=[waits_for("PodInitializing")],
    )


def test_pod_whose_volumes_cannot_be_mounted_is_stuck() -> None:
    (found,) = waiting_pods([without_volumes(90)], NOW)
    assert found.why.startswith("gpu pod p1: PodReadyToStartContainers (")
    assert "a Secret" in found.why
    assert found.is_stuck


def test_pod_that_was_just_scheduled_has_no_reason() -> None:
    assert waiting_pods([without_volumes(5)], NOW) == []


def test_pod_that_is_being_deleted_has_no_reason() -> None:
    going = without_volumes(90)
    going["metadata"]["deletionTimestamp"] = NOW.isoformat()
    assert waiting_pods([going], NOW) == []


@pytest.mark.parametrize(
    "status",
    [
        {},
        {
            "containerStatuses": [waits_for("ContainerCreating")],
            "initContainerStatuses": [waits_for("PodInitializing")],
        },
        {"conditions": [{"type": "PodScheduled", "status": "True"}]},
        {
            "conditions": [
                {
                    "type": "PodReadyToStartContainers",
                    "status": "True",
                    "lastTransitionTime": "2030-01-01T11:00:00Z",
                }
            ],
            "initContainerStatuses": [waits_for("PodInitializing")],
        },
    ],
)
def test_starting_pod_has_no_reason(status: dict[str, Any]) -> None:
    assert waiting_pods([pod(**status)], NOW) == []


@pytest.mark.parametrize(
    ("deployment", "job", "expected"),
    [
        ("Initializing", "", JobState.PENDING),
        ("Running", "PENDING", JobState.PENDING),
        ("Running", "RUNNING", JobState.RUNNING),
    ],
)
def test_stuck_job_is_reported_in_each_state(deployment: str, job: str, expected: JobState) -> None:
    condition = {"type": "ReplicaFailure", "status": "True", "message": "exceeded quota: jobs"}
    status = {"jobDeploymentStatus": deployment, "jobStatus": job, "rayClusterStatus": {"conditions": [condition]}}
    found = job_status(RayJobView.parse({"metadata": {"name": "a"}, "status": status}), "no such image", is_stuck=True)
    assert found == JobStatus(state=expected, message="no such image", is_stuck=True)


def test_rayjob_sets_the_limit_of_stuck_pods() -> None:
    annotations = {"cloister.dev/stuck-limit-s": "60"}
    assert RayJobView.parse({"metadata": {"name": "a", "annotations": annotations}}).stuck_limit_s == 60
    assert RayJobView.parse({"metadata": {"name": "a"}}).stuck_limit_s == 300


def test_rayjob_has_the_groups_with_gpus() -> None:
    groups = [
        {"groupName": name, "template": {"spec": {"containers": [{"name": "ray", "resources": {"limits": limits}}]}}}
        for name, limits in (("cpu", {"cpu": "2"}), ("v100", {"cpu": "4", "nvidia.com/gpu": "1"}))
    ]
    view = RayJobView.parse({"metadata": {"name": "a"}, "spec": {"rayClusterSpec": {"workerGroupSpecs": groups}}})
    assert view.gpu_groups == {"v100"}
    assert RayJobView.parse({"metadata": {"name": "a"}}).gpu_groups == frozenset()
