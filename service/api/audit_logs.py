"""``GET /v1/organization/audit_logs``: who deleted and changed what in the key's project.

The shape is OpenAI's; an event's details stand under its type, and those of a deleted file hold its size and digest.
Source: https://platform.openai.com/docs/api-reference/audit-logs.
"""

from collections.abc import Mapping
from typing import Annotated, Any, Final, Literal

import psycopg
from fastapi import APIRouter, Query
from psycopg.rows import DictRow
from pydantic import BaseModel, ConfigDict

from service.api.authentication import AdminAccess
from service.api.parts import PartsDependency
from service.api.schemas import Page, Text, page
from service.db import query
from service.errors import InvalidRequestError
from service.projects import Project

router = APIRouter(prefix="/v1/organization/audit_logs")

# Above every seq, and beyond every time that Postgres knows in seconds.
_MAX: Final = (1 << 63) - 1
# OpenAI's name of the details, where it is not "data".
_DETAILS: Final = {"project.updated": "changes_requested"}


class AuditLogApiKey(BaseModel):
    """The API key by which something was done."""

    id: str
    type: Literal["service_account"] = "service_account"


class AuditLogActor(BaseModel):
    """Who did it: an API key, an operator at the command line, or the stack itself when a time was over."""

    type: Literal["api_key", "operator", "retention"]
    api_key: AuditLogApiKey | None = None


class AuditLogProject(BaseModel):
    """The project that it was done in."""

    id: str
    name: str | None


class AuditLog(BaseModel):
    """OpenAI's audit log object. One more field, named by the type, holds the details."""

    model_config = ConfigDict(extra="allow")

    id: str
    object: Literal["organization.audit_log"] = "organization.audit_log"
    type: str
    effective_at: int
    project: AuditLogProject
    actor: AuditLogActor


def audit_log_object(row: Mapping[str, Any]) -> AuditLog:
    """A row of ``audit_log``, with the ``project_name``, as the client sees it."""
    details = {"id": row["object_id"], _DETAILS.get(row["type"], "data"): row["data"]}
    if row["sha256"] is not None:
        details |= {"bytes": row["size_bytes"], "sha256": row["sha256"].hex()}
    if row["actor"] in {"operator", "retention"}:
        actor = AuditLogActor(type=row["actor"])
    else:
        actor = AuditLogActor(type="api_key", api_key=AuditLogApiKey(id=row["actor"]))
    told = {
        "id": row["id"],
        "type": row["type"],
        "effective_at": int(row["at"].timestamp()),
        "project": AuditLogProject(id=row["project_id"], name=row["project_name"]),
        "actor": actor,
        row["type"]: details,
    }
    return AuditLog.model_validate(told)


@router.get("")
def list_audit_logs(
    *,
    parts: PartsDependency,
    access: AdminAccess,
    after: Annotated[Text | None, Query()] = None,
    before: Annotated[Text | None, Query()] = None,
    limit: Annotated[int, Query(ge=1, le=100)] = 20,
    event_types: Annotated[list[Text] | None, Query(alias="event_types[]")] = None,
    actor_ids: Annotated[list[Text] | None, Query(alias="actor_ids[]")] = None,
    resource_ids: Annotated[list[Text] | None, Query(alias="resource_ids[]")] = None,
    project_ids: Annotated[list[Text] | None, Query(alias="project_ids[]")] = None,
    effective_after: Annotated[int | None, Query(alias="effective_at[gt]", ge=0, lt=_MAX)] = None,
    effective_from: Annotated[int | None, Query(alias="effective_at[gte]", ge=0, lt=_MAX)] = None,
    effective_before: Annotated[int | None, Query(alias="effective_at[lt]", ge=0, lt=_MAX)] = None,
    effective_to: Annotated[int | None, Query(alias="effective_at[lte]", ge=0, lt=_MAX)] = None,
) -> Page[AuditLog]:
    """Lists what happened in the key's project, the newest first; with ``before`` alone, the page next to it.

    Raises:
        InvalidRequestError: ``after`` or ``before`` names no event of this project.
    """
    # An event is told with its whole seconds: that of 7.9 s is at 7, and not after 7.
    first_second = max(effective_from or 0, 0 if effective_after is None else effective_after + 1)
    end_second = min(
        _MAX if effective_to is None else effective_to + 1, _MAX if effective_before is None else effective_before
    )
    values = {
        "project_id": access.project.id,
        "above": 0,
        "below": _MAX,
        "event_types": event_types,
        "actor_ids": actor_ids,
        "resource_ids": resource_ids,
        "project_ids": project_ids,
        "from_s": first_second,
        "to_s": end_second,
        "limit": limit + 1,
    }
    backwards = bool(before and not after)
    with parts.pool.connection() as connection:
        if after:
            values["below"] = _cursor(connection, access.project, "after", after)
        if before:
            values["above"] = _cursor(connection, access.project, "before", before)
        connection.execute(query("read_in_index_order"))
        rows = connection.execute(query(f"list_audit_log_{'asc' if backwards else 'desc'}"), values).fetchall()
    shown = [audit_log_object(row) for row in rows[:limit]]
    if backwards:
        shown.reverse()
    return Page[AuditLog](**page(shown, limit=limit) | {"has_more": len(rows) > limit})


def _cursor(connection: psycopg.Connection[DictRow], project: Project, param: str, id: str) -> int:
    row = connection.execute(query("audit_cursor"), {"id": id, "project_id": project.id}).fetchone()
    if row is None:
        raise InvalidRequestError(
            f"Invalid '{param}': there is no audit log {id!r}. Give an id from another page.",
            param=param,
            code="invalid_value",
        )
    seq: int = row["seq"]
    return seq
