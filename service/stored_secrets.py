"""Encryption of the secrets that Postgres holds and that the service has to read again: those that sign webhooks.

The keys are in a file, so a copy of the database reveals no secret. Tokens of jobs and API keys are stored as digests
and need no encryption.

Source of the format: https://cryptography.io/en/latest/fernet/ (AES-128-CBC with HMAC-SHA256).
"""

import base64
import binascii
from pathlib import Path
from typing import Any, Final

import psycopg
from cryptography.fernet import Fernet, InvalidToken, MultiFernet
from psycopg.rows import dict_row

from service.db import query
from service.errors import CloisterError, SettingsError

KEYS_VARIABLE: Final = "CLOISTER_ENCRYPTION_KEYS_FILE"
_NO_KEYS: Final = (
    f"{KEYS_VARIABLE} is not set, so webhook secrets cannot be stored or read. Let it name a file with a key that "
    "`openssl rand -base64 32` prints"
)
# Rows of versions that did not encrypt begin with this, the form of Standard Webhooks; encrypted ones never do.
_CLEAR: Final = "whsec_"


class StoredSecretError(CloisterError):
    """No key decrypts a stored secret. The message has the remedy."""


def read_encryption_keys(path: Path) -> MultiFernet:
    """Read a file of keys, separated by commas or white space: the first one encrypts, all of them decrypt.

    Raises:
        SettingsError: the file is unreadable or has no key, or a key is not 32 bytes in base64. The message quotes no
            key.
    """
    try:
        words = path.read_text(encoding="ascii").replace(",", " ").split()
    except (OSError, UnicodeDecodeError) as error:
        raise SettingsError(f"{KEYS_VARIABLE}: cannot read {path} ({type(error).__name__})") from None
    if not words:
        raise SettingsError(f"{KEYS_VARIABLE}: {path} is empty. `openssl rand -base64 32` prints a key")
    try:
        keys = [base64.b64decode(word.translate(str.maketrans("-_", "+/")), validate=True) for word in words]
        return MultiFernet([Fernet(base64.urlsafe_b64encode(key)) for key in keys])
    except (ValueError, binascii.Error):
        raise SettingsError(
            f"{KEYS_VARIABLE}: a key in {path} is not 32 bytes in base64. `openssl rand -base64 32` prints one"
        ) from None


def encrypt(keys: MultiFernet | None, secret: str) -> str:
    """Encrypt a secret under the first key.

    Raises:
        SettingsError: there are no keys.
    """
    if keys is None:
        raise SettingsError(_NO_KEYS)
    return keys.encrypt(secret.encode()).decode()


def decrypt(keys: MultiFernet | None, stored: str) -> str:
    """Decrypt a stored secret. One in clear text, which an older version stored, is returned as it is.

    Raises:
        SettingsError: there are no keys.
        StoredSecretError: no key decrypts it.
    """
    if stored.startswith(_CLEAR):
        return stored
    if keys is None:
        raise SettingsError(_NO_KEYS)
    try:
        return keys.decrypt(stored).decode()
    except InvalidToken:
        raise StoredSecretError(
            f"no key in {KEYS_VARIABLE} decrypts the stored webhook secret. Add the key that encrypted it to the end "
            "of the file, or delete the endpoint and create it again"
        ) from None


def encrypt_stored_secrets(
    connection: psycopg.Connection[Any], keys: MultiFernet | None, *, only_clear: bool = False
) -> int:
    """Encrypt all stored secrets under the first key, in the transaction of the caller, and return their number.

    Args:
        connection: the database.
        keys: see ``read_encryption_keys``.
        only_clear: leave those alone that are encrypted already.

    Raises:
        SettingsError: a secret has to be encrypted, and there are no keys.
        StoredSecretError: no key decrypts one of the secrets; nothing has changed.
    """
    with connection.cursor(row_factory=dict_row) as cursor:
        rows = cursor.execute(query("lock_webhook_secrets")).fetchall()
        changed = [
            {"id": row["id"], "secret": encrypt(keys, decrypt(keys, row["secret"]))}
            for row in rows
            if row["secret"].startswith(_CLEAR) or not only_clear
        ]
        cursor.executemany(query("set_webhook_secret"), changed)
    return len(changed)
