"""The routes of ``/v1/files``."""

import contextlib
import itertools
from collections.abc import Iterator
from typing import Annotated, Any, BinaryIO, Final, Literal
from urllib.parse import quote

import psycopg
import structlog
from fastapi import APIRouter, Query
from fastapi.responses import StreamingResponse

from ray_job.contract.object_keys import file_key
from service.api.authentication import ReadAccess, SubmitAccess
from service.api.parts import Parts, PartsDependency
from service.api.schemas import DeletedFile, FileObject, Page, Text, file_object, page
from service.api.streaming import resumable
from service.api.uploads import Upload, UploadDependency, expires_after_s
from service.db import query
from service.errors import InvalidRequestError, NotFoundError, ObjectNotFoundError, ObjectStoreError, QuotaError
from service.ids import new_file_id
from service.projects import Project
from service.quotas import limits_of, upload_refusal

_log = structlog.get_logger(__name__)

router = APIRouter(prefix="/v1/files")

_CHUNK_BYTES: Final = 1 << 20
# Above every seq: where a listing of the newest first starts.
_NEWEST: Final = (1 << 63) - 1


def _no_such_file(file_id: str) -> NotFoundError:
    return NotFoundError(f"No such File object: {file_id}", param="id")


def _file_row(parts: Parts, project: Project, file_id: str) -> dict[str, Any]:
    with parts.pool.connection() as connection:
        row = connection.execute(query("file_by_id"), {"id": file_id, "project_id": project.id}).fetchone()
    if row is None:
        raise _no_such_file(file_id)
    return row


class _Counted:
    """The chunks of a file, and how many lines have gone by; a last one without an end counts too."""

    def __init__(self, file: BinaryIO) -> None:
        self._file = file
        self.lines = 0

    def __iter__(self) -> Iterator[bytes]:
        last = b"\n"
        while chunk := self._file.read(_CHUNK_BYTES):
            self.lines += chunk.count(b"\n")
            last = chunk[-1:]
            yield chunk
        self.lines += last != b"\n"


def _store(parts: Parts, project: Project, upload: Upload, file_id: str) -> dict[str, Any]:
    """Writes the object first: a file that is listed can be read.

    Raises:
        QuotaError: the project's limit leaves no room for it.
    """
    key = file_key(file_id)
    chunks = _Counted(upload.file)
    stored = parts.store.put(key, chunks)
    values = {
        "id": file_id,
        "project_id": project.id,
        "purpose": upload.purpose,
        "filename": upload.filename,
        "size_bytes": stored.size_bytes,
        "sha256": stored.sha256,
        "line_count": chunks.lines,
    }
    try:
        return _insert(parts, project, upload, values)
    except (psycopg.Error, QuotaError):
        if row := _inserted_nevertheless(parts, file_id):
            return row
        # Nothing would ever name the object; the first error is the one to tell.
        with contextlib.suppress(ObjectStoreError):
            parts.store.delete(key)
        raise


def _insert(parts: Parts, project: Project, upload: Upload, values: dict[str, Any]) -> dict[str, Any]:
    with parts.pool.connection() as connection:
        # One upload of a project after the other: two cannot both take the last room, and a client that pages on
        # behind the newest file cannot pass one with a lower seq that is committed only after it looked.
        connection.execute(query("lock_project"), {"id": project.id})
        settings = connection.execute(query("project_settings"), {"id": project.id}).fetchone()
        assert settings is not None  # noqa: S101 - projects are never deleted
        if refusal := upload_refusal(limits_of(settings), settings["stored_bytes"] or 0, values["size_bytes"]):
            raise refusal
        values["expires_after_s"] = expires_after_s(upload, settings["retention_s"] or parts.retention_s)
        row = connection.execute(query("insert_file"), values).fetchone()
    assert row is not None  # noqa: S101 - INSERT … RETURNING gives a row
    return row


def _inserted_nevertheless(parts: Parts, file_id: str) -> dict[str, Any] | None:
    """The row of a file, if the database had committed it when its connection broke.

    Raises:
        psycopg.Error: the database does not say; the object must stay, for the row may be there.
    """
    with parts.pool.connection() as connection:
        return connection.execute(query("inserted_file"), {"id": file_id}).fetchone()


@router.post("")
def create_file(parts: PartsDependency, access: SubmitAccess, upload: UploadDependency) -> FileObject:
    """Takes an upload."""
    return file_object(_store(parts, access.project, upload, new_file_id()))


@router.get("")
def list_files(
    *,
    parts: PartsDependency,
    access: ReadAccess,
    purpose: Annotated[Text | None, Query()] = None,
    limit: Annotated[int, Query(ge=1, le=10_000)] = 10_000,
    order: Annotated[Literal["asc", "desc"], Query()] = "desc",
    after: Annotated[Text | None, Query()] = None,
) -> Page[FileObject]:
    """Lists files by creation. The cursor is the order of creation itself, so files of the same second are told apart.

    Raises:
        InvalidRequestError: ``after`` names no file of this project.
    """
    with parts.pool.connection() as connection:
        cursor = 0 if order == "asc" else _NEWEST
        if after:
            row = connection.execute(query("file_cursor"), {"id": after, "project_id": access.project.id}).fetchone()
            if row is None:
                raise InvalidRequestError(
                    f"Invalid 'after': there is no file {after!r}. Give the id of the last file of the page before.",
                    param="after",
                    code="invalid_value",
                )
            cursor = row["seq"]
        connection.execute(query("read_in_index_order"))
        rows = connection.execute(
            query(f"list_files_{order}"),
            {
                "project_id": access.project.id,
                "purpose": purpose,
                "cursor": cursor,
                "newest": _NEWEST,
                "limit": limit + 1,
            },
        ).fetchall()
    return Page[FileObject](**page([file_object(row) for row in rows], limit=limit))


@router.get("/{file_id}")
def retrieve_file(parts: PartsDependency, access: ReadAccess, file_id: Text) -> FileObject:
    """Tells about one file."""
    return file_object(_file_row(parts, access.project, file_id))


@router.get("/{file_id}/content")
def retrieve_file_content(parts: PartsDependency, access: ReadAccess, file_id: Text) -> StreamingResponse:
    """Streams a file's content."""
    row = _file_row(parts, access.project, file_id)
    chunks = resumable(parts.store, file_key(file_id))
    # The first chunk is read before the answer starts, so that a store that is down is told as an error.
    try:
        first = next(chunks, b"")
    except ObjectNotFoundError:
        _file_row(parts, access.project, file_id)  # not found either if the file was deleted this very moment
        raise
    return StreamingResponse(
        itertools.chain((first,), chunks),
        media_type="application/octet-stream",
        headers={
            "content-length": str(row["size_bytes"]),
            "content-disposition": f"attachment; filename*=UTF-8''{quote(row['filename'], safe='')}",
        },
    )


@router.delete("/{file_id}")
def delete_file(parts: PartsDependency, access: SubmitAccess, file_id: Text) -> DeletedFile:
    """Deletes a file: it cannot be seen from then on.

    Its content goes at once; or, while a batch still reads it or the store refuses, when the reconciler finds that it
    can.
    """
    values = {"id": file_id, "project_id": access.project.id, "actor": access.key_id, "reason": "api"}
    with parts.pool.connection() as connection:
        if connection.execute(query("lock_file_to_delete"), values).fetchone() is None:
            raise _no_such_file(file_id)
        use = connection.execute(query("file_is_in_use"), values).fetchone()
        connection.execute(query("hide_file"), values)
    if use is not None and not use["in_use"]:
        try:
            parts.store.delete(file_key(file_id))
            with parts.pool.connection() as connection:
                connection.execute(query("remove_file"), values)
        except (ObjectStoreError, psycopg.Error) as error:
            _log.warning("deletion left to the reconciler", file_id=file_id, error=type(error).__name__)
    return DeletedFile(id=file_id)
