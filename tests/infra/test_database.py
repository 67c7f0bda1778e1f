"""The kinds of database: what they make in the cluster, and how the stack reaches them."""

from typing import Any

import pulumi
import pytest

from infra.credentials import DatabaseLogin
from infra.database import BundledDatabase, BundledDatabaseArgs, DatabaseConnection, SslMode, external_database
from infra.images import ImageReference
from infra.naming import StackNames
from infra.recording import Recording, is_secret, record

NAMES = StackNames(customer="acme", environment="dev")
IMAGE = ImageReference.parse("registry.example/postgres@sha256:" + "0" * 64)


def args(**changes: Any) -> BundledDatabaseArgs:
    wanted: dict[str, Any] = {"names": NAMES, "image": IMAGE, "storage": "20Gi"}
    return BundledDatabaseArgs(**wanted | {"owner_password": "for-owner", "job_password": "for-job"} | changes)


def bundled(**changes: Any) -> Recording:
    def program() -> None:
        connection = BundledDatabase("database", args(**changes)).connection
        pulumi.export("owner", connection.url(connection.owner))
        pulumi.export("job", connection.url(connection.job))

    return record(program)


def pod(recording: Recording) -> Any:
    return recording.of_type("StatefulSet")[0].inputs["spec"]["template"]


def external(ssl_mode: SslMode = "verify-full", ca_pem: str = "") -> DatabaseConnection:
    return external_database(
        host="db.example",
        port=5433,
        database="batches",
        owner=("cloister", "for-owner"),
        job=("cloister_job", "for-job"),
        ssl_mode=ssl_mode,
        ca_pem=ca_pem,
    )


def url(connection: DatabaseConnection, login: DatabaseLogin) -> str:
    return str(record(lambda: pulumi.export("url", connection.url(login))).outputs["url"])


def test_both_roles_reach_the_bundled_database_by_urls_without_a_password() -> None:
    outputs = bundled().outputs

    base = "database.cloister-acme-dev.svc:5432/cloister_acme_dev?sslmode=disable"
    assert outputs["owner"] == f"postgresql://cloister_acme_dev@{base}"
    assert outputs["job"] == f"postgresql://cloister_acme_dev_job@{base}"


def test_the_passwords_stand_in_one_secret_and_nowhere_else() -> None:
    recording = bundled()

    passwords = recording.named("database-passwords")
    assert passwords.inputs["stringData"] == {"owner": "for-owner", "job": "for-job"}
    assert is_secret(passwords, ("stringData", "owner"))
    others = [resource.inputs for resource in recording.resources if resource.name != "database-passwords"]
    assert "for-owner" not in str(others)
    assert "for-job" not in str(others)


def test_a_new_password_makes_a_new_pod() -> None:
    before, same, after = bundled(), bundled(), bundled(job_password="another")

    assert pod(before)["metadata"] == pod(same)["metadata"]
    assert pod(before)["metadata"]["annotations"] != pod(after)["metadata"]["annotations"]


def test_the_volume_is_protected_and_stays_unless_the_stack_may_lose_its_data() -> None:
    kept = bundled().named("database-data")
    lost = bundled(keep_data=False).named("database-data")

    assert (kept.protect, kept.retain_on_delete) == (True, True)
    assert (lost.protect, lost.retain_on_delete) == (False, False)


def test_the_volume_has_the_size_and_class_that_were_asked_for() -> None:
    spec = bundled(storage="7Gi", storage_class="fast").named("database-data").inputs["spec"]

    assert spec["resources"]["requests"]["storage"] == "7Gi"
    assert spec["storageClassName"] == "fast"


def test_placement_and_pull_secret_reach_the_pod() -> None:
    spec = pod(bundled(placement={"nodeSelector": {"pool": "system"}}, pull_secret="pull"))["spec"]

    assert spec["nodeSelector"] == {"pool": "system"}
    assert spec["imagePullSecrets"] == [{"name": "pull"}]


def test_an_external_database_is_verified_by_the_given_authority_or_those_of_the_system() -> None:
    own, known = external(ca_pem="PEM"), external()

    assert url(own, own.owner) == (
        "postgresql://cloister@db.example:5433/batches?sslmode=verify-full&sslrootcert=/etc/cloister/database-ca/ca.crt"
    )
    assert url(known, known.job).endswith("/batches?sslmode=verify-full&sslrootcert=system")
    assert url(external("require"), own.job).endswith("?sslmode=require")


def test_one_role_for_both_is_refused() -> None:
    with pytest.raises(ValueError, match="cannot be both owner and job"):
        external_database(
            host="db.example", port=5432, database="d", owner=("a", "1"), job=("a", "2"), ssl_mode="verify-full"
        )
