"""Every change of a batch's state by the reconciler, each in one transaction with its event.

    accept_batch     validating  → in_progress; its segments can be leased
    refuse_batch     validating  → failed, with the errors of its input file
    finalize_batch   in_progress → finalizing
    end_batch        finalizing | cancelling | in_progress → completed, expired, cancelled or failed

These are the queries of ``change_state``. It returns False and changes nothing if the batch is no longer in the state
that it was read in, for example because its owner cancelled it. The API makes the remaining change, to ``cancelling``.
"""

import dataclasses
from collections.abc import Iterable, Mapping, Sequence
from datetime import datetime
from typing import Any

import psycopg
import structlog
from psycopg.rows import DictRow

from ray_job.contract.parts import Usage
from service.assembly import Assembled
from service.db import Pool, query
from service.estimates import KEPT_MEASUREMENTS
from service.input_file import InputError
from service.reconciler.jobs import split_gpu_seconds
from service.reconciler.records import Batch, insert_event
from service.transitions import ALLOWED, BatchStatus

logger = structlog.get_logger(__name__)


def change_state(
    connection: psycopg.Connection[DictRow],
    name: str,
    batch: Batch,
    after: BatchStatus,
    now: datetime,
    *,
    errors: Iterable[InputError] = (),
    **values: Any,
) -> bool:
    """Run the named query, which changes the state, and add the event of the change and the batch's errors.

    Args:
        connection: the transaction.
        name: the query.
        batch: the batch.
        after: its state after the change.
        now: aware, UTC.
        errors: the errors to store.
        values: further parameters of the query.
    """
    before = batch.status
    if after not in ALLOWED[before]:
        raise ValueError(f"{batch.id}: the state {before} cannot change to {after}")
    parameters = {"batch_id": batch.id, "before": before.value, "after": after.value, "now": now, **values}
    if connection.execute(query(name), parameters).fetchone() is None:
        logger.info("batch.overtaken", batch_id=batch.id, before=before.value, after=after.value)
        return False
    insert_event(connection, batch.id, now, f"batch.{after.value}", {"before": before.value})
    rows = [
        {"batch_id": batch.id, "ordinal": ordinal, **dataclasses.asdict(error)} for ordinal, error in enumerate(errors)
    ]
    if rows:
        connection.cursor().executemany(query("insert_batch_error"), rows)
    return True


def end_batch(
    pool: Pool,
    batch: Batch,
    after: BatchStatus,
    now: datetime,
    retention_s: int,
    *,
    assembled: Assembled | None = None,
    problems: Sequence[InputError] = (),
    measured: Mapping[str, Any] | None = None,
) -> bool:
    """Move a batch to a final state, with its files, counts and usage.

    Args:
        pool: connections to Postgres.
        batch: the batch.
        after: its final state.
        now: aware, UTC.
        retention_s: how long the files are kept if neither the batch nor its project sets a time.
        assembled: its result files, which become visible now, and their counts; None if it has no results.
        problems: its errors.
        measured: parameters of ``record_measurement``; None to record none.
    """
    stored = {"output": assembled.output, "error": assembled.error} if assembled else {}
    files = [(batch.result_file_id(kind), kind, file) for kind, file in stored.items() if file is not None]
    ids = {kind: file_id for file_id, kind, _ in files}
    values = {
        "output_file_id": ids.get("output"),
        "error_file_id": ids.get("error"),
        "completed": assembled.completed if assembled else 0,
        "failed": assembled.failed if assembled else 0,
        "error_count": len(problems),
        **dataclasses.asdict(assembled.usage if assembled else Usage()),
    }
    with pool.connection() as connection:
        jobs = connection.execute(query("jobs_of_batch"), {"batch_id": batch.id}).fetchall()
        split_gpu_seconds(connection, [row["job_id"] for row in jobs], is_last=False)
        if not change_state(connection, "end_batch", batch, after, now, errors=problems, **values):
            return False
        for file_id, kind, file in files:
            values = {
                "id": file_id,
                "project_id": batch.project_id,
                "filename": f"{batch.id}_{kind}.jsonl",
                "size_bytes": file.size_bytes,
                "sha256": file.sha256,
                "now": now,
                "expires_after_s": batch.output_expires_after_s,
                "retention_s": retention_s,
            }
            connection.execute(query("insert_batch_file"), values)
        if measured:
            values = {"batch_id": batch.id, "now": now, "limit": KEPT_MEASUREMENTS, **measured}
            connection.execute(query("record_measurement"), values)
        return True
