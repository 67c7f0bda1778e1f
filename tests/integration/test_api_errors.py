"""Authentication, the error envelope and unavailable backends."""

import json
import re
from datetime import UTC, datetime

import httpx
import openai
import pytest

from service.adapters.memory_object_store import MemoryObjectStore
from service.api.app import create_app
from service.api_keys import authenticate, create_api_key
from service.backends import Backends
from service.db import Pool, open_pool
from service.errors import ObjectStoreError
from service.projects import ensure_default_project


def test_missing_key_is_refused_without_a_code(base_url: str) -> None:
    for headers in ({}, {"authorization": "Basic abc"}, {"authorization": "Bearer"}):
        answer = httpx.get(f"{base_url}/v1/files", headers=headers)
        assert answer.status_code == 401
        assert answer.json()["error"]["code"] is None
        assert answer.json()["error"]["type"] == "invalid_request_error"


def test_wrong_key_is_refused_with_a_code(base_url: str) -> None:
    client = openai.OpenAI(base_url=f"{base_url}/v1", api_key="sk-wrong", max_retries=0)
    with client, pytest.raises(openai.AuthenticationError) as caught:
        client.files.create(file=b"{}", purpose="batch")
    assert caught.value.code == "invalid_api_key"
    assert "sk-wrong" not in str(caught.value)


@pytest.mark.parametrize("column", ["revoked_at", "expires_at"])
def test_revoked_or_expired_key_is_refused(client: openai.OpenAI, api_pool: Pool, column: str) -> None:
    client.models.list()
    with api_pool.connection() as connection:
        connection.execute(f"UPDATE api_keys SET {column} = now()")  # type: ignore[arg-type] # noqa: S608
    with pytest.raises(openai.AuthenticationError):
        client.models.list()


def test_only_the_digest_of_a_key_is_stored(api_pool: Pool) -> None:
    project = ensure_default_project(api_pool)
    assert ensure_default_project(api_pool) == project
    key = create_api_key(api_pool, project_id=project.id, name="mine", expires_at=datetime(2100, 1, 1, tzinfo=UTC))
    assert re.fullmatch(r"sk-cloister-[\w-]{43}", key)
    access = authenticate(api_pool, key)
    assert access is not None
    assert access.project == project
    with api_pool.connection() as connection:
        row = connection.execute("SELECT * FROM api_keys WHERE name = 'mine'").fetchone()
    assert key.removeprefix("sk-cloister-") not in repr(row)


def test_organization_and_project_headers_are_accepted(base_url: str, api_key: str) -> None:
    with openai.OpenAI(base_url=f"{base_url}/v1", api_key=api_key, organization="org-x", project="proj_x") as client:
        assert list(client.batches.list()) == []


@pytest.mark.parametrize(
    ("method", "path", "status", "code"),
    [
        ("GET", "/v1/nothing", 404, "unknown_url"),
        ("PUT", "/v1/batches", 405, "method_not_allowed"),
        ("DELETE", "/v1/batches/batch_1", 405, "method_not_allowed"),
        ("GET", "/v1/batches/batch_1", 404, None),
        ("GET", "/v1/files/file-%00", 400, "invalid_value"),
    ],
)
def test_every_error_has_the_envelope_and_a_request_id(
    http: httpx.Client, method: str, path: str, status: int, code: str | None
) -> None:
    answer = http.request(method, path)
    assert answer.status_code == status
    assert answer.json()["error"].keys() == {"message", "type", "param", "code"}
    assert answer.json()["error"]["code"] == code
    assert re.fullmatch(r"req_[0-9a-f]{32}", answer.headers["x-request-id"])


def test_client_sees_the_request_id(client: openai.OpenAI) -> None:
    assert client.batches.list()._request_id


def test_unexpected_error_is_answered_without_client_content(
    client: openai.OpenAI, store: MemoryObjectStore, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail(_key: str, chunks: object) -> None:
        raise RuntimeError(f"a secret prompt {chunks}")

    monkeypatch.setattr(store, "put", fail)
    with pytest.raises(openai.InternalServerError) as caught:
        client.files.create(file=("a.jsonl", b'{"a":1}'), purpose="batch")
    assert caught.value.status_code == 500
    assert caught.value.type == "server_error"
    assert str(caught.value.request_id) in caught.value.message
    logged = "".join(capsys.readouterr())
    assert "RuntimeError" in logged
    assert "secret" not in logged + caught.value.message


def test_unreachable_store_is_answered_with_503(
    http: httpx.Client, store: MemoryObjectStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise ObjectStoreError("down")

    monkeypatch.setattr(store, "put", refuse)
    answer = http.post("/v1/files", data={"purpose": "batch"}, files={"file": ("a", b"{}")})
    assert answer.status_code == 503
    assert answer.headers["retry-after"] == "2"
    assert answer.json()["error"]["type"] == "server_error"


async def _get(app: object, path: str) -> httpx.Response:
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app=app), base_url="http://test") as client:  # type: ignore[arg-type]
        return await client.get(path, headers={"authorization": "Bearer k"})


def test_unreachable_database_is_answered_with_503() -> None:
    import asyncio

    with open_pool("postgresql://nobody@127.0.0.1:9/none?connect_timeout=1") as pool:
        pool.timeout = 0.5
        app = create_app(Backends(pool=pool, store=MemoryObjectStore()))
        for path in ("/readyz", "/v1/files"):
            answer = asyncio.run(_get(app, path))
            assert answer.status_code == 503
            assert json.loads(answer.content)["error"]["type"] == "server_error"
        assert asyncio.run(_get(app, "/healthz")).status_code == 200
