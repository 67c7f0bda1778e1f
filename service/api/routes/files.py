"""``/v1/files``: uploads, listings, downloads and deletion of files."""

import contextlib
import itertools
import re
import secrets
import time
from collections.abc import Iterator
from datetime import UTC, datetime
from typing import Annotated, Final, Literal
from urllib.parse import quote

import psycopg
import structlog
from fastapi import APIRouter, Path, Query
from fastapi.responses import StreamingResponse

from ray_job.contract.object_keys import file_key
from service.api.dependencies import BackendsDependency, ReadAccess, SubmitAccess
from service.api.openapi import INVALID_CURSOR, INVALID_ID, NO_ROOM, TOO_MANY_WRONG_KEYS, WITH_KEY, described, link
from service.api.routes.uploads import UPLOAD_BODY, UploadDependency
from service.api.schemas import NEWEST, DeletedFile, FileObject, Page, Text
from service.audit.log import Actor
from service.backends import Backends
from service.db import query
from service.db.rows import FileRow, fetch_all, fetch_one, fetch_optional, fetch_value
from service.errors import NotFoundError, ObjectNotFoundError, ObjectStoreError, QuotaError, unknown_cursor
from service.ports import ObjectStore
from service.projects import Project
from service.quotas import ProjectSettings, upload_refusal
from service.receipts import remove_file

_log = structlog.get_logger(__name__)

router = APIRouter(prefix="/v1/files", tags=["Files"], responses=WITH_KEY)

_CHUNK_BYTES: Final = 1 << 20
# As at OpenAI.
_BATCH_FILE_EXPIRES_AFTER_S: Final = 30 * 24 * 3600
# Pauses before the second and the third attempt. They cover a lost connection, not a restart of the store.
_PAUSES_S: Final = (0.05, 0.5)
_NO_FILE: Final = "The project has no such file, or it was deleted or has expired."

FileId = Annotated[Text, Path(description="The `id` of a file.")]


def resumable(store: ObjectStore, key: str) -> Iterator[bytes]:
    """Stream an object. If a read breaks, resume it after the last byte received.

    Raises:
        ObjectNotFoundError: the object does not exist, or no longer does.
        ObjectStoreError: the store failed three times in a row without returning a byte.
    """
    position, failures = 0, 0
    while True:
        try:
            for chunk in store.read(key, start=position):
                position += len(chunk)
                failures = 0
                yield chunk
        except ObjectNotFoundError:
            raise
        except ObjectStoreError as error:
            failures += 1
            if failures > len(_PAUSES_S):
                raise
            _log.warning("download resumed", error=str(error), at_byte=position)
            time.sleep(_PAUSES_S[failures - 1])
        else:
            return


def find_file(backends: Backends, project: Project, file_id: str, *, reader: Actor | None = None) -> FileRow:
    """Return a file of a project.

    Args:
        backends: the database.
        project: the project of the API key.
        file_id: the id that the client sent.
        reader: the actor that gets the content, which is recorded in the audit log; None for the metadata alone.

    Raises:
        NotFoundError: the project has no such file.
    """
    parameters = {"id": file_id, "project_id": project.id, **(reader.values() if reader else {})}
    with backends.pool.connection() as connection:
        row = fetch_optional(connection, FileRow, "read_file" if reader else "file_by_id", parameters)
    if row is None:
        raise NotFoundError(f"No such File object: {file_id}", param="id")
    return row


@router.post(
    "",
    operation_id="createFile",
    summary="Upload a file",
    description="Upload a file as a multipart form. Files with purpose `batch` are the input of batches, those with "
    "purpose `vision` images that their lines name.",
    responses=described(
        {
            400: "The form or a field is invalid, a batch file is not JSON Lines, or a vision file no image "
            "(`invalid_file_format`).",
            413: "The file is too large.",
            429: f"The project has no room for that many bytes (`insufficient_quota`). {NO_ROOM} {TOO_MANY_WRONG_KEYS}",
        },
        links={
            "retrieve": link("retrieveFile", "file_id"),
            "content": link("retrieveFileContent", "file_id"),
            "delete": link("deleteFile", "file_id"),
            "batch": {
                "operationId": "createBatch",
                "requestBody": {
                    "input_file_id": "$response.body#/id",
                    "endpoint": "/v1/chat/completions",
                    "completion_window": "24h",
                },
            },
        },
    ),
    openapi_extra={"requestBody": UPLOAD_BODY},
)
def create_file(backends: BackendsDependency, access: SubmitAccess, upload: UploadDependency) -> FileObject:
    """Store an upload: the object first, then its row, so that every listed file can be read.

    The client chooses how long the file is kept, at most the retention. By default it is the retention, for a batch
    file at most 30 days.

    Raises:
        QuotaError: the project's limit leaves no room for the file.
    """
    started_at = datetime.now(UTC)
    file_id, project_id = f"file-{secrets.token_hex(16)}", access.project.id
    line_count = 0

    def counted_chunks() -> Iterator[bytes]:
        nonlocal line_count
        last = b"\n"
        while chunk := upload.file.file.read(_CHUNK_BYTES):
            line_count += chunk.count(b"\n")
            last = chunk[-1:]
            yield chunk
        line_count += last != b"\n"  # a last line without a line end

    stored = backends.store.put(file_key(file_id), counted_chunks())
    try:
        with backends.pool.connection() as connection:
            # The lock serializes the uploads of a project: two cannot both take the last room, and no file becomes
            # visible with a lower seq than one that a paging client has already seen.
            connection.execute(query("lock_project"), {"id": project_id})
            settings = fetch_one(connection, ProjectSettings, "project_settings", {"id": project_id})
            if refusal := upload_refusal(settings, settings.stored_bytes or 0, stored.size_bytes):
                raise refusal
            kept_s = settings.retention_s or backends.retention_s
            if upload.expires_after_s:
                kept_s = min(kept_s, upload.expires_after_s)
            elif upload.purpose == "batch":
                kept_s = min(kept_s, _BATCH_FILE_EXPIRES_AFTER_S)
            parameters = {
                "id": file_id,
                "project_id": project_id,
                "purpose": upload.purpose,
                # Some clients send a whole path.
                "filename": re.split(r"[/\\]", (upload.file.filename or "").replace("\0", ""))[-1] or "upload",
                "size_bytes": stored.size_bytes,
                "sha256": stored.sha256,
                "line_count": line_count,
                "expires_after_s": kept_s,
                **access.actor.values(),
            }
            row = fetch_one(connection, FileRow, "insert_file", parameters)
    except (psycopg.Error, QuotaError, LookupError):
        # The project may have been erased, or the connection may have broken after the commit. If this query fails
        # too, the object must stay.
        with backends.pool.connection() as connection:
            committed = fetch_optional(connection, FileRow, "inserted_file", {"id": file_id})
        if committed is None:
            # No row will ever name the object. The first error is the one to report.
            with contextlib.suppress(ObjectStoreError):
                backends.store.delete(file_key(file_id))
            raise
        row = committed
    backends.traces.root(
        file_id,
        "upload",
        started_at,
        {
            "cloister.file.id": file_id,
            "cloister.project.id": project_id,
            "cloister.file.bytes": stored.size_bytes,
            "cloister.lines": line_count,
        },
    )
    return FileObject.from_row(row)


@router.get(
    "",
    operation_id="listFiles",
    summary="List files",
    description="List the files of the project by creation.",
    responses=described({400: INVALID_CURSOR}),
)
def list_files(
    *,
    backends: BackendsDependency,
    access: ReadAccess,
    purpose: Annotated[
        Text | None, Query(description="Only files with this purpose; output and error files have `batch_output`.")
    ] = None,
    limit: Annotated[int, Query(ge=1, le=10_000, description="The most objects to return.")] = 10_000,
    order: Annotated[
        Literal["asc", "desc"], Query(description="By creation: `desc` returns the newest first.")
    ] = "desc",
    after: Annotated[Text | None, Query(description="The `id` of the last object of the previous page.")] = None,
) -> Page[FileObject]:
    """List files by creation. The cursor is the order of creation, so it separates files of the same second.

    Raises:
        InvalidRequestError: ``after`` is not a file of this project.
    """
    project_id = access.project.id
    with backends.pool.connection() as connection:
        cursor: int | None = 0 if order == "asc" else NEWEST
        if after:
            cursor = fetch_value(connection, "file_cursor", {"id": after, "project_id": project_id})
            if cursor is None:
                raise unknown_cursor("file", after)
        connection.execute(query("read_in_index_order"))
        rows = fetch_all(
            connection,
            FileRow,
            f"list_files_{order}",
            {"project_id": project_id, "purpose": purpose, "cursor": cursor, "newest": NEWEST, "limit": limit + 1},
        )
    return Page[FileObject].of([FileObject.from_row(row) for row in rows], limit=limit)


@router.get(
    "/{file_id}",
    operation_id="retrieveFile",
    summary="Retrieve a file",
    description="Return the metadata of one file.",
    responses=described({400: INVALID_ID, 404: _NO_FILE}),
)
def retrieve_file(backends: BackendsDependency, access: ReadAccess, file_id: FileId) -> FileObject:
    """Return the metadata of one file."""
    return FileObject.from_row(find_file(backends, access.project, file_id))


@router.get(
    "/{file_id}/content",
    operation_id="retrieveFileContent",
    summary="Download a file",
    description="Stream the content of one file.",
    response_class=StreamingResponse,
    responses=described(
        {400: INVALID_ID, 404: _NO_FILE},
        description="The content, byte for byte.",
        content={"application/octet-stream": {}},
        headers={
            "content-disposition": {
                "description": "The name of the file (RFC 6266).",
                "required": True,
                "schema": {"type": "string"},
            }
        },
    ),
)
def retrieve_file_content(backends: BackendsDependency, access: ReadAccess, file_id: FileId) -> StreamingResponse:
    """Stream the content of one file. The audit log has one entry for each request, made before the first byte."""
    row = find_file(backends, access.project, file_id, reader=access.actor)
    chunks = resumable(backends.store, file_key(file_id))
    # The first chunk is read before the answer starts, so that an unreachable store is reported as an error.
    try:
        first = next(chunks, b"")
    except ObjectNotFoundError:
        find_file(backends, access.project, file_id)  # not found if the file was deleted a moment ago
        raise
    return StreamingResponse(
        itertools.chain((first,), chunks),
        media_type="application/octet-stream",
        headers={
            "content-length": str(row.size_bytes),
            "content-disposition": f"attachment; filename*=UTF-8''{quote(row.filename, safe='')}",
        },
    )


@router.delete(
    "/{file_id}",
    operation_id="deleteFile",
    summary="Delete a file",
    description="Delete one file. It disappears at once. Its content is deleted at once too, or, while a batch still "
    "reads it or the object store is unreachable, as soon as possible.",
    responses=described({400: INVALID_ID, 404: _NO_FILE}),
)
def delete_file(backends: BackendsDependency, access: SubmitAccess, file_id: FileId) -> DeletedFile:
    """Hide a file and delete its content.

    The reconciler deletes the content later if a batch still reads it or the store is unreachable.
    """
    parameters = {"id": file_id, "project_id": access.project.id, **access.actor.values()}
    with backends.pool.connection() as connection:
        if fetch_value(connection, "lock_file_to_delete", parameters) is None:
            raise NotFoundError(f"No such File object: {file_id}", param="id")
        is_in_use = fetch_value(connection, "file_is_in_use", parameters)
        connection.execute(query("hide_file"), parameters)
    if not is_in_use:
        try:
            versions = backends.store.delete(file_key(file_id))
            with backends.pool.connection() as connection:
                remove_file(
                    connection,
                    backends.receipt_key,
                    file_id=file_id,
                    actor=access.actor,
                    reason="api",
                    versions=versions,
                )
        except (ObjectStoreError, psycopg.Error) as error:
            _log.warning("deletion left to the reconciler", file_id=file_id, error=type(error).__name__)
    return DeletedFile(id=file_id)
