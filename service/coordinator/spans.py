"""Spans of leases and commits, in the traces of their batches.

Jobs export no spans: their pods parse untrusted input, and need no way to a collector. A commit of a traced segment
states the times of the work before it (``ray_job.contract.leases.SegmentTimes``).
"""

from collections.abc import Sequence
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING, Final

from psycopg.rows import DictRow

from ray_job.contract.leases import Commit, SegmentTimes
from service.traces import Attributes, Traces

if TYPE_CHECKING:
    from service.coordinator.leasing import ActiveJob

# A job may state any times.
_LONGEST_S: Final = 30 * 24 * 3600.0


def trace_leases(
    traces: Traces, job: "ActiveJob", leases: Sequence[DictRow], begun: Sequence[DictRow], started_at: datetime
) -> None:
    """Record the leases of sampled segments, and what batches waited for until their first lease.

    Args:
        traces: the spans.
        job: the job that got the leases.
        leases: rows of ``lease_turn``.
        begun: rows of ``record_first_leases``.
        started_at: when the job's request arrived.
    """
    now = datetime.now(UTC)
    for row in begun:
        attributes: Attributes = {
            "cloister.job.id": job.id,
            "gen_ai.request.model": job.model,
            "cloister.accelerator": row["accelerator"],
        }
        waiting_since, key = row["in_progress_at"] or now, f"{row['batch_id']}/wait"
        traces.child(row["batch_id"], "wait", waiting_since, attributes, end=now, key=key)
        if row["launched_at"] is not None and row["launched_at"] > waiting_since:
            launched_at = row["launched_at"]
            traces.child(row["batch_id"], "launch", waiting_since, attributes, end=launched_at, parent=key)
            traces.child(row["batch_id"], "start", launched_at, attributes, end=now, parent=key)
    for row in leases:
        if traces.samples(row["batch_id"], row["segment"]):
            of_lease: Attributes = {
                "cloister.job.id": job.id,
                "cloister.segment": row["segment"],
                "cloister.epoch": row["epoch"],
                "cloister.rows": row["rows"],
                "cloister.tokens": row["tokens"],
            }
            traces.child(row["batch_id"], "lease", started_at, of_lease, end=now)


def trace_commit(traces: Traces, job_id: str, message: Commit, accepted: Sequence[bool], received_at: datetime) -> None:
    """Record the work on the sampled segments of a part, from the lease to the record of the part."""
    now = datetime.now(UTC)
    times = {each.segment: each for each in message.times}
    for entry, counts in zip(message.segments, accepted, strict=True):
        if not traces.samples(message.batch_id, entry.segment):
            continue
        attributes: Attributes = {
            "cloister.job.id": job_id,
            "cloister.segment": entry.segment,
            "cloister.epoch": entry.epoch,
            "cloister.completed": entry.completed,
            "cloister.failed": entry.failed,
            "cloister.accepted": counts,
            "gen_ai.usage.input_tokens": entry.usage.input_tokens,
            "gen_ai.usage.output_tokens": entry.usage.output_tokens,
        }
        steps = [*_work(times.get(entry.segment), received_at), ("commit", received_at, now)]
        key = f"{message.key}/{entry.segment}"
        traces.child(message.batch_id, "segment", steps[0][1], attributes, end=now, key=key, is_error=not counts)
        for name, start, end in steps:
            traces.child(message.batch_id, name, start, {"cloister.segment": entry.segment}, end=end, parent=key)


def _work(times: SegmentTimes | None, received_at: datetime) -> list[tuple[str, datetime, datetime]]:
    """Return the steps of a job that took time, each with its start and end; times that go backwards count as equal."""
    if times is None:
        return []
    stated = (times.leased_s, times.read_s, times.sent_s, times.ready_s)
    moments: list[datetime] = []
    for age_s in stated:
        moment = received_at - timedelta(seconds=min(age_s, _LONGEST_S))
        moments.append(max([moment, *moments]))
    moments.append(received_at)
    names = ("read", "queue", "engine", "write")
    steps = zip(names, moments[:-1], moments[1:], strict=True)
    return [(name, start, end) for name, start, end in steps if end > start]
