"""Projects: the owners of API keys, files and batches inside a stack, their limits and what they use of them.

Every change is written down in the audit log, in the same transaction.
"""

import dataclasses
import secrets
from dataclasses import dataclass
from datetime import datetime
from typing import Any, Final

import psycopg
from psycopg.errors import UniqueViolation
from psycopg.rows import DictRow
from psycopg.types.json import Jsonb

from service.db import Pool, query
from service.errors import CloisterError
from service.quotas import Limits, Use, limits_of

DEFAULT_PROJECT_NAME: Final = "default"
OPERATOR: Final = "operator"
_ID_PREFIX: Final = "proj_"
_MAX_NAME_LENGTH: Final = 100


@dataclass(frozen=True, slots=True, kw_only=True)
class Project:
    """The owner of API keys, files and batches inside a stack."""

    id: str
    name: str


@dataclass(frozen=True, slots=True, kw_only=True)
class ProjectReport:
    """All that an operator wants to know of a project; times aware, ``retention_s`` None for the stack's default."""

    id: str
    name: str
    created_at: datetime
    archived_at: datetime | None
    retention_s: int | None
    limits: Limits
    use: Use


def audit(
    connection: psycopg.Connection[DictRow], type: str, *, project_id: str, object_id: str, data: dict[str, Any]
) -> None:
    """Writes down, in the caller's transaction, what an operator did.

    Args:
        connection: in the transaction that also holds what was done.
        type: OpenAI's name of the event, e.g. ``project.created``.
        project_id: the project that it was done to.
        object_id: the project or API key.
        data: what was set; never a key or a secret.
    """
    values = {"project_id": project_id, "actor": OPERATOR, "type": type, "object_id": object_id, "data": Jsonb(data)}
    connection.execute(query("insert_audit"), values)


def _new_id() -> str:
    return f"{_ID_PREFIX}{secrets.token_hex(12)}"


def create_project(pool: Pool, name: str, *, limits: Limits | None = None, retention_s: int | None = None) -> Project:
    """Makes a project; without limits by default, and with the stack's own retention.

    Raises:
        CloisterError: there is a project of that name, or it is no name.
    """
    if not (name.strip() and name.isprintable() and len(name) <= _MAX_NAME_LENGTH) or name.startswith(_ID_PREFIX):
        raise CloisterError(
            f"{name!r} is no name for a project: it must have 1 to {_MAX_NAME_LENGTH} printable characters and not "
            f"start with {_ID_PREFIX}, as ids do"
        )
    project = Project(id=_new_id(), name=name)
    settings = {**dataclasses.asdict(limits or Limits()), "retention_s": retention_s}
    try:
        with pool.connection() as connection:
            connection.execute(query("insert_project"), {"id": project.id, "name": name, **settings})
            data = {"name": name, **{key: value for key, value in settings.items() if value is not None}}
            audit(connection, "project.created", project_id=project.id, object_id=project.id, data=data)
    except UniqueViolation:
        raise CloisterError(
            f"there is a project {name!r} already; change it with `cloister projects set`, or choose another name"
        ) from None
    return project


def ensure_default_project(pool: Pool) -> Project:
    """The project named ``default``, made if it is not there. Safe to call from two places at once."""
    values = {"id": _new_id(), "name": DEFAULT_PROJECT_NAME}
    with pool.connection() as connection:
        row = connection.execute(query("ensure_project"), values).fetchone()
        assert row is not None  # noqa: S101 - the statement returns a row in both cases
        if row["id"] == values["id"]:
            data = {"name": DEFAULT_PROJECT_NAME}
            audit(connection, "project.created", project_id=row["id"], object_id=row["id"], data=data)
    return Project(**row)


def find_project(pool: Pool, name: str) -> Project:
    """The project with a name or an id.

    Raises:
        CloisterError: there is none.
    """
    with pool.connection() as connection:
        row = connection.execute(query("project_by_name"), {"name": name}).fetchone()
    if row is None:
        raise CloisterError(f"there is no project {name!r}; see `cloister projects list`")
    return Project(**row)


def list_projects(pool: Pool) -> list[ProjectReport]:
    """Every project with its limits and what it uses of them now, the oldest first."""
    with pool.connection() as connection:
        return [_report(row) for row in connection.execute(query("list_projects"))]


def _report(row: DictRow) -> ProjectReport:
    return ProjectReport(
        **{name: row[name] for name in ("id", "name", "created_at", "archived_at", "retention_s")},
        limits=limits_of(row),
        use=Use(**{field.name: row[field.name] for field in dataclasses.fields(Use)}),
    )


def set_project(pool: Pool, project: Project, changes: dict[str, int | None]) -> None:
    """Changes limits or the retention of a project; what is enqueued or stored already stays.

    Args:
        pool: the database.
        project: the project to change.
        changes: fields of ``Limits``, or ``retention_s``, and their new values; None takes the limit away.
    """
    with pool.connection() as connection:
        row = connection.execute(query("lock_project"), {"id": project.id}).fetchone()
        assert row is not None  # noqa: S101 - projects are never deleted
        connection.execute(query("set_project"), {"id": project.id, **row, **changes})
        audit(connection, "project.updated", project_id=project.id, object_id=project.id, data=dict(changes))


def archive_project(pool: Pool, project: Project) -> bool:
    """Refuses a project's keys from now on; its batches run on. False when it was archived before.

    Raises:
        CloisterError: it is the default project, which keys are made in where no other is named.
    """
    if project.name == DEFAULT_PROJECT_NAME:
        raise CloisterError("the default project cannot be archived; revoke its keys with `cloister keys revoke`")
    with pool.connection() as connection:
        if connection.execute(query("archive_project"), {"id": project.id}).fetchone() is None:
            return False
        audit(connection, "project.archived", project_id=project.id, object_id=project.id, data={})
        return True
