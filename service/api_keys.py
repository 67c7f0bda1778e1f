"""API keys. Only a key's SHA-256 digest and last four characters are stored."""

import hashlib
import hmac
import secrets
from collections.abc import Iterable
from dataclasses import dataclass
from datetime import datetime
from enum import StrEnum
from typing import Final

from service.audit.log import OPERATOR, Actor, record_action
from service.db import Pool, query
from service.db.rows import fetch_all, fetch_value
from service.errors import CloisterError
from service.projects import Project

_KEY_PREFIX: Final = "sk-cloister-"


class Scope(StrEnum):
    """A permission of a key.

    ``read`` lists and retrieves; ``submit`` uploads, creates, cancels and deletes; ``admin`` manages webhook endpoints
    and reads the audit log.
    """

    READ = "read"
    SUBMIT = "submit"
    ADMIN = "admin"


DEFAULT_SCOPES: Final = (Scope.READ, Scope.SUBMIT)


@dataclass(frozen=True, slots=True, kw_only=True)
class Access:
    """Permissions of a request: the project it acts for, the key it used, and the scopes of that key.

    ``actor`` is the key with the client's address and the id of the request, for the audit log.
    """

    project: Project
    key_id: str
    scopes: frozenset[Scope]
    actor: Actor


@dataclass(frozen=True, slots=True, kw_only=True)
class ApiKey:
    """A stored key. All times are aware."""

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
        """Return whether the key is valid at an aware time; if not, the reason and since when."""
        if self.revoked_at:
            return f"revoked {self.revoked_at:%Y-%m-%d}"
        if self.archived_at:
            return f"project archived {self.archived_at:%Y-%m-%d}"
        if self.expires_at and self.expires_at <= now:
            return f"expired {self.expires_at:%Y-%m-%d}"
        return f"valid until {self.expires_at:%Y-%m-%d}" if self.expires_at else "valid"


def create_api_key(
    pool: Pool,
    *,
    project_id: str,
    name: str,
    scopes: Iterable[Scope] = DEFAULT_SCOPES,
    expires_at: datetime | None = None,
    actor: Actor = OPERATOR,
) -> str:
    """Create a key for a project and return it. It cannot be shown again.

    Args:
        pool: the database.
        project_id: the project whose files and batches the key can reach.
        name: a name for listings.
        scopes: the key's permissions, at least one; ``read`` and ``submit`` by default.
        expires_at: aware time from which the key is refused; never by default.
        actor: the author, for the audit log.

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
                "key_sha256": key_digest(key),
                "hint": key[-4:],
                "scopes": [str(scope) for scope in names],
                "expires_at": expires_at,
            },
        ).fetchone()
        if row is None:
            raise CloisterError("the project is archived and its keys are refused; choose another with --project")
        data = {"name": name, "scopes": names, "expires_at": expires_at and int(expires_at.timestamp())}
        record_action(connection, "api_key.created", actor=actor, project_id=project_id, object_id=key_id, data=data)
    return key


def key_digest(key: str) -> bytes:
    """Return the SHA-256 digest of a key.

    A key has 256 random bits: a plain digest cannot be reversed, and the lookup needs no slow hash.
    """
    return hashlib.sha256(key.encode()).digest()


def authenticate(
    pool: Pool, key: str, *, client_address: str | None = None, request_id: str | None = None
) -> Access | None:
    """Return the access that a key grants, or None if it is unknown, expired or revoked.

    Args:
        pool: the database.
        key: the key that the client sent.
        client_address: IP address of the client, for the audit log.
        request_id: id of the request, for the audit log.
    """
    digest = key_digest(key)
    with pool.connection() as connection:
        rows = connection.execute(query("api_keys_by_digest"), {"key_sha256": digest}).fetchall()
    for row in rows:
        # The lookup used a prefix of the digest: its duration reveals nothing about the rest.
        if hmac.compare_digest(row["key_sha256"], digest):
            project = Project(id=row["project_id"], name=row["project_name"])
            actor = Actor(id=row["id"], client_address=client_address, request_id=request_id)
            return Access(project=project, key_id=row["id"], scopes=frozenset(map(Scope, row["scopes"])), actor=actor)
    return None


def count_refused_login(pool: Pool, key: str, *, network: str, missing_scope: bool = False) -> None:
    """Count a refused login. The audit log gets one entry per minute, network, reason and known key, with the count.

    Args:
        pool: the database.
        key: the key that the client sent. Its id is recorded if it exists.
        network: the client's address, without the part that it can choose freely.
        missing_scope: the key is valid, but lacks the scope; otherwise the key is unknown, revoked or expired.
    """
    values = {"key_sha256": key_digest(key), "address": network, "missing_scope": missing_scope}
    with pool.connection() as connection:
        connection.execute(query("count_refused_login"), values)


def digests_of_valid_keys(pool: Pool) -> frozenset[bytes]:
    """Return the first 8 bytes of the digest of each key that is valid now."""
    with pool.connection() as connection:
        rows = connection.execute(query("digests_of_valid_keys")).fetchall()
    return frozenset(row["digest"] for row in rows)


def valid_readers(pool: Pool, key_ids: Iterable[str]) -> set[str]:
    """Return those of the keys, by id, that are valid now and may read."""
    with pool.connection() as connection:
        return {row["id"] for row in connection.execute(query("valid_readers"), {"ids": list(key_ids)}).fetchall()}


def list_api_keys(pool: Pool, *, project_id: str | None = None) -> list[ApiKey]:
    """List every key, or every key of one project, oldest first."""
    with pool.connection() as connection:
        return fetch_all(connection, ApiKey, "list_api_keys", {"project_id": project_id})


def revoke_api_key(pool: Pool, key_id: str, *, actor: Actor = OPERATOR) -> bool:
    """Refuse a key from now on. Return whether the key exists; revoking it again changes nothing."""
    with pool.connection() as connection:
        row = connection.execute(query("revoke_api_key"), {"id": key_id}).fetchone()
        if row is None:
            return fetch_value(connection, "api_key_by_id", {"id": key_id}) is not None
        data = {"name": row["name"]}
        record_action(
            connection, "api_key.deleted", actor=actor, project_id=row["project_id"], object_id=key_id, data=data
        )
        return True
