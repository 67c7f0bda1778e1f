"""Reads and writes of batches in Postgres that do not change a state: see ``state_changes`` for those that do."""

import hashlib
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any, Self

import psycopg
import structlog
from psycopg.rows import DictRow, kwargs_row
from psycopg.types.json import Jsonb

from service.db import Pool, query
from service.transitions import BatchStatus, BatchView

logger = structlog.get_logger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class Batch(BatchView):
    """A batch as stored: the columns that decide its next action, and those that the actions need.

    Attributes:
        attempt: the number of its newest job under an earlier version; 0 if it never had one.
        most_output: the tokens that its requests allow; None if they were unknown when it was validated.
        counted_tokens: the tokens of its prompts; None unless each line was counted.
        read_at: the database's time when it was read. Its deadline is by the same clock, which that of this machine
            may differ from.
    """

    id: str
    project_id: str
    endpoint: str
    input_file_id: str
    output_expires_after_s: int | None
    model: str | None
    domain: str | None
    total: int
    attempt: int
    created_at: datetime
    most_output: int | None
    counted_tokens: int | None
    read_at: datetime

    @classmethod
    def from_row(cls, *, status: str, **columns: Any) -> Self:
        """Return the batch of a row of ``batch_to_reconcile``."""
        return cls(status=BatchStatus(status), **columns)

    @property
    def is_unplanned(self) -> bool:
        """True if an earlier version gave it a job of its own, and it has no plan: its parts have no records."""
        return self.domain is None and self.attempt > 0

    def result_file_id(self, kind: str) -> str:
        """Return the id of its ``output`` or ``error`` file.

        The id is derived from the batch's, so that a repeated assembly replaces the same object.
        """
        return f"file-{hashlib.sha256(f'{self.id}:{kind}'.encode()).hexdigest()[:32]}"


def load_batch(pool: Pool, batch_id: str) -> Batch | None:
    """Return a batch, or None if no batch has that id."""
    with pool.connection() as connection, connection.cursor(row_factory=kwargs_row(Batch.from_row)) as cursor:
        return cursor.execute(query("batch_to_reconcile"), {"batch_id": batch_id}).fetchone()


def insert_event(
    connection: psycopg.Connection[DictRow], batch_id: str, now: datetime, type: str, data: Mapping[str, Any]
) -> None:
    """Add an event to a batch and log it. The log omits the reason, which may hold the end of a job's log."""
    parameters = {"batch_id": batch_id, "now": now, "type": type, "data": Jsonb(dict(data))}
    connection.execute(query("insert_batch_event"), parameters)
    logger.info(type, batch_id=batch_id, **{name: value for name, value in data.items() if name != "reason"})


def record(
    connection: psycopg.Connection[DictRow],
    name: str,
    batch: Batch,
    now: datetime,
    *,
    event: tuple[str, Mapping[str, Any]] | None = None,
    **values: Any,
) -> None:
    """Run the named query, which writes to a batch, and add an event if it changed the batch.

    Args:
        connection: the transaction.
        name: the query. If there is an event, it returns a row for each change.
        batch: the batch.
        now: aware, UTC.
        event: its type and data.
        values: further parameters of the query.
    """
    parameters = {"batch_id": batch.id, "now": now, **values}
    cursor = connection.execute(query(name), parameters)
    if event is not None and cursor.fetchone() is not None:
        insert_event(connection, batch.id, now, *event)


@contextmanager
def reporting_lack_of_room(pool: Pool, batch: Batch, problem: str) -> Iterator[None]:
    """Add an event to a batch if the workspace has no room for its step, which is retried."""
    try:
        yield
    except OSError as error:
        reason = f"{problem} and will be retried: {error.strerror or error}"
        with pool.connection() as connection:
            record(connection, "record_waiting", batch, datetime.now(UTC), reason=reason, type="batch.waiting")
        raise
