"""What the answer about one batch tells beyond OpenAI's object: its place in the queue, its rate, its prospects."""

from collections.abc import Mapping
from datetime import datetime, timedelta
from typing import Any, Final

from service.api.parts import Parts
from service.api.schemas import DeadlineRisk, Extension, RetrievedBatch, batch_object
from service.db import query
from service.errors import NotFoundError
from service.transitions import BatchStatus

# Jobs report every few seconds; a rate that nothing was added to for so long says nothing of what is left.
RATE_IS_FRESH_FOR: Final = timedelta(seconds=60)
# Of the time that is left, or of the completion window where no rate is known.
_LOW_SHARE: Final = 0.5
_MEDIUM_SHARE_LEFT: Final = 0.1

_CAN_BE_LATE: Final = frozenset({BatchStatus.VALIDATING, BatchStatus.IN_PROGRESS})


def fresh_rate(row: Mapping[str, Any], now: datetime) -> float | None:
    """Rows per second of a batch that runs, or None where the last report is too old or none came yet."""
    is_fresh = row["progress_at"] is not None and now - row["progress_at"] <= RATE_IS_FRESH_FOR
    rate: float | None = row["rows_per_s"]
    return rate if row["status"] == BatchStatus.IN_PROGRESS and is_fresh else None


def eta_s(row: Mapping[str, Any], now: datetime) -> float | None:
    """Seconds until every line has a result if the rate stays as it is; None where there is no rate."""
    rate = fresh_rate(row, now)
    if not rate:
        return None
    rows_left = max(0, row["total"] - row["completed"] - row["failed"])
    return float(rows_left / rate)


def deadline_risk(row: Mapping[str, Any], now: datetime) -> DeadlineRisk | None:
    """How likely a batch is to miss its deadline; None once its lines are done or it is to end anyway.

    With a rate: ``low`` while the ETA takes at most half of the time that is left, ``medium`` while it fits, else
    ``high``. Without: ``low`` while more than half of the completion window is left, ``medium`` while more than a
    tenth is, else ``high``.
    """
    if row["status"] not in _CAN_BE_LATE:
        return None
    left_s = (row["expires_at"] - now).total_seconds()
    eta = eta_s(row, now)
    if eta is not None:
        is_low, is_medium = eta <= left_s * _LOW_SHARE, eta <= left_s
    else:
        window_s = (row["expires_at"] - row["created_at"]).total_seconds()
        is_low, is_medium = left_s > window_s * _LOW_SHARE, left_s > window_s * _MEDIUM_SHARE_LEFT
    return "low" if is_low else "medium" if is_medium else "high"


def gpu_seconds(row: Mapping[str, Any], now: datetime) -> float:
    """GPU-seconds that were reserved so far: those of jobs that ended, and of the one that runs."""
    since = row["job_running_since"]
    running_s = 0.0 if since is None else max(0.0, (now - since).total_seconds())
    return float(row["gpu_seconds"] + row["gpus"] * running_s)


def extension_of(row: Mapping[str, Any], now: datetime) -> Extension:
    """The extension of a row of ``batch_with_extension``."""
    rate, eta = fresh_rate(row, now), eta_s(row, now)
    return Extension(
        queue_position=row["queue_position"],
        rate_rows_per_second=None if rate is None else round(rate, 3),
        eta_seconds=None if eta is None else round(eta),
        estimated_completion_at=None if eta is None else int((now + timedelta(seconds=eta)).timestamp()),
        deadline_risk=deadline_risk(row, now),
        gpu_seconds=round(gpu_seconds(row, now), 1),
        enqueued_tokens=row["enqueued_tokens"],
        attempt=row["attempt"],
        failed_attempts=row["failed_attempts"],
        last_job_message=row["last_job_message"],
    )


def no_such_batch(batch_id: str) -> NotFoundError:
    """What is said of a batch that is not there, or is another project's."""
    return NotFoundError(f"No batch found with id '{batch_id}'.", param="batch_id")


def batch_row(parts: Parts, project_id: str, batch_id: str) -> dict[str, Any]:
    """A batch of a project with all that its extension is made of, in one round trip.

    Raises:
        NotFoundError: the project has no such batch.
    """
    with parts.pool.connection() as connection:
        row = connection.execute(query("batch_with_extension"), {"id": batch_id, "project_id": project_id}).fetchone()
    if row is None:
        raise no_such_batch(batch_id)
    return row


def retrieved_batch(parts: Parts, project_id: str, batch_id: str) -> RetrievedBatch:
    """OpenAI's batch object with the extension ``x_cloister``.

    Raises:
        NotFoundError: the project has no such batch.
    """
    row = batch_row(parts, project_id, batch_id)
    # Postgres' own time: what it compares with was written by that clock.
    extension = extension_of(row, row["now"])
    return RetrievedBatch(**batch_object(row).model_dump(), x_cloister=extension)
