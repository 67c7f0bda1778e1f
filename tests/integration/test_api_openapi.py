"""The served OpenAPI document: valid, complete, and matched by the answers."""

import json
from collections.abc import Iterator, Mapping
from typing import Any

import httpx
import openai
import pytest
from fastapi.routing import APIRoute
from openapi_spec_validator import validate

from service.adapters.memory_object_store import MemoryObjectStore
from service.api.app import create_app
from service.api.openapi import document
from service.backends import Backends
from service.db import Pool, open_pool
from tests.integration.described_answers import closed, problem

BATCH = {"input_file_id": "file-none", "endpoint": "/v1/completions", "completion_window": "24h"}


@pytest.fixture(scope="module")
def described() -> dict[str, Any]:
    """The document of an application without a database."""
    with open_pool("postgresql://nobody@127.0.0.1:9/none") as pool:
        return document(create_app(Backends(pool=pool, store=MemoryObjectStore())))


def check(described: Mapping[str, Any], answer: httpx.Response, path: str) -> httpx.Response:
    """Fail unless the document describes this answer: status, headers, content type and every field of the body."""
    strict = closed(described)
    operation = strict["paths"][path][answer.request.method.lower()]
    assert problem(strict, operation, answer.status_code, answer.headers, answer.content) is None
    return answer


def test_served_document_is_valid_and_public(base_url: str, described: dict[str, Any]) -> None:
    answer = httpx.get(f"{base_url}/openapi.json")
    assert answer.json() == json.loads(json.dumps(described))
    validate(described)


def test_document_describes_exactly_the_routes(described: dict[str, Any], pool: Pool) -> None:
    app = create_app(Backends(pool=pool, store=MemoryObjectStore()))
    routes = {
        (method.lower(), route.path_format)
        for route in app.routes
        if isinstance(route, APIRoute) and route.path != "/openapi.json"
        for method in route.methods
    }
    assert {(method, path) for path, methods in described["paths"].items() for method in methods} == routes


def operations(described: Mapping[str, Any]) -> Iterator[tuple[str, dict[str, Any]]]:
    for path, methods in described["paths"].items():
        for method, operation in methods.items():
            yield f"{method} {path}", operation


def test_operations_and_parameters_have_descriptions(described: dict[str, Any]) -> None:
    for name, operation in operations(described):
        assert operation["summary"], name
        assert operation["description"], name
        assert "Raises" not in operation["description"], name
        for part in (*operation.get("parameters", ()), *operation["responses"].values()):
            assert part["description"], name


def test_only_probes_and_metrics_are_public(described: dict[str, Any]) -> None:
    public = {name for name, operation in operations(described) if "security" not in operation}
    assert public == {"get /healthz", "get /readyz", "get /metrics"}
    for name, operation in operations(described):
        assert name in public or {"401", "403", "500", "503"} <= operation["responses"].keys(), name


def test_errors_use_the_envelope_instead_of_fastapis(described: dict[str, Any]) -> None:
    for name, operation in operations(described):
        assert "422" not in operation["responses"], name
        for status, answer in operation["responses"].items():
            if int(status) >= 400:
                (schema,) = [content["schema"]["$ref"] for content in answer["content"].values()]
                assert schema.rpartition("/")[2] in {"Error", "NotReady"}, name
    assert "HTTPValidationError" not in described["components"]["schemas"]


def test_fields_of_bodies_are_described(described: dict[str, Any]) -> None:
    for name in ("BatchRequest", "BatchObject", "RetrievedBatch", "FileObject", "Extension"):
        for field, schema in described["components"]["schemas"][name]["properties"].items():
            assert schema.get("description"), f"{name}.{field}"


def test_answers_about_files_match_the_document(http: httpx.Client, described: dict[str, Any]) -> None:
    form = {"data": {"purpose": "batch"}, "files": {"file": ("ü.jsonl", b'{"a":1}')}}
    file_id = check(described, http.post("/v1/files", **form), "/v1/files").json()["id"]  # type: ignore[arg-type]
    for path in ("/v1/files/{file_id}", "/v1/files/{file_id}/content"):
        assert check(described, http.get(path.replace("{file_id}", file_id)), path).status_code == 200
    assert check(described, http.get("/v1/files"), "/v1/files").json()["data"]
    assert check(described, http.delete(f"/v1/files/{file_id}"), "/v1/files/{file_id}").status_code == 200
    assert check(described, http.get(f"/v1/files/{file_id}"), "/v1/files/{file_id}").status_code == 404
    assert check(described, http.get("/v1/files?limit=0"), "/v1/files").status_code == 400
    assert check(described, http.post("/v1/files", data={"purpose": "x"}), "/v1/files").status_code == 400


def test_answers_about_batches_match_the_document(
    http: httpx.Client, described: dict[str, Any], api_pool: Pool
) -> None:
    batch_id = check(described, http.post("/v1/batches", json=BATCH), "/v1/batches").json()["id"]
    one, cancel = "/v1/batches/{batch_id}", "/v1/batches/{batch_id}/cancel"
    assert check(described, http.get(f"/v1/batches/{batch_id}"), one).json()["x_cloister"]
    assert check(described, http.get("/v1/batches"), "/v1/batches").json()["data"]
    assert check(described, http.post(f"/v1/batches/{batch_id}/cancel"), cancel).json()["status"] == "cancelling"
    with api_pool.connection() as connection:
        connection.execute(
            "UPDATE batches SET status = 'failed', model = 'm', in_progress_at = now() WHERE id = %s", [batch_id]
        )
        connection.execute("INSERT INTO batch_errors VALUES (%s, 0, 'c', 'm', NULL, 3)", [batch_id])
    assert check(described, http.get(f"/v1/batches/{batch_id}"), one).json()["errors"]["data"][0]["line"] == 3
    assert check(described, http.post(f"/v1/batches/{batch_id}/cancel"), cancel).status_code == 409
    for path in ("/v1/batches/{batch_id}/results", "/v1/batches/{batch_id}/events"):
        assert check(described, http.get(path.replace("{batch_id}", batch_id)), path).status_code == 200
        assert check(described, http.get(path.replace("{batch_id}", "batch_x")), path).status_code == 404
    assert check(described, http.post("/v1/batches", json={}), "/v1/batches").status_code == 400


def test_other_answers_match_the_document(
    base_url: str, http: httpx.Client, described: dict[str, Any], client: openai.OpenAI
) -> None:
    for path in ("/v1/models", "/v1/models/{model_id}", "/healthz", "/readyz", "/metrics"):
        answer = http.get(path.replace("{model_id}", "demo/small"))
        assert check(described, answer, path).status_code == 200
    assert check(described, http.get("/v1/models/x"), "/v1/models/{model_id}").status_code == 404
    assert check(described, httpx.get(f"{base_url}/v1/models"), "/v1/models").status_code == 401
    for path in ("/v1/organization/audit_logs", "/v1/webhook_endpoints"):
        assert check(described, http.get(path), path).status_code == 403
    assert client.models.list().data


def test_answers_to_administrators_match_the_document(
    http: httpx.Client, admin_key: str, described: dict[str, Any]
) -> None:
    http.headers["authorization"] = f"Bearer {admin_key}"
    hooks, one = "/v1/webhook_endpoints", "/v1/webhook_endpoints/{endpoint_id}"
    body = {"url": "https://hooks.example.com/a", "event_types": ["batch.completed"]}
    url = f"{hooks}/{check(described, http.post(hooks, json=body), hooks).json()['id']}"
    assert check(described, http.get(hooks), hooks).json()["data"]
    assert check(described, http.get(url), one).status_code == 200
    assert check(described, http.delete(url), one).status_code == 200
    assert check(described, http.get(url), one).status_code == 404
    logs = "/v1/organization/audit_logs"
    assert check(described, http.get(logs), logs).json()["data"]


@pytest.mark.parametrize(
    ("status", "headers", "body", "words"),
    [
        (418, {}, b"", "status 418"),
        (200, {}, b"", "headers"),
        (200, {"content-type": "text/html"}, b"", "content type"),
        (200, {"content-type": "application/json"}, b'{"object":"list"}', "required property"),
        (200, {"content-type": "application/json"}, b'{"object":"list","data":[],"more":1}', "unexpected"),
    ],
)
def test_undescribed_answer_is_detected(
    described: dict[str, Any], status: int, headers: dict[str, str], body: bytes, words: str
) -> None:
    if headers:
        headers = {**headers, "x-request-id": "req_1"}
    strict = closed(described)
    assert words in str(problem(strict, strict["paths"]["/v1/models"]["get"], status, headers, body))


def test_unsupported_method_is_answered_with_the_supported_ones(http: httpx.Client) -> None:
    assert http.put("/v1/files").headers["allow"] == "GET, POST"
    assert http.put("/v1/files/file-1").headers["allow"] == "DELETE, GET"
