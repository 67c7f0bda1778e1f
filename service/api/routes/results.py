"""``GET /v1/batches/{id}/results``: the results of a batch so far, while it runs."""

import itertools
import tempfile
from collections.abc import Iterator, Mapping
from typing import Annotated, Final, Literal

import structlog
from fastapi import APIRouter, Depends, Query, Request
from fastapi.responses import StreamingResponse

from ray_job.contract.lines import Outcome
from ray_job.contract.object_keys import file_key
from ray_job.contract.parts import PartError
from service.api.dependencies import BackendsDependency, ReadAccess
from service.api.openapi import NO_ROOM, TOO_MANY_WRONG_KEYS, WITH_KEY, described
from service.api.routes.batches import NO_BATCH, BatchId, find_batch
from service.api.routes.files import find_file, resumable
from service.api.transfers import Transfer, Transfers, full_disk_reported
from service.assembly import CommittedRows, PartRecord, committed_rows
from service.audit.log import record_action
from service.backends import Backends
from service.db.rows import fetch_all
from service.errors import ApiError, NotFoundError, ObjectNotFoundError
from service.projects import Project
from service.transitions import FINAL

_log = structlog.get_logger(__name__)

router = APIRouter(prefix="/v1/batches", tags=["Batches"], responses=WITH_KEY)

ResultKind = Literal["output", "error"]
_OUTCOMES: Final[Mapping[ResultKind, Outcome]] = {"output": "completed", "error": "failed"}


def _transfer(request: Request, access: ReadAccess) -> Iterator[Transfer]:
    """Release the room and the slot of a request when its answer has ended or its client is gone."""
    transfers: Transfers = request.app.state.transfers
    with transfers.begin(access.key_id) as transfer:
        yield transfer


@router.get(
    "/{batch_id}/results",
    operation_id="retrieveBatchResults",
    summary="Stream the results of a batch so far",
    description="Stream the lines of a batch's output or error file so far, in input order. While the batch runs, "
    "these are the lines that are committed now; afterwards, the content of the file. The length of the answer is sent "
    "first, so a client can detect an answer that was cut.",
    response_class=StreamingResponse,
    responses=described(
        {
            400: "`kind` or the id is invalid.",
            404: f"{NO_BATCH[:-1]}, or its file was deleted or has expired.",
            429: f"{NO_ROOM} {TOO_MANY_WRONG_KEYS}",
        },
        description="JSON Lines, each as in the output or error file, in input order.",
        content={"application/jsonl": {"schema": {"type": "string"}}},
        headers={
            "x-cloister-lines": {
                "description": "The number of lines.",
                "required": True,
                "schema": {"type": "integer", "minimum": 0},
            },
            "x-cloister-complete": {
                "description": "`true` if the batch has ended: no line will follow.",
                "required": True,
                "schema": {"type": "string", "enum": ["true", "false"]},
            },
        },
    ),
)
def retrieve_results(
    backends: BackendsDependency,
    access: ReadAccess,
    transfer: Annotated[Transfer, Depends(_transfer)],
    batch_id: BatchId,
    kind: Annotated[
        ResultKind,
        Query(description="The lines of the output file (answers with status 2xx) or of the error file (all others)."),
    ] = "output",
) -> StreamingResponse:
    """Stream the lines of a batch's output or error file so far, in input order.

    Raises:
        NotFoundError: the project has no such batch, or the batch's file was deleted or has expired.
        RateLimitError: the disk has no room for the lines, or the key has too many large transfers.
    """
    batch = find_batch(backends, access.project, batch_id)
    rows = None if batch.status in FINAL else _committed_rows(backends, access.project, batch_id, kind, transfer)
    is_complete = rows is None
    with backends.pool.connection() as connection:
        ids = {"project_id": access.project.id, "object_id": batch_id}
        record_action(connection, "batch.results_downloaded", actor=access.actor, **ids, data={"kind": kind})
    if rows is None:
        batch = find_batch(backends, access.project, batch_id)
        file_id = batch.output_file_id if kind == "output" else batch.error_file_id
        if file_id is None:
            rows = CommittedRows(lines=0, size_bytes=0, chunks=iter(()))
        else:
            try:
                file = find_file(backends, access.project, file_id)
                chunks = resumable(backends.store, file_key(file_id))
                first = next(chunks, b"")
            except (NotFoundError, ObjectNotFoundError):
                raise NotFoundError(
                    f"The {kind} file '{file_id}' of the batch was deleted or has expired. Its content is no longer "
                    "available.",
                    param="batch_id",
                ) from None
            count = batch.completed if kind == "output" else batch.failed
            rows = CommittedRows(lines=count, size_bytes=file.size_bytes, chunks=itertools.chain((first,), chunks))
    return StreamingResponse(
        rows.chunks,
        media_type="application/jsonl",
        headers={
            "content-length": str(rows.size_bytes),
            "x-cloister-lines": str(rows.lines),
            "x-cloister-complete": str(is_complete).lower(),
        },
    )


def _committed_rows(
    backends: Backends, project: Project, batch_id: str, kind: ResultKind, transfer: Transfer
) -> CommittedRows | None:
    """Return the lines in committed parts of a running batch, or None if the batch ended meanwhile."""
    with backends.pool.connection() as connection:
        parts = fetch_all(connection, PartRecord, "parts_of_batch", {"batch_id": batch_id})
    file = transfer.closing.enter_context(tempfile.TemporaryFile())  # noqa: SIM115 - closed with the transfer
    try:
        with full_disk_reported():
            rows = committed_rows(
                backends.store,
                parts,
                batch_id=batch_id,
                outcome=_OUTCOMES[kind],
                file=file,
                claim=transfer.claim,
            )
    except ObjectNotFoundError:
        # Parts are deleted only after the batch has ended: while it is open, none can be missing.
        if find_batch(backends, project, batch_id).status in FINAL:
            return None
        raise
    except PartError as error:
        _log.error("part damaged", batch_id=batch_id, error=str(error))
        raise ApiError(
            f"A part of the results of '{batch_id}' is damaged. Wait for the batch to end: its files report every "
            "missing line."
        ) from error
    return None if find_batch(backends, project, batch_id).status in FINAL else rows
