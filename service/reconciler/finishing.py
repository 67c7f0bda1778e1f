"""The step to a final state: assembles the files, then ends the batch in one transaction."""

import hashlib
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import structlog

from ray_job.contract.object_keys import batch_prefix, file_key
from service.assembly import Assembled, AssemblyError, assemble
from service.errors import ObjectNotFoundError
from service.input_file import InputError
from service.ports import ObjectStore, StoredObject
from service.reconciler.context import Context, utc_now
from service.reconciler.jobs import note_waiting
from service.reconciler.records import Batch, Ending, ResultFile, end, load_batch, note_parts_deleted
from service.transitions import BatchStatus, GiveUp

logger = structlog.get_logger(__name__)


class _OvertakenError(Exception):
    """The batch is not in the state any more from which it was to be ended."""


def finish(context: Context, batch: Batch) -> None:
    """Ends a batch that is finalizing (completed, or expired when lines are missing) or cancelling (cancelled).

    One whose lines should all have a result, and do not, fails; what can be read is handed over all the same.

    Raises:
        ObjectStoreError: the store cannot be reached; the batch stays as it is.
        OSError: the workspace has no room; the batch stays as it is.
    """
    try:
        assembled = _assemble(context, batch)
    except _OvertakenError:
        return
    except AssemblyError as error:
        _end(context, batch, Ending(after=BatchStatus.FAILED, problems=[_assembly_problem(str(error))]))
        return
    after = _after(batch, assembled)
    problems = _damage(batch, assembled)
    if after is BatchStatus.FAILED and not problems:
        problems = [_assembly_problem(f"{assembled.found:,} of {batch.total:,} lines have a result")]
    _end(context, batch, _ending(batch, after, assembled, problems))


def give_up(context: Context, batch: Batch, reason: GiveUp) -> None:
    """Fails a batch that is in progress, and hands over what was committed.

    Raises:
        ObjectStoreError: the store cannot be reached; the batch stays as it is.
        OSError: the workspace has no room; the batch stays as it is.
    """
    try:
        assembled = _assemble(context, batch)
    except _OvertakenError:
        return
    problems = [InputError(code=reason.code, message=reason.message), *_damage(batch, assembled)]
    _end(context, batch, _ending(batch, BatchStatus.FAILED, assembled, problems))


def delete_parts(context: Context, batch: Batch) -> None:
    """Deletes what a batch that is over left behind besides its files."""
    for key in list(context.store.keys(batch_prefix(batch.id))):
        context.store.delete(key)
    note_parts_deleted(context.pool, batch, utc_now())


def result_file_id(batch_id: str, kind: str) -> str:
    """The id of a batch's output or error file; derived, so that a repeated assembly replaces the same object."""
    return f"file-{hashlib.sha256(f'{batch_id}:{kind}'.encode()).hexdigest()[:32]}"


def _assemble(context: Context, batch: Batch) -> Assembled:
    is_late = batch.view.status is BatchStatus.FINALIZING and batch.view.missed_its_deadline
    try:
        return assemble(
            context.store,
            batch_id=batch.id,
            output_key=file_key(result_file_id(batch.id, "output")),
            error_key=file_key(result_file_id(batch.id, "error")),
            workspace=context.workspace,
            expire_lines_of=_input_file(context, batch) if is_late else None,
            before_writing=lambda: _check_not_overtaken(context, batch),
        )
    except OSError as error:
        reason = f"the results cannot be put together for now, which is tried again: {error.strerror or error}"
        with context.pool.connection() as connection:
            note_waiting(connection, batch, reason, utc_now(), type="batch.waiting")
        raise


def _after(batch: Batch, assembled: Assembled) -> BatchStatus:
    if batch.view.status is BatchStatus.CANCELLING:
        return BatchStatus.CANCELLED
    if batch.view.missed_its_deadline:
        return BatchStatus.EXPIRED if assembled.found < batch.total else BatchStatus.COMPLETED
    return BatchStatus.COMPLETED if assembled.found == batch.total else BatchStatus.FAILED


def _damage(batch: Batch, assembled: Assembled) -> list[InputError]:
    """What the owner is told of damaged parts: nothing where each line has a result in another."""
    if not assembled.damaged:
        return []
    logger.error("batch.parts_damaged", batch_id=batch.id, problems=assembled.damaged)
    if assembled.found == batch.total:
        return []
    return [
        _assembly_problem(
            f"{assembled.found:,} of {batch.total:,} lines have a result that can be read, and it is handed over; "
            f"parts that are damaged: {len(assembled.damaged):,}, first of all {assembled.damaged[0]}"
        )
    ]


def _assembly_problem(what: str) -> InputError:
    message = f"The results could not all be put together: {what}. Create the batch again."
    return InputError(code="assembly_failed", message=message)


def _check_not_overtaken(context: Context, batch: Batch) -> None:
    """Whatever ended the batch meanwhile may have deleted parts: what was read of them must not replace its files."""
    now = load_batch(context.pool, batch.id)
    if now is None or now.view.status is not batch.view.status:
        raise _OvertakenError(batch.id)


def _end(context: Context, batch: Batch, ending: Ending) -> None:
    end(context.pool, batch, ending, utc_now(), context.retention_s)


@dataclass(frozen=True, slots=True)
class _Content:
    """An object's content, read anew each time it is iterated."""

    store: ObjectStore
    key: str

    def __iter__(self) -> Iterator[bytes]:
        return self.store.read(self.key)


def _input_file(context: Context, batch: Batch) -> Iterable[bytes] | None:
    """The content of the input file, or None if it is gone."""
    content = _Content(context.store, file_key(batch.input_file_id))
    try:
        next(iter(content), b"")
    except ObjectNotFoundError:
        logger.warning("batch.input_file_gone", batch_id=batch.id, file_id=batch.input_file_id)
        return None
    return content


def _ending(batch: Batch, after: BatchStatus, assembled: Assembled, problems: Sequence[InputError]) -> Ending:
    return Ending(
        after=after,
        output=_result_file(batch, "output", assembled.output),
        error=_result_file(batch, "error", assembled.error),
        assembled=assembled,
        problems=problems,
    )


def _result_file(batch: Batch, kind: str, stored: StoredObject | None) -> ResultFile | None:
    if stored is None:
        return None
    return ResultFile(id=result_file_id(batch.id, kind), filename=f"{batch.id}_{kind}.jsonl", stored=stored)
