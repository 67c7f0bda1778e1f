"""The KubeRay launcher and the API server: few requests, no second job, no leftovers."""

import copy
from collections.abc import Callable
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest

from ray_job.contract.job_spec import ModelSpec
from ray_job.contract.rayjobs import rayjob_name
from service.adapters.kuberay_launcher import KubeRayLauncher
from service.adapters.rayjob_status import RayJobView
from service.adapters.rayjobs_api import RayJobsApi, open_client
from service.errors import LauncherError, LaunchRefusedError, SettingsError
from service.ports import JobState
from tests.contract.kubernetes_stand_in import ApiServer, kubeconfig
from tests.contract.rayjobs import TEMPLATE, TEMPLATES, TOKEN, spec, until

Open = Callable[[], KubeRayLauncher]


def test_rayjob_is_the_template_with_name_label_spec_and_secret(server: ApiServer, launcher: KubeRayLauncher) -> None:
    launcher.launch(spec(7), TOKEN)
    name = "job-00000000000000000000000000000007"
    rayjob = server.cluster.rayjobs[name]
    assert rayjob["metadata"]["labels"] == {"cloister.dev/job": spec(7).job_id}
    pod = rayjob["spec"]["rayClusterSpec"]["headGroupSpec"]["template"]["spec"]
    assert pod["containers"][0]["env"] == [{"name": "CLOISTER_JOB_SPEC", "value": spec(7).to_json()}]
    assert pod["volumes"][0]["secret"]["secretName"] == name
    job_label = {"labels": {"cloister.dev/job": spec(7).job_id}}
    assert rayjob["spec"]["rayClusterSpec"]["headGroupSpec"]["template"].pop("metadata") == job_label
    pod["containers"][0]["env"] = []
    pod["volumes"][0]["secret"]["secretName"] = "set-by-the-launcher"
    assert rayjob["spec"] == TEMPLATE["spec"]


def test_token_is_in_a_secret_that_the_rayjob_owns(server: ApiServer, launcher: KubeRayLauncher) -> None:
    launcher.launch(spec(7), TOKEN)
    (rayjob,), (secret,) = server.cluster.rayjobs.values(), server.cluster.secrets.values()
    assert secret["stringData"] == {"token": TOKEN}
    assert TOKEN not in str(rayjob)
    name, uid = rayjob["metadata"]["name"], rayjob["metadata"]["uid"]
    owner = {"apiVersion": "ray.io/v1", "kind": "RayJob", "name": name, "uid": uid}
    assert (secret["metadata"]["name"], secret["metadata"]["ownerReferences"]) == (name, [owner])


@pytest.mark.parametrize("has_owner", [True, False])
def test_rayjob_belongs_to_the_object_that_is_deleted_before_its_rights(
    server: ApiServer, launcher: KubeRayLauncher, *, has_owner: bool
) -> None:
    server.cluster.has_owner = has_owner
    launcher.launch(spec(7), TOKEN)
    (rayjob,) = server.cluster.rayjobs.values()
    owner = {"apiVersion": "v1", "kind": "ConfigMap", "name": "jobs", "uid": "uid-1", "blockOwnerDeletion": True}
    assert rayjob["metadata"].get("ownerReferences") == ([owner] if has_owner else None)


def test_pods_of_a_job_and_of_no_other_one_reach_each_other(server: ApiServer, launcher: KubeRayLauncher) -> None:
    for number in (7, 8):
        launcher.launch(spec(number, model="large"), TOKEN)
    for number, policy in zip((7, 8), server.cluster.network_policies.values(), strict=True):
        pods = {"matchLabels": {"cloister.dev/job": spec(number).job_id}}
        rayjob = server.cluster.rayjobs[rayjob_name(spec(number).job_id)]
        assert policy["spec"] == {
            "podSelector": pods,
            "policyTypes": ["Ingress", "Egress"],
            "ingress": [{"from": [{"podSelector": pods}]}],
            "egress": [{"to": [{"podSelector": pods}]}],
        }
        assert policy["metadata"]["ownerReferences"][0]["uid"] == rayjob["metadata"]["uid"]
        cluster = rayjob["spec"]["rayClusterSpec"]
        for group in (cluster["headGroupSpec"], *cluster["workerGroupSpecs"]):
            assert group["template"]["metadata"]["labels"] == pods["matchLabels"]


def test_no_pod_starts_before_the_network_policy_of_its_job(server: ApiServer, launcher: KubeRayLauncher) -> None:
    server.cluster.refusals["create network policy"] = (403, "denied by the admission policy")
    with pytest.raises(LauncherError, match=r"cannot create the NetworkPolicy job-0+1-.* answered 403: denied"):
        launcher.launch(spec(), TOKEN)
    assert server.cluster.secrets == {}
    server.cluster.refusals.clear()
    for _ in range(2):
        launcher.launch(spec(), TOKEN)
    assert (len(server.cluster.network_policies), len(server.cluster.secrets)) == (1, 1)


def test_repeated_launch_replaces_the_token(server: ApiServer, launcher: KubeRayLauncher) -> None:
    launcher.launch(spec(), TOKEN)
    launcher.launch(spec(), "another")
    assert [each["stringData"]["token"] for each in server.cluster.secrets.values()] == ["another"]


def test_launch_that_failed_before_its_secret_can_be_repeated(server: ApiServer, launcher: KubeRayLauncher) -> None:
    server.cluster.refusals["create secret"] = (500, "etcdserver: leader changed")
    with pytest.raises(LauncherError, match=r"cannot create the Secret job-0+1: .* answered 500: etcdserver"):
        launcher.launch(spec(), TOKEN)
    server.cluster.refusals.clear()
    launcher.launch(spec(), TOKEN)
    assert (len(server.cluster.rayjobs), len(server.cluster.secrets)) == (1, 1)


def test_restarted_process_continues_with_the_same_rayjob(server: ApiServer, open_launcher: Open) -> None:
    first = open_launcher()
    first.launch(spec(), TOKEN)
    server.cluster.set_status(rayjob_name(spec().job_id), jobDeploymentStatus="Running", jobStatus="RUNNING")
    second = open_launcher()
    second.launch(spec(), TOKEN)
    assert second.status(spec().job_id).state is JobState.RUNNING
    assert len(server.cluster.rayjobs) == 1


def test_hundred_running_jobs_cost_no_requests(server: ApiServer, launcher: KubeRayLauncher) -> None:
    jobs = [spec(number) for number in range(100)]
    for job in jobs:
        launcher.launch(job, TOKEN)
        server.cluster.set_status(rayjob_name(job.job_id), jobDeploymentStatus="Running", rayClusterName="c")
    until(lambda: launcher._watch.view(rayjob_name(jobs[-1].job_id)) is not None)
    before = server.cluster.requests.total()
    for _ in range(10):
        assert all(launcher.status(job.job_id).state is JobState.PENDING for job in jobs)
    assert server.cluster.requests.total() - before <= 1  # one list of the pending pods


def test_expired_resource_version_is_listed_again(server: ApiServer, launcher: KubeRayLauncher) -> None:
    launcher.launch(spec(), TOKEN)
    until(lambda: server.cluster.requests["watch"] > 0)
    server.cluster.forget_history()
    until(lambda: server.cluster.requests["list"] >= 2, within_s=1.9)  # a failure would pause for 2 s
    server.cluster.set_status(rayjob_name(spec().job_id), jobDeploymentStatus="Running", jobStatus="RUNNING")
    until(lambda: launcher.status(spec().job_id).state is JobState.RUNNING)


def test_ended_watch_is_reopened(server: ApiServer, launcher: KubeRayLauncher) -> None:
    launcher.launch(spec(), TOKEN)
    until(lambda: server.cluster.requests["watch"] > 0)
    server.watches_ended += 1
    server.cluster.set_status(rayjob_name(spec().job_id), jobDeploymentStatus="Running", jobStatus="RUNNING")
    until(lambda: server.cluster.requests["watch"] >= 2)
    until(lambda: launcher.status(spec().job_id).state is JobState.RUNNING)
    assert server.cluster.requests["list"] == 1


def test_without_a_watch_each_status_is_a_request(server: ApiServer, open_launcher: Open) -> None:
    server.cluster.refusals["list"] = (403, "rayjobs.ray.io is forbidden: cannot list")
    launcher = open_launcher()
    launcher.launch(spec(), TOKEN)
    server.cluster.set_status(rayjob_name(spec().job_id), jobDeploymentStatus="Running", jobStatus="RUNNING")
    assert launcher.status(spec().job_id).state is JobState.RUNNING
    assert server.cluster.requests["get"] == 1


def test_state_of_a_lost_watch_is_not_used(server: ApiServer, launcher: KubeRayLauncher) -> None:
    name = rayjob_name(spec().job_id)
    launcher.launch(spec(), TOKEN)
    server.cluster.set_status(name, jobDeploymentStatus="Running", jobStatus="RUNNING")
    until(lambda: launcher._watch.view(name) is not None)
    server.cluster.refusals |= {"list": (500, "etcd is away"), "watch": (500, "etcd is away")}
    server.watches_ended += 1
    server.cluster.forget_history()
    server.cluster.set_status(name, jobDeploymentStatus="Complete", jobStatus="SUCCEEDED")
    until(lambda: launcher.status(spec().job_id).state is JobState.SUCCEEDED)


@pytest.mark.parametrize("call", ["launch", "status", "stop"])
def test_unreachable_api_server_raises_launcher_error(call: str, server: ApiServer, launcher: KubeRayLauncher) -> None:
    server.shutdown()
    server.server_close()
    with pytest.raises(LauncherError, match=r"cannot reach the Kubernetes API at http://127"):
        getattr(launcher, call)(*((spec(), TOKEN) if call == "launch" else (spec().job_id,)))


def test_wrong_token_is_not_reported_as_a_missing_job(server: ApiServer, tmp_path: Path) -> None:
    path = tmp_path / "kubeconfig"
    path.write_text(kubeconfig(server, "wrong"))
    launcher = KubeRayLauncher(RayJobsApi(open_client(path), "jobs"), TEMPLATES)
    with pytest.raises(LauncherError, match="answered 401: Unauthorized"):
        launcher.status(spec().job_id)


def test_refusal_has_the_message_of_the_api_server_without_the_spec(
    server: ApiServer, launcher: KubeRayLauncher
) -> None:
    server.cluster.refusals["create"] = (403, "exceeded quota: jobs, requested: nvidia.com/gpu=1")
    with pytest.raises(LauncherError, match="answered 403: exceeded quota: jobs, requested") as caught:
        launcher.launch(spec(), TOKEN)
    assert "secret-name" not in str(caught.value)


@pytest.mark.parametrize(
    ("status", "message", "is_final"),
    [
        (400, "RayJob in version v1 cannot be handled", True),
        (403, "rayjobs.ray.io is forbidden: cannot create resource", True),
        (422, "spec.entrypoint: Invalid value", True),
        (403, "forbidden: exceeded quota: jobs, requested: count/rayjobs.ray.io=1", False),
        (429, "too many requests", False),
        (500, "etcd is away", False),
    ],
)
def test_permanent_refusal_is_distinguished_from_a_temporary_one(
    status: int, message: str, is_final: bool, server: ApiServer, launcher: KubeRayLauncher
) -> None:
    server.cluster.refusals["create"] = (status, message)
    with pytest.raises(LauncherError, match=message) as caught:
        launcher.launch(spec(), TOKEN)
    assert isinstance(caught.value, LaunchRefusedError) == is_final


def test_rayjob_that_ended_long_ago_is_deleted(server: ApiServer, open_launcher: Open) -> None:
    server.cluster.create({"metadata": {"name": "old"}, "spec": TEMPLATE["spec"]})
    server.cluster.create({"metadata": {"name": "new"}, "spec": TEMPLATE["spec"]})
    for name, minutes in (("old", 12), ("new", 9)):
        ended = (datetime.now(UTC) - timedelta(minutes=minutes)).strftime("%Y-%m-%dT%H:%M:%SZ")
        server.cluster.set_status(name, jobDeploymentStatus="Complete", jobStatus="STOPPED", endTime=ended)
    open_launcher()
    until(lambda: "old" not in server.cluster.rayjobs)
    assert "new" in server.cluster.rayjobs


def test_stopped_job_counts_as_running_until_its_pods_are_gone(server: ApiServer, launcher: KubeRayLauncher) -> None:
    server.cluster.is_collecting = False
    launcher.launch(spec(), TOKEN)
    server.cluster.set_status(rayjob_name(spec().job_id), jobDeploymentStatus="Running", jobStatus="RUNNING")
    launcher.stop(spec().job_id)
    assert launcher.status(spec().job_id).state is JobState.RUNNING
    launcher.stop(spec().job_id)
    assert server.cluster.deletions == ["Foreground"]
    server.cluster.is_collecting = True
    server.cluster.delete(rayjob_name(spec().job_id))
    until(lambda: launcher.status(spec().job_id).state is JobState.MISSING)


@pytest.mark.parametrize("late", ["MODIFIED", "ADDED"])
def test_late_event_does_not_restore_a_deleted_job(late: str, server: ApiServer, launcher: KubeRayLauncher) -> None:
    launcher.launch(spec(), TOKEN)
    rayjob = server.cluster.rayjobs[rayjob_name(spec().job_id)]
    server.cluster.delete(rayjob_name(spec().job_id))
    until(lambda: launcher.status(spec().job_id).state is JobState.MISSING)
    launcher._watch.apply(late, rayjob)
    assert launcher.status(spec().job_id).state is JobState.MISSING


def test_late_event_does_not_undo_the_end_of_a_job(server: ApiServer, launcher: KubeRayLauncher) -> None:
    launcher.launch(spec(), TOKEN)
    rayjob = copy.deepcopy(server.cluster.rayjobs[rayjob_name(spec().job_id)])
    server.cluster.set_status(rayjob_name(spec().job_id), jobDeploymentStatus="Complete", jobStatus="SUCCEEDED")
    until(lambda: launcher.status(spec().job_id).state is JobState.SUCCEEDED)
    launcher._watch.apply("MODIFIED", rayjob)
    assert launcher.status(spec().job_id).state is JobState.SUCCEEDED


def test_late_answer_does_not_restore_a_deleted_job(server: ApiServer, launcher: KubeRayLauncher) -> None:
    launcher.launch(spec(), TOKEN)
    rayjob = copy.deepcopy(server.cluster.rayjobs[rayjob_name(spec().job_id)])
    server.cluster.delete(rayjob_name(spec().job_id))
    until(lambda: launcher.status(spec().job_id).state is JobState.MISSING)
    launcher._watch.note(RayJobView.parse(rayjob))
    assert launcher.status(spec().job_id).state is JobState.MISSING


def test_missing_job_can_be_launched(server: ApiServer, launcher: KubeRayLauncher) -> None:
    until(lambda: server.cluster.requests["watch"] > 0)
    assert launcher.status(spec().job_id).state is JobState.MISSING
    launcher.launch(spec(), TOKEN)
    until(lambda: launcher._watch.view(rayjob_name(spec().job_id)) is not None)


def test_model_without_a_template_is_refused_with_its_accelerator(launcher: KubeRayLauncher) -> None:
    model = ModelSpec(id="larger", source="x", accelerator="a10g")
    assert "no node pool has its accelerator, a10g" in launcher.refusal(model)
    with pytest.raises(LauncherError, match="larger: it has no RayJob template"):
        launcher.launch(replace(spec(), model=model), TOKEN)


def test_process_outside_of_kubernetes_needs_a_kubeconfig() -> None:
    with pytest.raises(SettingsError, match="CLOISTER_KUBECONFIG with the path of a kubeconfig"):
        open_client(None)
