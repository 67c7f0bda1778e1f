"""Kinds of database: their resources and connections."""

from typing import Any

import pulumi
import pulumi_kubernetes as kubernetes
import pytest

from infra.data.database import BundledDatabase, BundledDatabaseArgs, DatabaseConnection, SslMode
from infra.kubernetes.images import ImageReference
from infra.kubernetes.kept_data import DataProtection
from infra.kubernetes.naming import StackNames
from infra.rendering.recording import Recording, record
from infra.tenancy.credentials import DatabaseLogin

NAMES = StackNames(customer="acme", environment="dev")
IMAGE = ImageReference.parse("registry.example/postgres@sha256:" + "0" * 64)


def protection(*, keep_data: bool = True) -> DataProtection:
    return DataProtection(provider=kubernetes.Provider("kept-data", upsert_existing_objects=True), keep_data=keep_data)


def args(*, keep_data: bool = True, **changes: Any) -> BundledDatabaseArgs:
    wanted: dict[str, Any] = {"names": NAMES, "image": IMAGE, "storage": "20Gi"}
    wanted |= {"protection": protection(keep_data=keep_data)}
    passwords = {"owner_password": "for-owner", "service_password": "for-service", "digest_key": "key"}
    return BundledDatabaseArgs(**wanted | passwords | changes)


def bundled(**changes: Any) -> Recording:
    def program() -> None:
        connection = BundledDatabase("database", args(**changes)).connection
        pulumi.export("url", connection.url(connection.service))
        pulumi.export("owner_url", connection.url(connection.owner))

    return record(program)


def pod(recording: Recording) -> Any:
    return recording.of_type("StatefulSet")[0].inputs["spec"]["template"]


def external(ssl_mode: SslMode = "verify-full", ca_pem: str = "") -> DatabaseConnection:
    address: dict[str, Any] = {"host": "db.example", "port": 5433, "database": "batches"}
    login = DatabaseLogin(**address, role="cloister", password="for-owner")
    return DatabaseConnection(
        owner=login,
        service=login,
        ssl_mode=ssl_mode,
        ca_pem=ca_pem,
    )


def url(connection: DatabaseConnection) -> str:
    return str(record(lambda: pulumi.export("url", connection.url(connection.service))).outputs["url"])


def test_url_of_the_bundled_database_has_no_password() -> None:
    address = "database.cloister-acme-dev.svc:5432/cloister_acme_dev?sslmode=disable"
    assert bundled().outputs["url"] == f"postgresql://cloister_acme_dev_service@{address}"
    assert bundled().outputs["owner_url"] == f"postgresql://cloister_acme_dev@{address}"


def test_passwords_are_in_one_secret_only() -> None:
    recording = bundled()

    passwords = recording.named("database-passwords")
    assert passwords.inputs["stringData"] == {"owner": "for-owner", "service": "for-service"}
    assert passwords.is_secret(("stringData", "owner"))
    assert passwords.is_secret(("stringData", "service"))
    others = [resource.inputs for resource in recording.resources if resource.name != "database-passwords"]
    assert "for-owner" not in str(others)
    assert "for-service" not in str(others)


@pytest.mark.parametrize("password", ["owner_password", "service_password"])
def test_new_password_replaces_the_pod(password: str) -> None:
    before, same, after = bundled(), bundled(), bundled(**{password: "another"})

    assert pod(before)["metadata"] == pod(same)["metadata"]
    assert pod(before)["metadata"]["annotations"] != pod(after)["metadata"]["annotations"]


def test_volume_is_protected_if_the_stack_keeps_its_data() -> None:
    kept, unprotected = bundled().named("database-data"), bundled(keep_data=False).named("database-data")

    assert (kept.protect, unprotected.protect) == (True, False)
    assert "::kept-data::" in kept.provider


def test_volume_has_the_requested_size_and_class() -> None:
    spec = bundled(storage="7Gi", storage_class="fast").named("database-data").inputs["spec"]

    assert spec["resources"]["requests"]["storage"] == "7Gi"
    assert spec["storageClassName"] == "fast"


def test_placement_and_pull_secret_apply_to_the_pod() -> None:
    spec = pod(bundled(placement={"nodeSelector": {"pool": "system"}}, pull_secret="pull"))["spec"]

    assert spec["nodeSelector"] == {"pool": "system"}
    assert spec["imagePullSecrets"] == [{"name": "pull"}]


def test_external_database_is_verified_with_its_ca_or_those_of_the_system() -> None:
    own, known = external(ca_pem="PEM"), external()

    assert url(own) == (
        "postgresql://cloister@db.example:5433/batches?sslmode=verify-full&sslrootcert=/etc/cloister/database-ca/ca.crt"
    )
    assert url(known).endswith("/batches?sslmode=verify-full&sslrootcert=system")
    assert url(external("require")).endswith("?sslmode=require")
