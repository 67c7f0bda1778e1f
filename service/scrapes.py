"""Rows of the database that metrics are made of."""

import time
from collections.abc import Mapping
from threading import Lock
from typing import Any, Final

import psycopg
import structlog
from psycopg.rows import DictRow

from service.db import Pool, query

_log = structlog.get_logger(__name__)

# Several Prometheus servers cost the database one read in this time.
CACHED_FOR_S: Final = 5.0


class ScrapedRows:
    """Reads named queries on a scrape, at most once in a few seconds.

    Args:
        pool: the database.
        queries: parameters of each query, by its name.
        cached_for_s: how long the rows are returned again.
    """

    def __init__(
        self, pool: Pool, queries: Mapping[str, Mapping[str, Any]], *, cached_for_s: float = CACHED_FOR_S
    ) -> None:
        self._pool = pool
        self._queries = queries
        self._cached_for_s = cached_for_s
        self._lock = Lock()
        self._read_at = float("-inf")
        self._rows: dict[str, list[DictRow]] | None = None

    def read(self) -> dict[str, list[DictRow]] | None:
        """Return the rows by query; None if the database is unreachable."""
        with self._lock:
            if time.monotonic() - self._read_at >= self._cached_for_s:
                try:
                    with self._pool.connection(timeout=2) as connection:
                        self._rows = {
                            name: connection.execute(query(name), values).fetchall()
                            for name, values in self._queries.items()
                        }
                except psycopg.Error as error:
                    _log.warning("metrics.database_unreachable", error=type(error).__name__)
                    self._rows = None
                self._read_at = time.monotonic()
            return self._rows
