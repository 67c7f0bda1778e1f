"""What is written down about a batch's jobs: launched, running, over, and the next one."""

import dataclasses
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import datetime
from typing import Final, Literal

import psycopg
from psycopg.rows import DictRow

from ray_job.contract.job_spec import ModelSpec
from service.db import Pool, query
from service.reconciler.records import Batch, insert_event
from service.transitions import NextAttempt

LAUNCH_LOCK: Final = 7_203_003

WaitingEvent = Literal["job.waiting", "batch.waiting"]
"""What waits: the job, or a batch whose files are to be written."""


def gpus_of(model: ModelSpec) -> int:
    """The GPUs that a job of this model reserves while it runs; the http lane uses those of others."""
    return 0 if model.lane == "http" else model.num_gpus * model.concurrency


@contextmanager
def turn_to_launch(pool: Pool, batch: Batch, max_running_jobs: int) -> Iterator[psycopg.Connection[DictRow] | None]:
    """The transaction in which a batch's job is to be launched and noted, or None when it is another's turn.

    Between the look at the queue and the note no other job is launched, by no process. Where the process dies before
    the note, the same job id is launched again, which changes nothing. The caller notes the launch, or postpones it.
    """
    # Thousands may ask in vain: they need not wait for each other.
    if not _may_launch(pool, batch, max_running_jobs):
        yield None
        return
    with pool.connection() as connection:
        connection.execute(query("lock_launches"), {"lock": LAUNCH_LOCK})
        is_next = _is_next(connection, batch, max_running_jobs)
        yield connection if is_next else None


def _may_launch(pool: Pool, batch: Batch, max_running_jobs: int) -> bool:
    with pool.connection() as connection:
        return _is_next(connection, batch, max_running_jobs)


def _is_next(connection: psycopg.Connection[DictRow], batch: Batch, max_running_jobs: int) -> bool:
    values = {"batch_id": batch.id, "max_running_jobs": max_running_jobs}
    row = connection.execute(query("may_launch"), values).fetchone()
    return row is not None and bool(row["may_launch"])


def note_launch(connection: psycopg.Connection[DictRow], batch: Batch, gpus: int, now: datetime) -> None:
    """The launcher took the job of the newest attempt."""
    values = {"batch_id": batch.id, "attempt": batch.view.attempt, "gpus": gpus}
    if connection.execute(query("job_was_launched"), values).fetchone() is not None:
        insert_event(connection, batch.id, now, "job.launched", {"job_id": batch.job_id})


def postpone_launch(
    connection: psycopg.Connection[DictRow], batch: Batch, launch_after: datetime, *, refused: bool, now: datetime
) -> None:
    """The launcher did not take the job, or ``refused`` it: until it is tried again, others get their turn."""
    values = {"batch_id": batch.id, "attempt": batch.view.attempt, "launch_after": launch_after}
    connection.execute(query("postpone_launch"), {**values, "refused": refused, "now": now})


def note_running(pool: Pool, batch: Batch, now: datetime) -> None:
    """The job was seen to run: its GPUs are held from now on."""
    values = {"batch_id": batch.id, "attempt": batch.view.attempt, "now": now}
    with pool.connection() as connection:
        if connection.execute(query("job_runs"), values).fetchone() is not None:
            insert_event(connection, batch.id, now, "job.running", {"job_id": batch.job_id})


def note_waiting(
    connection: psycopg.Connection[DictRow], batch: Batch, reason: str, now: datetime, *, type: WaitingEvent
) -> None:
    """Something was seen to wait: whoever watches the batch is told why, and at most every ten minutes why else."""
    values = {"batch_id": batch.id, "job_id": batch.job_id, "reason": reason, "now": now, "type": type}
    connection.execute(query("batch_waits"), values)


def note_job_over(pool: Pool, batch: Batch, now: datetime) -> None:
    """The job was seen to have ended: the seconds for which it held its GPUs are added up."""
    values = {"batch_id": batch.id, "attempt": batch.view.attempt, "now": now}
    with pool.connection() as connection:
        connection.execute(query("job_is_over"), values)


def note_next_attempt(pool: Pool, batch: Batch, attempt: NextAttempt, reason: str, now: datetime) -> bool:
    """Writes down a new attempt, before its job is launched."""
    values = {"batch_id": batch.id, "attempt": batch.view.attempt} | dataclasses.asdict(attempt)
    with pool.connection() as connection:
        if connection.execute(query("next_attempt"), values).fetchone() is None:
            return False
        data = {"job_id": batch.job_id, "reason": reason, "failed_attempts": attempt.failed_attempts}
        insert_event(connection, batch.id, now, "job.ended", data)
        return True
