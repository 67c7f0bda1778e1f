"""Rows that queries return, as types.

A row type has a field for each column that the service reads; ``record`` ignores all other columns. psycopg's own
``class_row`` rejects them, so that a process of the previous version would fail once a migration has added a column.
"""

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import date, datetime
from decimal import Decimal
from typing import Any, TypeVar

import psycopg
from psycopg.rows import DictRow

from service.db import query

Row = TypeVar("Row")
Connection = psycopg.Connection[DictRow]


def record(kind: type[Row], row: Mapping[str, Any]) -> Row:
    """Build a dataclass from the columns of a row that it has fields for."""
    fields = dataclasses.fields(kind)  # type: ignore[arg-type] # a dataclass, which a type variable cannot require
    return kind(**{field.name: row[field.name] for field in fields if field.name in row})


def fetch_optional(connection: Connection, kind: type[Row], name: str, parameters: Mapping[str, Any]) -> Row | None:
    """Run a named query and return its first row, or None if it has none."""
    row = connection.execute(query(name), parameters).fetchone()
    return None if row is None else record(kind, row)


def fetch_one(connection: Connection, kind: type[Row], name: str, parameters: Mapping[str, Any]) -> Row:
    """Run a named query that always has a row, and return it.

    Raises:
        LookupError: the query has no row, which is a defect.
    """
    row = fetch_optional(connection, kind, name, parameters)
    if row is None:
        raise LookupError(f"the query {name!r} returned no row")
    return row


def fetch_all(connection: Connection, kind: type[Row], name: str, parameters: Mapping[str, Any]) -> list[Row]:
    """Run a named query and return all of its rows."""
    return [record(kind, row) for row in connection.execute(query(name), parameters)]


def fetch_value(connection: Connection, name: str, parameters: Mapping[str, Any]) -> Any | None:
    """Run a named query and return the first column of its first row, or None if it has none."""
    row = connection.execute(query(name), parameters).fetchone()
    return None if row is None else next(iter(row.values()))


@dataclass(frozen=True, slots=True, kw_only=True)
class FileRow:
    """A row of ``files``."""

    id: str
    purpose: str
    filename: str
    size_bytes: int
    line_count: int
    created_at: datetime
    expires_at: datetime | None


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchProgressRow:
    """State and progress of a batch."""

    id: str
    status: str
    total: int
    completed: int
    failed: int
    rows_per_s: float | None
    progress_at: datetime | None
    created_at: datetime
    expires_at: datetime


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchRow(BatchProgressRow):
    """A row of ``batches``. ``errors`` holds its ``batch_errors`` in order, if the query reads them."""

    endpoint: str
    model: str | None
    input_file_id: str
    output_file_id: str | None
    error_file_id: str | None
    completion_window: str
    metadata: dict[str, str] | None
    request_sha256: bytes
    in_progress_at: datetime | None
    finalizing_at: datetime | None
    completed_at: datetime | None
    failed_at: datetime | None
    expired_at: datetime | None
    cancelling_at: datetime | None
    cancelled_at: datetime | None
    input_tokens: int
    cached_tokens: int
    output_tokens: int
    reasoning_tokens: int
    errors: Sequence[Mapping[str, Any]] | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class RetrievedBatchRow(BatchRow):
    """A batch with everything that ``x_cloister`` reports. ``now`` is the database's time."""

    priority: int
    paused_at: datetime | None
    job_id: str | None
    failed_jobs: int
    enqueued_tokens: int
    gpu_seconds: float
    cost: Decimal | None
    currency: str | None
    is_queued: bool
    last_job_message: str | None
    estimate: Mapping[str, Any] | None
    now: datetime


@dataclass(frozen=True, slots=True, kw_only=True)
class JobRow:
    """A job with its leases, and the work of its sharing domain. ``now`` is the database's time."""

    id: str
    model: str
    status: str
    accelerator: str
    gpus: int
    engines: int
    segments: int
    batches: int
    lease_age_s: float | None
    segments_left: int
    rows_per_s: float
    created_at: datetime
    launched_at: datetime | None
    idle_since: datetime | None
    seen_at: datetime | None
    now: datetime


@dataclass(frozen=True, slots=True, kw_only=True)
class UsageRow:
    """Usage of some days, projects and models. A value that it is not grouped by is None.

    ``project_id`` is empty for the stack itself, ``currency`` is empty for seconds without a price.
    """

    day: date | None = None
    project_id: str | None
    model: str | None
    currency: str | None
    batches: int
    completed: int
    failed: int
    input_tokens: int
    cached_tokens: int
    output_tokens: int
    gpu_seconds: float
    overhead_gpu_seconds: float
    cost: Decimal
    overhead_cost: Decimal


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchUsageRow(UsageRow):
    """Usage of one batch. ``id`` is in brackets for what is not that of a batch that exists."""

    id: str


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelJobsRow:
    """Jobs of a model on an accelerator; ``gpus`` are those that running ones reserve, ``engines`` are ready."""

    model: str
    accelerator: str
    running: int
    queued: int
    gpus: int
    engines: int


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelQueueRow:
    """Open batches of a model, with their rows that are not committed, and the tokens of these as far as known."""

    model: str
    batches: int
    rows: int
    input_tokens: float
    output_tokens: float
    unknown_batches: int


@dataclass(frozen=True, slots=True, kw_only=True)
class WatchedBatchRow(BatchProgressRow):
    """A batch with its events after the last one that a watcher knows. ``now`` is the database's time."""

    events: Sequence[dict[str, Any]] | None
    now: datetime
