"""The embedded Postgres: its socket, restarts, and the rights of the job role."""

import os
from collections.abc import Iterator
from pathlib import Path
from threading import Event

import psycopg
import pytest

from service.local import postgres
from service.local.layout import Layout, layout_of, make_directories
from service.local.processes import child_environment, end_everything
from service.local.supervisor import Child, Supervisor

pytestmark = pytest.mark.slow


def _start(layout: Layout) -> Supervisor:
    make_directories(layout)
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


def test_job_role_reports_progress(layout: Layout) -> None:
    with psycopg.connect(layout.database_url("cloister_job")) as connection:
        row = connection.execute("SELECT report_progress('batch_none', 1, 0, 0, 0, 0, 0, 0)").fetchone()
    assert row == (False,)


@pytest.mark.parametrize(
    "statement",
    [
        "SELECT * FROM batches",
        "SELECT * FROM api_keys",
        "DELETE FROM files",
        "CREATE TABLE t ()",
        "CREATE TEMP TABLE t ()",
    ],
)
def test_job_role_can_do_nothing_else(layout: Layout, statement: str) -> None:
    with (
        psycopg.connect(layout.database_url("cloister_job")) as connection,
        pytest.raises(psycopg.errors.InsufficientPrivilege),
    ):
        connection.execute(statement)  # type: ignore[call-overload]


def test_job_role_cannot_connect_to_other_databases(layout: Layout) -> None:
    with pytest.raises(psycopg.OperationalError, match="permission denied"):
        psycopg.connect(layout.database_url("cloister_job").replace("/cloister?", "/postgres?"))


def test_only_this_account_can_open_the_socket(layout: Layout) -> None:
    assert layout.runtime_dir.stat().st_mode & 0o077 == 0
    with psycopg.connect(layout.database_url("cloister")) as connection:
        assert connection.execute("SHOW listen_addresses").fetchone() == ("",)


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
