"""What a RayJob's status means for its batch."""

from datetime import UTC, datetime
from typing import Any

import pytest

from service.adapters.rayjob_status import job_status, view_of, waiting_pods
from service.ports import JobState, JobStatus


def state(deployment: str = "", job: str = "", waiting: str = "", **status: Any) -> JobStatus:
    told = {"jobDeploymentStatus": deployment, "jobStatus": job, **status}
    metadata = {"name": "batch-1-1", "creationTimestamp": "2030-01-01T00:00:00Z"}
    plain = {name: value for name, value in told.items() if value}  # KubeRay leaves out what is empty
    rayjob = {"metadata": metadata, "spec": {"preRunningDeadlineSeconds": 900}, "status": plain}
    return job_status(view_of(rayjob), waiting)


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
def test_each_pair_of_kuberays_and_rays_words_is_one_state(deployment: str, job: str, expected: JobState) -> None:
    assert state(deployment, job).state is expected


@pytest.mark.parametrize(
    ("status", "message"),
    [
        ({"reason": "AppFailed", "message": "available logs:\nEngineStartError: no"}, "EngineStartError: no"),
        ({"reason": "DeadlineExceeded", "message": "passed"}, "ran longer than its time limit"),
        ({"reason": "PreRunningDeadlineExceeded"}, "not ready within 900 s: worker: no room"),
        ({"reason": "JobStatusCheckTimeoutExceeded"}, "gave up the RayJob: JobStatusCheckTimeoutExceeded"),
        ({}, "no reason given"),
    ],
)
def test_a_failed_rayjob_tells_why(status: dict[str, str], message: str) -> None:
    assert message in state("Failed", waiting="worker: no room", **status).message


def test_a_rayjob_that_kuberay_refused_has_ended_when_it_was_made() -> None:
    rayjob = {
        "metadata": {"name": "a", "creationTimestamp": "2030-01-01T00:00:00Z"},
        "status": {"jobDeploymentStatus": "ValidationFailed", "message": "RayJob name should be no more than 47"},
    }
    view = view_of(rayjob)
    assert view.ended_at is not None
    assert "no more than 47" in job_status(view, "").message


def test_pods_that_kuberay_cannot_make_are_a_reason_to_wait() -> None:
    condition = {"type": "ReplicaFailure", "status": "True", "message": "forbidden: exceeded quota: jobs"}
    told = state("Initializing", rayClusterStatus={"conditions": [condition]})
    assert told == JobStatus(state=JobState.PENDING, message="forbidden: exceeded quota: jobs")


NOW = datetime(2030, 1, 1, 12, tzinfo=UTC)


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
def test_a_waiting_pod_tells_why_and_what_to_do(status: dict[str, Any], expected: str) -> None:
    (found,) = waiting_pods([pod(**status)], NOW)
    assert found.place == ("c1", "gpu")
    assert expected in found.why
    assert found.is_stuck == ("Unschedulable" not in expected)


@pytest.mark.parametrize(
    ("limit_s", "message", "is_stuck"),
    [
        ("1800", "0/5 nodes are available: 5 node(s) didn't match Pod's node affinity/selector.", True),
        ("7200", "0/5 nodes are available: 5 node(s) didn't match Pod's node affinity/selector.", False),
        (None, "0/5 nodes are available: 5 node(s) didn't match Pod's node affinity/selector.", False),
        ("1800", "0/5 nodes are available: 1 Insufficient nvidia.com/gpu, 4 node(s) didn't match", False),
        ("1800", "0/5 nodes are available: 1 node(s) were unschedulable, 4 node(s) didn't match", False),
    ],
)
def test_a_pod_whose_pool_has_no_node_is_stuck_after_a_time(limit_s: str | None, message: str, is_stuck: bool) -> None:
    condition = {"type": "PodScheduled", "status": "False", "reason": "Unschedulable", "message": message}
    waiting = pod(conditions=[condition])
    waiting["metadata"]["creationTimestamp"] = "2030-01-01T11:00:00Z"
    waiting["metadata"]["annotations"] = {"cloister.dev/node-limit-s": limit_s} if limit_s else {}
    (found,) = waiting_pods([waiting], NOW)
    assert found.is_stuck == is_stuck


@pytest.mark.parametrize(
    "status",
    [
        {},
        {
            "containerStatuses": [waits_for("ContainerCreating")],
            "initContainerStatuses": [waits_for("PodInitializing")],
        },
        {"conditions": [{"type": "PodScheduled", "status": "True"}]},
    ],
)
def test_a_pod_that_is_on_its_way_has_no_reason(status: dict[str, Any]) -> None:
    assert waiting_pods([pod(**status)], NOW) == []


@pytest.mark.parametrize(
    ("deployment", "expected"),
    [("Initializing", JobState.PENDING), ("Running", JobState.RUNNING)],
)
def test_a_job_that_is_stuck_says_so_whether_it_runs_or_not(deployment: str, expected: JobState) -> None:
    rayjob = {"metadata": {"name": "a"}, "status": {"jobDeploymentStatus": deployment, "jobStatus": "RUNNING"}}
    told = job_status(view_of(rayjob), "no such image", is_stuck=True)
    assert told == JobStatus(state=expected, message="no such image", is_stuck=True)


def test_how_long_a_pod_may_be_stuck_stands_in_the_rayjob() -> None:
    annotations = {"cloister.dev/stuck-limit-s": "60"}
    assert view_of({"metadata": {"name": "a", "annotations": annotations}}).stuck_limit_s == 60
    assert view_of({"metadata": {"name": "a"}}).stuck_limit_s == 300
