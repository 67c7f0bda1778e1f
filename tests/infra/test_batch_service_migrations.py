"""`python -m service.db`, which the migrations job runs, on a real Postgres."""

from collections.abc import Iterator
from uuid import uuid4

import psycopg
import pytest
from psycopg import errors, sql
from psycopg.conninfo import make_conninfo

from service.db.__main__ import run
from service.errors import SettingsError


@pytest.fixture
def role(database_url: str) -> Iterator[str]:
    name = f"job_{uuid4().hex[:8]}"
    with psycopg.connect(database_url, autocommit=True) as connection:
        connection.execute(sql.SQL("CREATE ROLE {} LOGIN").format(sql.Identifier(name)))
        yield name
        connection.execute(sql.SQL("DROP OWNED BY {}").format(sql.Identifier(name)))
        connection.execute(sql.SQL("DROP ROLE {}").format(sql.Identifier(name)))


def test_job_role_can_report_progress_and_read_nothing(database_url: str, role: str) -> None:
    run({"CLOISTER_DATABASE_URL": database_url, "CLOISTER_JOB_ROLE": role})
    with psycopg.connect(make_conninfo(database_url, user=role), autocommit=True) as connection:
        reported = connection.execute("SELECT report_progress('batch_none', 1, 1, 0, 1, 0, 1, 0)").fetchone()
        assert reported == (False,)
        with pytest.raises(errors.InsufficientPrivilege):
            connection.execute("SELECT * FROM batches")


def test_second_run_changes_nothing(database_url: str, role: str) -> None:
    environment = {"CLOISTER_DATABASE_URL": database_url, "CLOISTER_JOB_ROLE": role}
    run(environment)
    assert run(environment) == []


def test_missing_role_is_reported_with_the_statement_that_creates_it(database_url: str) -> None:
    with pytest.raises(SettingsError, match="CREATE ROLE nobody_here LOGIN"):
        run({"CLOISTER_DATABASE_URL": database_url, "CLOISTER_JOB_ROLE": "nobody_here"})


def test_owner_cannot_be_the_job_role(database_url: str) -> None:
    with psycopg.connect(database_url) as connection:
        owner = connection.info.user
    with pytest.raises(SettingsError, match="jobs need a separate role"):
        run({"CLOISTER_DATABASE_URL": database_url, "CLOISTER_JOB_ROLE": owner})


def test_missing_settings_are_reported_together() -> None:
    with pytest.raises(SettingsError, match="CLOISTER_DATABASE_URL and CLOISTER_JOB_ROLE must be set"):
        run({})


def test_unreachable_database_is_reported_with_its_host() -> None:
    with pytest.raises(SettingsError, match="the database at /nowhere does not answer"):
        run({"CLOISTER_DATABASE_URL": "postgresql://a@/b?host=/nowhere", "CLOISTER_JOB_ROLE": "c"})
