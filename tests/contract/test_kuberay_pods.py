"""The pods of a job in the KubeRay launcher: why it waits, whether it is stuck, whether it works."""

from typing import Any

import pytest

from ray_job.contract.job_spec import JobSpec
from ray_job.contract.rayjobs import rayjob_name
from service.adapters.kuberay_launcher import KubeRayLauncher
from service.ports import JobState, JobStatus
from tests.contract.kubernetes_stand_in import ApiServer
from tests.contract.rayjobs import TOKEN, spec, until


def test_reason_for_waiting_is_repeated_when_the_job_fails_for_it(server: ApiServer, launcher: KubeRayLauncher) -> None:
    launcher.launch(spec(), TOKEN)
    name = rayjob_name(spec().job_id)
    server.cluster.pods = [waiting_pod(cluster="c1")]
    server.cluster.set_status(name, jobDeploymentStatus="Initializing", rayClusterName="c1")
    until(lambda: "ImagePullBackOff (check the image's reference" in launcher.status(spec().job_id).message)
    server.cluster.pods, launcher._waiting_until = [], 0.0
    failed = {
        "jobDeploymentStatus": "Failed",
        "reason": "PreRunningDeadlineExceeded",
        "endTime": "2099-01-01T00:00:00Z",
    }
    server.cluster.set_status(name, **failed)
    until(lambda: launcher.status(spec().job_id).state is JobState.FAILED)
    message = launcher.status(spec().job_id).message
    assert message.startswith("the Ray cluster was not ready within 900 s: headgroup pod c1-head-x: ImagePullBackOff")


def test_job_is_stuck_if_no_pod_of_a_group_has_run_for_too_long(server: ApiServer, launcher: KubeRayLauncher) -> None:
    launcher.launch(spec(), TOKEN)
    server.cluster.pods = [waiting_pod(cluster="c1")]
    server.cluster.set_status(rayjob_name(spec().job_id), jobDeploymentStatus="Initializing", rayClusterName="c1")
    until(lambda: launcher._stuck != {} or launcher.status(spec().job_id).is_stuck)
    assert not launcher.status(spec().job_id).is_stuck
    why = later(launcher, 301)
    assert launcher.status(spec().job_id) == JobStatus(state=JobState.PENDING, message=why, is_stuck=True)


def later(launcher: KubeRayLauncher, seconds: float) -> str:
    """Let time pass for the one stuck group; return why it is stuck."""
    ((key, (since, why)),) = launcher._stuck.items()
    launcher._stuck = {key: (since - seconds, why)}
    return why


def test_lack_of_nodes_has_its_own_limit_from_its_detection_on(server: ApiServer, launcher: KubeRayLauncher) -> None:
    launcher.launch(spec(), TOKEN)
    pod = waiting_pod(cluster="c1", node_limit_s="1800")
    message = "0/5 nodes are available: 5 node(s) didn't match Pod's node affinity/selector."
    condition = {"type": "PodScheduled", "status": "False", "reason": "Unschedulable", "message": message}
    pod["metadata"]["creationTimestamp"] = "2020-01-01T00:00:00Z"  # it has waited in a full pool for long
    pod["status"] = {"phase": "Pending", "conditions": [condition]}
    server.cluster.pods = [pod]
    server.cluster.set_status(rayjob_name(spec().job_id), jobDeploymentStatus="Running", rayClusterName="c1")
    until(lambda: launcher.status(spec().job_id).state is JobState.PENDING and launcher._stuck != {})
    later(launcher, 1_700)
    assert not launcher.status(spec().job_id).is_stuck
    later(launcher, 101)
    assert launcher.status(spec().job_id).is_stuck


def test_stuck_pod_is_tolerated_while_another_of_its_group_runs(server: ApiServer, launcher: KubeRayLauncher) -> None:
    launcher.launch(spec(), TOKEN)
    server.cluster.pods = [waiting_pod(cluster="c1"), running_pod(cluster="c1")]
    server.cluster.set_status(rayjob_name(spec().job_id), jobDeploymentStatus="Running", rayClusterName="c1")
    until(lambda: launcher.status(spec().job_id).state is JobState.PENDING and launcher._waiting != {})
    assert launcher._stuck == {}


@pytest.mark.parametrize(("running", "is_stuck"), [(1, True), (2, False)])
def test_engine_on_two_pods_needs_two_of_its_group(
    running: int, is_stuck: bool, server: ApiServer, launcher: KubeRayLauncher
) -> None:
    launcher.launch(spec(), TOKEN)
    others = [running_pod(cluster="c1")] * running
    server.cluster.pods = [waiting_pod(cluster="c1", hosts_per_engine="2"), *others]
    server.cluster.set_status(rayjob_name(spec().job_id), jobDeploymentStatus="Running", rayClusterName="c1")
    until(lambda: launcher.status(spec().job_id).state is JobState.PENDING and launcher._waiting != {})
    assert (launcher._stuck != {}) == is_stuck


@pytest.fixture
def gpu_job(server: ApiServer, launcher: KubeRayLauncher) -> JobSpec:
    """A job whose process runs on a Ray cluster that may have workers with GPUs."""
    job = spec(model="large")
    launcher.launch(job, TOKEN)
    server.cluster.set_status(
        rayjob_name(job.job_id), jobDeploymentStatus="Running", jobStatus="RUNNING", rayClusterName="c1"
    )
    until(lambda: launcher.status(job.job_id).state is JobState.RUNNING)
    return job


def look(launcher: KubeRayLauncher, job: JobSpec) -> JobStatus:
    launcher._waiting_until = 0.0
    return launcher.status(job.job_id)


def test_job_works_once_a_pod_with_gpus_has_a_node(
    server: ApiServer, launcher: KubeRayLauncher, gpu_job: JobSpec
) -> None:
    server.cluster.pods = [running_pod(cluster="c1"), running_pod(cluster="c2", group="v100")]
    assert not look(launcher, gpu_job).is_working
    placed = waiting_pod(cluster="c1", group="v100")
    server.cluster.pods += [placed]
    assert not look(launcher, gpu_job).is_working
    placed["spec"]["nodeName"] = "v100-1"
    assert look(launcher, gpu_job).is_working


def test_pods_of_a_working_job_are_not_listed_again(
    server: ApiServer, launcher: KubeRayLauncher, gpu_job: JobSpec
) -> None:
    server.cluster.pods = [running_pod(cluster="c1", group="v100")]
    assert look(launcher, gpu_job).is_working
    before = server.cluster.requests["pods"]
    assert look(launcher, gpu_job).is_working
    assert server.cluster.requests["pods"] - before == 1  # the pending ones


def test_running_job_counts_as_working_if_pods_cannot_be_listed(
    server: ApiServer, launcher: KubeRayLauncher, gpu_job: JobSpec
) -> None:
    server.cluster.refusals["pods"] = (403, "pods is forbidden")
    assert look(launcher, gpu_job).is_working


def test_waiting_job_still_waits_if_pods_can_no_longer_be_listed(
    server: ApiServer, launcher: KubeRayLauncher, gpu_job: JobSpec
) -> None:
    assert not look(launcher, gpu_job).is_working
    server.cluster.refusals["pods"] = (500, "etcd is away")
    assert not look(launcher, gpu_job).is_working


def test_state_is_known_if_pods_cannot_be_listed(server: ApiServer, launcher: KubeRayLauncher) -> None:
    server.cluster.refusals["pods"] = (403, "pods is forbidden")
    launcher.launch(spec(), TOKEN)
    server.cluster.set_status(rayjob_name(spec().job_id), jobDeploymentStatus="Initializing", rayClusterName="c1")
    until(lambda: server.cluster.requests["pods"] > 0 or launcher.status(spec().job_id).state is JobState.MISSING)
    assert launcher.status(spec().job_id) == JobStatus(state=JobState.PENDING)


def waiting_pod(*, cluster: str, group: str = "headgroup", **annotations: str) -> dict[str, Any]:
    waiting = {"reason": "ImagePullBackOff", "message": 'Back-off pulling image "registry.example/ray"'}
    status = {"name": "ray-head", "state": {"waiting": waiting}, "image": "", "imageID": "", "ready": False}
    return {
        "metadata": {
            "name": f"{cluster}-head-x",
            "labels": {"ray.io/cluster": cluster, "ray.io/group": group},
            "annotations": {f"cloister.dev/{name.replace('_', '-')}": value for name, value in annotations.items()},
        },
        "spec": {"containers": []},
        "status": {"phase": "Pending", "containerStatuses": [{**status, "restartCount": 0}]},
    }


def running_pod(*, cluster: str, group: str = "headgroup") -> dict[str, Any]:
    spec = {"containers": [], "nodeName": "node-1"}
    return {**waiting_pod(cluster=cluster, group=group), "spec": spec, "status": {"phase": "Running"}}
