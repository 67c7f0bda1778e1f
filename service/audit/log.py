"""Entries of the audit log: who did what, from where.

Each entry is added in the transaction of the action that it records. Entries hold ids, sizes, digests and settings,
never content, file names or secrets. ``service.audit.chain`` seals them, so that a later change is noticed.
"""

from dataclasses import dataclass
from typing import Any, Final

import psycopg
from psycopg.rows import DictRow
from psycopg.types.json import Jsonb

from service.db import query


@dataclass(frozen=True, slots=True, kw_only=True)
class Actor:
    """Author of an action.

    Attributes:
        id: the id of an API key, ``operator`` for the command line, or ``retention``.
        operator: name of the operator; not verified, because the login of the database is the only proof.
        client_address: IP address of the API's client.
        request_id: id of the request to the API, as in its log.
    """

    id: str
    operator: str | None = None
    client_address: str | None = None
    request_id: str | None = None

    def values(self) -> dict[str, str | None]:
        """Return the parameters of queries that add an entry."""
        return {
            "actor": self.id,
            "operator": self.operator,
            "client_address": self.client_address,
            "request_id": self.request_id,
        }


OPERATOR: Final = Actor(id="operator")
RETENTION: Final = Actor(id="retention")


def record_action(
    connection: psycopg.Connection[DictRow],
    type: str,
    *,
    actor: Actor,
    project_id: str | None,
    object_id: str,
    data: dict[str, Any] | None = None,
) -> None:
    """Record an action in the audit log, in the caller's transaction.

    Args:
        connection: the transaction that also makes the change.
        type: OpenAI's name of the event, e.g. ``project.created``.
        actor: the author.
        project_id: the project that the object belongs to; None for an object of the stack.
        object_id: the project, API key, file, batch or model.
        data: the new values; never content, a key or a secret.
    """
    values = {"project_id": project_id, "type": type, "object_id": object_id, "data": Jsonb(data or {})}
    connection.execute(query("insert_audit"), values | actor.values())
