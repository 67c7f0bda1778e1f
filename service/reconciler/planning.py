"""Plans of batches: acceptance of a batch with its segments, and a new plan for one of an earlier version.

The plan is written first. If the process dies before the transaction with its segments, the same plan is written again.
"""

import dataclasses
from collections.abc import Iterator, Sequence
from datetime import UTC, datetime
from typing import Any

import psycopg
from psycopg.rows import DictRow
from psycopg.types.json import Jsonb

from ray_job.contract.input_lines import line_blocks
from ray_job.contract.job_spec import ModelSpec
from ray_job.contract.object_keys import file_key, parts_prefix, plan_key
from ray_job.contract.parts import PartHeader, Usage
from service.assembly import PartRecord, read_headers
from service.db import query
from service.estimates import Estimate
from service.planning import PlanBuilder, Segment
from service.reconciler.backends import Backends
from service.reconciler.records import Batch, load_batch, reporting_lack_of_room
from service.reconciler.state_changes import change_state
from service.transitions import BatchStatus


def accept(
    backends: Backends, batch: Batch, plan: PlanBuilder, *, model: ModelSpec, total: int, estimate: Estimate
) -> None:
    """Write the plan of a validating batch, and move the batch to ``in_progress`` with its segments.

    If the batch was cancelled meanwhile, its plan is deleted.

    Args:
        backends: the backends.
        batch: the batch.
        plan: the lines of its input file.
        model: its model.
        total: the number of its lines.
        estimate: what it takes.

    Raises:
        ObjectStoreError: the store cannot be reached; the batch is unchanged.
    """
    domain = sharing_domain(model, batch)
    with backends.traces.step(batch.id, "plan") as step:
        segments = plan.write(backends.store, batch.id, merge_equal=_merges_equal(model))
        step.attributes |= {"gen_ai.request.model": model.id, "cloister.segments": len(segments)}
        values: dict[str, Any] = {"model": model.id, "total": total, "estimate": Jsonb(dataclasses.asdict(estimate))}
        values |= {"domain": domain, "segments": len(segments)}
        with backends.pool.connection() as connection:
            is_accepted = change_state(
                connection, "accept_batch", batch, BatchStatus.IN_PROGRESS, datetime.now(UTC), **values
            )
            if is_accepted:
                _add_work(connection, batch, model.id, domain, segments)
    if not is_accepted:
        _delete_unused_plan(backends, batch)


def plan_again(backends: Backends, batch: Batch) -> None:
    """Plan the lines without a result of a batch that an earlier version accepted; its job must have ended.

    The parts that the job wrote get their records, and the batch the counts and tokens of their lines. Does nothing if
    the batch is no longer in progress, or was planned meanwhile.

    Args:
        backends: the backends.
        batch: the batch, which is in progress and has no sharing domain.

    Raises:
        ObjectNotFoundError: the content of the input file is gone; the batch is unchanged.
        ObjectStoreError: the store cannot be reached; the batch is unchanged.
        OSError: the workspace has no room; the batch is unchanged.
    """
    parts: list[dict[str, Any]] = []
    done: set[int] = set()
    counts, usage = {"completed": 0, "failed": 0}, Usage()
    for part, header in earlier_parts(backends, batch):
        parts.append({"key": part.key, "batch_id": batch.id, "refused_lines": part.refused_lines})
        for line, outcome, tokens in zip(header.lines, header.outcomes, header.usage, strict=True):
            if line not in part.refused_lines:
                done.add(line)
                counts[outcome] += 1
                usage += tokens
    offered = backends.catalogue.get(batch.model or "")
    # No job can run a model that is no longer offered, so its settings do not matter.
    model = offered.spec if offered else ModelSpec(id=batch.model or "", source="")
    domain = sharing_domain(model, batch)
    with (
        reporting_lack_of_room(backends.pool, batch, "the batch cannot be planned now"),
        PlanBuilder(backends.workspace, done) as plan,
    ):
        for first, lines in line_blocks(backends.store.read(file_key(batch.input_file_id))):
            plan.add(first, lines)
        segments = plan.write(backends.store, batch.id, merge_equal=_merges_equal(model))
    values = {"batch_id": batch.id, "domain": domain, "segments": len(segments), **counts, **dataclasses.asdict(usage)}
    with backends.pool.connection() as connection:
        is_planned = connection.execute(query("record_plan_again"), values).fetchone() is not None
        if is_planned:
            if parts:
                connection.cursor().executemany(query("insert_earlier_part"), parts)
            _add_work(connection, batch, model.id, domain, segments)
    if not is_planned:
        _delete_unused_plan(backends, batch)


def earlier_parts(backends: Backends, batch: Batch) -> Iterator[tuple[PartRecord, PartHeader]]:
    """Yield the readable parts of a batch that an earlier version ran, so that each line counts once.

    Raises:
        ObjectStoreError: the store cannot be reached.
    """
    done: set[int] = set()
    for key, header in read_headers(backends.store, backends.store.keys(parts_prefix(batch.id)), batch.id):
        yield PartRecord(key=key, refused_lines=[line for line in header.lines if line in done]), header
        done.update(header.lines)


def sharing_domain(model: ModelSpec, batch: Batch) -> str:
    """Return whose batches share a job with this one: ``stack``, the id of its project, or its own id."""
    match model.sharing:
        case "stack":
            return "stack"
        case "project":
            return batch.project_id
        case "batch":
            return batch.id


def _merges_equal(model: ModelSpec) -> bool:
    """Return whether lines of a model with equal bodies may share an answer: only the direct engine copies answers."""
    return model.engine == "direct"


def _add_work(
    connection: psycopg.Connection[DictRow], batch: Batch, model_id: str, domain: str, segments: Sequence[Segment]
) -> None:
    """Add the segments of a batch, and make its domain and the turn of its project known."""
    columns = {
        "numbers": [segment.number for segment in segments],
        "start_bytes": [segment.start_byte for segment in segments],
        "end_bytes": [segment.end_byte for segment in segments],
        "rows": [segment.rows for segment in segments],
        "tokens": [segment.tokens for segment in segments],
        "media_bytes": [segment.media_bytes for segment in segments],
        "files": [",".join(segment.files) for segment in segments],
    }
    connection.execute(query("insert_segments"), {"batch_id": batch.id, **columns})
    values = {"model": model_id, "domain": domain, "project_id": batch.project_id}
    for name in ("insert_domain", "insert_turn", "announce_work"):
        connection.execute(query(name), values)


def _delete_unused_plan(backends: Backends, batch: Batch) -> None:
    """Delete the plan of a batch that has ended meanwhile. Another process may have accepted the batch instead."""
    current = load_batch(backends.pool, batch.id)
    if current is None or current.status not in {BatchStatus.IN_PROGRESS, BatchStatus.FINALIZING}:
        backends.store.delete(plan_key(batch.id))
