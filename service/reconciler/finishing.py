"""The step to a final state: assemble the result files and end the batch."""

from collections.abc import Iterator
from datetime import UTC, datetime

import structlog

from ray_job.contract.object_keys import file_key
from ray_job.contract.parts import PartError
from service.assembly import Assembled, PartRecord, assemble
from service.db.rows import fetch_all
from service.errors import ObjectNotFoundError
from service.input_file import InputError
from service.job_transitions import JOB_FAILED
from service.reconciler.backends import Backends
from service.reconciler.estimating import adopt_reports
from service.reconciler.planning import earlier_parts
from service.reconciler.records import Batch, load_batch, reporting_lack_of_room
from service.reconciler.state_changes import end_batch
from service.traces import Attribute, Traces
from service.transitions import BatchStatus

logger = structlog.get_logger(__name__)


def finish(backends: Backends, batch: Batch) -> None:
    """Assemble and end a batch that is cancelling, finalizing or given up.

    It ends cancelled or completed; expired if it missed its deadline and lines are missing; failed if it was given up,
    or if lines are missing for another reason. The results that can be read are delivered in every case.

    Args:
        backends: the backends.
        batch: the batch.

    Raises:
        ObjectStoreError: the store cannot be reached; the batch is unchanged.
        OSError: the workspace has no room; the batch is unchanged.
    """
    assembled, problem, problems = None, "", list[InputError]()
    try:
        with backends.traces.step(batch.id, "assemble") as step:
            assembled = _assemble(backends, batch)
            step.attributes["cloister.lines"] = assembled.found if assembled else 0
        if assembled is None:
            return
    except PartError as error:
        after, problem = BatchStatus.FAILED, str(error)
    else:
        expected, counted = batch.counted_tokens, assembled.usage.input_tokens
        if assembled.completed == batch.total and expected not in (None, counted):
            logger.warning("estimate.inexact", batch_id=batch.id, counted=expected, engine_counted=counted)
        if assembled.damaged:
            logger.error("batch.parts_damaged", batch_id=batch.id, problems=assembled.damaged)
            # Without missing lines, each line of a damaged part has a result elsewhere.
            if assembled.found != batch.total:
                problem = (
                    f"{assembled.found:,} of {batch.total:,} lines have a readable result, which is delivered; "
                    f"{len(assembled.damaged):,} parts are damaged, the first one is: {assembled.damaged[0]}"
                )
        after = _final_state(batch, assembled)
        if batch.status is BatchStatus.IN_PROGRESS:
            problems = [InputError(code=batch.giving_up_code or JOB_FAILED, message=batch.giving_up_message or "")]
        elif after is BatchStatus.FAILED:
            problem = problem or f"{assembled.found:,} of {batch.total:,} lines have a result"
    if problem:
        message = f"The results could not be fully assembled: {problem}. Create the batch again."
        problems.append(InputError(code="assembly_failed", message=message))
    measured = adopt_reports(backends, batch) if after is BatchStatus.COMPLETED else None
    is_ended = end_batch(
        backends.pool,
        batch,
        after,
        datetime.now(UTC),
        backends.retention_s,
        assembled=assembled,
        problems=problems,
        measured=measured,
    )
    if is_ended:
        trace_end(backends.traces, batch, after, assembled)


def trace_end(traces: Traces, batch: Batch, after: BatchStatus, assembled: Assembled | None = None) -> None:
    """Record the root span of a batch that has ended, with the counts of its results if it has any."""
    attributes: dict[Attribute, str | int | bool] = {
        "cloister.batch.id": batch.id,
        "cloister.project.id": batch.project_id,
        "cloister.state": after.value,
        "cloister.lines": batch.total,
    }
    if batch.model:
        attributes["gen_ai.request.model"] = batch.model
    if assembled:
        attributes |= {
            "cloister.completed": assembled.completed,
            "cloister.failed": assembled.failed,
            "gen_ai.usage.input_tokens": assembled.usage.input_tokens,
            "gen_ai.usage.output_tokens": assembled.usage.output_tokens,
        }
    traces.root(batch.id, "batch", batch.created_at, attributes, is_error=after is BatchStatus.FAILED)


def _final_state(batch: Batch, assembled: Assembled) -> BatchStatus:
    """Return the state in which a batch ends, with the results that it has."""
    if batch.status is BatchStatus.CANCELLING:
        return BatchStatus.CANCELLED
    if batch.status is BatchStatus.IN_PROGRESS:
        return BatchStatus.FAILED
    if assembled.found == batch.total:
        return BatchStatus.COMPLETED
    return BatchStatus.EXPIRED if batch.missed_deadline else BatchStatus.FAILED


def _assemble(backends: Backends, batch: Batch) -> Assembled | None:
    """Write the result files from the parts; return None if another step ended or cancelled the batch meanwhile.

    Raises:
        PartError: a part holds a line that the input file lacks.
        ObjectStoreError, OSError: see ``finish``.
    """

    def is_unchanged() -> bool:
        # Whatever ended the batch may have deleted parts. An incomplete assembly must not replace its files.
        current = load_batch(backends.pool, batch.id)
        return current is not None and current.status is batch.status

    def input_file() -> Iterator[bytes]:
        return backends.store.read(file_key(batch.input_file_id))

    should_expire = batch.status is BatchStatus.FINALIZING and batch.missed_deadline
    if should_expire:
        try:
            next(input_file(), b"")
        except ObjectNotFoundError:
            logger.warning("batch.input_file_gone", batch_id=batch.id, file_id=batch.input_file_id)
            should_expire = False
    if batch.is_unplanned:
        parts = [part for part, _ in earlier_parts(backends, batch)]
    else:
        with backends.pool.connection() as connection:
            parts = fetch_all(connection, PartRecord, "parts_of_batch", {"batch_id": batch.id})
    with reporting_lack_of_room(backends.pool, batch, "the results cannot be assembled now"):
        return assemble(
            backends.store,
            parts,
            batch_id=batch.id,
            output_key=file_key(batch.result_file_id("output")),
            error_key=file_key(batch.result_file_id("error")),
            workspace=backends.workspace,
            expire_lines_of=input_file if should_expire else None,
            may_write=is_unchanged,
        )
