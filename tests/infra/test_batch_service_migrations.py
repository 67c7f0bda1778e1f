"""`python -m service.db`, which the migrations job runs, on a real Postgres."""

import psycopg
import pytest

from service.db.__main__ import run
from service.errors import SettingsError


def test_database_is_closed_to_other_roles(database_url: str) -> None:
    run({"CLOISTER_DATABASE_URL": database_url})
    query = "SELECT has_database_privilege('public', current_database(), 'CONNECT')"
    with psycopg.connect(database_url) as connection:
        assert connection.execute(query).fetchone() == (False,)


def test_second_run_changes_nothing(database_url: str) -> None:
    run({"CLOISTER_DATABASE_URL": database_url})
    assert run({"CLOISTER_DATABASE_URL": database_url}) == []


def test_missing_setting_is_reported() -> None:
    with pytest.raises(SettingsError, match="CLOISTER_DATABASE_URL must be set"):
        run({})


def test_unreachable_database_is_reported_with_its_host() -> None:
    with pytest.raises(SettingsError, match="the database at /nowhere does not answer"):
        run({"CLOISTER_DATABASE_URL": "postgresql://a@/b?host=/nowhere"})
