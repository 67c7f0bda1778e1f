"""Attacks on the secrets that a stack stores: with a copy of its database, and with the digests that its pods show."""

import base64
import hashlib
import secrets
from pathlib import Path

import httpx
import openai
import psycopg
import pytest
from cryptography.fernet import Fernet, MultiFernet
from typer.testing import CliRunner

from service.adapters.memory_object_store import MemoryObjectStore
from service.api.app import create_app
from service.audit.log import OPERATOR
from service.backends import Backends
from service.cli.app import app
from service.db import Pool, query
from service.db.__main__ import run as migrate
from service.errors import SettingsError
from service.stored_secrets import StoredSecretError, decrypt, encrypt, encrypt_stored_secrets, read_encryption_keys
from service.webhooks import EventType, create_endpoint
from tests.conftest import as_owner
from tests.infra.previewed_stacks import preview_values, stack_text
from tests.integration.reconciler_harness import KEYS, Stack, eventually
from tests.integration.test_webhook_deliveries import cancel_one, deliveries, delivering, receiving, subscribe
from tests.security.serving import served

PASSWORD, S3_PASSWORD = "winter2026", "summer2026"
CLEAR = f"whsec_{base64.b64encode(bytes(range(32))).decode()}"


def dump(pool: Pool) -> str:
    """Return all rows of all tables as text."""
    with pool.connection() as connection:
        tables = connection.execute("SELECT relname FROM pg_stat_user_tables").fetchall()
        rows = [
            connection.execute(psycopg.sql.SQL("SELECT t::text FROM {} t").format(psycopg.sql.Identifier(name)))
            for name in (table["relname"] for table in tables)
        ]
        return "\n".join(str(row) for cursor in rows for row in cursor.fetchall())


def key_file(path: Path, *keys: str) -> Path:
    path.write_text("\n".join(keys))
    return path


def new_key() -> str:
    return base64.b64encode(secrets.token_bytes(32)).decode()


def add_clear_row(pool: Pool) -> None:
    """Add an endpoint as the version that did not encrypt stored it."""
    with pool.connection() as connection:
        connection.execute("INSERT INTO projects (id, name) VALUES ('p', 'p')")
        connection.execute(
            "INSERT INTO webhook_endpoints (id, project_id, url, secret, events) "
            "VALUES ('we_old', 'p', 'http://x.example', %s, ARRAY['batch.failed'])",
            [CLEAR],
        )


def stored(pool: Pool) -> list[str]:
    with pool.connection() as connection:
        return [row["secret"] for row in connection.execute(query("lock_webhook_secrets"))]


def test_copy_of_the_database_reveals_no_secret_and_webhooks_verify(stack: Stack) -> None:
    with receiving() as receiver:
        secret = subscribe(stack, receiver.url)
        bare = secret.removeprefix("whsec_").rstrip("=")
        assert bare not in dump(stack.pool)
        cancel_one(stack)
        with delivering(stack):
            eventually(lambda: len(receiver.got) == 1)
            eventually(lambda: deliveries(stack)[0]["delivered_at"] is not None)
        [(headers, content)] = receiver.got
        assert openai.OpenAI(api_key="x").webhooks.unwrap(content, headers, secret=secret)
        assert bare not in dump(stack.pool)


def test_migration_encrypts_secrets_of_an_older_version(pool: Pool, tmp_path: Path) -> None:
    add_clear_row(pool)
    keys = key_file(tmp_path / "keys", new_key())
    environment = {"CLOISTER_DATABASE_URL": as_owner(pool), "CLOISTER_ENCRYPTION_KEYS_FILE": str(keys)}
    migrate(environment)
    assert CLEAR.removeprefix("whsec_") not in dump(pool)
    [first] = stored(pool)
    assert decrypt(read_encryption_keys(keys), first) == CLEAR
    migrate(environment)
    assert stored(pool) == [first]


def test_migration_without_a_key_leaves_clear_secrets_and_names_the_setting(pool: Pool) -> None:
    add_clear_row(pool)
    with pytest.raises(SettingsError, match="CLOISTER_ENCRYPTION_KEYS_FILE is not set"):
        migrate({"CLOISTER_DATABASE_URL": as_owner(pool)})
    assert stored(pool) == [CLEAR]


def test_rotation_lets_the_old_key_be_removed(pool: Pool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    old, new = new_key(), new_key()
    add_clear_row(pool)
    path = key_file(tmp_path / "keys", old)
    _, secret = create_endpoint(
        pool,
        read_encryption_keys(path),
        project_id="p",
        url="http://x.example",
        events=[EventType.FAILED],
        name="",
        actor=OPERATOR,
    )
    monkeypatch.setenv("CLOISTER_DATABASE_URL", pool.conninfo)
    monkeypatch.setenv("CLOISTER_ENCRYPTION_KEYS_FILE", str(key_file(path, new, old)))
    result = CliRunner().invoke(app, ["secrets", "rotate"], catch_exceptions=False)
    assert result.output == "webhook secrets encrypted under the first key: 2\n"
    keys = read_encryption_keys(key_file(path, new))
    assert {decrypt(keys, each) for each in stored(pool)} == {CLEAR, secret}


def test_rotation_without_an_old_key_changes_nothing(pool: Pool, tmp_path: Path) -> None:
    add_clear_row(pool)
    with pool.connection() as connection:
        encrypt_stored_secrets(connection, KEYS)
    before = stored(pool)
    with pytest.raises(StoredSecretError), pool.connection() as connection:
        encrypt_stored_secrets(connection, read_encryption_keys(key_file(tmp_path / "keys", new_key())))
    assert stored(pool) == before


def test_delivery_without_the_right_key_waits_for_it(stack: Stack) -> None:
    with receiving() as receiver:
        subscribe(stack, receiver.url)
        stack.sql("UPDATE webhook_endpoints SET secret = %s", Fernet(Fernet.generate_key()).encrypt(b"x").decode())
        cancel_one(stack)
        with delivering(stack):
            eventually(lambda: deliveries(stack)[0]["last_error"] is not None)
        assert "no key in CLOISTER_ENCRYPTION_KEYS_FILE" in deliveries(stack)[0]["last_error"]
        assert deliveries(stack)[0]["due_at"] is not None
        assert receiver.got == []


def test_api_without_keys_stores_no_secret_and_names_the_setting(api_pool: Pool, admin_key: str) -> None:
    with served(create_app(Backends(pool=api_pool, store=MemoryObjectStore()))) as url:
        answer = httpx.post(
            f"{url}/v1/webhook_endpoints",
            json={"url": "https://x.example", "event_types": ["batch.failed"], "name": ""},
            headers={"authorization": f"Bearer {admin_key}"},
        )
    assert answer.status_code == 503
    assert "CLOISTER_ENCRYPTION_KEYS_FILE" in answer.json()["error"]["message"]
    assert stored(api_pool) == []


@pytest.mark.parametrize("content", ["", "short", "ä", "A" * 44 + "!"])
def test_wrong_key_file_is_refused_without_quoting_it(tmp_path: Path, content: str) -> None:
    (tmp_path / "keys").write_text(content)
    with pytest.raises(SettingsError, match=r"CLOISTER_ENCRYPTION_KEYS_FILE: ") as raised:
        read_encryption_keys(tmp_path / "keys")
    assert not content or content not in str(raised.value)


def test_missing_key_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(SettingsError, match=r"cannot read .*none"):
        read_encryption_keys(tmp_path / "none")


def test_changed_ciphertext_is_refused() -> None:
    token = encrypt(KEYS, CLEAR)
    with pytest.raises(StoredSecretError):
        decrypt(MultiFernet([Fernet(Fernet.generate_key())]), token)
    with pytest.raises(StoredSecretError):
        decrypt(KEYS, token[:-8] + "AAAAAAA=")


def shown_digests(key: str) -> set[str]:
    """Return the annotations of the dev stack's pods, which may be read without reading Secrets."""
    text = stack_text()
    passwords = {"database_owner_password": PASSWORD, "object_store_secret_access_key": S3_PASSWORD}
    recording = preview_values({**text.values, **passwords, "encryption_keys": key}, text.secret_keys)
    return {
        value
        for kind in ("StatefulSet", "Deployment")
        for each in recording.of_type(kind)
        for name, value in each.inputs["spec"]["template"]["metadata"]["annotations"].items()
        if name in {"cloister.dev/passwords", "cloister.dev/keys", "cloister.dev/credentials"}
    }


def test_annotations_of_pods_confirm_no_guess_of_a_password() -> None:
    key = new_key()
    shown = shown_digests(key)
    assert len(shown) == 3
    guesses = ([PASSWORD], [S3_PASSWORD], [PASSWORD, "cloister-acme-dev", S3_PASSWORD])
    assert not shown & {hashlib.sha256("\0".join(guess).encode()).hexdigest()[:16] for guess in guesses}
    assert shown == shown_digests(key)
    assert not shown & shown_digests(new_key())
