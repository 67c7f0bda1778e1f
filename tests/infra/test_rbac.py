import pytest

from ray_job.contract.cluster import LAUNCHER_RIGHTS
from service.adapters import rayjobs_api
from tests.infra.previewed_stacks import STACKS_OF_CUSTOMERS, preview


def test_launcher_has_the_rights_that_it_uses_only() -> None:
    rules = {(right.resource, verb) for right in LAUNCHER_RIGHTS for verb in right.verbs}
    requests = {name for name in vars(rayjobs_api.RayJobsApi) if not name.startswith("_")}
    others = {"pods", "owner", "put_secret", "ensure_network_policy"}
    asked = {("rayjobs", request.removesuffix("_all")) for request in requests - others}
    assert rules == asked | {
        ("pods", "list"),
        ("configmaps", "get"),
        ("configmaps/finalizers", "update"),
        ("secrets", "create"),
        ("secrets", "update"),
        ("networkpolicies", "create"),
    }


@pytest.mark.parametrize("name", STACKS_OF_CUSTOMERS)
def test_service_has_one_role_in_the_jobs_namespace_and_no_cluster_role(name: str) -> None:
    recording = preview(name)
    (role,) = recording.of_type("rbac.authorization.k8s.io/v1:Role")
    assert role.inputs["metadata"]["namespace"].endswith("-jobs")
    assert not recording.of_type("ClusterRole")
    assert not recording.of_type("ClusterRoleBinding")


def test_role_is_bound_to_the_reconciler_only() -> None:
    (binding,) = preview("dev").of_type("RoleBinding")
    assert binding.inputs["subjects"] == [
        {"kind": "ServiceAccount", "name": "reconciler", "namespace": "cloister-acme-dev"}
    ]
    tokens = {
        deployment.name: deployment.inputs["spec"]["template"]["spec"]["automountServiceAccountToken"]
        for deployment in preview("dev").of_type("Deployment")
    }
    assert tokens == {"api": False, "coordinator": False, "reconciler": True}
