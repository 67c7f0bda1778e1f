"""``GET /v1/organization/audit_logs``: what was done in the key's project, by whom and from where.

The shape is OpenAI's: the details of an event are under its type. Those of a file include its size and digest.
Source: https://platform.openai.com/docs/api-reference/audit-logs.
"""

from typing import Annotated, Any, Final, Literal, Self

from fastapi import APIRouter, Query
from psycopg.rows import DictRow
from pydantic import BaseModel, ConfigDict, Field

from service.api.dependencies import AdminAccess, BackendsDependency
from service.api.openapi import INVALID_CURSOR, WITH_KEY, described
from service.api.schemas import NEWEST, Answer, Page, Text
from service.api_keys import PERSON_PREFIX
from service.db import query
from service.db.rows import fetch_value
from service.errors import InvalidRequestError

router = APIRouter(prefix="/v1/organization/audit_logs", tags=["Audit logs"], responses=WITH_KEY)

# OpenAI's name of the details, if it is not "data".
_DETAILS: Final = {"project.updated": "changes_requested"}

UnixTime = Annotated[int, Field(ge=0, lt=NEWEST)]


class AuditLogApiKey(Answer):
    """The API key of the request."""

    id: str
    type: Literal["service_account"] = "service_account"


class AuditLogUser(Answer):
    """The author of an action: the subject of a person's token, or the operator at the command line."""

    id: str


class AuditLogSession(Answer):
    """Origin of the action: the address of the API's client, and the person or operator."""

    ip_address: str | None = None
    user: AuditLogUser | None = None


class AuditLogActor(Answer):
    """The author of the action: an API key, a person, an operator at the command line, or the stack (retention)."""

    type: Literal["api_key", "session", "operator", "retention"]
    api_key: AuditLogApiKey | None = None
    session: AuditLogSession | None = None


class AuditLogProject(Answer):
    """The project in which the change was made."""

    id: str
    name: str | None


class AuditLog(Answer):
    """OpenAI's audit log object. One more field, named after the type, holds the details."""

    model_config = ConfigDict(extra="allow")

    id: str
    object: Literal["organization.audit_log"] = "organization.audit_log"
    type: str
    effective_at: int
    project: AuditLogProject
    actor: AuditLogActor
    request_id: str | None = None

    @classmethod
    def from_row(cls, row: DictRow) -> Self:
        """Return a row of ``audit_log``, with the name of its project, as clients see it."""
        details: dict[str, Any] = {"id": row["object_id"], _DETAILS.get(row["type"], "data"): row["data"]}
        if row["sha256"] is not None:
            details |= {"bytes": row["size_bytes"], "sha256": row["sha256"].hex()}
        actor: dict[str, Any] = {"type": row["actor"]}
        user = row["operator"]
        if row["actor"].startswith(PERSON_PREFIX):
            actor, user = {"type": "session"}, row["actor"].removeprefix(PERSON_PREFIX)
        elif row["actor"] not in {"operator", "retention"}:
            actor = {"type": "api_key", "api_key": {"id": row["actor"]}}
        if row["client_address"] or user:
            actor["session"] = {"ip_address": row["client_address"], "user": {"id": user} if user else None}
        fields = {
            "id": row["id"],
            "type": row["type"],
            "effective_at": int(row["at"].timestamp()),
            "project": {"id": row["project_id"], "name": row["project_name"]},
            "actor": actor,
            "request_id": row["request_id"],
            row["type"]: details,
        }
        return cls.model_validate(fields)


class AuditLogQuery(BaseModel):
    """The query parameters of a listing."""

    after: Text | None = Field(None, description="The `id` of the last object of the previous page.")
    before: Text | None = Field(None, description="The `id` of the first object of the next page.")
    limit: int = Field(20, ge=1, le=100, description="The most objects to return.")
    event_types: list[Text] | None = Field(None, alias="event_types[]", description="Only events of these types.")
    actor_ids: list[Text] | None = Field(None, alias="actor_ids[]", description="Only changes by these API keys.")
    resource_ids: list[Text] | None = Field(None, alias="resource_ids[]", description="Only changes of these objects.")
    project_ids: list[Text] | None = Field(
        None, alias="project_ids[]", description="Only events of these projects; a key sees only its own project."
    )
    later_than: UnixTime | None = Field(
        None, alias="effective_at[gt]", description="Only events after this time, in Unix seconds."
    )
    from_time: UnixTime | None = Field(
        None, alias="effective_at[gte]", description="Only events at or after this time, in Unix seconds."
    )
    earlier_than: UnixTime | None = Field(
        None, alias="effective_at[lt]", description="Only events before this time, in Unix seconds."
    )
    to_time: UnixTime | None = Field(
        None, alias="effective_at[lte]", description="Only events at or before this time, in Unix seconds."
    )

    def time_range(self) -> tuple[int, int]:
        """Return the first second, and the second after the last. An event of 7.9 s is at 7, and not after 7."""
        first = max(self.from_time or 0, 0 if self.later_than is None else self.later_than + 1)
        end = min(
            NEWEST if self.to_time is None else self.to_time + 1,
            NEWEST if self.earlier_than is None else self.earlier_than,
        )
        return first, end


@router.get(
    "",
    operation_id="listAuditLogs",
    summary="List audit logs",
    description="List the events of the key's project, newest first. With `before` alone, the page that precedes it.",
    responses=described({400: INVALID_CURSOR}),
)
def list_audit_logs(
    backends: BackendsDependency, access: AdminAccess, wanted: Annotated[AuditLogQuery, Query()]
) -> Page[AuditLog]:
    """List the events of the key's project, newest first; with ``before`` alone, the page that precedes it.

    Raises:
        InvalidRequestError: ``after`` or ``before`` is not an event of this project.
    """
    project_id = access.project.id
    bounds = {"above": 0, "below": NEWEST}
    from_s, to_s = wanted.time_range()
    is_backwards = bool(wanted.before and not wanted.after)
    with backends.pool.connection() as connection:
        for param, bound, cursor_id in (("after", "below", wanted.after), ("before", "above", wanted.before)):
            if not cursor_id:
                continue
            cursor = fetch_value(connection, "audit_cursor", {"id": cursor_id, "project_id": project_id})
            if cursor is None:
                raise InvalidRequestError(
                    f"Invalid '{param}': there is no audit log {cursor_id!r}. Use an id from another page.",
                    param=param,
                    code="invalid_value",
                )
            bounds[bound] = cursor
        connection.execute(query("read_in_index_order"))
        rows = connection.execute(
            query(f"list_audit_log_{'asc' if is_backwards else 'desc'}"),
            {
                **bounds,
                "project_id": project_id,
                "event_types": wanted.event_types,
                "actor_ids": wanted.actor_ids,
                "resource_ids": wanted.resource_ids,
                "project_ids": wanted.project_ids,
                "from_s": from_s,
                "to_s": to_s,
                "limit": wanted.limit + 1,
            },
        ).fetchall()
    shown = [AuditLog.from_row(row) for row in rows[: wanted.limit]]
    if is_backwards:
        shown.reverse()
    return Page[AuditLog].of(shown, limit=wanted.limit).model_copy(update={"has_more": len(rows) > wanted.limit})
