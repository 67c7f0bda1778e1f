"""Content of requests stays in the object store: it is in no table, log, event, or error object of the API."""

import json
import subprocess
import sys
from typing import Any

import httpx
import pytest

from service.adapters.memory_object_store import MemoryObjectStore
from service.db import Pool
from tests.integration.reconciler_harness import Stack

CHAT = "/v1/chat/completions"
CANARY = "CANARY-4711-zebra"
BODY: dict[str, Any] = {"model": "demo", "messages": [{"role": "user", "content": CANARY}]}
LINE: dict[str, Any] = {"custom_id": CANARY, "method": "POST", "url": CHAT, "body": BODY}


def written(**changes: Any) -> bytes:
    return json.dumps(LINE | changes).encode()


BROKEN_FILES = {
    "string body": written(body=CANARY),
    "array body": written(body=[CANARY]),
    "no body": json.dumps({"custom_id": CANARY}).encode(),
    "object as custom_id": written(custom_id={CANARY: CANARY}),
    "long custom_id": written(custom_id=CANARY * 40),
    "repeated custom_id": written() + b"\n" + written(),
    "method": written(method=CANARY),
    "url": written(url=f"/{CANARY}"),
    "model": written(body=BODY | {"model": CANARY}),
    "model of another type": written(body=BODY | {"model": [CANARY]}),
    "two models": written() + b"\n" + written(custom_id="b", body=BODY | {"model": CANARY}),
    "stream": written(body=BODY | {"stream": CANARY}),
    "no messages": written(body={"model": "demo", "prompt": CANARY}),
    "nested too deep": written(body=BODY | {"x": CANARY}).replace(b'"x": "', b'"x": ' + b"[" * 600 + b'"'),
    "cut JSON": written()[:-4],
    "text": CANARY.encode(),
    "JSON array": json.dumps([LINE]).encode(),
    "JSON string": json.dumps(CANARY).encode(),
    "control character": written().replace(b"zebra", b"zebra\x01"),
    "not UTF-8": written() + b"\xff",
    "byte order mark": b"\n\xef\xbb\xbf" + written(),
    "half a surrogate pair": written().replace(b"zebra", b"zebra\\ud800"),
    "NUL": written(custom_id=f"{CANARY}\0"),
    "two objects": written() + written(),
    "comma": written() + b",",
}


def dump(pool: Pool) -> str:
    """Return the content of all tables as text."""
    with pool.connection() as connection:
        tables = connection.execute("SELECT tablename FROM pg_tables WHERE schemaname = 'public'").fetchall()
        rows = [
            str(connection.execute(f'SELECT t::text FROM "{table["tablename"]}" AS t').fetchall())  # type: ignore[arg-type] # noqa: S608
            for table in tables
        ]
    return "\n".join(rows)


def assert_absent(*texts: str) -> None:
    for text in texts:
        for secret in (CANARY, "zebra", CANARY.encode().hex()):
            place = text.lower().find(secret.lower())
            assert place < 0, text[max(0, place - 300) : place + 100]


@pytest.mark.parametrize("content", BROKEN_FILES.values(), ids=BROKEN_FILES)
def test_invalid_input_files_are_not_quoted(stack: Stack, content: bytes, capsys: pytest.CaptureFixture[str]) -> None:
    stack.create(content)
    assert stack.advance()["status"] == "failed"
    assert stack.errors()
    assert_absent(dump(stack.pool), "".join(capsys.readouterr()))


@pytest.mark.parametrize("field", [CANARY, "病人的诊断是糖尿病zebra", "zebra"])
def test_names_of_unknown_fields_are_not_quoted(stack: Stack, field: str) -> None:
    model = stack.backends.catalogue["demo"]
    object.__setattr__(model.spec, "engine", "processor")
    stack.create(written(body=BODY | {field.lower().replace("-", "") + "É": 1}))
    assert stack.advance()["status"] == "failed"
    assert_absent(dump(stack.pool))


def test_answers_of_the_engine_are_only_in_the_files(stack: Stack, capsys: pytest.CaptureFixture[str]) -> None:
    error = b'{"error":{"message":"%s","code":400}}' % CANARY.encode()
    job = stack.started(written(), written(custom_id="b"))
    assert job.commit(1, fails=True, body=error)
    assert job.commit(2, body=error)
    while stack.advance()["status"] != "completed":
        pass
    row = stack.batch()
    assert CANARY in json.dumps(stack.file(row["error_file_id"]))
    assert CANARY in json.dumps(stack.file(row["output_file_id"]))
    assert_absent(dump(stack.pool), "".join(capsys.readouterr()))


def test_expired_lines_are_only_in_the_error_file(stack: Stack, capsys: pytest.CaptureFixture[str]) -> None:
    stack.started(written())
    stack.sql("UPDATE batches SET expires_at = now() - interval '1 s'")
    while stack.advance()["status"] != "expired":
        pass
    assert CANARY in json.dumps(stack.file(stack.batch()["error_file_id"]))
    assert_absent(dump(stack.pool), "".join(capsys.readouterr()))


# Metadata is the client's, so the name of an entry may be quoted.
REFUSED_REQUESTS: dict[str, dict[str, Any]] = {
    "text": {"content": CANARY},
    "cut JSON": {"content": json.dumps({"input_file_id": CANARY})[:-1]},
    "string": {"json": CANARY},
    "unknown field": {"json": {"body": CANARY}},
    "endpoint": {"json": {"input_file_id": "f", "endpoint": CANARY, "completion_window": "24h"}},
    "window": {"json": {"input_file_id": "f", "endpoint": CHAT, "completion_window": CANARY}},
    "file id of another type": {"json": {"input_file_id": [CANARY], "endpoint": CHAT, "completion_window": "24h"}},
    "metadata": {"json": {"input_file_id": "f", "endpoint": CHAT, "completion_window": "24h", "metadata": CANARY}},
    "long metadata": {
        "json": {"input_file_id": "f", "endpoint": CHAT, "completion_window": "24h", "metadata": {"a": CANARY * 60}}
    },
    "priority": {
        "json": {"input_file_id": "f", "endpoint": CHAT, "completion_window": "24h", "x_cloister": {"priority": 4711}}
    },
    "expiry": {
        "json": {
            "input_file_id": "f",
            "endpoint": CHAT,
            "completion_window": "24h",
            "output_expires_after": {"anchor": CANARY, "seconds": 4711},
        }
    },
    "idempotency key": {
        "json": {"input_file_id": "f", "endpoint": CHAT, "completion_window": "24h"},
        "headers": {"idempotency-key": CANARY * 20},
    },
}


@pytest.mark.parametrize("request_", REFUSED_REQUESTS.values(), ids=REFUSED_REQUESTS)
def test_refused_requests_are_not_quoted(
    http: httpx.Client, api_pool: Pool, request_: dict[str, Any], capsys: pytest.CaptureFixture[str]
) -> None:
    answer = http.post("/v1/batches", **request_)
    assert answer.status_code == 400
    assert "4711" not in answer.text
    assert_absent(answer.text, dump(api_pool), "".join(capsys.readouterr()))


@pytest.mark.parametrize("name", ["purpose", "expires_after[anchor]", "expires_after[seconds]", "unknown"])
def test_refused_uploads_are_not_quoted(
    http: httpx.Client, api_pool: Pool, store: MemoryObjectStore, name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    answer = http.post("/v1/files", data={"purpose": "batch", name: CANARY}, files={"file": ("a", CANARY.encode())})
    assert answer.status_code == 400
    assert_absent(answer.text, dump(api_pool), "".join(capsys.readouterr()))
    assert list(store.keys("")) == []


@pytest.mark.parametrize("path", ["/v1/files/{}", "/v1/batches/{}", "/v1/models/{}", "/v1/{}", "/v1/estimates/{}"])
def test_paths_with_content_are_not_logged(http: httpx.Client, path: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert http.get(path.format(CANARY)).status_code == 404
    assert_absent("".join(capsys.readouterr()))


def test_second_request_with_the_same_idempotency_key_is_not_quoted(
    http: httpx.Client, api_pool: Pool, capsys: pytest.CaptureFixture[str]
) -> None:
    request = {"input_file_id": "f", "endpoint": CHAT, "completion_window": "24h"}
    headers = {"idempotency-key": "one"}
    assert http.post("/v1/batches", json=request, headers=headers).status_code == 200
    other = http.post("/v1/batches", json=request | {"metadata": {"a": CANARY}}, headers=headers)
    assert other.json()["error"]["code"] == "idempotency_key_reused"
    assert_absent(other.text, dump(api_pool), "".join(capsys.readouterr()))


# Runs the API and the reconciler over a store whose errors quote content, as an unforeseen error might.
UNFORESEEN = """
import sys, threading, time
from pathlib import Path
import httpx
from service.adapters.directory_object_store import DirectoryObjectStore
from service.api.app import create_app
from service.api_keys import create_api_key
from service.backends import Backends
from service.db import open_pool
from service.logging import configure_logging
from service.projects import Project
from service.reconciler.loop import Workers
from tests.integration.reconciler_harness import Stack, line
from tests.security.serving import served

class Store(DirectoryObjectStore):
    broken = False

    def read(self, key, *, start=0):
        if self.broken:
            yield b"x"
            raise ValueError(f"cannot read {CANARY}") from KeyError(CANARY)
        yield from super().read(key, start=start)

    def put(self, key, chunks):
        if self.broken:
            raise ValueError(f"cannot write {CANARY}: {b''.join(chunks)!r}")
        return super().put(key, chunks)

    def keys(self, prefix):
        raise ValueError(f"cannot list {CANARY}")

database_url, directory, CANARY = sys.argv[1:]
configure_logging("debug")
with open_pool(database_url) as pool:
    store = Store(Path(directory))
    stack = Stack(pool, store, Path(directory))
    stack.create(line(1))
    store.broken = True
    with Workers(stack.backends) as workers:
        workers.run_pass(until=time.monotonic() + 5)
    key = create_api_key(pool, project_id="p", name="test")
    with served(create_app(Backends(pool=pool, store=store))) as url:
        headers = {"authorization": f"Bearer {key}"}
        upload = httpx.post(f"{url}/v1/files", data={"purpose": "batch"}, files={"file": ("a", b"{}")}, headers=headers)
        assert upload.status_code == 500
        print(upload.text)
        try:
            httpx.get(f"{url}/v1/files/file-batch_1/content", headers=headers)
        except httpx.RemoteProtocolError:
            print("download cut")
"""


def test_unforeseen_errors_are_logged_without_their_messages(database_url: str, pool: Pool, tmp_path: Any) -> None:
    program = [sys.executable, "-c", UNFORESEEN, database_url, str(tmp_path), CANARY]
    done = subprocess.run(program, capture_output=True, text=True, check=False, timeout=120)
    assert done.returncode == 0, done.stderr
    assert "batch.step_failed" in done.stdout
    assert "download cut" in done.stdout
    assert '"error": "ValueError"' in done.stdout
    assert_absent(done.stdout, done.stderr, dump(pool))
