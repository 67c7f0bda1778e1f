"""The routes of ``/v1/batches``."""

from collections.abc import Mapping
from typing import Annotated, Any, Final

import psycopg
from fastapi import APIRouter, Query
from psycopg.rows import DictRow
from psycopg.types.json import Jsonb

from service.api.authentication import ReadAccess, SubmitAccess
from service.api.batch_requests import Creation, CreationDependency
from service.api.extension import retrieved_batch
from service.api.parts import Parts, PartsDependency
from service.api.schemas import BatchObject, Page, RetrievedBatch, Text, batch_object, page
from service.db import query
from service.errors import ApiError, ConflictError, InvalidRequestError, NotFoundError
from service.ids import new_batch_id
from service.projects import Project
from service.quotas import Limits, Use, batch_refusal, estimated_tokens, limits_of

router = APIRouter(prefix="/v1/batches")

# Above every seq: where a listing of the newest first starts.
_NEWEST: Final = (1 << 63) - 1
_COMPLETION_WINDOWS_S: Final = {"24h": 24 * 3600}
# The official client waits 10 minutes for an answer and tries three times: its last attempt may come 20 minutes
# after the first.
_RETRY_WINDOW_S: Final = 25 * 60


def _insert_or_find(parts: Parts, project: Project, creation: Creation) -> dict[str, Any]:
    """Finds the batch that the same request has made, or makes it if the project's limits leave room for it.

    All in one transaction that holds the project's row: two creations at once cannot both take the last room, and a
    retry sees the batch of the first attempt.

    Raises:
        InvalidRequestError: the idempotency key is that of another request.
        RateLimitError: the project's limits leave no room now.
        QuotaError: they never will.
    """
    batch = creation.batch
    values = {
        "id": new_batch_id(),
        "project_id": project.id,
        "endpoint": batch.endpoint,
        "input_file_id": batch.input_file_id,
        "completion_window": batch.completion_window,
        "completion_window_s": _COMPLETION_WINDOWS_S[batch.completion_window],
        "metadata": None if batch.metadata is None else Jsonb(batch.metadata),
        "output_expires_after_s": batch.output_expires_after.seconds if batch.output_expires_after else None,
        "request_sha256": creation.request_sha256,
        "idempotency_key": creation.idempotency_key,
        "window_s": _RETRY_WINDOW_S,
    }
    refusal: ApiError | None = None
    with parts.pool.connection() as connection:
        settings = connection.execute(query("lock_project"), {"id": project.id}).fetchone()
        assert settings is not None  # noqa: S101 - projects are never deleted
        row = _earlier(connection, creation, values)
        if row is None:
            values |= _enqueued(connection, values)
            refusal = _refusal(connection, limits_of(settings), values)
            name = "note_refused_creation" if refusal else "insert_batch"
            cursor = connection.execute(query(name), values)
            row = None if refusal else cursor.fetchone()
    if refusal:
        raise refusal
    assert row is not None  # noqa: S101 - INSERT … RETURNING gives a row
    return row


def _earlier(
    connection: psycopg.Connection[DictRow], creation: Creation, values: Mapping[str, Any]
) -> dict[str, Any] | None:
    if creation.idempotency_key is None:
        if not creation.is_retry:
            return None
        return connection.execute(query("batch_by_request"), values).fetchone()
    row = connection.execute(query("batch_by_idempotency_key"), values).fetchone()
    if row is not None and row["request_sha256"] != creation.request_sha256:
        raise InvalidRequestError(
            f"The 'Idempotency-Key' was used before, for another request: it made {row['id']}. Send that request again "
            "unchanged to get its batch, or use a new key.",
            param="Idempotency-Key",
            code="idempotency_key_reused",
        )
    return row


def _enqueued(connection: psycopg.Connection[DictRow], values: Mapping[str, Any]) -> dict[str, int]:
    """What the new batch takes of the project's limits; nothing if there is no such file: the batch will fail."""
    file = connection.execute(query("input_of_new_batch"), values).fetchone()
    if file is None:
        return {"enqueued_requests": 0, "enqueued_tokens": 0}
    return {"enqueued_requests": file["line_count"], "enqueued_tokens": estimated_tokens(file["size_bytes"])}


def _refusal(connection: psycopg.Connection[DictRow], limits: Limits, values: Mapping[str, Any]) -> ApiError | None:
    if limits == Limits():
        return None
    open_batches = connection.execute(query("open_batches"), values).fetchone()
    assert open_batches is not None  # noqa: S101 - an aggregate gives a row
    soonest_end_s = open_batches.pop("soonest_end_s")
    return batch_refusal(
        limits,
        Use(**open_batches),
        requests=values["enqueued_requests"],
        tokens=values["enqueued_tokens"],
        soonest_end_s=soonest_end_s,
    )


def _batch_row(parts: Parts, project: Project, batch_id: str) -> dict[str, Any]:
    with parts.pool.connection() as connection:
        row = connection.execute(query("batch_by_id"), {"id": batch_id, "project_id": project.id}).fetchone()
    if row is None:
        raise NotFoundError(f"No batch found with id '{batch_id}'.", param="batch_id")
    return row


@router.post("")
def create_batch(parts: PartsDependency, access: SubmitAccess, creation: CreationDependency) -> BatchObject:
    """Creates a batch, or finds the one that an earlier attempt of the same request created."""
    return batch_object(_insert_or_find(parts, access.project, creation))


@router.get("")
def list_batches(
    parts: PartsDependency,
    access: ReadAccess,
    after: Annotated[Text | None, Query()] = None,
    limit: Annotated[int, Query(ge=0, le=100)] = 20,
) -> Page[BatchObject]:
    """Lists batches, the newest first.

    Raises:
        InvalidRequestError: ``after`` names no batch of this project.
    """
    with parts.pool.connection() as connection:
        cursor = _NEWEST
        if after:
            row = connection.execute(query("batch_cursor"), {"id": after, "project_id": access.project.id}).fetchone()
            if row is None:
                raise InvalidRequestError(
                    f"Invalid 'after': there is no batch {after!r}. Give the id of the last batch of the page before.",
                    param="after",
                    code="invalid_value",
                )
            cursor = row["seq"]
        connection.execute(query("read_in_index_order"))
        rows = connection.execute(
            query("list_batches"), {"project_id": access.project.id, "cursor": cursor, "limit": limit + 1}
        ).fetchall()
    return Page[BatchObject](**page([batch_object(row) for row in rows], limit=limit))


@router.get("/{batch_id}")
def retrieve_batch(parts: PartsDependency, access: ReadAccess, batch_id: Text) -> RetrievedBatch:
    """Tells about one batch, with ``x_cloister`` beside OpenAI's fields."""
    return retrieved_batch(parts, access.project.id, batch_id)


@router.post("/{batch_id}/cancel")
def cancel_batch(parts: PartsDependency, access: SubmitAccess, batch_id: Text) -> BatchObject:
    """Starts to cancel a batch; a batch that is being cancelled or is cancelled stays as it is.

    Raises:
        ConflictError: the batch has ended in another way.
    """
    with parts.pool.connection() as connection:
        row = connection.execute(query("cancel_batch"), {"id": batch_id, "project_id": access.project.id}).fetchone()
    if row is None:
        row = _batch_row(parts, access.project, batch_id)
        if row["status"] not in {"cancelling", "cancelled"}:
            raise ConflictError(f"Cannot cancel a batch with status '{row['status']}'.")
    return batch_object(row)
