"""``/v1/deletion_receipts``: signed proofs of the deletions in the key's project."""

from typing import Annotated, Final

from fastapi import APIRouter, Path, Query

from service.api.dependencies import AdminAccess, BackendsDependency
from service.api.openapi import INVALID_CURSOR, INVALID_ID, WITH_KEY, described
from service.api.schemas import NEWEST, Page, Text
from service.db import query
from service.db.rows import fetch_value
from service.errors import NotFoundError, unknown_cursor
from service.receipts import Receipt

router = APIRouter(prefix="/v1/deletion_receipts", tags=["Deletion receipts"], responses=WITH_KEY)

_NO_RECEIPT: Final = "The project has no such receipt."


@router.get(
    "",
    operation_id="listDeletionReceipts",
    summary="List deletion receipts",
    description="List the receipts of deletions in the project, newest first. Each is signed; `cloister "
    "verify-receipt` verifies it offline.",
    responses=described({400: INVALID_CURSOR}),
)
def list_deletion_receipts(
    backends: BackendsDependency,
    access: AdminAccess,
    object_id: Annotated[Text | None, Query(description="Only receipts of this file or batch.")] = None,
    after: Annotated[Text | None, Query(description="The `id` of the last object of the previous page.")] = None,
    limit: Annotated[int, Query(ge=1, le=100, description="The most objects to return.")] = 20,
) -> Page[Receipt]:
    """List the receipts of the key's project, newest first.

    Raises:
        InvalidRequestError: ``after`` is not a receipt of this project.
    """
    values = {"project_id": access.project.id, "object_id": object_id, "limit": limit + 1, "cursor": NEWEST}
    with backends.pool.connection() as connection:
        if after:
            values["cursor"] = fetch_value(connection, "receipt_cursor", {**values, "id": after})
            if values["cursor"] is None:
                raise unknown_cursor("receipt", after)
        connection.execute(query("read_in_index_order"))
        rows = connection.execute(query("list_receipts"), values).fetchall()
    return Page[Receipt].of([Receipt.from_envelope(row["envelope"]) for row in rows], limit=limit)


@router.get(
    "/{receipt_id}",
    operation_id="retrieveDeletionReceipt",
    summary="Retrieve a deletion receipt",
    description="Return one receipt.",
    responses=described({400: INVALID_ID, 404: _NO_RECEIPT}),
)
def retrieve_deletion_receipt(
    backends: BackendsDependency,
    access: AdminAccess,
    receipt_id: Annotated[Text, Path(description="The `id` of a receipt.")],
) -> Receipt:
    """Return one receipt of the key's project.

    Raises:
        NotFoundError: the project has no such receipt.
    """
    with backends.pool.connection() as connection:
        envelope = fetch_value(connection, "receipt_by_id", {"id": receipt_id, "project_id": access.project.id})
    if envelope is None:
        raise NotFoundError(f"No such deletion receipt: {receipt_id}", param="id")
    return Receipt.from_envelope(envelope)
