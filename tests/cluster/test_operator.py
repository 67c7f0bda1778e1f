"""KubeRay's real operator with RayJobs of the stack. Pods are admitted and never run.

The operator has its rights in the namespaces of two customers' jobs only.
"""

import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from infra.tenancy.network import RAY_DASHBOARD_PORT
from ray_job.contract.cluster import RAY_METRICS_PORT
from service.adapters.kuberay_launcher import KubeRayLauncher
from service.adapters.rayjobs_api import RayJobsApi, open_client
from service.ports import JobState
from tests.cluster.api import KubernetesApi
from tests.cluster.control_plane import ControlPlane, kuberay_operator
from tests.cluster.deployed import JOBS, SERVICE, TOKEN, Deployed, job_spec
from tests.cluster.kuberay import operator_account

pytestmark = pytest.mark.cluster
JOB = job_spec(9)
NEIGHBOUR = "cloister-globex-dev-jobs"
RIGHTS = (
    ("", "secrets", "list"),
    ("", "pods", "create"),
    ("ray.io", "rayjobs", "update"),
    ("rbac.authorization.k8s.io", "roles", "create"),
)


@pytest.fixture(scope="module")
def token(deployed: Deployed, api: KubernetesApi) -> Iterator[str]:
    """Token of the operator, with its rights in the namespaces of two customers' jobs."""
    assert deployed.templates
    api.create({"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": NEIGHBOUR}})
    with operator_account(api, (JOBS, NEIGHBOUR)) as made:
        yield made
    api.delete("v1", "Namespace", NEIGHBOUR)
    api.wait_until_gone("v1", "Namespace", NEIGHBOUR, within_s=120)


@pytest.fixture(scope="module")
def launcher(cluster: ControlPlane, deployed: Deployed, token: str) -> Iterator[KubeRayLauncher]:
    api = RayJobsApi(open_client(deployed.reconciler), JOBS)
    operator = kuberay_operator(cluster, token=token, watched=(JOBS, NEIGHBOUR))
    with operator, KubeRayLauncher(api, deployed.templates) as opened:
        opened.launch(JOB, TOKEN)
        yield opened


def test_operator_has_its_rights_in_namespaces_of_jobs_only(cluster: ControlPlane, token: str) -> None:
    kubeconfig = cluster.access.kubeconfig(cluster.server, cluster.ca_file, user="operator-rights", token=token)
    with KubernetesApi(kubeconfig) as operator:
        # An empty namespace asks for all of them.
        everywhere = (JOBS, NEIGHBOUR, SERVICE, "kube-system", "")
        for right in RIGHTS:
            assert [place for place in everywhere if operator.may(*right, place)] == [JOBS, NEIGHBOUR], right


def eventually(ask: Callable[[], Any], *, within_s: float = 60) -> Any:
    end = time.monotonic() + within_s
    while not (found := ask()):
        assert time.monotonic() < end
        time.sleep(0.2)
    return found


def test_rayjob_becomes_a_cluster_with_an_admitted_head(launcher: KubeRayLauncher, api: KubernetesApi) -> None:
    pods = eventually(lambda: api.list("v1", "Pod", JOBS))
    (head,) = (pod for pod in pods if pod["metadata"]["labels"]["ray.io/node-type"] == "head")
    (variable,) = (each for each in ray_container(head)["env"] if each["name"] == "CLOISTER_JOB_SPEC")
    assert variable["value"] == JOB.to_json()
    assert launcher.status(JOB.job_id).state == JobState.PENDING
    # Without a port of the dashboard, the operator never submits a job.
    (service,) = (each for each in api.list("v1", "Service", JOBS) if each["metadata"]["name"].endswith("-head-svc"))
    ports = {each["name"]: each["port"] for each in service["spec"]["ports"]}
    assert (ports["dashboard"], ports["metrics"]) == (RAY_DASHBOARD_PORT, RAY_METRICS_PORT)
    for pod in pods:
        declared = {(each["name"], each["containerPort"]) for each in ray_container(pod)["ports"]}
        assert ("metrics", RAY_METRICS_PORT) in declared


def test_status_contains_why_the_head_is_pending(launcher: KubeRayLauncher) -> None:
    # The nodes have no labels because the stack's node pools are not deployed.
    reason = eventually(lambda: launcher.status(JOB.job_id).message, within_s=30)
    assert "node" in reason


def test_no_object_of_the_operator_was_refused(launcher: KubeRayLauncher, api: KubernetesApi) -> None:
    assert launcher.status(JOB.job_id).state == JobState.PENDING
    events = api.list("v1", "Event", JOBS)
    refused = [each["message"] for each in events if each["type"] == "Warning" and "Failed" in each["reason"]]
    assert [message for message in refused if "nodes are available" not in message] == []


def test_stopping_a_job_deletes_its_cluster_and_pods(launcher: KubeRayLauncher, api: KubernetesApi) -> None:
    launcher.stop(JOB.job_id)
    eventually(lambda: launcher.status(JOB.job_id).state == JobState.MISSING, within_s=90)
    assert api.list("ray.io/v1", "RayCluster", JOBS) == []
    assert api.list("v1", "Pod", JOBS) == []


def ray_container(pod: dict[str, Any]) -> dict[str, Any]:
    container: dict[str, Any] = pod["spec"]["containers"][0]
    return container
