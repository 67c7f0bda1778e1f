"""Projects: the owners of API keys, files and batches inside a stack, with their limits and current use.

Every change writes an audit log entry in the same transaction.
"""

import dataclasses
import secrets
from dataclasses import dataclass
from datetime import datetime
from typing import Final

from psycopg.errors import UniqueViolation

from service.audit.log import OPERATOR, Actor, record_action
from service.db import Pool, query
from service.db.rows import fetch_one, fetch_optional, record
from service.errors import CloisterError
from service.quotas import Limits, ProjectSettings, Use

DEFAULT_PROJECT_NAME: Final = "default"
_ID_PREFIX: Final = "proj_"
_MAX_NAME_LENGTH: Final = 100


@dataclass(frozen=True, slots=True, kw_only=True)
class Project:
    """The owner of API keys, files and batches inside a stack."""

    id: str
    name: str


@dataclass(frozen=True, slots=True, kw_only=True)
class ProjectReport:
    """A project as an operator sees it. Times are aware; ``retention_s`` is None for the stack's default."""

    id: str
    name: str
    created_at: datetime
    archived_at: datetime | None
    retention_s: int | None
    limits: Limits
    use: Use


def create_project(
    pool: Pool, name: str, *, limits: Limits | None = None, retention_s: int | None = None, actor: Actor = OPERATOR
) -> Project:
    """Create a project. By default it has no limits and the stack's retention.

    Raises:
        CloisterError: the name is taken or invalid.
    """
    if not (name.strip() and name.isprintable() and len(name) <= _MAX_NAME_LENGTH) or name.startswith(_ID_PREFIX):
        raise CloisterError(
            f"{name!r} is not a valid project name: use 1 to {_MAX_NAME_LENGTH} printable characters that do not "
            f"start with {_ID_PREFIX}, as ids do"
        )
    project = Project(id=f"{_ID_PREFIX}{secrets.token_hex(12)}", name=name)
    settings = {**dataclasses.asdict(limits or Limits()), "retention_s": retention_s}
    try:
        with pool.connection() as connection:
            connection.execute(query("insert_project"), {"id": project.id, "name": name, **settings})
            data = {"name": name, **{key: value for key, value in settings.items() if value is not None}}
            ids = {"project_id": project.id, "object_id": project.id}
            record_action(connection, "project.created", actor=actor, **ids, data=data)
    except UniqueViolation:
        raise CloisterError(
            f"a project {name!r} already exists; change it with `cloister projects set`, or choose another name"
        ) from None
    return project


def ensure_default_project(pool: Pool, *, actor: Actor = OPERATOR) -> Project:
    """Return the project named ``default``, and create it if needed. Safe to call concurrently."""
    values = {"id": f"{_ID_PREFIX}{secrets.token_hex(12)}", "name": DEFAULT_PROJECT_NAME}
    with pool.connection() as connection:
        project = fetch_one(connection, Project, "ensure_project", values)
        if project.id == values["id"]:
            ids = {"project_id": project.id, "object_id": project.id}
            record_action(connection, "project.created", actor=actor, **ids, data={"name": DEFAULT_PROJECT_NAME})
    return project


def find_project(pool: Pool, name: str) -> Project:
    """Return the project with a name or an id.

    Raises:
        CloisterError: it does not exist.
    """
    with pool.connection() as connection:
        project = fetch_optional(connection, Project, "project_by_name", {"name": name})
    if project is None:
        raise CloisterError(f"there is no project {name!r}; see `cloister projects list`")
    return project


def list_projects(pool: Pool) -> list[ProjectReport]:
    """List every project with its limits and current use, oldest first."""
    with pool.connection() as connection:
        rows = connection.execute(query("list_projects")).fetchall()
    return [record(ProjectReport, {**row, "limits": record(Limits, row), "use": record(Use, row)}) for row in rows]


def set_project(pool: Pool, project: Project, changes: dict[str, int | None], *, actor: Actor = OPERATOR) -> None:
    """Change limits or the retention of a project.

    What is already enqueued or stored stays, but a lower retention also applies to the files that exist.

    Args:
        pool: the database.
        project: the project to change.
        changes: new values of fields of ``Limits``, or of ``retention_s``; None removes the limit.
        actor: the author, for the audit log.
    """
    with pool.connection() as connection:
        current = fetch_one(connection, ProjectSettings, "lock_project", {"id": project.id})
        connection.execute(query("set_project"), {**dataclasses.asdict(current), "id": project.id, **changes})
        ids = {"project_id": project.id, "object_id": project.id}
        record_action(connection, "project.updated", actor=actor, **ids, data=dict(changes))


def erase_project(pool: Pool, project: Project, *, actor: Actor = OPERATOR) -> bool:
    """Refuse a project's keys from now on, and have the reconciler delete everything in it, and then the project.

    The audit log and the receipts stay. The name is free at once, and the project is found by its id only.

    Returns:
        False if its erasure began before.
    """
    with pool.connection() as connection:
        if connection.execute(query("start_erasure"), {"id": project.id}).fetchone() is None:
            return False
        connection.execute(query("remove_endpoints_of_project"), {"id": project.id})
        ids = {"project_id": project.id, "object_id": project.id}
        record_action(connection, "project.archived", actor=actor, **ids, data={"erase": True})
        return True


@dataclass(frozen=True, slots=True, kw_only=True)
class ErasureProgress:
    """Remainder of a project that is being erased.

    Attributes:
        open_batches: batches that are being cancelled.
        batches: all batches.
        files: all files.
        jobs: jobs of the project that still run.
        urls_expire_at: when the last URL that its jobs may hold has expired; None without such URLs. Its batches are
            deleted then.
    """

    open_batches: int
    batches: int
    files: int
    jobs: int
    urls_expire_at: datetime | None


def erasure_progress(pool: Pool, project: Project) -> ErasureProgress | None:
    """Return what is left of a project that is being erased, or None once it is gone."""
    with pool.connection() as connection:
        return fetch_optional(connection, ErasureProgress, "erasure_progress", {"id": project.id})


def archive_project(pool: Pool, project: Project, *, actor: Actor = OPERATOR) -> bool:
    """Refuse a project's keys from now on; its batches continue. Return False if it was archived before.

    Raises:
        CloisterError: it is the default project, which owns the keys that name no other project.
    """
    if project.name == DEFAULT_PROJECT_NAME:
        raise CloisterError("the default project cannot be archived; revoke its keys with `cloister keys revoke`")
    with pool.connection() as connection:
        if connection.execute(query("archive_project"), {"id": project.id}).fetchone() is None:
            return False
        record_action(connection, "project.archived", actor=actor, project_id=project.id, object_id=project.id)
        return True
