"""KubeRay launcher with the service account of the stack, on a real API server."""

import base64
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from ray_job.contract.cluster import JOBS_OWNER
from service.adapters.kuberay_launcher import KubeRayLauncher
from service.adapters.rayjob_templates import network_policy
from service.adapters.rayjobs_api import RayJobsApi, open_client
from service.errors import LauncherError
from service.ports import JobState
from tests.cluster.api import ApiError, KubernetesApi
from tests.cluster.deployed import JOBS, SERVICE, TOKEN, Deployed, job_spec

pytestmark = pytest.mark.cluster

ALLOWED: list[tuple[str, ...]] = [
    *(("ray.io", "rayjobs", verb, JOBS) for verb in ("create", "get", "list", "watch", "delete")),
    ("", "pods", "list", JOBS),
    ("", "secrets", "create", JOBS),
    ("", "secrets", "update", JOBS),
    ("networking.k8s.io", "networkpolicies", "create", JOBS),
    ("", "configmaps", "get", JOBS, JOBS_OWNER),
    ("", "configmaps/finalizers", "update", JOBS, JOBS_OWNER),
]
FORBIDDEN = [
    *(("ray.io", "rayjobs", verb, JOBS) for verb in ("update", "patch", "deletecollection")),
    *(("ray.io", "rayjobs", verb, place) for verb in ("create", "list") for place in (SERVICE, "default", "")),
    *(("ray.io", "rayclusters", verb, JOBS) for verb in ("create", "get", "delete")),
    *(("", "pods", verb, JOBS) for verb in ("create", "get", "delete", "watch", "patch")),
    *(("", f"pods/{sub}", verb, JOBS) for sub in ("exec", "attach", "portforward") for verb in ("create", "get")),
    ("", "pods/log", "get", JOBS),
    ("", "pods/ephemeralcontainers", "patch", JOBS),
    ("", "pods", "list", SERVICE),
    *(("", "secrets", verb, place) for verb in ("get", "list", "watch", "delete") for place in (JOBS, SERVICE, "")),
    *(("", "secrets", verb, place) for verb in ("create", "update") for place in (SERVICE, "")),
    *(
        ("networking.k8s.io", "networkpolicies", verb, JOBS)
        for verb in ("get", "list", "update", "patch", "delete", "deletecollection")
    ),
    ("networking.k8s.io", "networkpolicies", "create", SERVICE),
    *(("", "configmaps", verb, place) for verb in ("get", "update") for place in (JOBS, SERVICE)),
    *(("", "serviceaccounts/token", "create", place) for place in (JOBS, SERVICE)),
    *(("", "namespaces", verb, "") for verb in ("get", "list", "create", "delete")),
    *(("", "nodes", verb, "") for verb in ("list", "patch")),
    *(("apps", "deployments", verb, SERVICE) for verb in ("get", "patch", "create")),
    *(("batch", "jobs", "create", place) for place in (JOBS, SERVICE)),
    *(("rbac.authorization.k8s.io", kind, "create", JOBS) for kind in ("roles", "rolebindings")),
    *(("rbac.authorization.k8s.io", "roles", verb, JOBS) for verb in ("escalate", "bind", "update")),
    ("", "users", "impersonate", ""),
    ("*", "*", "*", ""),
    ("*", "*", "*", JOBS),
]


@pytest.fixture
def rayjobs(deployed: Deployed) -> RayJobsApi:
    return RayJobsApi(open_client(deployed.reconciler), JOBS)


@pytest.fixture
def launcher(deployed: Deployed, rayjobs: RayJobsApi) -> Iterator[KubeRayLauncher]:
    with KubeRayLauncher(rayjobs, deployed.templates) as opened:
        yield opened


def until(done: Callable[[], bool], *, within_s: float = 20) -> None:
    end = time.monotonic() + within_s
    while not done():
        assert time.monotonic() < end
        time.sleep(0.05)


def test_launcher_has_the_rights_that_it_needs(deployed: Deployed) -> None:
    with KubernetesApi(deployed.reconciler) as own:
        assert [asked for asked in ALLOWED if not own.may(*asked)] == []


def test_launcher_has_no_other_rights(deployed: Deployed) -> None:
    with KubernetesApi(deployed.reconciler) as own:
        assert [asked for asked in FORBIDDEN if own.may(*asked)] == []


def network_policy_of_a_job() -> dict[str, Any]:
    created = {
        "metadata": {"name": "job-1", "namespace": JOBS, "uid": "1", "labels": {"cloister.dev/job": "job_1"}},
    }
    return network_policy(created)


OTHERS = {"podSelector": {"matchLabels": {"cloister.dev/job": "job_2"}}}
OPEN: list[tuple[str, dict[str, Any]]] = [
    ("all pods", {"podSelector": {}}),
    ("all jobs", {"podSelector": {"matchExpressions": [{"key": "cloister.dev/job", "operator": "Exists"}]}}),
    ("heads", {"podSelector": {"matchLabels": {"ray.io/node-type": "head"}}}),
    ("to everyone", {"egress": [{}]}),
    ("from everyone", {"ingress": [{}]}),
    ("to everyone on a port", {"egress": [{"ports": [{"port": 443}]}]}),
    ("to an address", {"egress": [{"to": [{"ipBlock": {"cidr": "0.0.0.0/0"}}]}]}),
    ("to another job", {"egress": [{"to": [OTHERS]}]}),
    ("from another job", {"ingress": [{"from": [OTHERS]}]}),
    ("to another namespace", {"egress": [{"to": [{"namespaceSelector": {}}]}]}),
    ("to pods of another namespace", {"egress": [{"to": [{"namespaceSelector": {}, "podSelector": {}}]}]}),
]


@pytest.mark.parametrize("opened", [pytest.param(spec, id=name) for name, spec in OPEN])
def test_launcher_cannot_open_other_connections(deployed: Deployed, opened: dict[str, Any]) -> None:
    good = network_policy_of_a_job()
    bad = {**good, "spec": {**good["spec"], **opened}}

    def is_refused() -> bool:
        try:
            own.create(bad, dry_run=True)
        except ApiError as error:
            return "the policy must" in str(error)
        return False

    with KubernetesApi(deployed.reconciler) as own:
        until(is_refused)  # the API server reads a new admission policy with a delay
        own.create(good, dry_run=True)


def test_launcher_cannot_create_a_network_policy_that_outlives_its_job(deployed: Deployed) -> None:
    orphan = network_policy_of_a_job()
    orphan["metadata"]["ownerReferences"] = []
    with KubernetesApi(deployed.reconciler) as own, pytest.raises(ApiError, match="must belong to a RayJob"):
        own.create(orphan, dry_run=True)


def test_repeated_launches_create_one_rayjob_and_secret(
    launcher: KubeRayLauncher, deployed: Deployed, api: KubernetesApi
) -> None:
    launcher.launch(job_spec(1), TOKEN)
    launcher.launch(job_spec(1), TOKEN)
    with KubeRayLauncher(RayJobsApi(open_client(deployed.reconciler), JOBS), deployed.templates) as after_a_restart:
        after_a_restart.launch(job_spec(1), "another")
    made = [each["metadata"]["name"] for each in api.list("ray.io/v1", "RayJob", JOBS)]
    assert made == ["job-00000000000000000000000000000001"]
    (secret,) = (each for each in api.list("v1", "Secret", JOBS) if each["metadata"]["name"] == made[0])
    assert base64.b64decode(secret["data"]["token"]).decode() == "another"
    assert [owner["name"] for owner in secret["metadata"]["ownerReferences"]] == made
    assert launcher.status(job_spec(1).job_id).state == JobState.PENDING


def test_watch_reports_status_changes(launcher: KubeRayLauncher, api: KubernetesApi) -> None:
    launcher.launch(job_spec(2), TOKEN)
    name = "job-00000000000000000000000000000002"
    until(lambda: launcher.status(job_spec(2).job_id).state == JobState.PENDING)
    rayjob = {"apiVersion": "ray.io/v1", "kind": "RayJob", "metadata": {"name": name, "namespace": JOBS}}
    status = {"jobDeploymentStatus": "Running", "jobStatus": "RUNNING"}
    api.patch({**rayjob, "status": status}, field_manager="operator", subresource="status")
    until(lambda: launcher.status(job_spec(2).job_id).state == JobState.RUNNING)


def test_stopped_job_is_missing_after_its_rayjob_is_deleted(launcher: KubeRayLauncher) -> None:
    launcher.launch(job_spec(3), TOKEN)
    launcher.stop(job_spec(3).job_id)
    # The garbage collector discovers new kinds every 30 s and completes no deletion before.
    until(lambda: launcher.status(job_spec(3).job_id).state == JobState.MISSING, within_s=90)
    launcher.stop(job_spec(3).job_id)


def test_launcher_reads_its_own_namespace_only(deployed: Deployed, rayjobs: RayJobsApi) -> None:
    assert rayjobs.pods("Pending") == []
    with pytest.raises(LauncherError, match="403"):
        RayJobsApi(open_client(deployed.reconciler), SERVICE).list_all()


def test_each_job_has_a_network_policy(launcher: KubeRayLauncher, api: KubernetesApi) -> None:
    launcher.launch(job_spec(4), TOKEN)
    (made,) = (
        each
        for each in api.list("networking.k8s.io/v1", "NetworkPolicy", JOBS)
        if each["metadata"]["name"].startswith("job-00000000000000000000000000000004-")
    )
    assert made["spec"]["podSelector"] == {"matchLabels": {"cloister.dev/job": job_spec(4).job_id}}
    assert made["metadata"]["ownerReferences"][0]["kind"] == "RayJob"
