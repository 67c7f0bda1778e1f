"""Commits of parts, places for them, and segments that a job gives back."""

from datetime import UTC, datetime
from typing import Any, Final

import psycopg
from psycopg.rows import DictRow

from ray_job.contract.leases import Commit, CommitResponse, CommittedRows, Failure, PartUrl, PartUrls, PartUrlsRequest
from ray_job.contract.object_keys import is_part_key, new_part_key
from ray_job.contract.parts import Usage
from ray_job.contract.plans import bitmap_value
from service.coordinator.errors import JobEndedError, RefusedError
from service.coordinator.leasing import URL_EXPIRES_S, active_job
from service.coordinator.spans import trace_commit
from service.db import Pool, query
from service.job_transitions import JOB_FAILED
from service.ports import ObjectStore
from service.traces import OFF, Traces

MAX_PART_URLS: Final = 64
# How often a segment is given back until its batch fails.
MAX_FAILURES: Final = 4
MAX_REASON_CHARACTERS: Final = 1_000


def part_urls(pool: Pool, store: ObjectStore, job_id: str, request: PartUrlsRequest) -> PartUrls:
    """Return places for parts of a batch that the job has leased; none if the batch has ended.

    Raises:
        JobEndedError: the job has ended.
        RefusedError: the job had no lease of the batch, or asks for none or too many.
    """
    if not 1 <= request.count <= MAX_PART_URLS:
        raise RefusedError(f"count must be a number from 1 to {MAX_PART_URLS}")
    with pool.connection() as connection:
        active_job(connection, job_id)
        values = {"job_id": job_id, "batch_id": request.batch_id}
        row = connection.execute(query("takes_parts"), values).fetchone()
    if row is None:
        raise RefusedError(f"the job had no lease of {request.batch_id}", status_code=404)
    if not row["takes_parts"]:
        return PartUrls(parts=())
    keys = [new_part_key(request.batch_id, job_id) for _ in range(request.count)]
    return PartUrls(parts=tuple(PartUrl(key=key, url=store.write_url(key, expires_s=URL_EXPIRES_S)) for key in keys))


def commit(pool: Pool, job_id: str, message: Commit, traces: Traces = OFF) -> CommitResponse:
    """Record a part. The rows of a segment count if its lease is still the newest, and none of them counts already.

    Raises:
        JobEndedError: the job has ended.
        RefusedError: the key is not one of the job's for this batch, or the message contradicts itself.
    """
    batch_id, key = message.batch_id, message.key
    if not is_part_key(key, batch_id=batch_id, job_id=job_id):
        raise RefusedError("the key is not that of a part of this job and batch")
    if len({entry.segment for entry in message.segments}) < len(message.segments) or not message.segments:
        raise RefusedError("a commit names each of its segments once, and at least one")
    lines = [line for entry in message.segments for line in entry.lines]
    if len(set(lines)) < len(lines):
        raise RefusedError("a commit names each of its lines once")
    if any(entry.completed + entry.failed != len(entry.lines) for entry in message.segments):
        raise RefusedError("completed and failed of a segment must add up to the number of its lines")
    try:
        rows = [bitmap_value(entry.rows) for entry in message.segments]
    except ValueError as error:
        raise RefusedError(f"the rows of a segment are unreadable: {error}") from None
    if any(bits.bit_count() > len(entry.lines) for entry, bits in zip(message.segments, rows, strict=True)):
        raise RefusedError("a segment has fewer lines than rows")
    values: dict[str, Any] = {"job_id": job_id, "batch_id": batch_id, "key": key}
    received_at = datetime.now(UTC)
    with pool.connection() as connection:
        job = connection.execute(query("committing_job"), values).fetchone()
        if job is None:
            raise JobEndedError
        # Rows are locked in the same order everywhere: domain, batch, segments.
        if job["has_failures"]:
            connection.execute(query("lock_domain_of_job"), values)
        batch = connection.execute(query("lock_batch_of_job"), values).fetchone()
        known = connection.execute(query("recorded_part"), values).fetchone()
        if known is not None:
            return CommitResponse(accepted=tuple(known["accepted"]))
        accepted = [False] * len(rows)
        if batch is not None and batch["is_at_work"]:
            accepted = _record_rows(connection, values, message, rows)
        if any(accepted):
            _record_part(connection, values, message, accepted)
        else:
            connection.execute(query("record_refused_commit"), values)
        # Failures that were recorded meanwhile stay: their domain is not locked.
        if any(accepted) and job["has_failures"]:
            connection.execute(query("forget_failures"), values)
    if batch is not None:
        trace_commit(traces, job_id, message, accepted, received_at)
    return CommitResponse(accepted=tuple(accepted))


def _record_rows(
    connection: psycopg.Connection[DictRow], values: dict[str, Any], message: Commit, rows: list[int]
) -> list[bool]:
    """Add the rows to their segments, and return for each segment whether they count."""
    numbers = [entry.segment for entry in message.segments]
    locked = connection.execute(query("lock_segments"), {**values, "numbers": numbers})
    segments = {row["number"]: row for row in locked}
    accepted, changed = [], list[tuple[int, str, bool]]()
    for entry, bits in zip(message.segments, rows, strict=True):
        segment = segments.get(entry.segment)
        done = 0 if segment is None else bitmap_value(segment["rows_done"])
        counts = (
            segment is not None
            and not segment["is_done"]
            and segment["epoch"] == entry.epoch
            and segment["job_id"] in {None, values["job_id"]}
            and bits > 0
            and bits.bit_length() <= segment["rows"]
            and not done & bits
        )
        accepted.append(counts)
        if segment is not None and counts:
            is_done = (done | bits).bit_count() == segment["rows"]
            changed.append((entry.segment, f"{done | bits:x}", is_done))
    if changed:
        columns = {
            "numbers": [number for number, _, _ in changed],
            "rows_done": [done for _, done, _ in changed],
            "is_done": [is_done for _, _, is_done in changed],
        }
        connection.execute(query("record_rows"), {**values, **columns})
    counted = [entry for entry, counts in zip(message.segments, accepted, strict=True) if counts]
    if counted:
        totals = _totals(counted) | {"segments_done": sum(is_done for _, _, is_done in changed)}
        connection.execute(query("record_progress"), {**values, **totals})
    return accepted


def _record_part(
    connection: psycopg.Connection[DictRow], values: dict[str, Any], message: Commit, accepted: list[bool]
) -> None:
    refused = [entry for entry, counts in zip(message.segments, accepted, strict=True) if not counts]
    counted = [entry for entry, counts in zip(message.segments, accepted, strict=True) if counts]
    columns = {
        "accepted": accepted,
        "refused_lines": [line for entry in refused for line in entry.lines],
        "tokens": sum(entry.usage.input_tokens + entry.usage.output_tokens for entry in counted),
    }
    connection.execute(query("record_part"), {**values, **columns})


def _totals(entries: list[CommittedRows]) -> dict[str, int]:
    usage = sum((entry.usage for entry in entries), Usage())
    return {
        "completed": sum(entry.completed for entry in entries),
        "failed": sum(entry.failed for entry in entries),
        "input_tokens": usage.input_tokens,
        "cached_tokens": usage.cached_tokens,
        "output_tokens": usage.output_tokens,
        "reasoning_tokens": usage.reasoning_tokens,
    }


def fail(pool: Pool, job_id: str, message: Failure) -> None:
    """Take a segment back that the job cannot run. At the fourth time its batch is given up.

    Raises:
        JobEndedError: the job has ended.
    """
    values = {
        "job_id": job_id,
        "batch_id": message.batch_id,
        "segment": message.segment,
        "epoch": message.epoch,
    }
    with pool.connection() as connection:
        active_job(connection, job_id)
        # Rows are locked in the same order everywhere: batch, segments.
        connection.execute(query("lock_batch_of_job"), values)
        row = connection.execute(query("give_back_segment"), values).fetchone()
        if row is not None and row["failures"] >= MAX_FAILURES:
            reason = (
                f"Segment {message.segment} of the batch's plan could not be run {row['failures']} times: "
                f"{message.reason[:MAX_REASON_CHARACTERS]}. Create the batch again."
            )
            connection.execute(query("give_up_batch"), {**values, "code": JOB_FAILED, "message": reason})
        connection.execute(query("record_given_back"), values)
