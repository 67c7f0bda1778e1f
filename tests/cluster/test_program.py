"""The project's program with Pulumi's real engine and a real API server."""

import base64
import copy
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from pulumi import automation

from tests.cluster.api import KubernetesApi
from tests.cluster.control_plane import ControlPlane
from tests.cluster.deployed import JOBS, SERVICE
from tests.cluster.dev_stack import SECRETS, Deployment, dev_stack

pytestmark = [
    pytest.mark.cluster,
    # Pulumi's Automation API leaves the event loop of a failed program to the garbage collector.
    pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning"),
]

DEPLOYMENTS = ("api", "coordinator", "reconciler")
STATEFUL_SETS = ("database", "object-store")


@pytest.fixture(scope="module")
def deployment(cluster: ControlPlane, programs: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Deployment]:
    """One deployment for all tests, which follow the order of a stack's life."""
    with dev_stack(cluster, programs, tmp_path_factory.mktemp("pulumi"), keep_data=False) as made:
        made.up()
        yield made


def annotations(api: KubernetesApi) -> dict[str, dict[str, str]]:
    """Return the annotations of the pods of each Deployment and StatefulSet; changing them replaces the pods."""
    found = {}
    for kind, names in (("Deployment", DEPLOYMENTS), ("StatefulSet", STATEFUL_SETS)):
        for name in names:
            body = api.find("apps/v1", kind, name, SERVICE)
            assert body is not None
            found[name] = body["spec"]["template"]["metadata"]["annotations"]
    return found


def rolled(before: dict[str, dict[str, str]], after: dict[str, dict[str, str]]) -> set[str]:
    return {name for name in before if before[name] != after[name]}


def test_up_creates_everything_without_a_warning_of_the_server(deployment: Deployment, api: KubernetesApi) -> None:
    assert deployment.warnings == []
    assert deployment.stack.outputs()["service_namespace"].value == SERVICE
    assert {each["metadata"]["name"] for each in api.list("apps/v1", "Deployment", SERVICE)} == set(DEPLOYMENTS)
    assert {each["metadata"]["name"] for each in api.list("apps/v1", "StatefulSet", SERVICE)} == set(STATEFUL_SETS)


def test_nodes_have_the_labels_of_their_pools(deployment: Deployment, api: KubernetesApi) -> None:
    assert deployment.values["node_pools"]["cpu"]["nodes"] == ["node-2"]
    labels = {node["metadata"]["name"]: node["metadata"]["labels"] for node in api.list("v1", "Node")}
    assert {name: found["cloister.dev/pool"] for name, found in labels.items()} == {"node-1": "system", "node-2": "cpu"}


def test_controllers_create_every_pod(deployment: Deployment, api: KubernetesApi) -> None:
    assert deployment.warnings == []
    wanted = {"api": 2, "coordinator": 1, "reconciler": 2, "migrations": 1, "database": 1}
    wanted |= {"object-store": 1, "object-store-setup": 1}
    end = time.monotonic() + 30
    while (made := components(api)) != wanted:
        refused = [each["message"] for each in api.list("v1", "Event", SERVICE) if each["reason"] == "FailedCreate"]
        assert time.monotonic() < end, f"{made}: {refused}"
        time.sleep(0.2)


def components(api: KubernetesApi) -> dict[str, int]:
    labels = [pod["metadata"]["labels"] for pod in api.list("v1", "Pod", SERVICE)]
    return dict(Counter(label["app.kubernetes.io/component"] for label in labels))


def test_second_preview_shows_no_change(deployment: Deployment) -> None:
    assert deployment.planned() == {}
    assert deployment.planned(refresh=True) == {}


def test_state_and_workspace_have_no_secret_in_clear_text(deployment: Deployment) -> None:
    assert "database-credentials" in deployment.engine.state_file.read_text()
    files = [path for path in deployment.engine.directory.rglob("*") if path.is_file()]
    everything = b"\0".join(path.read_bytes() for path in files)
    for secret in SECRETS.values():
        # Only a part of it: base64 depends on the preceding bytes, and a connection file contains more.
        assert secret[:20].encode() not in everything
        assert base64.b64encode(secret.encode()).rstrip(b"=") not in everything


def test_changed_limit_rolls_the_service_only(deployment: Deployment, api: KubernetesApi) -> None:
    before = {each["metadata"]["name"]: each["metadata"]["generation"] for each in _workloads(api)}
    deployment.values |= {"limits": {"max_running_jobs": 3}}
    deployment.up()
    after = {each["metadata"]["name"]: each["metadata"]["generation"] for each in _workloads(api)}
    assert {name for name in before if after[name] != before[name]} == set(DEPLOYMENTS)


def test_changed_model_rolls_the_readers_of_the_catalogue(deployment: Deployment, api: KubernetesApi) -> None:
    before = annotations(api)
    models = copy.deepcopy(deployment.values["models"])
    models[0]["engine_args"]["max_model_len"] = 1024
    deployment.values |= {"models": models}
    deployment.up()
    assert rolled(before, annotations(api)) == set(DEPLOYMENTS)


def test_changed_password_rolls_the_database_and_its_clients(deployment: Deployment, api: KubernetesApi) -> None:
    before = annotations(api)
    deployment.secrets |= {"database_service_password": "4f2e3d4c5b6a79880000000000000000"}
    deployment.up()
    assert rolled(before, annotations(api)) == {"database", *DEPLOYMENTS}


def test_changed_service_image_runs_a_new_migration_job(deployment: Deployment, api: KubernetesApi) -> None:
    (before,) = migrations(api)
    service = deployment.values["images"]["service"].partition("@")[0] + "@sha256:" + "9" * 64
    deployment.values |= {"images": deployment.values["images"] | {"service": service}}
    deployment.up()
    assert (before, migrations(api)) == ("migrations-111111111111", ["migrations-999999999999"])


def migrations(api: KubernetesApi) -> list[str]:
    names = (each["metadata"]["name"] for each in api.list("batch/v1", "Job", SERVICE))
    return [name for name in names if name.startswith("migrations-")]


def test_up_keeps_the_number_of_pods_of_the_autoscaler(deployment: Deployment, api: KubernetesApi) -> None:
    scale = {"apiVersion": "apps/v1", "kind": "Deployment", "metadata": {"name": "api", "namespace": SERVICE}}
    api.patch({**scale, "spec": {"replicas": 4}}, field_manager="autoscaler")
    deployment.values |= {"log_level": "debug"}
    deployment.up()
    found = api.find("apps/v1", "Deployment", "api", SERVICE)
    assert found is not None
    assert found["spec"]["replicas"] == 4


def test_refresh_previews_the_repair_of_a_manual_change_that_up_refuses_without_force(
    deployment: Deployment, api: KubernetesApi, monkeypatch: pytest.MonkeyPatch
) -> None:
    policy = {"apiVersion": "networking.k8s.io/v1", "kind": "NetworkPolicy"}
    place = {"metadata": {"name": "default-deny", "namespace": JOBS}}
    api.patch({**policy, **place, "spec": {"policyTypes": ["Ingress"]}}, field_manager="somebody")
    assert deployment.planned() == {}
    assert deployment.planned(refresh=True) == {"update": 1}
    with pytest.raises(automation.CommandError, match='conflict with "somebody"'):
        deployment.up(refresh=True)
    monkeypatch.setenv("PULUMI_K8S_ENABLE_PATCH_FORCE", "true")
    deployment.up(refresh=True)
    found = api.find("networking.k8s.io/v1", "NetworkPolicy", "default-deny", JOBS)
    assert found is not None
    assert found["spec"]["policyTypes"] == ["Ingress", "Egress"]


def test_forcing_stays_in_the_state_until_the_next_plain_up(deployment: Deployment) -> None:
    assert set(deployment.planned()) == {"update"}
    deployment.up()
    assert deployment.planned() == {}


def test_refresh_detects_manually_deleted_objects(deployment: Deployment, api: KubernetesApi) -> None:
    api.delete("policy/v1", "PodDisruptionBudget", "api", SERVICE)
    assert deployment.planned() == {}
    assert deployment.planned(refresh=True) == {"create": 1}
    deployment.up(refresh=True)
    assert api.find("policy/v1", "PodDisruptionBudget", "api", SERVICE) is not None


def test_destroy_leaves_nothing(deployment: Deployment, api: KubernetesApi) -> None:
    deployment.destroy()
    assert [api.find("v1", "Namespace", name) for name in (SERVICE, JOBS)] == [None, None]
    nodes = {node["metadata"]["name"]: node["metadata"].get("labels", {}) for node in api.list("v1", "Node")}
    assert not any(key.startswith("cloister.dev/") for labels in nodes.values() for key in labels)
    ours = [each["metadata"]["name"] for each in api.list("scheduling.k8s.io/v1", "PriorityClass")]
    assert not any(name.startswith("cloister-") for name in ours)


def _workloads(api: KubernetesApi) -> list[dict[str, Any]]:
    return [*api.list("apps/v1", "Deployment", SERVICE), *api.list("apps/v1", "StatefulSet", SERVICE)]
