"""The reconciler's reads and writes in Postgres. A write tells whether the batch still was where it was expected."""

import dataclasses
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any, Final

import psycopg
import structlog
from psycopg.rows import DictRow
from psycopg.types.json import Jsonb

from ray_job.contract.parts import Usage
from service.assembly import Assembled
from service.db import Pool, query
from service.input_file import InputError, InputFacts
from service.ports import StoredObject
from service.transitions import BatchStatus, BatchView, GiveUp, is_allowed

logger = structlog.get_logger(__name__)

_VIEW_FIELDS: Final = tuple(field.name for field in dataclasses.fields(BatchView))
_USAGE_FIELDS: Final = tuple(field.name for field in dataclasses.fields(Usage))


@dataclass(frozen=True, slots=True, kw_only=True)
class Batch:
    """A batch as the reconciler sees it; ``view`` is what decides its next step."""

    id: str
    project_id: str
    endpoint: str
    input_file_id: str
    output_expires_after_s: int | None
    model: str | None
    total: int
    created_at: datetime
    job_running_since: datetime | None
    view: BatchView

    @property
    def job_id(self) -> str:
        """The id of its newest job."""
        return f"{self.id}-{self.view.attempt}"


@dataclass(frozen=True, slots=True, kw_only=True)
class ResultFile:
    """An output or error file that was written and is to be told to the client."""

    id: str
    filename: str
    stored: StoredObject


@dataclass(frozen=True, slots=True, kw_only=True)
class Ending:
    """How a batch ends: its state, its files, its counts and what went wrong."""

    after: BatchStatus
    output: ResultFile | None = None
    error: ResultFile | None = None
    assembled: Assembled | None = None
    problems: Sequence[InputError] = ()


def load_batch(pool: Pool, batch_id: str) -> Batch | None:
    """One batch, or None if there is none with that id."""
    with pool.connection() as connection:
        row = connection.execute(query("batch_to_reconcile"), {"batch_id": batch_id}).fetchone()
    if row is None:
        return None
    row["status"] = BatchStatus(row["status"])
    code, message = row.pop("giving_up_code"), row.pop("giving_up_message")
    row["giving_up"] = None if code is None else GiveUp(code, message)
    view = BatchView(**{name: row.pop(name) for name in _VIEW_FIELDS})
    return Batch(view=view, **row)


def input_file_problem(pool: Pool, batch: Batch) -> InputError | None:
    """Why the batch's input file cannot be used, if so.

    A file that was deleted or expired after the batch was created is kept for it until it ends; else it would depend
    on how soon a batch is looked at whether it runs.
    """
    with pool.connection() as connection:
        row = connection.execute(
            query("input_file_of_batch"), {"file_id": batch.input_file_id, "project_id": batch.project_id}
        ).fetchone()
    if row is None:
        return _file_error(f"The input file '{batch.input_file_id}' does not exist. Upload it with purpose 'batch'.")
    if row["deleted_at"] is not None and row["deleted_at"] <= batch.created_at:
        return _file_error(f"The input file '{batch.input_file_id}' was deleted. Upload it again.")
    if row["expires_at"] is not None and row["expires_at"] <= batch.created_at:
        return _file_error(f"The input file '{batch.input_file_id}' has expired. Upload it again.")
    if row["purpose"] != "batch":
        return _file_error(
            f"The file '{batch.input_file_id}' has purpose '{row['purpose']}'. Upload the input file with purpose "
            "'batch'."
        )
    return None


def _file_error(message: str) -> InputError:
    return InputError(code="invalid_request", message=message, param="file_id")


def accept(pool: Pool, batch: Batch, facts: InputFacts, now: datetime) -> bool:
    """To ``in_progress``, with its first attempt due at once."""
    with pool.connection() as connection:
        values = {"model": facts.model, "total": facts.total}
        return _moved(connection, "accept_batch", batch, BatchStatus.IN_PROGRESS, {**values, "now": now})


def refuse(pool: Pool, batch: Batch, errors: Iterable[InputError], error_count: int, now: datetime) -> bool:
    """To ``failed``, with the errors of its input file."""
    with pool.connection() as connection:
        if not _moved(connection, "refuse_batch", batch, BatchStatus.FAILED, {"error_count": error_count, "now": now}):
            return False
        _insert_errors(connection, batch.id, errors)
        return True


def note_giving_up(connection: psycopg.Connection[DictRow], batch: Batch, reason: GiveUp, now: datetime) -> None:
    """Writes down why the batch will fail."""
    values = {"batch_id": batch.id, "attempt": batch.view.attempt, "now": now, **dataclasses.asdict(reason)}
    if connection.execute(query("give_up_batch"), values).fetchone() is not None:
        data = {"job_id": batch.job_id, "code": reason.code, "reason": reason.message}
        insert_event(connection, batch.id, now, "batch.giving_up", data)


def finalize(pool: Pool, batch: Batch, now: datetime) -> bool:
    """To ``finalizing``."""
    with pool.connection() as connection:
        return _moved(connection, "finalize_batch", batch, BatchStatus.FINALIZING, {"now": now})


def end(pool: Pool, batch: Batch, ending: Ending, now: datetime, retention_s: int) -> bool:
    """To a final state, with files, counts and usage, in one transaction.

    ``retention_s`` is how long the files are kept where neither the batch nor its project says so.
    """
    assembled = ending.assembled
    usage = dataclasses.asdict(assembled.usage) if assembled else dict.fromkeys(_USAGE_FIELDS, 0)
    values = {
        "output_file_id": ending.output.id if ending.output else None,
        "error_file_id": ending.error.id if ending.error else None,
        "completed": assembled.completed if assembled else 0,
        "failed": assembled.failed if assembled else 0,
        "error_count": len(ending.problems),
        **usage,
        "now": now,
    }
    with pool.connection() as connection:
        if not _moved(connection, "end_batch", batch, ending.after, values):
            return False
        for file in (ending.output, ending.error):
            if file is not None:
                _insert_file(connection, batch, file, now, retention_s)
        _insert_errors(connection, batch.id, ending.problems)
        return True


def note_parts_deleted(pool: Pool, batch: Batch, now: datetime) -> None:
    """Nothing is left to be done for the batch."""
    with pool.connection() as connection:
        connection.execute(query("parts_were_deleted"), {"batch_id": batch.id, "now": now})


def _moved(
    connection: psycopg.Connection[DictRow],
    name: str,
    batch: Batch,
    after: BatchStatus,
    values: Mapping[str, Any],
) -> bool:
    before = batch.view.status
    if not is_allowed(before, after):
        raise ValueError(f"{batch.id} cannot go from {before} to {after}")
    parameters = {"batch_id": batch.id, "before": before.value, "after": after.value, **values}
    if connection.execute(query(name), parameters).fetchone() is None:
        logger.info("batch.overtaken", batch_id=batch.id, before=before.value, after=after.value)
        return False
    insert_event(connection, batch.id, values["now"], f"batch.{after.value}", {"before": before.value})
    return True


def insert_event(
    connection: psycopg.Connection[DictRow], batch_id: str, now: datetime, type: str, data: Mapping[str, Any]
) -> None:
    """Adds to what happened to a batch, and logs it, but for a reason: it may hold the end of a job's log."""
    parameters = {"batch_id": batch_id, "now": now, "type": type, "data": Jsonb(dict(data))}
    connection.execute(query("insert_batch_event"), parameters)
    logger.info(type, batch_id=batch_id, **{name: value for name, value in data.items() if name != "reason"})


def _insert_errors(connection: psycopg.Connection[DictRow], batch_id: str, errors: Iterable[InputError]) -> None:
    rows = [
        {"batch_id": batch_id, "ordinal": ordinal, **dataclasses.asdict(error)} for ordinal, error in enumerate(errors)
    ]
    if rows:
        connection.cursor().executemany(query("insert_batch_error"), rows)


def _insert_file(
    connection: psycopg.Connection[DictRow], batch: Batch, file: ResultFile, now: datetime, retention_s: int
) -> None:
    connection.execute(
        query("insert_batch_file"),
        {
            "id": file.id,
            "project_id": batch.project_id,
            "filename": file.filename,
            "size_bytes": file.stored.size_bytes,
            "sha256": file.stored.sha256,
            "now": now,
            "expires_after_s": batch.output_expires_after_s,
            "retention_s": retention_s,
        },
    )
