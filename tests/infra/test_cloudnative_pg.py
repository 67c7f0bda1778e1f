"""The database as a cluster of CloudNativePG: backups and recovery."""

from typing import Any

import pulumi
import pytest

from infra.cloudnative_pg import BackupArgs, CloudNativePgArgs, CloudNativePgDatabase, RecoveryArgs
from infra.images import ImageReference
from infra.naming import StackNames
from infra.object_store import ObjectStoreLogin, customer_object_store
from infra.recording import Recording, is_secret, record

NAMES = StackNames(customer="acme", environment="prod")
IMAGE = ImageReference.parse("registry.example/postgresql@sha256:" + "0" * 64)


def args(**changes: Any) -> CloudNativePgArgs:
    store = customer_object_store(
        bucket="batch",
        prefix="acme/prod",
        endpoint_url="https://s3.example",
        region="eu-1",
        service=ObjectStoreLogin(access_key_id="ID", secret_access_key="for-backups"),
    )
    wanted: dict[str, Any] = {
        "names": NAMES,
        "image": IMAGE,
        "postgres_version": 17,
        "storage": "50Gi",
        "owner_password": "for-owner",
        "job_password": "for-job",
        "backup": BackupArgs(store=store, schedule="0 0 3 * * *", retention_days=14),
    }
    return CloudNativePgArgs(**wanted | changes)


def recorded(**changes: Any) -> Recording:
    def program() -> None:
        connection = CloudNativePgDatabase("database", args(**changes)).connection
        pulumi.export("url", connection.url(connection.owner))

    return record(program)


def spec(recording: Recording, kind: str) -> Any:
    [found] = [resource for resource in recording.resources if resource.inputs.get("kind") == kind]
    return found.inputs["spec"]


def test_the_service_connects_to_the_primary_and_only_encrypted() -> None:
    host = "database-rw.cloister-acme-prod.svc:5432"

    assert recorded().outputs["url"] == f"postgresql://cloister_acme_prod@{host}/cloister_acme_prod?sslmode=require"


def test_passwords_and_keys_stand_in_secrets_and_nowhere_else() -> None:
    recording = recorded()

    secrets = recording.of_type("Secret")
    assert all(is_secret(secret, ("stringData",)) for secret in secrets)
    assert {secret.name for secret in secrets} == {"database-owner", "database-job", "database-backup-key"}
    others = str([resource.inputs for resource in recording.resources if resource not in secrets])
    assert not any(value in others for value in ("for-owner", "for-job", "for-backups"))


def test_the_role_of_jobs_is_no_superuser_and_the_superuser_cannot_log_in() -> None:
    cluster = spec(recorded(), "Cluster")

    assert cluster["enableSuperuserAccess"] is False
    [role] = cluster["managed"]["roles"]
    assert (role["name"], role["superuser"]) == ("cloister_acme_prod_job", False)


def test_backups_go_to_the_object_store_of_the_stack_on_schedule() -> None:
    recording = recorded()

    store, schedule = spec(recording, "ObjectStore"), spec(recording, "ScheduledBackup")
    assert store["configuration"]["destinationPath"] == "s3://batch/acme/prod/database"
    assert (store["retentionPolicy"], schedule["schedule"]) == ("14d", "0 0 3 * * *")
    assert spec(recording, "Cluster")["plugins"][0]["parameters"]["barmanObjectName"] == "database-backups"


def test_a_cluster_without_backups_needs_no_plugin() -> None:
    recording = recorded(backup=None)

    assert "plugins" not in spec(recording, "Cluster")
    assert {r.inputs.get("kind") for r in recording.resources} & {"ObjectStore", "ScheduledBackup"} == set()


def test_a_recovery_is_another_cluster_that_reads_the_backups_of_the_first_and_writes_its_own() -> None:
    recording = recorded(recovery=RecoveryArgs(from_server="database", until="2030-01-31T12:00:00Z"))

    cluster = spec(recording, "Cluster")
    assert cluster["bootstrap"]["recovery"]["recoveryTarget"] == {"targetTime": "2030-01-31T12:00:00Z"}
    assert cluster["externalClusters"][0]["plugin"]["parameters"]["serverName"] == "database"
    assert cluster["plugins"][0]["parameters"]["serverName"] == "database-restored"
    assert recording.outputs["url"].startswith("postgresql://cloister_acme_prod@database-restored-rw.")


def test_the_cluster_is_protected_and_stays_unless_the_stack_may_lose_its_data() -> None:
    assert recorded().named("database-cluster").protect
    assert recorded().named("database-cluster").retain_on_delete
    assert not recorded(keep_data=False).named("database-cluster").protect


def test_what_cannot_work_is_refused() -> None:
    with pytest.raises(ValueError, match="give the section `backup` too"):
        args(backup=None, recovery=RecoveryArgs(from_server="database"))
    with pytest.raises(ValueError, match="no moment with its offset"):
        RecoveryArgs(from_server="database", until="2030-01-31 12:00")
    with pytest.raises(ValueError, match="no name of a cluster"):
        RecoveryArgs(from_server="Database 1")
    with pytest.raises(ValueError, match="six fields"):
        BackupArgs(store=args().backup.store, schedule="0 3 * * *", retention_days=1)  # type: ignore[union-attr]
