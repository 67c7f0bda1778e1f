"""Scopes of keys, and isolation between projects."""

import hashlib
from datetime import UTC, datetime, timedelta

import httpx
import openai
import pytest
from fastapi.routing import APIRoute

from service.adapters.memory_object_store import MemoryObjectStore
from service.api.app import create_app
from service.api_keys import Scope, authenticate, create_api_key, list_api_keys, revoke_api_key
from service.backends import Backends
from service.db import Pool
from service.projects import Project, archive_project, create_project

# The scope that a route needs; of two, either.
NEEDED: dict[tuple[str, str], Scope | frozenset[Scope]] = {
    ("GET", "/v1/models"): Scope.READ,
    ("GET", "/v1/models/{model_id:path}"): Scope.READ,
    ("GET", "/v1/estimates/{model_id:path}"): Scope.READ,
    ("GET", "/v1/files"): Scope.READ,
    ("GET", "/v1/files/{file_id}"): Scope.READ,
    ("GET", "/v1/files/{file_id}/content"): Scope.READ,
    ("GET", "/v1/batches"): Scope.READ,
    ("GET", "/v1/batches/{batch_id}"): Scope.READ,
    ("GET", "/v1/batches/{batch_id}/results"): Scope.READ,
    ("GET", "/v1/batches/{batch_id}/events"): Scope.READ,
    ("GET", "/v1/jobs"): Scope.READ,
    ("GET", "/v1/organization/usage/completions"): frozenset({Scope.READ, Scope.OPERATOR}),
    ("GET", "/v1/organization/costs"): frozenset({Scope.READ, Scope.OPERATOR}),
    ("GET", "/v1/capacity"): Scope.OPERATOR,
    ("POST", "/v1/files"): Scope.SUBMIT,
    ("DELETE", "/v1/files/{file_id}"): Scope.SUBMIT,
    ("POST", "/v1/batches"): Scope.SUBMIT,
    ("POST", "/v1/batches/{batch_id}/cancel"): Scope.SUBMIT,
    ("POST", "/v1/batches/{batch_id}/pause"): Scope.SUBMIT,
    ("POST", "/v1/batches/{batch_id}/resume"): Scope.SUBMIT,
    ("GET", "/v1/organization/audit_logs"): Scope.ADMIN,
    ("GET", "/v1/deletion_receipts"): Scope.ADMIN,
    ("GET", "/v1/deletion_receipts/{receipt_id}"): Scope.ADMIN,
    ("POST", "/v1/webhook_endpoints"): Scope.ADMIN,
    ("GET", "/v1/webhook_endpoints"): Scope.ADMIN,
    ("GET", "/v1/webhook_endpoints/{endpoint_id}"): Scope.ADMIN,
    ("DELETE", "/v1/webhook_endpoints/{endpoint_id}"): Scope.ADMIN,
}
EACH_ROUTE = pytest.mark.parametrize(("method", "path"), NEEDED)
# Routes whose answer depends on the catalogue or the request, not on an object of the project.
WITHOUT_OBJECT = {path for _, path in NEEDED if "{" not in path or "{model_id" in path}


def send(base_url: str, key: str, method: str, path: str, object_id: str = "nothing") -> httpx.Response:
    url = base_url + path[: path.find("{")] + object_id + path[path.find("}") + 1 :] if "{" in path else base_url + path
    return httpx.request(method, url, headers={"authorization": f"Bearer {key}"})


def test_every_route_except_probes_is_tested_here(api_pool: Pool) -> None:
    routes = create_app(Backends(pool=api_pool, store=MemoryObjectStore())).routes
    served = {(method, route.path) for route in routes if isinstance(route, APIRoute) for method in route.methods}
    assert served - {("GET", "/healthz"), ("GET", "/readyz"), ("GET", "/metrics"), ("GET", "/openapi.json")} == set(
        NEEDED
    )


@EACH_ROUTE
def test_route_accepts_only_keys_with_its_scope(
    base_url: str, api_pool: Pool, project: Project, method: str, path: str
) -> None:
    needed = NEEDED[method, path]
    accepted = {needed} if isinstance(needed, Scope) else needed
    for scope in Scope:
        key = create_api_key(api_pool, project_id=project.id, name="one scope", scopes=[scope])
        answer = send(base_url, key, method, path)
        if scope in accepted:
            assert answer.status_code in {200, 400, 404}
        else:
            assert (answer.status_code, answer.json()["error"]["code"]) == (403, "missing_scope")
            missing = answer.json()["error"]["message"].partition("Missing scopes: ")[2]
            assert any(missing.startswith(each) for each in accepted)


@EACH_ROUTE
def test_routes_refuse_requests_without_a_valid_key(base_url: str, method: str, path: str) -> None:
    answer = send(base_url, "sk-cloister-wrong", method, path)
    assert (answer.status_code, answer.json()["error"]["code"]) == (401, "invalid_api_key")
    assert httpx.request(method, base_url + path).json()["error"]["code"] is None


@EACH_ROUTE
def test_objects_of_another_project_do_not_exist(
    client: openai.OpenAI, base_url: str, api_pool: Pool, method: str, path: str
) -> None:
    file = client.files.create(file=("a.jsonl", b"{}"), purpose="batch")
    batch = client.batches.create(input_file_id=file.id, endpoint="/v1/completions", completion_window="24h")
    other = create_project(api_pool, f"stranger of {file.id}")
    stranger = create_api_key(api_pool, project_id=other.id, name="test", scopes=Scope)
    if path in WITHOUT_OBJECT:
        answers = [send(base_url, stranger, method, f"{path}?after={object_id}") for object_id in (file.id, batch.id)]
        assert all(file.id not in answer.text.replace(f"'{file.id}'", "") for answer in answers)
        return
    for object_id in (file.id, batch.id):
        there, unknown = send(base_url, stranger, method, path, object_id), send(base_url, stranger, method, path)
        assert there.status_code == unknown.status_code == 404
        assert there.text.replace(object_id, "nothing") == unknown.text
    assert client.files.retrieve(file.id) == file
    assert client.batches.retrieve(batch.id).status == "validating"


def test_file_of_another_project_counts_as_missing(
    client: openai.OpenAI, stranger: openai.OpenAI, api_pool: Pool
) -> None:
    file = client.files.create(file=("a.jsonl", b"{}\n" * 5), purpose="batch")
    batch = stranger.batches.create(input_file_id=file.id, endpoint="/v1/completions", completion_window="24h")
    with api_pool.connection() as connection:
        row = connection.execute("SELECT enqueued_requests FROM batches WHERE id = %s", [batch.id]).fetchone()
    assert row == {"enqueued_requests": 0}


def test_key_is_refused_from_its_expiry(base_url: str, api_pool: Pool, project: Project) -> None:
    def status(expires_at: datetime) -> int:
        key = create_api_key(api_pool, project_id=project.id, name="test", expires_at=expires_at)
        return send(base_url, key, "GET", "/v1/models").status_code

    assert status(datetime.now(UTC) + timedelta(minutes=1)) == 200
    assert status(datetime.now(UTC)) == 401


def test_only_the_revoked_key_is_refused(base_url: str, api_pool: Pool, project: Project, api_key: str) -> None:
    other = create_api_key(api_pool, project_id=project.id, name="other")
    (key_id,) = [key.id for key in list_api_keys(api_pool, project_id=project.id) if key.hint == api_key[-4:]]
    assert revoke_api_key(api_pool, key_id)
    assert revoke_api_key(api_pool, key_id)
    assert not revoke_api_key(api_pool, "key_none")
    assert send(base_url, api_key, "GET", "/v1/models").status_code == 401
    assert send(base_url, other, "GET", "/v1/models").status_code == 200


def test_keys_of_an_archived_project_are_refused(base_url: str, api_pool: Pool, project: Project, api_key: str) -> None:
    assert archive_project(api_pool, project)
    assert not archive_project(api_pool, project)
    assert send(base_url, api_key, "GET", "/v1/models").json()["error"]["code"] == "invalid_api_key"


def test_whole_digest_of_a_key_is_compared(api_pool: Pool, project: Project, api_key: str) -> None:
    digest = hashlib.sha256(api_key.encode()).digest()
    with api_pool.connection() as connection:
        connection.execute(
            "UPDATE api_keys SET key_sha256 = %s WHERE key_sha256 = %s", [digest[:8] + b"x" * 24, digest]
        )
    assert authenticate(api_pool, api_key) is None
    with api_pool.connection() as connection:
        connection.execute(
            "INSERT INTO api_keys (id, project_id, name, key_sha256, hint, scopes)"
            " VALUES ('key_same_prefix', %s, 'test', %s, '', '{read}')",
            [project.id, digest],
        )
    access = authenticate(api_pool, api_key)
    assert access is not None
    assert (access.key_id, access.scopes) == ("key_same_prefix", {Scope.READ})
