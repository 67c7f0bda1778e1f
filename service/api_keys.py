"""API keys. Only a key's SHA-256 digest and last four characters are stored."""

import hashlib
import hmac
import secrets
from collections.abc import Iterable
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Final

from service.audit.log import OPERATOR, Actor, record_action
from service.db import Pool, query
from service.db.rows import fetch_all, fetch_value
from service.errors import CloisterError
from service.projects import Project
from service.scopes import DEFAULT_SCOPES, Scope

_KEY_PREFIX: Final = "sk-cloister-"
PERSON_PREFIX: Final = "user:"
"""Start of the identity of a person, which no id of a key has."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Access:
    """Permissions of a request.

    Attributes:
        project: the project that it acts for.
        key_id: the API key; of a person, ``user:`` and the subject of their token.
        scopes: what it may do.
        actor: who acts and from where, for the audit log; its id is ``key_id``.
        expires_at: when a person's token expires; aware. None for a key, whose expiry the database knows.
    """

    project: Project
    key_id: str
    scopes: frozenset[Scope]
    actor: Actor
    expires_at: datetime | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class ApiKey:
    """A stored key. All times are aware; ``expires_at`` is never later than the stack's maximum lifetime allows."""

    id: str
    name: str
    project_name: str
    scopes: list[str]
    hint: str
    created_at: datetime
    expires_at: datetime | None
    revoked_at: datetime | None
    archived_at: datetime | None
    last_used_at: datetime | None

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
    pool: Pool,
    key: str,
    max_lifetime: timedelta | None = None,
    *,
    client_address: str | None = None,
    request_id: str | None = None,
) -> Access | None:
    """Return the access that a key grants, or None if it is unknown, expired or revoked.

    The use is recorded once a minute.

    Args:
        pool: the database.
        key: the key that the client sent.
        max_lifetime: how long after its creation any key expires; None for no limit.
        client_address: IP address of the client, for the audit log.
        request_id: id of the request, for the audit log.
    """
    digest = key_digest(key)
    values = {"key_sha256": digest, "max_lifetime": max_lifetime}
    with pool.connection() as connection:
        rows = connection.execute(query("api_keys_by_digest"), values).fetchall()
        # The lookup used a prefix of the digest: its duration reveals nothing about the rest.
        row = next((row for row in rows if hmac.compare_digest(row["key_sha256"], digest)), None)
        if row is None:
            return None
        if row["is_use_due"]:
            connection.execute(query("note_use_of_api_key"), {"id": row["id"]})
    project = Project(id=row["project_id"], name=row["project_name"])
    scopes = frozenset(map(Scope, row["scopes"]))
    actor = Actor(id=row["id"], client_address=client_address, request_id=request_id)
    return Access(project=project, key_id=row["id"], scopes=scopes, actor=actor)


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


def digests_of_valid_keys(pool: Pool, max_lifetime: timedelta | None = None) -> frozenset[bytes]:
    """Return the first 8 bytes of the digest of each key that is valid now."""
    with pool.connection() as connection:
        rows = connection.execute(query("digests_of_valid_keys"), {"max_lifetime": max_lifetime}).fetchall()
    return frozenset(row["digest"] for row in rows)


def valid_readers(pool: Pool, key_ids: Iterable[str], max_lifetime: timedelta | None = None) -> set[str]:
    """Return those of the keys, by id, that are valid now and may read."""
    values = {"ids": list(key_ids), "max_lifetime": max_lifetime}
    with pool.connection() as connection:
        return {row["id"] for row in connection.execute(query("valid_readers"), values).fetchall()}


def list_api_keys(pool: Pool, *, project_id: str | None = None, max_lifetime: timedelta | None = None) -> list[ApiKey]:
    """List every key, or every key of one project, oldest first."""
    values = {"project_id": project_id, "max_lifetime": max_lifetime}
    with pool.connection() as connection:
        return fetch_all(connection, ApiKey, "list_api_keys", values)


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
