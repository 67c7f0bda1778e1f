"""Stacks that keep their data: destroy leaves the claims, `up` adopts them, and nothing replaces them."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from pulumi import automation

from tests.cluster.api import KubernetesApi
from tests.cluster.control_plane import ControlPlane
from tests.cluster.deployed import JOBS, SERVICE
from tests.cluster.dev_stack import Deployment, dev_stack

pytestmark = [
    pytest.mark.cluster,
    # Pulumi's Automation API leaves the event loop of a program that failed for the garbage collector.
    pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning"),
]
CLAIMS = {"database-data", "object-store-data"}


@pytest.fixture(scope="module")
def deployment(cluster: ControlPlane, programs: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Deployment]:
    """One deployment for all tests, which follow the order of a stack's life."""
    # A claim without a class accepts one later; a class cannot be changed.
    database = bundled("standard")
    with dev_stack(cluster, programs, tmp_path_factory.mktemp("pulumi"), keep_data=True, database=database) as made:
        made.up()
        yield made


def bundled(storage_class: str) -> dict[str, Any]:
    """Section `database` with a volume of a storage class."""
    return {"kind": "bundled", "volume": {"size_gib": 20, "storage_class": storage_class}}


def uids(api: KubernetesApi) -> dict[str, str]:
    """UIDs of the service's namespace and of the claims in it."""
    claims = api.list("v1", "PersistentVolumeClaim", SERVICE)
    namespace = api.find("v1", "Namespace", SERVICE)
    found = [*claims, namespace] if namespace else claims
    return {each["metadata"]["name"]: each["metadata"]["uid"] for each in found}


def test_destroy_is_refused_while_data_is_protected(deployment: Deployment, api: KubernetesApi) -> None:
    before = uids(api)
    with pytest.raises(automation.CommandError, match="protected"):
        deployment.destroy()
    assert uids(api) == before


def test_kept_namespace_and_claims_outlive_destroy(deployment: Deployment, api: KubernetesApi) -> None:
    before = uids(api)
    deployment.unprotect()
    deployment.destroy()
    assert api.find("v1", "Namespace", JOBS) is None
    assert api.list("apps/v1", "StatefulSet", SERVICE) == []
    assert uids(api) == before
    assert set(before) == {SERVICE, *CLAIMS}


def test_up_after_destroy_adopts_kept_objects(deployment: Deployment, api: KubernetesApi) -> None:
    before = uids(api)
    deployment.up()
    assert uids(api) == before
    assert deployment.planned() == {}
    assert deployment.planned(refresh=True) == {}


def test_state_of_an_older_release_keeps_its_objects(deployment: Deployment, api: KubernetesApi) -> None:
    before = uids(api)
    stack = deployment.stack
    state = stack.export_stack()
    # Older releases managed all objects by the provider `cluster`.
    providers = {
        each["urn"].rpartition("::")[2]: f"{each['urn']}::{each['id']}"
        for each in state.deployment["resources"]
        if each["type"] == "pulumi:providers:kubernetes"
    }
    text = json.dumps(state.deployment).replace(providers["kept-data"], providers["cluster"])
    resources = json.loads(text)["resources"]
    state.deployment["resources"] = [each for each in resources if not each["urn"].endswith("::kept-data")]
    stack.import_stack(state)
    assert set(deployment.planned()) <= {"create", "update"}
    deployment.up()
    assert uids(api) == before
    assert deployment.planned() == {}


def test_new_image_of_the_database_keeps_its_claim(deployment: Deployment, api: KubernetesApi) -> None:
    before = uids(api)
    postgres = deployment.values["images"]["postgres"].partition("@")[0] + "@sha256:" + "8" * 64
    deployment.values |= {"images": deployment.values["images"] | {"postgres": postgres}}
    deployment.up()
    assert uids(api) == before


def test_move_to_a_new_major_version_replaces_the_deleted_claim_only(
    deployment: Deployment, api: KubernetesApi
) -> None:
    before = uids(api)
    api.delete("apps/v1", "StatefulSet", "database", SERVICE)
    api.delete("v1", "PersistentVolumeClaim", "database-data", SERVICE)
    api.wait_until_gone("v1", "PersistentVolumeClaim", "database-data", SERVICE, within_s=60)
    deployment.stack.refresh(target=[deployment.urn("database-data"), deployment.urn("StatefulSet::database")])
    deployment.up()
    after = uids(api)
    assert {name for name in before if after[name] != before[name]} == {"database-data"}
    assert deployment.planned() == {}


@pytest.mark.parametrize(("keep_data", "reason"), [(True, "marked for protection"), (False, "field conflict")])
def test_changed_storage_class_is_refused(
    deployment: Deployment, api: KubernetesApi, *, keep_data: bool, reason: str
) -> None:
    deployment.values |= {"keep_data": keep_data}
    deployment.up()
    before = uids(api)
    with deployment.changed(database=bundled("fast")), pytest.raises(automation.CommandError, match=reason):
        deployment.up()
    assert uids(api) == before


def test_destroy_without_kept_data_leaves_nothing(deployment: Deployment, api: KubernetesApi) -> None:
    assert not deployment.values["keep_data"]
    deployment.up()
    deployment.destroy()
    assert api.find("v1", "Namespace", SERVICE) is None
    assert uids(api) == {}
