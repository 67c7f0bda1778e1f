"""Findings on the database of a stack, on a real Postgres."""

import os
from collections.abc import Callable, Iterator

import psycopg
import pytest

from service.doctor.backends import check_database
from service.doctor.findings import Result
from service.settings import read_settings
from tests.integration.doctor.doctor_run import Doctor


def test_refused_login_names_the_setting_but_not_the_password(
    doctor: Doctor, settings: Callable[..., None], database_url: str
) -> None:
    settings(DATABASE_URL=database_url.replace("postgres:@", "nobody:secret-value@"))
    run = doctor()
    assert run["database"].startswith("failed: CLOISTER_DATABASE_URL: ")
    assert 'role "nobody" does not exist' in run["database"]
    assert "secret-value" not in run.out
    assert run.results["object store"] == "ok"


def test_unreachable_database_is_reported(doctor: Doctor, settings: Callable[..., None]) -> None:
    settings(DATABASE_URL="postgresql://cloister@127.0.0.1:9/none")
    assert "Connection refused" in doctor()["database"]


@pytest.mark.usefixtures("settings")
def test_missing_migration_is_a_failure(doctor: Doctor, database_url: str) -> None:
    with psycopg.connect(database_url) as connection:
        connection.execute("DELETE FROM migrations WHERE name LIKE '0002%'")
    assert doctor()["migrations"].startswith("failed: not applied: 0002_")
    with psycopg.connect(database_url) as connection:
        connection.execute("DROP TABLE migrations")
    assert "0001_initial" in doctor()["migrations"]


@pytest.fixture
def other_role(database_url: str) -> Iterator[str]:
    with psycopg.connect(database_url, autocommit=True) as connection:
        connection.execute("CREATE ROLE doctor_other LOGIN")
        yield "doctor_other"
        connection.execute("DROP ROLE doctor_other")


def test_missing_table_permission_is_no_network_problem(
    doctor: Doctor, settings: Callable[..., None], database_url: str, other_role: str
) -> None:
    settings(DATABASE_URL=database_url.replace("postgresql://postgres:@", f"postgresql://{other_role}@"))
    run = doctor()
    assert "the login works, but a query fails: permission denied for table migrations" in run["database"]
    assert "network policy" not in run["database"]


@pytest.mark.usefixtures("settings")
def test_role_that_cannot_change_the_audit_log_is_good(doctor: Doctor) -> None:
    assert doctor().results["database role"] == "ok"


def test_role_that_owns_the_schema_is_a_warning(
    doctor: Doctor, settings: Callable[..., None], database_url: str
) -> None:
    settings(DATABASE_URL=database_url)
    run = doctor()
    assert run["database role"].startswith("warning: postgres owns the schema")
    assert "docs/how-to/deploy.md" in run["database role"]


def test_query_that_waits_for_a_lock_times_out(settings: Callable[..., None], database_url: str) -> None:
    settings()
    with psycopg.connect(database_url) as other:
        other.execute("LOCK TABLE migrations")
        *_, found = check_database(read_settings(os.environ), query_timeout_s=0.2)
    assert found.result == Result.FAILED
    assert "statement timeout" in found.message
