"""The step to a final state: assembles the files, then ends the batch in one transaction."""

import hashlib
import itertools
from collections.abc import Iterable

import structlog

from ray_job.contract.object_keys import batch_prefix, file_key
from service.assembly import Assembled, AssemblyError, assemble
from service.errors import ObjectNotFoundError
from service.input_file import InputError
from service.ports import StoredObject
from service.reconciler.context import Context, utc_now
from service.reconciler.records import Batch, Ending, ResultFile, end, note_parts_deleted
from service.transitions import BatchStatus, Fail

logger = structlog.get_logger(__name__)


def finish(context: Context, batch: Batch) -> None:
    """Ends a batch that is finalizing (completed, or expired when lines are missing) or cancelling (cancelled).

    Raises:
        ObjectStoreError: the store cannot be reached; the batch stays as it is.
    """
    is_cancelled = batch.view.status is BatchStatus.CANCELLING
    try:
        assembled = _assemble(context, batch)
    except AssemblyError as error:
        after = BatchStatus.CANCELLED if is_cancelled else BatchStatus.FAILED
        message = f"The results could not be put together: {error}. Create the batch again."
        end(
            context.pool,
            batch,
            Ending(after=after, problem=InputError(code="assembly_failed", message=message)),
            utc_now(),
        )
        return
    after = BatchStatus.CANCELLED if is_cancelled else BatchStatus.COMPLETED
    if not is_cancelled and assembled.completed + assembled.failed - assembled.expired < batch.total:
        after = BatchStatus.EXPIRED
    end(context.pool, batch, _ending(batch, after, assembled), utc_now())


def give_up(context: Context, batch: Batch, failure: Fail) -> None:
    """Fails a batch that is in progress, and hands over what was committed.

    Raises:
        ObjectStoreError: the store cannot be reached; the batch stays as it is.
    """
    problem = InputError(code=failure.code, message=failure.message)
    try:
        ending = _ending(batch, BatchStatus.FAILED, _assemble(context, batch), problem)
    except AssemblyError as error:
        logger.exception("batch.assembly_failed", batch_id=batch.id, error=str(error))
        ending = Ending(after=BatchStatus.FAILED, problem=problem)
    end(context.pool, batch, ending, utc_now())


def delete_parts(context: Context, batch: Batch) -> None:
    """Deletes what a batch that is over left behind besides its files."""
    for key in list(context.store.keys(batch_prefix(batch.id))):
        context.store.delete(key)
    note_parts_deleted(context.pool, batch, utc_now())


def result_file_id(batch_id: str, kind: str) -> str:
    """The id of a batch's output or error file; derived, so that a repeated assembly replaces the same object."""
    return f"file-{hashlib.sha256(f'{batch_id}:{kind}'.encode()).hexdigest()[:32]}"


def _assemble(context: Context, batch: Batch) -> Assembled:
    is_finalizing = batch.view.status is BatchStatus.FINALIZING
    is_late = is_finalizing and batch.view.missed_its_deadline
    return assemble(
        context.store,
        batch_id=batch.id,
        output_key=file_key(result_file_id(batch.id, "output")),
        error_key=file_key(result_file_id(batch.id, "error")),
        workspace=context.workspace,
        expected_lines=batch.total if is_finalizing and not is_late else None,
        expire_lines_of=_input_file(context, batch) if is_late else None,
    )


def _input_file(context: Context, batch: Batch) -> Iterable[bytes] | None:
    """The content of the input file, or None if its owner deleted it meanwhile."""
    chunks = context.store.read(file_key(batch.input_file_id))
    try:
        return itertools.chain([next(chunks, b"")], chunks)
    except ObjectNotFoundError:
        logger.warning("batch.input_file_gone", batch_id=batch.id, file_id=batch.input_file_id)
        return None


def _ending(batch: Batch, after: BatchStatus, assembled: Assembled, problem: InputError | None = None) -> Ending:
    return Ending(
        after=after,
        output=_result_file(batch, "output", assembled.output),
        error=_result_file(batch, "error", assembled.error),
        assembled=assembled,
        problem=problem,
    )


def _result_file(batch: Batch, kind: str, stored: StoredObject | None) -> ResultFile | None:
    if stored is None:
        return None
    return ResultFile(id=result_file_id(batch.id, kind), filename=f"{batch.id}_{kind}.jsonl", stored=stored)
