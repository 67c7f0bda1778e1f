"""Signatures with Ed25519 in DSSE envelopes, and the keys for them.

Everyone with the public key can verify an envelope without the stack.
Sources: https://github.com/secure-systems-lab/dsse/blob/master/protocol.md, https://www.rfc-editor.org/rfc/rfc8032.
"""

import base64
import hashlib
import re
import stat
from pathlib import Path
from typing import Final

from cryptography.exceptions import InvalidSignature, UnsupportedAlgorithm
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey
from pydantic import BaseModel, ConfigDict

from service.errors import SettingsError

NEW_KEY: Final = "(umask 077; openssl rand -hex 32 > FILE)"
"""Command that creates a key file."""


class Signature(BaseModel):
    """A signature of an envelope."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True, use_attribute_docstrings=True)

    keyid: str
    """SHA-256 of the public key in DER, in hexadecimal."""
    sig: str
    """Ed25519, in Base64."""


class Envelope(BaseModel):
    """A DSSE envelope."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True, use_attribute_docstrings=True)

    payloadType: str  # noqa: N815 - DSSE's name
    payload: str
    """What is signed, in Base64."""
    signatures: list[Signature]


def read_key_file(path: Path, *, setting: str) -> Ed25519PrivateKey:
    """Read a private key: 32 random bytes in hexadecimal, as RFC 8032 defines it.

    Args:
        path: the file.
        setting: what names the file, for messages.

    Raises:
        SettingsError: the file is unreadable or no key, or others can read it. The message contains the remedy.
    """
    try:
        text = path.read_text(encoding="ascii", errors="replace").strip()
        mode = path.stat().st_mode
    except OSError as error:
        advice = f"Create a key with `{NEW_KEY}`, or correct the path"
        raise SettingsError(f"{setting}: cannot read {path}: {error.strerror}. {advice}") from error
    if mode & (stat.S_IRWXG | stat.S_IRWXO):
        raise SettingsError(f"{setting}: other users can read {path}. Run `chmod 600 {path}`")
    if not re.fullmatch(r"[0-9a-fA-F]{64}", text):
        raise SettingsError(f"{setting}: {path} does not hold 64 hexadecimal digits. Create it with `{NEW_KEY}`")
    return Ed25519PrivateKey.from_private_bytes(bytes.fromhex(text))


def public_pem(key: Ed25519PrivateKey) -> str:
    """Return the public half of a key in PEM (RFC 8410), which openssl reads too."""
    encoding, form = serialization.Encoding.PEM, serialization.PublicFormat.SubjectPublicKeyInfo
    return key.public_key().public_bytes(encoding, form).decode()


def read_public_key(pem: str) -> Ed25519PublicKey | None:
    """Return the public key in PEM; None if it is no Ed25519 key."""
    try:
        key = serialization.load_pem_public_key(pem.encode())
    except (ValueError, UnsupportedAlgorithm):
        return None
    return key if isinstance(key, Ed25519PublicKey) else None


def signed_envelope(key: Ed25519PrivateKey, payload_type: str, payload: bytes) -> Envelope:
    """Sign a payload."""
    der = key.public_key().public_bytes(serialization.Encoding.DER, serialization.PublicFormat.SubjectPublicKeyInfo)
    sig = _base64(key.sign(_signed_bytes(payload_type, payload)))
    signature = Signature(keyid=hashlib.sha256(der).hexdigest(), sig=sig)
    return Envelope(payloadType=payload_type, payload=_base64(payload), signatures=[signature])


def is_signed(key: Ed25519PublicKey, envelope: Envelope, payload_type: str) -> bool:
    """Return whether one of the signatures of an envelope of this type is of the key.

    Raises:
        ValueError: payload or signatures are not in Base64.
    """
    payload = base64.b64decode(envelope.payload, validate=True)
    signatures = [base64.b64decode(each.sig, validate=True) for each in envelope.signatures]
    return envelope.payloadType == payload_type and any(
        _verifies(key, each, _signed_bytes(payload_type, payload)) for each in signatures
    )


def _verifies(key: Ed25519PublicKey, signature: bytes, data: bytes) -> bool:
    try:
        key.verify(signature, data)
    except InvalidSignature:
        return False
    return True


def _signed_bytes(payload_type: str, payload: bytes) -> bytes:
    """Return what a signature covers: DSSE's pre-authentication encoding."""
    return b"DSSEv1 %d %s %d %s" % (len(payload_type), payload_type.encode(), len(payload), payload)


def _base64(data: bytes) -> str:
    return base64.b64encode(data).decode()
