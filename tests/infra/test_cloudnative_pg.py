"""CloudNativePG database: connection, backups and recovery."""

from typing import Any

import pulumi
import pulumi_kubernetes as kubernetes
import pytest

from infra.data.cloudnative_pg import CloudNativePgArgs, CloudNativePgDatabase
from infra.data.object_store import ObjectStoreConnection
from infra.kubernetes.images import ImageReference
from infra.kubernetes.kept_data import DataProtection
from infra.kubernetes.naming import StackNames
from infra.rendering.recording import Recording, record
from infra.stack_file.sections import BackupSection, RecoverySection
from infra.tenancy.credentials import ObjectStoreLogin
from tests.infra.previewed_stacks import changed, preview, preview_values, stack_text

NAMES = StackNames(customer="acme", environment="prod")
IMAGE = ImageReference.parse("registry.example/postgresql@sha256:" + "0" * 64)
KEY = ObjectStoreLogin(access_key_id="ID", secret_access_key="for-backups")
STORE = ObjectStoreConnection(
    bucket="batch", prefix="acme/prod", endpoint_url="https://s3.example", region="eu-1", service=KEY, job=KEY
)


def args(*, keep_data: bool = True, **changes: Any) -> CloudNativePgArgs:
    provider = kubernetes.Provider("kept-data", upsert_existing_objects=True)
    wanted: dict[str, Any] = {
        "names": NAMES,
        "image": IMAGE,
        "postgres_version": 17,
        "storage": "50Gi",
        "protection": DataProtection(provider=provider, keep_data=keep_data),
        "owner_password": "for-owner",
        "service_password": "for-service",
        "store": STORE,
        "backup": BackupSection(schedule="0 0 3 * * *", retention_days=14),
    }
    return CloudNativePgArgs(**wanted | changes)


def recorded(**changes: Any) -> Recording:
    def program() -> None:
        connection = CloudNativePgDatabase("database", args(**changes)).connection
        pulumi.export("url", connection.url(connection.service))

    return record(program)


def spec(recording: Recording, kind: str) -> Any:
    [found] = [resource for resource in recording.resources if resource.inputs.get("kind") == kind]
    return found.inputs["spec"]


def test_service_verifies_the_primary_with_the_ca_of_the_operator() -> None:
    host = "database-rw.cloister-acme-prod.svc:5432"
    options = "sslmode=verify-full&sslrootcert=/etc/cloister/database-ca/ca.crt"

    assert recorded().outputs["url"] == f"postgresql://cloister_acme_prod_service@{host}/cloister_acme_prod?{options}"


@pytest.mark.parametrize("name", ["api", "reconciler", "coordinator", "migrations"])
def test_pods_mount_the_certificate_of_the_ca_and_not_its_key(name: str) -> None:
    recording = preview("air-gap")
    [found] = [each for kind in ("Deployment", "batch/v1:Job") for each in recording.of_type(kind) if each.name == name]
    pod = found.inputs["spec"]["template"]["spec"]
    [volume] = [each["secret"] for each in pod["volumes"] if each["name"] == "database-ca"]
    assert (volume["secretName"], volume["items"]) == ("database-ca", [{"key": "ca.crt", "path": "ca.crt"}])
    [mount] = [each for each in pod["containers"][0]["volumeMounts"] if each["name"] == "database-ca"]
    assert mount["mountPath"] == "/etc/cloister/database-ca"


def test_operator_creates_the_role_of_the_service_without_privileges() -> None:
    [role] = spec(recorded(), "Cluster")["managed"]["roles"]

    assert (role["name"], role["login"], role["superuser"]) == ("cloister_acme_prod_service", True, False)
    assert role["passwordSecret"] == {"name": "database-service"}
    assert recorded().named("database-service").inputs["stringData"]["username"] == role["name"]


def test_passwords_and_keys_are_in_secrets_only() -> None:
    recording = recorded()

    secrets = recording.of_type("Secret")
    assert all(secret.is_secret(("stringData",)) for secret in secrets)
    assert {secret.name for secret in secrets} == {"database-owner", "database-service", "database-backup-key"}
    others = str([resource.inputs for resource in recording.resources if resource not in secrets])
    assert not any(value in others for value in ("for-owner", "for-service", "for-backups"))


def test_superuser_cannot_log_in() -> None:
    assert spec(recorded(), "Cluster")["enableSuperuserAccess"] is False


def test_scheduled_backups_use_the_object_store_of_the_stack() -> None:
    recording = recorded()

    store, schedule = spec(recording, "ObjectStore"), spec(recording, "ScheduledBackup")
    assert store["configuration"]["destinationPath"] == "s3://batch/acme/prod/database"
    assert (store["retentionPolicy"], schedule["schedule"]) == ("14d", "0 0 3 * * *")
    assert spec(recording, "Cluster")["plugins"][0]["parameters"]["barmanObjectName"] == "database-backups"


def test_backups_can_use_the_bundled_object_store() -> None:
    database = {"kind": "cloudnative_pg", "backup": {}}
    recording = preview_values(changed(database=database), stack_text().secret_keys)

    location = spec(recording, "ObjectStore")["configuration"]
    assert location["endpointURL"] == "http://object-store.cloister-acme-dev.svc:7070"
    assert location["destinationPath"] == "s3://cloister-acme-dev/acme/dev/database"
    key = recording.named("database-backup-key")
    assert key.inputs["stringData"]["access_key_id"] == "cloister-acme-dev"
    assert any(urn.endswith("::object-store-setup") for urn in key.dependencies)


def test_cluster_without_backups_needs_no_plugin() -> None:
    recording = recorded(backup=None)

    assert "plugins" not in spec(recording, "Cluster")
    assert {r.inputs.get("kind") for r in recording.resources} & {"ObjectStore", "ScheduledBackup"} == set()


def test_recovered_cluster_reads_old_backups_and_writes_new_ones() -> None:
    recording = recorded(recovery=RecoverySection(from_server="database", until="2030-01-31T12:00:00Z"))

    cluster = spec(recording, "Cluster")
    assert cluster["bootstrap"]["recovery"]["recoveryTarget"] == {"targetTime": "2030-01-31T12:00:00Z"}
    assert cluster["externalClusters"][0]["plugin"]["parameters"]["serverName"] == "database"
    assert cluster["plugins"][0]["parameters"]["serverName"] == "database-restored"
    assert recording.outputs["url"].startswith("postgresql://cloister_acme_prod_service@database-restored-rw.")


def test_cluster_is_protected_and_kept_if_the_stack_keeps_its_data() -> None:
    assert recorded().named("database-cluster").protect
    assert recorded().named("database-cluster").retain_on_delete
    assert not recorded(keep_data=False).named("database-cluster").protect


def test_cluster_is_never_deleted_by_pulumi() -> None:
    assert recorded(keep_data=False).named("database-cluster").retain_on_delete
