"""Postgres: the connection pool, the migrations and the named queries.

Queries stand in ``queries/*.sql``, each under a line ``-- name: the_name``; ``query("the_name")`` gives its text.
Migrations stand in ``migrations/NNNN_title.sql`` and run forward only, each once, in one transaction.
"""

import functools
import re
from collections.abc import Iterator, Mapping
from importlib import resources
from typing import Any, Final, LiteralString

import psycopg
from psycopg.rows import DictRow, dict_row
from psycopg_pool import ConnectionPool

MIGRATION_LOCK = 7_203_001

Pool = ConnectionPool[psycopg.Connection[DictRow]]

CONNECTION_LIMITS: Final[Mapping[str, Any]] = {
    "connect_timeout": 5,
    "keepalives_idle": 10,
    "keepalives_interval": 5,
    "keepalives_count": 3,
    "tcp_user_timeout": 25_000,
}
"""A server whose machine is lost says no goodbye: within 25 seconds (the last in milliseconds) its client must notice.

Source: https://www.postgresql.org/docs/current/libpq-connect.html#LIBPQ-PARAMKEYWORDS
"""


def open_pool(database_url: str, *, max_size: int = 10) -> Pool:
    """Opens a pool whose connections give rows as dicts; it connects in the background and reconnects by itself."""

    def check(connection: psycopg.Connection[DictRow]) -> None:
        # Where one connection is lost, all are: the pool would find them one by one, with pauses that double.
        try:
            ConnectionPool.check_connection(connection)
        except psycopg.OperationalError:
            pool.check()
            raise

    pool: Pool = ConnectionPool(
        database_url,
        min_size=1,
        max_size=max_size,
        timeout=10,
        # The pool doubles its pauses up to this many seconds: as long as a long outage, it would stay away after one.
        reconnect_timeout=10,
        kwargs={"row_factory": dict_row, **CONNECTION_LIMITS},
        check=check,
        open=True,
    )
    return pool


@functools.cache
def _queries() -> dict[str, str]:
    queries: dict[str, str] = {}
    folder = resources.files(__package__) / "queries"
    for file in sorted(folder.iterdir(), key=lambda entry: entry.name):
        for block in re.split(r"^-- name: ", file.read_text(), flags=re.MULTILINE)[1:]:
            name, _, text = block.partition("\n")
            if name.strip() in queries:
                raise ValueError(f"two queries are named {name.strip()!r}; the second stands in {file.name}")
            queries[name.strip()] = text.strip()
    return queries


def query(name: str) -> LiteralString:
    """The text of a named query.

    Raises:
        KeyError: no query has that name.
    """
    return _queries()[name]


def _migrations() -> Iterator[tuple[str, str]]:
    folder = resources.files(__package__) / "migrations"
    for file in sorted(folder.iterdir(), key=lambda entry: entry.name):
        if file.name.endswith(".sql"):
            yield file.name.removesuffix(".sql"), file.read_text()


def migration_names() -> list[str]:
    """The names of all migrations, in the order in which they run."""
    return [name for name, _ in _migrations()]


def migrate(database_url: str, **connect: Any) -> list[str]:
    """Runs the migrations that this database has not seen; returns their names. Safe to run from two places."""
    done: list[str] = []
    with psycopg.connect(database_url, **connect) as connection:
        connection.execute("SELECT pg_advisory_xact_lock(%s)", [MIGRATION_LOCK])
        connection.execute(
            "CREATE TABLE IF NOT EXISTS migrations (name text PRIMARY KEY, run_at timestamptz NOT NULL DEFAULT now())"
        )
        seen = {row[0] for row in connection.execute("SELECT name FROM migrations")}
        for name, text in _migrations():
            if name not in seen:
                connection.execute(text)
                connection.execute("INSERT INTO migrations (name) VALUES (%s)", [name])
                done.append(name)
    return done
