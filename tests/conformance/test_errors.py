"""Shape of every error, and properties of all responses."""

import asyncio
from typing import Any

import httpx
import openai
import pytest

from tests.conformance.target import Target
from tests.conformance.test_batches import REQUEST
from tests.conformance.workload import CHAT, NO_FILE

pytestmark = pytest.mark.point("E1")

BAD_REQUESTS: dict[str, tuple[str, str, dict[str, Any]]] = {
    "an unknown file": ("GET", "files/file-none", {}),
    "the content of an unknown file": ("GET", "files/file-none/content", {}),
    "the deletion of an unknown file": ("DELETE", "files/file-none", {}),
    "an empty upload": ("POST", "files", {}),
    "a wrong limit of files": ("GET", "files?limit=0", {}),
    "an unknown batch": ("GET", "batches/batch_none", {}),
    "the cancel of an unknown batch": ("POST", "batches/batch_none/cancel", {}),
    "an empty creation": ("POST", "batches", {"json": {}}),
    "a wrong limit of batches": ("GET", "batches?limit=101", {}),
    "an unknown model": ("GET", "models/no-such-model", {}),
    "an unknown path": ("GET", "no/such/path", {}),
    "an unsupported method": ("PUT", "batches", {}),
}


@pytest.fixture(scope="module", params=BAD_REQUESTS)
def refusal(request: pytest.FixtureRequest, http: httpx.Client) -> httpx.Response:
    """Response to one of the bad requests."""
    method, path, options = BAD_REQUESTS[request.param]
    return http.request(method, path, **options)


def test_an_error_is_a_4xx_with_json(refusal: httpx.Response) -> None:
    assert (refusal.status_code // 100, refusal.headers["content-type"].split(";")[0]) == (4, "application/json")


def test_an_error_has_the_four_fields(refusal: httpx.Response) -> None:
    assert sorted(refusal.json()["error"]) == ["code", "message", "param", "type"]


def test_an_error_has_a_message_and_a_type(refusal: httpx.Response) -> None:
    error = refusal.json()["error"]
    assert (type(error["message"]), error["type"]) == (str, "invalid_request_error")
    assert error["message"] != ""


@pytest.mark.point("E3")
def test_an_error_has_a_request_id(refusal: httpx.Response) -> None:
    assert refusal.headers.get("x-request-id", "") != ""


@pytest.mark.point("E3")
@pytest.mark.parametrize("path", ["files?limit=1", "batches?limit=1", "models"])
def test_a_response_has_a_request_id(http: httpx.Client, path: str) -> None:
    assert http.get(path).headers.get("x-request-id", "") != ""


@pytest.mark.point("E3")
def test_request_ids_differ(http: httpx.Client) -> None:
    assert len({http.get("models").headers["x-request-id"] for _ in range(3)}) == 3


@pytest.mark.point("E3")
def test_the_client_exposes_the_request_id(client: openai.OpenAI) -> None:
    assert client.models.list()._request_id not in {None, ""}


@pytest.mark.point("E2")
def test_the_client_raises_a_bad_request(client: openai.OpenAI) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        client.batches.create(input_file_id=NO_FILE, endpoint=CHAT, completion_window="1h")  # type: ignore[arg-type]
    error = caught.value
    assert (error.code, error.param, error.type) == ("invalid_value", "completion_window", "invalid_request_error")
    assert error.request_id not in {None, ""}


@pytest.mark.point("E2")
def test_the_async_client_raises_not_found(target: Target) -> None:
    async def look() -> None:
        async with target.async_client() as client:
            await client.batches.retrieve("batch_none")

    with pytest.raises(openai.NotFoundError) as caught:
        asyncio.run(look())
    assert caught.value.type == "invalid_request_error"


@pytest.mark.point("E2")
def test_the_client_raises_not_found_for_a_file(client: openai.OpenAI) -> None:
    with pytest.raises(openai.NotFoundError) as caught:
        client.files.content("file-none")
    assert caught.value.request_id not in {None, ""}


def test_a_creation_over_a_megabyte_is_refused_with_an_error_object(http: httpx.Client) -> None:
    answer = http.post("batches", json={**REQUEST, "metadata": {"x": "v" * (2 << 20)}})
    assert answer.status_code in {400, 413}
    assert answer.json()["error"]["type"] == "invalid_request_error"
