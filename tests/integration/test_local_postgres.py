"""The embedded Postgres: its socket, its roles, and restarts."""

import os
from collections.abc import Iterator
from pathlib import Path
from threading import Event

import psycopg
import pytest

from service.local import postgres
from service.local.keys import make_keys
from service.local.layout import Layout, layout_of, make_directories
from service.local.processes import child_environment, end_everything
from service.local.supervisor import Child, Supervisor

pytestmark = pytest.mark.slow


def _start(layout: Layout) -> Supervisor:
    make_directories(layout)
    make_keys(layout)
    environment = child_environment(layout, "postgres", os.environ, offline=True, gpu=False)
    command = postgres.prepare(layout, environment)
    supervisor = Supervisor(print)
    supervisor.start(Child(name="postgres", command=command, environment=environment, log=layout.log("postgres")))
    supervisor.wait_until(lambda: postgres.answers(layout), what="Postgres", timeout_s=60, stopping=Event())
    postgres.set_up(layout)
    return supervisor


def _stop(layout: Layout, supervisor: Supervisor) -> None:
    assert end_everything(layout) > 0
    supervisor.reap()


@pytest.fixture(scope="module")
def layout(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Layout]:
    layout = layout_of(Path(tmp_path_factory.mktemp("local")) / "data")
    supervisor = _start(layout)
    yield layout
    _stop(layout, supervisor)


@pytest.fixture
def other_role(layout: Layout) -> Iterator[str]:
    with psycopg.connect(layout.database_url(postgres.SUPERUSER, "postgres"), autocommit=True) as connection:
        connection.execute("CREATE ROLE other LOGIN")
        yield "other"
        connection.execute("DROP ROLE other")


@pytest.mark.parametrize("database", ["cloister", "postgres"])
def test_only_the_roles_of_the_stack_can_connect(layout: Layout, other_role: str, database: str) -> None:
    with pytest.raises(psycopg.OperationalError, match="permission denied"):
        psycopg.connect(layout.database_url(other_role, database))


def test_only_this_account_can_open_the_socket(layout: Layout) -> None:
    assert layout.runtime_dir.stat().st_mode & 0o077 == 0
    with psycopg.connect(layout.database_url("cloister")) as connection:
        assert connection.execute("SHOW listen_addresses").fetchone() == ("",)


def test_service_adds_to_the_audit_log_and_cannot_change_it(layout: Layout) -> None:
    with psycopg.connect(layout.database_url(postgres.SERVICE)) as connection:
        connection.execute("INSERT INTO audit_log (actor, type, object_id) VALUES ('operator', 'a', 'b')")
        with pytest.raises(psycopg.errors.InsufficientPrivilege):
            connection.execute("DELETE FROM audit_log")


def test_data_directory_of_a_version_with_one_role_is_upgraded(layout: Layout) -> None:
    with psycopg.connect(layout.database_url(postgres.SUPERUSER)) as connection:
        connection.execute("DROP OWNED BY cloister_service")
        connection.execute("DROP ROLE cloister_service")
    postgres.set_up(layout)
    with psycopg.connect(layout.database_url(postgres.SERVICE)) as connection:
        assert connection.execute("SELECT count(*) FROM projects").fetchone() == (0,)


def test_database_survives_a_restart(tmp_path: Path) -> None:
    layout = layout_of(tmp_path / "data")
    supervisor = _start(layout)
    with psycopg.connect(layout.database_url("cloister")) as connection:
        connection.execute("INSERT INTO projects (id, name) VALUES ('proj_1', 'kept')")
    _stop(layout, supervisor)
    supervisor = _start(layout)
    with psycopg.connect(layout.database_url("cloister")) as connection:
        assert connection.execute("SELECT name FROM projects").fetchone() == ("kept",)
    _stop(layout, supervisor)
