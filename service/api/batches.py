"""The routes of ``/v1/batches``."""

from typing import Annotated, Any, Final

from fastapi import APIRouter, Query
from psycopg.types.json import Jsonb

from service.api.authentication import ReadAccess, SubmitAccess
from service.api.batch_requests import Creation, CreationDependency
from service.api.parts import Parts, PartsDependency
from service.api.schemas import BatchObject, Page, Text, batch_object, page
from service.api_keys import Project
from service.db import query
from service.errors import ConflictError, InvalidRequestError, NotFoundError
from service.ids import new_batch_id

router = APIRouter(prefix="/v1/batches")

_COMPLETION_WINDOWS_S: Final = {"24h": 24 * 3600}
# The official client waits 10 minutes for an answer and tries three times: its last attempt may come 20 minutes
# after the first.
_RETRY_WINDOW_S: Final = 25 * 60


def _insert_or_find(parts: Parts, project: Project, creation: Creation) -> dict[str, Any]:
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
        "window_s": _RETRY_WINDOW_S,
    }
    with parts.pool.connection() as connection:
        connection.execute(query("lock_batch_request"), values)
        row = None
        if creation.may_be_a_retry:
            row = connection.execute(query("batch_by_request"), values).fetchone()
        if row is None:
            row = connection.execute(query("insert_batch"), values).fetchone()
    assert row is not None  # noqa: S101 - INSERT … RETURNING gives a row
    return row


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
        cursor = None
        if after:
            row = connection.execute(query("batch_cursor"), {"id": after, "project_id": access.project.id}).fetchone()
            if row is None:
                raise InvalidRequestError(
                    f"Invalid 'after': there is no batch {after!r}. Give the id of the last batch of the page before.",
                    param="after",
                    code="invalid_value",
                )
            cursor = row["seq"]
        rows = connection.execute(
            query("list_batches"), {"project_id": access.project.id, "cursor": cursor, "limit": limit + 1}
        ).fetchall()
    return Page[BatchObject](**page([batch_object(row) for row in rows], limit=limit))


@router.get("/{batch_id}")
def retrieve_batch(parts: PartsDependency, access: ReadAccess, batch_id: Text) -> BatchObject:
    """Tells about one batch."""
    return batch_object(_batch_row(parts, access.project, batch_id))


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
