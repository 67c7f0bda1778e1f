"""``GET /v1/batches/{id}/results``: what a batch has so far, while it runs."""

import contextlib
import itertools
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Annotated, Any, BinaryIO, Final, Literal

import structlog
from fastapi import APIRouter, Query
from fastapi.responses import StreamingResponse

from ray_job.contract.lines import Outcome
from ray_job.contract.object_keys import file_key
from service.api.authentication import ReadAccess
from service.api.extension import batch_row
from service.api.parts import Parts, PartsDependency
from service.api.schemas import Text
from service.api.streaming import resumable
from service.assembly import AssemblyError, CommittedRows, committed_rows
from service.db import query
from service.errors import ApiError, NotFoundError, ObjectNotFoundError
from service.transitions import FINAL

_log = structlog.get_logger(__name__)

router = APIRouter(prefix="/v1/batches")

ResultKind = Literal["output", "error"]
_OUTCOMES: Final[Mapping[ResultKind, Outcome]] = {"output": "completed", "error": "failed"}


@dataclass(frozen=True, slots=True, kw_only=True)
class _Results:
    """Lines of one kind: their number, their size, their bytes; ``is_complete``: none will follow."""

    lines: int
    size_bytes: int
    chunks: Iterator[bytes]
    is_complete: bool


@router.get("/{batch_id}/results")
def retrieve_results(
    parts: PartsDependency,
    access: ReadAccess,
    batch_id: Text,
    kind: Annotated[ResultKind, Query()] = "output",
) -> StreamingResponse:
    """Streams the lines of a batch's output or error file, in input order, as far as it got.

    While the batch runs these are the lines that are committed now; once it has ended, the content of its file.
    The answer's length is sent first, so an answer that is cut cannot be taken for a whole one.

    Raises:
        NotFoundError: the project has no such batch, or the file of the batch was deleted or has expired.
    """
    results = _results(parts, access.project.id, batch_id, kind)
    return StreamingResponse(
        results.chunks,
        media_type="application/jsonl",
        headers={
            "content-length": str(results.size_bytes),
            "x-cloister-lines": str(results.lines),
            "x-cloister-complete": str(results.is_complete).lower(),
        },
    )


def _results(parts: Parts, project_id: str, batch_id: str, kind: ResultKind) -> _Results:
    row = batch_row(parts, project_id, batch_id)
    if row["status"] in FINAL:
        return _of_file(parts, project_id, row, kind)
    with contextlib.ExitStack() as opened:
        file = opened.enter_context(tempfile.TemporaryFile())
        rows: CommittedRows | ObjectNotFoundError
        try:
            rows = _committed(parts, batch_id, kind, file)
        except ObjectNotFoundError as error:
            rows = error
        # Parts are deleted only after a batch has ended: while it is open, none of them is missing here.
        row = batch_row(parts, project_id, batch_id)
        if row["status"] not in FINAL:
            if isinstance(rows, ObjectNotFoundError):
                raise rows
            chunks = _closing(opened.pop_all(), rows.chunks)
            return _Results(lines=rows.count, size_bytes=rows.size_bytes, chunks=chunks, is_complete=False)
    return _of_file(parts, project_id, row, kind)


def _committed(parts: Parts, batch_id: str, kind: ResultKind, file: BinaryIO) -> CommittedRows:
    try:
        return committed_rows(parts.store, batch_id=batch_id, outcome=_OUTCOMES[kind], file=file)
    except AssemblyError as error:
        _log.error("part damaged", batch_id=batch_id, error=str(error))
        raise ApiError(
            f"A part of the results of '{batch_id}' is damaged. Wait for the batch to end: its files leave out nothing "
            "without saying so."
        ) from error


def _closing(opened: contextlib.ExitStack, chunks: Iterator[bytes]) -> Iterator[bytes]:
    with opened:
        yield from chunks


def _of_file(parts: Parts, project_id: str, row: Mapping[str, Any], kind: ResultKind) -> _Results:
    """The file of a batch that has ended; a file that was not written has no lines."""
    file_id = row[f"{kind}_file_id"]
    if file_id is None:
        return _Results(lines=0, size_bytes=0, chunks=iter(()), is_complete=True)
    with parts.pool.connection() as connection:
        file = connection.execute(query("result_file"), {"id": file_id, "project_id": project_id}).fetchone()
    gone = NotFoundError(
        f"The {kind} file '{file_id}' of the batch was deleted or has expired. Its content cannot be had any more.",
        param="batch_id",
    )
    if file is None:
        raise gone
    chunks = resumable(parts.store, file_key(file_id))
    try:
        first = next(chunks, b"")
    except ObjectNotFoundError:
        raise gone from None
    return _Results(
        lines=row[_OUTCOMES[kind]],
        size_bytes=file["size_bytes"],
        chunks=itertools.chain((first,), chunks),
        is_complete=True,
    )
