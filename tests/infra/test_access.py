import pytest

from infra.access import LAUNCHER_RULES
from service.adapters import rayjobs_api
from tests.infra.previewed_stacks import STACKS, preview


def test_the_launcher_may_do_what_it_asks_for_and_nothing_else() -> None:
    rules = {(resource, verb) for rule in LAUNCHER_RULES for resource in rule["resources"] for verb in rule["verbs"]}
    requests = {name for name in vars(rayjobs_api.RayJobsApi) if not name.startswith("_")}
    asked = {("rayjobs", request.removesuffix("_all")) for request in requests - {"pods"}}
    assert rules == asked | {("pods", "list")}


@pytest.mark.parametrize("name", STACKS)
def test_the_service_has_one_role_in_the_namespace_of_jobs_and_no_cluster_role(name: str) -> None:
    recording = preview(name)
    (role,) = recording.of_type("rbac.authorization.k8s.io/v1:Role")
    assert role.inputs["metadata"]["namespace"].endswith("-jobs")
    assert not recording.of_type("ClusterRole")
    assert not recording.of_type("ClusterRoleBinding")


def test_the_role_is_the_reconcilers_alone() -> None:
    (binding,) = preview("dev").of_type("RoleBinding")
    assert binding.inputs["subjects"] == [
        {"kind": "ServiceAccount", "name": "reconciler", "namespace": "cloister-acme-dev"}
    ]
    tokens = {
        deployment.name: deployment.inputs["spec"]["template"]["spec"]["automountServiceAccountToken"]
        for deployment in preview("dev").of_type("Deployment")
    }
    assert tokens == {"api": False, "reconciler": True}
