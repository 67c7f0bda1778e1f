"""API keys. Of a key, only its SHA-256 digest and last four characters are kept."""

import hashlib
import hmac
import secrets
from collections.abc import Iterable
from dataclasses import dataclass
from datetime import datetime
from enum import StrEnum
from typing import Final

from service.db import Pool, query
from service.errors import CloisterError
from service.projects import Project, audit

_KEY_PREFIX: Final = "sk-cloister-"


class Scope(StrEnum):
    """What a key may do: see everything of its project; upload, create, cancel and delete; see and manage the rest."""

    READ = "read"
    SUBMIT = "submit"
    ADMIN = "admin"


DEFAULT_SCOPES: Final = (Scope.READ, Scope.SUBMIT)


@dataclass(frozen=True, slots=True, kw_only=True)
class Access:
    """Whom a request acts for, by which key, and what that key may do."""

    project: Project
    key_id: str
    scopes: frozenset[Scope]


def _digest(key: str) -> bytes:
    # A key has 256 random bits: a plain digest cannot be reversed, and a lookup by it needs no slow hash.
    return hashlib.sha256(key.encode()).digest()


def create_api_key(
    pool: Pool,
    *,
    project_id: str,
    name: str,
    scopes: Iterable[Scope] = DEFAULT_SCOPES,
    expires_at: datetime | None = None,
) -> str:
    """Makes a key for a project and returns it; it cannot be shown again.

    Args:
        pool: the database.
        project_id: the project whose files and batches the key reaches.
        name: tells keys apart in a listing.
        scopes: what the key may do, at least one; to read and to submit by default.
        expires_at: aware time from which the key is refused; never by default.

    Raises:
        CloisterError: the project is archived.
    """
    key = _KEY_PREFIX + secrets.token_urlsafe(32)
    key_id = f"key_{secrets.token_hex(12)}"
    names = sorted(set(scopes), key=list(Scope).index)
    with pool.connection() as connection:
        row = connection.execute(
            query("insert_api_key"),
            {
                "id": key_id,
                "project_id": project_id,
                "name": name,
                "key_sha256": _digest(key),
                "hint": key[-4:],
                "scopes": [str(scope) for scope in names],
                "expires_at": expires_at,
            },
        ).fetchone()
        if row is None:
            raise CloisterError("the project is archived: its keys are refused; choose another with --project")
        data = {"name": name, "scopes": names, "expires_at": expires_at and int(expires_at.timestamp())}
        audit(connection, "api_key.created", project_id=project_id, object_id=key_id, data=data)
    return key


def authenticate(pool: Pool, key: str) -> Access | None:
    """What a key gives access to, or None for a key that is unknown, expired or revoked."""
    digest = _digest(key)
    with pool.connection() as connection:
        rows = connection.execute(query("api_keys_by_digest"), {"key_sha256": digest}).fetchall()
    for row in rows:
        # The lookup went by a prefix of the digest: how long it took tells nothing of the rest.
        if hmac.compare_digest(row["key_sha256"], digest):
            project = Project(id=row["project_id"], name=row["project_name"])
            return Access(project=project, key_id=row["id"], scopes=frozenset(map(Scope, row["scopes"])))
    return None


@dataclass(frozen=True, slots=True, kw_only=True)
class ApiKey:
    """What is kept of a key; all times aware."""

    id: str
    name: str
    project_name: str
    scopes: list[str]
    hint: str
    created_at: datetime
    expires_at: datetime | None
    revoked_at: datetime | None
    archived_at: datetime | None

    def state(self, now: datetime) -> str:
        """Whether it is valid at an aware time, and if not, since when and why."""
        if self.revoked_at:
            return f"revoked {self.revoked_at:%Y-%m-%d}"
        if self.archived_at:
            return f"project archived {self.archived_at:%Y-%m-%d}"
        if self.expires_at and self.expires_at <= now:
            return f"expired {self.expires_at:%Y-%m-%d}"
        return f"valid until {self.expires_at:%Y-%m-%d}" if self.expires_at else "valid"


def list_api_keys(pool: Pool, *, project_id: str | None = None) -> list[ApiKey]:
    """Every key, or every key of one project, the oldest first."""
    with pool.connection() as connection:
        return [ApiKey(**row) for row in connection.execute(query("list_api_keys"), {"project_id": project_id})]


def revoke_api_key(pool: Pool, key_id: str) -> bool:
    """Refuses a key from now on; false when there is no such key. To revoke it again changes nothing."""
    with pool.connection() as connection:
        row = connection.execute(query("revoke_api_key"), {"id": key_id}).fetchone()
        if row is None:
            return connection.execute(query("api_key_by_id"), {"id": key_id}).fetchone() is not None
        audit(connection, "api_key.deleted", project_id=row["project_id"], object_id=key_id, data={"name": row["name"]})
        return True
