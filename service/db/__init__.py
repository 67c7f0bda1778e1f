"""Postgres: the connection pool, the migrations and the named queries.

``queries/*.sql`` holds the queries, each under a line ``-- name: the_name``; ``query("the_name")`` returns its text.
``rows`` holds the types of their rows. ``migrations/NNNN_title.sql`` run forward only, each once, in one transaction.
"""

import functools
import re
from collections.abc import Mapping
from importlib import resources
from typing import Any, Final, LiteralString

import psycopg
from psycopg.rows import DictRow, dict_row
from psycopg_pool import ConnectionPool

from service.db.login import connection_string, libpq_url

MIGRATION_LOCK = 7_203_001

Pool = ConnectionPool[psycopg.Connection[DictRow]]

CONNECTION_LIMITS: Final[Mapping[str, Any]] = {
    "connect_timeout": 5,
    "keepalives_idle": 10,
    "keepalives_interval": 5,
    "keepalives_count": 3,
    "tcp_user_timeout": 25_000,
}
"""Detect a lost server within 25 seconds, even if its machine disappeared without closing connections.

Source: https://www.postgresql.org/docs/current/libpq-connect.html#LIBPQ-PARAMKEYWORDS
"""


def open_pool(database_url: str, *, max_size: int = 10) -> Pool:
    """Open a pool whose connections return rows as dicts. It connects in the background and reconnects by itself."""

    def check(connection: psycopg.Connection[DictRow]) -> None:
        # If one connection is lost, all are. The pool alone would find them one by one, with doubling pauses.
        try:
            ConnectionPool.check_connection(connection)
        except psycopg.OperationalError:
            pool.check()
            raise

    pool: Pool = ConnectionPool(
        # A callable is asked at each connection.
        database_url if libpq_url(database_url) == database_url else functools.partial(connection_string, database_url),
        min_size=1,
        max_size=max_size,
        timeout=10,
        # The upper limit of the pool's doubling pauses: without it, reconnecting takes as long as the outage did.
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
                raise ValueError(f"two queries are named {name.strip()!r}; the second is in {file.name}")
            queries[name.strip()] = text.strip()
    return queries


def query(name: str) -> LiteralString:
    """Return the text of a named query.

    Raises:
        KeyError: no query has that name.
    """
    return _queries()[name]


def migrations() -> dict[str, str]:
    """Return the text of every migration by its name, in the order in which they run."""
    folder = resources.files(__package__) / "migrations"
    files = sorted((file for file in folder.iterdir() if file.name.endswith(".sql")), key=lambda file: file.name)
    return {file.name.removesuffix(".sql"): file.read_text() for file in files}


def migrate(database_url: str, **connect: Any) -> list[str]:
    """Run the migrations that this database lacks and return their names. Safe to run concurrently."""
    done: list[str] = []
    with psycopg.connect(connection_string(database_url), **connect) as connection:
        connection.execute("SELECT pg_advisory_xact_lock(%s)", [MIGRATION_LOCK])
        connection.execute(
            "CREATE TABLE IF NOT EXISTS migrations (name text PRIMARY KEY, run_at timestamptz NOT NULL DEFAULT now())"
        )
        seen = {row[0] for row in connection.execute("SELECT name FROM migrations")}
        for name, text in migrations().items():
            if name not in seen:
                connection.execute(text)
                connection.execute("INSERT INTO migrations (name) VALUES (%s)", [name])
                done.append(name)
    return done
