"""``/v1/batches``: creation, listing, retrieval, cancellation and pauses of batches."""

import hashlib
import json
import re
import secrets
from collections.abc import Mapping
from datetime import UTC, datetime
from typing import Annotated, Any, Final, Literal

from fastapi import APIRouter, Depends, Header, Path, Query, Request
from psycopg.types.json import Jsonb
from pydantic import ValidationError

from service.api.dependencies import BackendsDependency, QueuePositionsDependency, ReadAccess, SubmitAccess
from service.api.errors import invalid_request
from service.api.extension import RUNNABLE, Extension, RetrievedBatch
from service.api.openapi import INVALID_CURSOR, INVALID_ID, TOO_MANY_WRONG_KEYS, WITH_KEY, described, link
from service.api.queue_positions import QueuePositions
from service.api.schemas import NEWEST, BatchObject, BatchRequest, Page, Text
from service.api_keys import Access
from service.backends import Backends
from service.db import query
from service.db.rows import (
    BatchRow,
    Connection,
    FileRow,
    RetrievedBatchRow,
    fetch_all,
    fetch_one,
    fetch_optional,
    fetch_value,
)
from service.errors import InvalidRequestError, NotFoundError, unknown_cursor
from service.projects import Project
from service.quotas import ProjectSettings, Use, batch_refusal, estimated_tokens
from service.transitions import BatchStatus

router = APIRouter(prefix="/v1/batches", tags=["Batches"], responses=WITH_KEY)

_MAX_BODY_BYTES: Final = 1 << 20
_IDEMPOTENCY_KEY: Final = re.compile(r"[!-~][ -~]{0,254}")
_COMPLETION_WINDOWS_S: Final = {"24h": 24 * 3600}
# The official client waits 10 minutes for an answer and tries three times, so its last attempt can come 20 minutes
# after the first.
_RETRY_WINDOW_S: Final = 25 * 60
NO_BATCH: Final = "The project has no such batch."
_LINKS: Final = {
    "retrieve": link("retrieveBatch", "batch_id"),
    "cancel": link("cancelBatch", "batch_id"),
    "pause": link("pauseBatch", "batch_id"),
    "results": link("retrieveBatchResults", "batch_id"),
    "events": link("watchBatch", "batch_id"),
}

BatchId = Annotated[Text, Path(description="The `id` of a batch.")]
IdempotencyKey = Annotated[
    str | None,
    Header(
        alias="Idempotency-Key",
        description="A value that the client chooses, 1 to 255 printable ASCII characters. Requests with the same "
        "key create one batch.",
        examples=["5f7c1c1e-8f0a-4a83-9d0e-0c6f7b0a3d55"],
    ),
]
RetryCount = Annotated[
    str | None,
    Header(
        alias="X-Stainless-Retry-Count",
        description="How often the client has sent this request before. Above 0, the answer is the batch that the "
        "same request created within 25 minutes, if any. The official client sends this header.",
        examples=["0"],
    ),
]


def batch_not_found(batch_id: str) -> NotFoundError:
    """Return the error for a batch that does not exist or belongs to another project."""
    return NotFoundError(f"No batch found with id '{batch_id}'.", param="batch_id")


def find_batch(backends: Backends, project: Project, batch_id: str) -> RetrievedBatchRow:
    """Return a batch of a project, with everything that its extension needs, in one round trip.

    Raises:
        NotFoundError: the project has no such batch.
    """
    parameters = {"id": batch_id, "project_id": project.id}
    with backends.pool.connection() as connection:
        row = fetch_optional(connection, RetrievedBatchRow, "batch_with_extension", parameters)
    if row is None:
        raise batch_not_found(batch_id)
    return row


def request_sha256(batch: BatchRequest, idempotency_key: str | None) -> bytes:
    """Return a digest that two requests share only if they ask for the same batch under the same key."""
    # An omitted field and a null are the same request.
    canonical = json.dumps([batch.model_dump(mode="json", exclude_none=True), idempotency_key or ""], sort_keys=True)
    return hashlib.sha256(canonical.encode()).digest()


async def parsed_request(request: Request, _access: SubmitAccess) -> BatchRequest:
    """Parse the body after authentication. Like OpenAI, accept any content type."""
    body = bytearray()
    async for chunk in request.stream():
        body += chunk
        if len(body) > _MAX_BODY_BYTES:
            raise InvalidRequestError("The request body is larger than 1 MB.", status_code=413)
    try:
        return BatchRequest.model_validate_json(bytes(body))
    except ValidationError as error:
        raise invalid_request(error.errors()[0]) from None


def _earlier_batch(connection: Connection, parameters: Mapping[str, Any], *, may_be_retry: bool) -> BatchRow | None:
    """Return the batch that an earlier attempt of the same request created.

    Raises:
        InvalidRequestError: the idempotency key belongs to another request.
    """
    if parameters["idempotency_key"] is None:
        return fetch_optional(connection, BatchRow, "batch_by_request", parameters) if may_be_retry else None
    row = fetch_optional(connection, BatchRow, "batch_by_idempotency_key", parameters)
    if row is not None and row.request_sha256 != parameters["request_sha256"]:
        raise InvalidRequestError(
            f"The 'Idempotency-Key' was used before for another request, which created {row.id}. Send that request "
            "again unchanged to get its batch, or use a new key.",
            param="Idempotency-Key",
            code="idempotency_key_reused",
        )
    return row


@router.post(
    "",
    operation_id="createBatch",
    summary="Create a batch",
    description="Create a batch, or return the one that an earlier attempt of the same request created.",
    responses=described(
        {
            400: "The body is not a JSON object, or a field is invalid. `idempotency_key_reused`: the key was used for "
            "another request before.",
            413: "The body is larger than 1 MB.",
            429: "A limit of the project is reached (`rate_limit_error`: try again after `retry-after` seconds), or "
            f"the batch is larger than the limit allows (`insufficient_quota`). {TOO_MANY_WRONG_KEYS}",
        },
        links=_LINKS,
    ),
    openapi_extra={
        "requestBody": {
            "required": True,
            "content": {
                "application/json": {
                    "schema": {"$ref": "#/components/schemas/BatchRequest"},
                    "example": {
                        "input_file_id": "file-0f3c2a",
                        "endpoint": "/v1/chat/completions",
                        "completion_window": "24h",
                        "metadata": {"team": "search"},
                    },
                }
            },
        }
    },
)
def create_batch(
    backends: BackendsDependency,
    access: SubmitAccess,
    batch: Annotated[BatchRequest, Depends(parsed_request)],
    idempotency_key: IdempotencyKey = None,
    retry_count: RetryCount = None,
) -> BatchObject:
    """Create a batch, or return the one that an earlier attempt of the same request created.

    Raises:
        InvalidRequestError: the idempotency key is invalid or belongs to another request.
        RateLimitError: the project's limits leave no room now.
        QuotaError: the project's limits can never leave room for this batch.
    """
    if idempotency_key is not None and not _IDEMPOTENCY_KEY.fullmatch(idempotency_key):
        raise InvalidRequestError(
            "Invalid 'Idempotency-Key': expected 1 to 255 printable ASCII characters. Use a new random value, e.g. a "
            "UUID, for each batch.",
            param="Idempotency-Key",
            code="invalid_value",
        )
    # int() refuses numbers with thousands of digits.
    may_be_retry = retry_count is not None and retry_count.isdecimal() and bool(retry_count.strip("0"))
    parameters: dict[str, Any] = {
        # In lower-case hexadecimal, so that names in Kubernetes and object keys can hold it.
        "id": f"batch_{secrets.token_hex(16)}",
        "project_id": access.project.id,
        "endpoint": batch.endpoint,
        "input_file_id": batch.input_file_id,
        "completion_window": batch.completion_window,
        "completion_window_s": _COMPLETION_WINDOWS_S[batch.completion_window],
        "metadata": None if batch.metadata is None else Jsonb(batch.metadata),
        "priority": batch.x_cloister.priority if batch.x_cloister else 0,
        "output_expires_after_s": batch.output_expires_after.seconds if batch.output_expires_after else None,
        "request_sha256": request_sha256(batch, idempotency_key),
        "idempotency_key": idempotency_key,
        "window_s": _RETRY_WINDOW_S,
        **access.actor.values(),
    }
    started_at = datetime.now(UTC)
    with backends.pool.connection() as connection:
        # The lock on the project covers the whole transaction: concurrent creations cannot both take the last room,
        # and a retry sees the batch of the first attempt.
        limits = fetch_one(connection, ProjectSettings, "lock_project", {"id": access.project.id})
        row = _earlier_batch(connection, parameters, may_be_retry=may_be_retry)
        if row is not None:
            return BatchObject.from_row(row)
        # A batch whose input file does not exist takes nothing of the limits: it will fail.
        file = fetch_optional(connection, FileRow, "input_of_new_batch", parameters)
        requests, tokens = (file.line_count, estimated_tokens(file.size_bytes)) if file else (0, 0)
        parameters |= {"enqueued_requests": requests, "enqueued_tokens": tokens}
        # Only the id of a file that exists: another one may be any text.
        parameters |= {"audited_file_id": file.id if file else None}
        refusal = None
        if limits.limits_batches:
            use = fetch_one(connection, Use, "open_batches", parameters)
            refusal = batch_refusal(limits, use, requests=requests, tokens=tokens)
        if refusal is None:
            created = fetch_one(connection, BatchRow, "insert_batch", parameters)
        else:
            connection.execute(query("note_refused_creation"), parameters)
    if refusal is not None:
        # Raised after the commit, which must keep the note.
        raise refusal
    file_id, size_bytes = (file.id, file.size_bytes) if file else ("", 0)
    backends.traces.child(
        created.id,
        "create",
        started_at,
        {"cloister.project.id": access.project.id, "cloister.file.id": file_id, "cloister.file.bytes": size_bytes},
        link=file_id,
    )
    return BatchObject.from_row(created)


@router.get(
    "",
    operation_id="listBatches",
    summary="List batches",
    description="List the batches of the project, newest first.",
    responses=described({400: INVALID_CURSOR}),
)
def list_batches(
    backends: BackendsDependency,
    access: ReadAccess,
    after: Annotated[Text | None, Query(description="The `id` of the last object of the previous page.")] = None,
    limit: Annotated[int, Query(ge=0, le=100, description="The most objects to return.")] = 20,
) -> Page[BatchObject]:
    """List the batches of the project, newest first.

    Raises:
        InvalidRequestError: ``after`` is not a batch of this project.
    """
    project_id = access.project.id
    with backends.pool.connection() as connection:
        cursor: int | None = NEWEST
        if after:
            cursor = fetch_value(connection, "batch_cursor", {"id": after, "project_id": project_id})
            if cursor is None:
                raise unknown_cursor("batch", after)
        connection.execute(query("read_in_index_order"))
        parameters = {"project_id": project_id, "cursor": cursor, "limit": limit + 1}
        rows = fetch_all(connection, BatchRow, "list_batches", parameters)
    return Page[BatchObject].of([BatchObject.from_row(row) for row in rows], limit=limit)


@router.get(
    "/{batch_id}",
    operation_id="retrieveBatch",
    summary="Retrieve a batch",
    description="Return one batch, with `x_cloister` beside OpenAI's fields.",
    responses=described({400: INVALID_ID, 404: NO_BATCH}, links=_LINKS),
)
def retrieve_batch(
    backends: BackendsDependency, positions: QueuePositionsDependency, access: ReadAccess, batch_id: BatchId
) -> RetrievedBatch:
    """Return one batch, with ``x_cloister`` beside OpenAI's fields."""
    return _retrieved(find_batch(backends, access.project, batch_id), positions)


@router.post(
    "/{batch_id}/cancel",
    operation_id="cancelBatch",
    summary="Cancel a batch",
    description="Start to cancel a batch. A batch that is being cancelled or is cancelled stays as it is.",
    responses=described(
        {400: INVALID_ID, 404: NO_BATCH, 409: "The batch is completed, failed or expired."},
        links={"retrieve": link("retrieveBatch", "batch_id")},
    ),
)
def cancel_batch(backends: BackendsDependency, access: SubmitAccess, batch_id: BatchId) -> BatchObject:
    """Start to cancel a batch. A batch that is being cancelled or is cancelled stays as it is.

    Raises:
        InvalidRequestError: status 409, the batch ended in another state.
    """
    parameters = {"id": batch_id, "project_id": access.project.id, **access.actor.values()}
    with backends.pool.connection() as connection:
        row = fetch_optional(connection, BatchRow, "cancel_batch", parameters)
        if row is None:
            row = fetch_optional(connection, BatchRow, "batch_by_id", parameters)
    if row is None:
        raise batch_not_found(batch_id)
    if row.status not in {BatchStatus.CANCELLING, BatchStatus.CANCELLED}:
        raise InvalidRequestError(
            f"Cannot cancel a batch with status '{row.status}'.",
            status_code=409,
            # The official client retries 409 unless this header forbids it.
            headers={"x-should-retry": "false"},
        )
    return BatchObject.from_row(row)


@router.post(
    "/{batch_id}/pause",
    operation_id="pauseBatch",
    summary="Pause a batch",
    description="Stop the job of a batch and launch none until the batch is resumed. Requests with an answer keep it. "
    "The deadline stays. A paused batch stays as it is.",
    responses=described(
        {400: INVALID_ID, 404: NO_BATCH, 409: "The batch is finalizing, being cancelled or at its end."},
        links={"resume": link("resumeBatch", "batch_id"), "retrieve": link("retrieveBatch", "batch_id")},
    ),
)
def pause_batch(
    backends: BackendsDependency, positions: QueuePositionsDependency, access: SubmitAccess, batch_id: BatchId
) -> RetrievedBatch:
    """Stop the job of a batch and launch none until the batch is resumed.

    Raises:
        InvalidRequestError: status 409, no line is left to run.
    """
    return _change_pause(backends, positions, access, batch_id, "pause")


@router.post(
    "/{batch_id}/resume",
    operation_id="resumeBatch",
    summary="Resume a batch",
    description="Let a paused batch go on with the requests that have no answer. Any other batch stays as it is.",
    responses=described(
        {400: INVALID_ID, 404: NO_BATCH, 409: "The batch is finalizing, being cancelled or at its end."},
        links={"retrieve": link("retrieveBatch", "batch_id")},
    ),
)
def resume_batch(
    backends: BackendsDependency, positions: QueuePositionsDependency, access: SubmitAccess, batch_id: BatchId
) -> RetrievedBatch:
    """Let a paused batch go on with the lines that have no result.

    Raises:
        InvalidRequestError: status 409, no line is left to run.
    """
    return _change_pause(backends, positions, access, batch_id, "resume")


def _change_pause(
    backends: Backends, positions: QueuePositions, access: Access, batch_id: str, change: Literal["pause", "resume"]
) -> RetrievedBatch:
    parameters = {"id": batch_id, "project_id": access.project.id, **access.actor.values()}
    with backends.pool.connection() as connection:
        connection.execute(query(f"{change}_batch"), parameters)
    row = find_batch(backends, access.project, batch_id)
    if row.status not in RUNNABLE:
        raise InvalidRequestError(
            f"Cannot {change} a batch with status '{row.status}'.",
            status_code=409,
            headers={"x-should-retry": "false"},
        )
    return _retrieved(row, positions)


def _retrieved(row: RetrievedBatchRow, positions: QueuePositions) -> RetrievedBatch:
    position = positions.now().get(row.job_id) if row.is_queued and row.job_id else None
    return RetrievedBatch.from_row(row, x_cloister=Extension.from_row(row, queue_position=position))
