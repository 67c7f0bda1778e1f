"""Reads and writes of batches in Postgres that do not change a state: see ``state_changes`` for those that do.

Each write names the attempt that it expects, and does nothing if the batch has moved on.
"""

import hashlib
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import datetime
from typing import Any, Final, Self

import psycopg
import structlog
from psycopg.rows import DictRow, kwargs_row
from psycopg.types.json import Jsonb

from service.db import Pool, query
from service.transitions import BatchStatus, BatchView

logger = structlog.get_logger(__name__)

LAUNCH_LOCK: Final = 7_203_003


@dataclass(frozen=True, slots=True, kw_only=True)
class Batch(BatchView):
    """A batch as stored: the columns that decide its next action, and those that the actions need.

    Attributes:
        most_output: the tokens that its requests allow; None if they were unknown when it was validated.
        counted_tokens: the tokens of its prompts; None unless each line was counted.
    """

    id: str
    project_id: str
    endpoint: str
    input_file_id: str
    output_expires_after_s: int | None
    model: str | None
    total: int
    created_at: datetime
    job_running_since: datetime | None
    most_output: int | None
    counted_tokens: int | None

    @classmethod
    def from_row(cls, *, status: str, **columns: Any) -> Self:
        """Return the batch of a row of ``batch_to_reconcile``."""
        return cls(status=BatchStatus(status), **columns)

    @property
    def job_id(self) -> str:
        """The id of its newest job."""
        return f"{self.id}-{self.attempt}"

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


@contextmanager
def launch_turn(pool: Pool, batch: Batch, max_running_jobs: int) -> Iterator[psycopg.Connection[DictRow] | None]:
    """Open the transaction in which a batch's job is launched and recorded; yield None if it is another batch's turn.

    No process launches another job between the check of the queue and the record. If this process dies before it
    records the launch, the same job id is launched again, which has no effect. The caller records the launch or
    postpones it.
    """

    def is_next(connection: psycopg.Connection[DictRow]) -> bool:
        values = {"batch_id": batch.id, "max_running_jobs": max_running_jobs}
        row = connection.execute(query("may_launch"), values).fetchone()
        return row is not None and bool(row["may_launch"])

    # Most batches in a long queue must wait, so they check first without the lock.
    with pool.connection() as connection:
        may_launch = is_next(connection)
    if not may_launch:
        yield None
        return
    with pool.connection() as connection:
        connection.execute(query("lock_launches"), {"lock": LAUNCH_LOCK})
        yield connection if is_next(connection) else None


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
        event: its type and data, to which the job's id is added.
        values: further parameters of the query.
    """
    parameters = {"batch_id": batch.id, "job_id": batch.job_id, "attempt": batch.attempt, "now": now, **values}
    cursor = connection.execute(query(name), parameters)
    if event is not None and cursor.fetchone() is not None:
        insert_event(connection, batch.id, now, event[0], {"job_id": batch.job_id, **event[1]})
