"""What `cloister doctor` finds of a stack's database, a real Postgres."""

import os
from collections.abc import Callable

import psycopg
import pytest

from service.cli.doctor.database import database
from service.cli.doctor.findings import Result
from service.db import Pool
from service.settings import read_settings
from tests.integration.doctor.told import Doctor


def test_a_database_that_refuses_is_told_by_its_setting_and_without_the_password(
    doctor: Doctor, settings: Callable[..., None], database_url: str
) -> None:
    settings(DATABASE_URL=database_url.replace("postgres:@", "nobody:not-to-be-told@"))
    told = doctor()
    assert told["database"].startswith("failed: CLOISTER_DATABASE_URL: ")
    assert 'role "nobody" does not exist' in told["database"]
    assert "not-to-be-told" not in told.out
    assert told.results["object store"] == "ok"


def test_a_database_that_is_not_there_is_told(doctor: Doctor, settings: Callable[..., None]) -> None:
    settings(DATABASE_URL="postgresql://cloister@127.0.0.1:9/none")
    assert "Connection refused" in doctor()["database"]


@pytest.mark.usefixtures("settings")
def test_a_migration_that_has_not_run_is_told(doctor: Doctor, pool: Pool) -> None:
    with pool.connection() as connection:
        connection.execute("DELETE FROM migrations WHERE name LIKE '0002%'")
    assert doctor()["migrations"].startswith("failed: these have not run: 0002_")
    with pool.connection() as connection:
        connection.execute("DROP TABLE migrations")
    assert "0001_initial" in doctor()["migrations"]


@pytest.mark.usefixtures("settings")
@pytest.mark.parametrize(
    ("statement", "excess"),
    [
        ("GRANT SELECT ON batches TO doctor_job", "table batches"),
        ("GRANT UPDATE (name) ON projects TO doctor_job", "table projects"),
        ("GRANT SELECT ON files TO PUBLIC", "table files"),
        ("GRANT CREATE ON SCHEMA public TO doctor_job", "CREATE in the schema public"),
        ("ALTER ROLE doctor_job CREATEDB", "the role is a CREATEDB"),
        ("GRANT pg_monitor TO doctor_job", "member of pg_monitor"),
        (
            "CREATE FUNCTION open_door() RETURNS text LANGUAGE sql SECURITY DEFINER AS 'SELECT 1::text'",
            "function open_door",
        ),
    ],
)
def test_a_job_role_that_may_do_more_is_told(doctor: Doctor, pool: Pool, statement: str, excess: str) -> None:
    with pool.connection() as connection:
        connection.execute(statement)
    assert f"failed: doctor_job may do more than report progress: {excess}" in doctor()["database role of jobs"]


@pytest.mark.usefixtures("settings")
@pytest.mark.parametrize(
    ("statement", "lacking"),
    [
        ("REVOKE EXECUTE ON FUNCTION report_progress FROM doctor_job", "EXECUTE of the function report_progress"),
        ("ALTER ROLE doctor_job NOLOGIN", "LOGIN"),
        ("REVOKE USAGE ON SCHEMA public FROM PUBLIC", "USAGE of the schema public"),
    ],
)
def test_a_job_role_that_cannot_report_is_told(doctor: Doctor, pool: Pool, statement: str, lacking: str) -> None:
    with pool.connection() as connection:
        connection.execute(statement)
    assert f"cannot report progress. It lacks {lacking}:" in doctor()["database role of jobs"]


def test_a_role_that_may_not_read_is_not_told_of_the_network(
    doctor: Doctor, settings: Callable[..., None], database_url: str, job_role: str
) -> None:
    settings(DATABASE_URL=database_url.replace("postgresql://postgres:@", f"postgresql://{job_role}@"))
    told = doctor()
    assert "lets in, but a query fails: permission denied for table migrations" in told["database"]
    assert "network policy" not in told["database"]


def test_a_query_that_waits_for_a_lock_is_given_up(settings: Callable[..., None], database_url: str) -> None:
    settings()
    with psycopg.connect(database_url) as other:
        other.execute("LOCK TABLE migrations")
        *_, found = database(read_settings(os.environ), limit_s=0.2)
    assert found.result == Result.FAILED
    assert "statement timeout" in found.message
