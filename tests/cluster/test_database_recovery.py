"""Recovery of a CloudNativePG database as the how-to describes it, without the operator: the old cluster stays."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from pulumi import automation

from tests.cluster.api import KubernetesApi
from tests.cluster.cloudnative_pg import install_crds
from tests.cluster.control_plane import ControlPlane
from tests.cluster.deployed import SERVICE
from tests.cluster.dev_stack import Deployment, dev_stack

pytestmark = [
    pytest.mark.cluster,
    # Pulumi's Automation API leaves the event loop of a failed program to the garbage collector.
    pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning"),
]
API_VERSION = "postgresql.cnpg.io/v1"


@pytest.fixture(scope="module")
def deployment(
    cluster: ControlPlane, api: KubernetesApi, programs: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Deployment]:
    """One deployment for all tests, which follow the order of the how-to."""
    install_crds(api)
    directory = tmp_path_factory.mktemp("pulumi")
    with dev_stack(cluster, programs, directory, keep_data=True, database=cloudnative_pg()) as made:
        made.up()
        yield made


def cloudnative_pg(**keys: Any) -> dict[str, Any]:
    """Section `database` with backups in the bundled object store."""
    return {"kind": "cloudnative_pg", "backup": {}, **keys}


def uids(api: KubernetesApi) -> dict[str, str]:
    return {each["metadata"]["name"]: each["metadata"]["uid"] for each in api.list(API_VERSION, "Cluster", SERVICE)}


def test_manifests_match_the_definitions(deployment: Deployment, api: KubernetesApi) -> None:
    assert deployment.warnings == []
    assert [each["metadata"]["name"] for each in api.list(API_VERSION, "ScheduledBackup", SERVICE)] == ["database"]
    assert set(uids(api)) == {"database"}


def test_recovery_is_refused_while_the_old_cluster_is_protected(deployment: Deployment, api: KubernetesApi) -> None:
    before = uids(api)
    deployment.values |= {"database": cloudnative_pg(recovery={"from_server": "database"})}
    with pytest.raises(automation.CommandError, match="protected"):
        deployment.up()
    assert uids(api).items() >= before.items()


def test_recovery_creates_a_cluster_beside_the_old_one(deployment: Deployment, api: KubernetesApi) -> None:
    before = uids(api)["database"]
    deployment.unprotect("database-cluster")
    deployment.up()
    assert set(uids(api)) == {"database", "database-restored"}
    assert uids(api)["database"] == before
    assert deployment.planned() == {}


def test_old_cluster_stays_without_kept_data_too(deployment: Deployment, api: KubernetesApi) -> None:
    deployment.values |= {"keep_data": False}
    deployment.up()
    before = uids(api)
    deployment.values |= {"database": cloudnative_pg(recovery={"from_server": "database-restored"})}
    deployment.up()
    assert uids(api).items() > before.items()


def test_destroy_without_kept_data_leaves_nothing(deployment: Deployment, api: KubernetesApi) -> None:
    deployment.destroy()
    assert api.find("v1", "Namespace", SERVICE) is None
    assert api.list(API_VERSION, "Cluster") == []
