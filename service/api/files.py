"""The routes of ``/v1/files``."""

import contextlib
import functools
import itertools
from typing import Annotated, Any, Literal
from urllib.parse import quote

import psycopg
from fastapi import APIRouter, Query
from fastapi.responses import StreamingResponse

from ray_job.contract.object_keys import file_key
from service.api.authentication import ReadAccess, SubmitAccess
from service.api.parts import Parts, PartsDependency
from service.api.schemas import DeletedFile, FileObject, Page, Text, file_object, page
from service.api.uploads import Upload, UploadDependency
from service.api_keys import Project
from service.db import query
from service.errors import InvalidRequestError, NotFoundError, ObjectStoreError
from service.ids import new_file_id

router = APIRouter(prefix="/v1/files")

_CHUNK_BYTES = 1 << 20


def _no_such_file(file_id: str) -> NotFoundError:
    return NotFoundError(f"No such File object: {file_id}", param="id")


def _file_row(parts: Parts, project: Project, file_id: str) -> dict[str, Any]:
    with parts.pool.connection() as connection:
        row = connection.execute(query("file_by_id"), {"id": file_id, "project_id": project.id}).fetchone()
    if row is None:
        raise _no_such_file(file_id)
    return row


def _insert(parts: Parts, project: Project, upload: Upload, file_id: str) -> dict[str, Any]:
    """Writes the object first: a file that is listed can be read."""
    key = file_key(file_id)
    stored = parts.store.put(key, iter(functools.partial(upload.file.read, _CHUNK_BYTES), b""))
    values = {
        "id": file_id,
        "project_id": project.id,
        "purpose": upload.purpose,
        "filename": upload.filename,
        "size_bytes": stored.size_bytes,
        "sha256": stored.sha256,
        "expires_after_s": upload.expires_after_s,
    }
    try:
        with parts.pool.connection() as connection:
            row = connection.execute(query("insert_file"), values).fetchone()
    except psycopg.Error:
        # Nothing would ever name the object; the database's error is the one to tell.
        with contextlib.suppress(ObjectStoreError):
            parts.store.delete(key)
        raise
    assert row is not None  # noqa: S101 - INSERT … RETURNING gives a row
    return row


@router.post("")
def create_file(parts: PartsDependency, access: SubmitAccess, upload: UploadDependency) -> FileObject:
    """Takes an upload."""
    return file_object(_insert(parts, access.project, upload, new_file_id()))


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
        cursor = None
        if after:
            row = connection.execute(query("file_cursor"), {"id": after, "project_id": access.project.id}).fetchone()
            if row is None:
                raise InvalidRequestError(
                    f"Invalid 'after': there is no file {after!r}. Give the id of the last file of the page before.",
                    param="after",
                    code="invalid_value",
                )
            cursor = row["seq"]
        rows = connection.execute(
            query(f"list_files_{order}"),
            {"project_id": access.project.id, "purpose": purpose, "cursor": cursor, "limit": limit + 1},
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
    chunks = parts.store.read(file_key(file_id))
    # The first chunk is read before the answer starts, so that a store that is down is told as an error.
    first = next(chunks, b"")
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
    """Deletes a file and its content. Where the store refuses, nothing has changed and the client may try again."""
    with parts.pool.connection() as connection:
        row = connection.execute(query("delete_file"), {"id": file_id, "project_id": access.project.id}).fetchone()
        if row is None:
            raise _no_such_file(file_id)
        parts.store.delete(file_key(file_id))
    return DeletedFile(id=file_id)
