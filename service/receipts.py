"""Deletion receipts: signed statements of what was deleted, when, and by whom.

A receipt is a DSSE envelope whose payload is a ``Deletion`` in JSON, signed with Ed25519. It holds ids and digests, no
content and no file name. Everyone with the public key can verify it without the stack.
Sources: https://github.com/secure-systems-lab/dsse/blob/master/protocol.md, https://www.rfc-editor.org/rfc/rfc8032.
"""

import base64
import secrets
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Final, Literal, Self

import psycopg
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from psycopg.rows import DictRow
from psycopg.types.json import Jsonb
from pydantic import BaseModel, ConfigDict, ValidationError

from service.audit.log import Actor
from service.db import query
from service.errors import CloisterError, SettingsError
from service.signing import NEW_KEY, Envelope, is_signed, read_key_file, read_public_key, signed_envelope

KEY_VARIABLE: Final = "CLOISTER_RECEIPT_KEY_FILE"
PAYLOAD_TYPE: Final = "application/vnd.cloister.deletion+json"
# More versions of one object than this are counted only, so that a receipt stays small.
_MAX_VERSIONS: Final = 1_000

Kind = Literal["file", "batch", "orphan", "project"]


class ReceiptError(CloisterError):
    """A receipt is unreadable, was changed, or was signed with another key."""


class _Part(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True, frozen=True, use_attribute_docstrings=True)


class Deletion(_Part):
    """Statement of a deletion: its object, time and author. An unknown value is null."""

    id: str
    """The id of the receipt."""
    kind: Kind
    """`file`; `batch` with its plan, results that were not assembled, events and errors; `project` with everything in
    it; `orphan`, an object in the object store that belonged to nothing."""
    object_id: str
    """The id of the file, batch or project; the key of an orphan."""
    project_id: str | None
    deleted_at: int
    """Unix time in seconds."""
    actor: str
    """The id of an API key, `operator` or `retention`."""
    reason: str
    size_bytes: int | None
    """Size of the content."""
    sha256: str | None
    """SHA-256 of the content, in hexadecimal."""
    versions: list[str]
    """Ids of the versions that the object store had kept, at most 1,000; empty without versioning."""


class Receipt(_Part):
    """A deletion with its proof. The signature covers the payload of the envelope, which holds the same values."""

    id: str
    object: Literal["deletion_receipt"]
    deletion: Deletion
    envelope: Envelope

    @classmethod
    def from_envelope(cls, envelope: Any) -> Self:
        """Return the receipt of a stored envelope."""
        parsed = Envelope.model_validate(envelope)
        deletion = Deletion.model_validate_json(base64.b64decode(parsed.payload))
        return cls(id=deletion.id, object="deletion_receipt", deletion=deletion, envelope=parsed)


def read_key(path: Path | None) -> Ed25519PrivateKey:
    """Read the private key of a stack: 32 random bytes in hexadecimal, as RFC 8032 defines it.

    Raises:
        SettingsError: there is no key, or others can read it. The message names the setting and the remedy.
    """
    if path is None:
        raise SettingsError(
            f"{KEY_VARIABLE} is not set, and no deletion is allowed without a signed receipt. Create a key with "
            f"`{NEW_KEY}`, keep it as long as the stack, and set {KEY_VARIABLE} to its path"
        )
    return read_key_file(path, setting=KEY_VARIABLE)


def sign(key: Ed25519PrivateKey, deletion: Deletion) -> Envelope:
    """Return the signed envelope of a deletion."""
    return signed_envelope(key, PAYLOAD_TYPE, deletion.model_dump_json().encode())


def verify(text: str, public_key: str) -> Deletion:
    """Verify a receipt offline.

    Args:
        text: the receipt in JSON.
        public_key: the public key in PEM.

    Raises:
        ReceiptError: the receipt is unreadable, was changed, or was signed with another key.
    """
    key = read_public_key(public_key)
    if key is None:
        raise ReceiptError("the public key is not an Ed25519 key in PEM; `cloister receipts public-key` prints it")
    try:
        receipt = Receipt.model_validate_json(text)
        is_valid = is_signed(key, receipt.envelope, PAYLOAD_TYPE)
        signed = Receipt.from_envelope(receipt.envelope.model_dump())
    except (ValidationError, ValueError):
        raise ReceiptError("this is no receipt: use the output of `cloister receipts get`, unchanged") from None
    if not is_valid:
        raise ReceiptError("the signature is wrong: the receipt was changed, or signed with another key")
    if signed != receipt:
        raise ReceiptError("the receipt was changed: its fields differ from the signed payload")
    return receipt.deletion


def write_receipt(
    connection: psycopg.Connection[DictRow],
    key: Ed25519PrivateKey,
    *,
    kind: Kind,
    object_id: str,
    project_id: str | None,
    actor: Actor,
    reason: str,
    size_bytes: int | None = None,
    sha256: bytes | None = None,
    versions: Sequence[str] = (),
) -> None:
    """Sign and store the receipt of a deletion, in the transaction that records the deletion."""
    deletion = Deletion(
        id=f"receipt_{secrets.token_hex(16)}",
        kind=kind,
        object_id=object_id,
        project_id=project_id,
        deleted_at=int(datetime.now(UTC).timestamp()),
        actor=actor.id,
        reason=reason,
        size_bytes=size_bytes,
        sha256=None if sha256 is None else sha256.hex(),
        versions=list(versions[:_MAX_VERSIONS]),
    )
    values = {"id": deletion.id, "project_id": project_id, "object_id": object_id}
    connection.execute(query("insert_receipt"), {**values, "envelope": Jsonb(sign(key, deletion).model_dump())})


def remove_file(
    connection: psycopg.Connection[DictRow],
    key: Ed25519PrivateKey,
    *,
    file_id: str,
    actor: Actor,
    reason: str,
    versions: Sequence[str],
    on_behalf_of: str = "",
) -> None:
    """Delete the row of a file whose object was deleted, with its audit log entry and its receipt.

    Does nothing if another process has done it meanwhile.

    Args:
        connection: the transaction.
        key: the key of the stack.
        file_id: the file.
        actor: the author for the audit log.
        reason: why it was deleted.
        versions: ids of the deleted versions of the object.
        on_behalf_of: the author for the receipt, if it is another one.
    """
    row = connection.execute(query("remove_file"), {"id": file_id, "reason": reason, **actor.values()}).fetchone()
    if row is not None:
        values = {name: row[name] for name in ("object_id", "project_id", "size_bytes", "sha256")}
        by = Actor(id=on_behalf_of) if on_behalf_of else actor
        write_receipt(connection, key, kind="file", actor=by, reason=reason, versions=versions, **values)
