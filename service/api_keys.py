"""Projects and their API keys. Of a key, only its SHA-256 digest and last four characters are kept."""

import hashlib
import hmac
import secrets
from dataclasses import dataclass
from datetime import datetime
from enum import StrEnum
from typing import Final

from service.db import Pool, query

DEFAULT_PROJECT_NAME: Final = "default"
_KEY_PREFIX: Final = "sk-cloister-"


@dataclass(frozen=True, slots=True, kw_only=True)
class Project:
    """The owner of API keys, files and batches inside a stack."""

    id: str
    name: str


class Scope(StrEnum):
    """What a key may do: see everything of its project; upload, create, cancel and delete; see and manage the rest."""

    READ = "read"
    SUBMIT = "submit"
    ADMIN = "admin"


@dataclass(frozen=True, slots=True, kw_only=True)
class Access:
    """Whom a request acts for, by which key, and what that key may do."""

    project: Project
    key_id: str
    scopes: frozenset[Scope]


def _digest(key: str) -> bytes:
    # A key has 256 random bits: a plain digest cannot be reversed, and a lookup by it needs no slow hash.
    return hashlib.sha256(key.encode()).digest()


def create_project(pool: Pool, name: str) -> Project:
    """Makes a project.

    Raises:
        psycopg.errors.UniqueViolation: there is a project of that name.
    """
    project_id = f"proj_{secrets.token_hex(12)}"
    with pool.connection() as connection:
        connection.execute(query("insert_project"), {"id": project_id, "name": name})
    return Project(id=project_id, name=name)


def ensure_default_project(pool: Pool) -> Project:
    """The project named ``default``, made if it is not there. Safe to call from two places at once."""
    with pool.connection() as connection:
        row = connection.execute(
            query("ensure_project"), {"id": f"proj_{secrets.token_hex(12)}", "name": DEFAULT_PROJECT_NAME}
        ).fetchone()
    assert row is not None  # noqa: S101 - the statement returns a row in both cases
    return Project(id=row["id"], name=row["name"])


def create_api_key(pool: Pool, *, project_id: str, name: str, expires_at: datetime | None = None) -> str:
    """Makes a key for a project and returns it; it cannot be shown again.

    Args:
        pool: the database.
        project_id: the project whose files and batches the key reaches.
        name: tells keys apart in a listing.
        expires_at: aware time from which the key is refused; never by default.
    """
    key = _KEY_PREFIX + secrets.token_urlsafe(32)
    with pool.connection() as connection:
        connection.execute(
            query("insert_api_key"),
            {
                "id": f"key_{secrets.token_hex(12)}",
                "project_id": project_id,
                "name": name,
                "key_sha256": _digest(key),
                "hint": key[-4:],
                "expires_at": expires_at,
            },
        )
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
    hint: str
    created_at: datetime
    expires_at: datetime | None
    revoked_at: datetime | None


def list_api_keys(pool: Pool) -> list[ApiKey]:
    """Every key, the oldest first."""
    with pool.connection() as connection:
        return [ApiKey(**row) for row in connection.execute(query("list_api_keys"))]


def revoke_api_key(pool: Pool, key_id: str) -> bool:
    """Refuses a key from now on; false when there is no such key."""
    with pool.connection() as connection:
        return connection.execute(query("revoke_api_key"), {"id": key_id}).fetchone() is not None
