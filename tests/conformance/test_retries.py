"""Retried creations."""

import asyncio
import itertools
import secrets
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import openai
import pytest

from tests.conformance.target import Target
from tests.conformance.workload import CHAT, NO_FILE

pytestmark = pytest.mark.point("R1")

_numbers = itertools.count()
# Makes the requests of each check and each run unique.
_RUN = secrets.token_hex(8)


@pytest.fixture
def request_body() -> dict[str, Any]:
    """A creation that no other check sends."""
    metadata = {"check": f"{_RUN}-{next(_numbers)}"}
    return {"input_file_id": NO_FILE, "endpoint": CHAT, "completion_window": "24h", "metadata": metadata}


def create(http: httpx.Client, body: dict[str, Any], attempt: int) -> str:
    answer = http.post("batches", json=body, headers={"x-stainless-retry-count": str(attempt)})
    return str(answer.raise_for_status().json()["id"])


def batches_of(client: openai.OpenAI, body: dict[str, Any]) -> list[str]:
    return [batch.id for batch in client.batches.list(limit=100).data if batch.metadata == body["metadata"]]


@pytest.mark.point("R2")
def test_the_same_creation_twice_makes_two_batches(http: httpx.Client, request_body: dict[str, Any]) -> None:
    assert create(http, request_body, 0) != create(http, request_body, 0)


@pytest.mark.parametrize("attempt", [1, 2])
def test_a_retried_creation_returns_the_first_batch(
    http: httpx.Client, request_body: dict[str, Any], attempt: int
) -> None:
    assert create(http, request_body, attempt - 1) == create(http, request_body, attempt)


def test_a_retry_without_a_received_first_attempt_makes_a_batch(
    http: httpx.Client, request_body: dict[str, Any]
) -> None:
    assert create(http, request_body, 1)[:6] == "batch_"


@pytest.mark.point("R2")
def test_a_retry_of_another_request_makes_its_own_batch(http: httpx.Client, request_body: dict[str, Any]) -> None:
    other = request_body | {"metadata": {"check": f"{_RUN}-other"}}
    assert create(http, request_body, 0) != create(http, other, 1)


def test_concurrent_retries_make_one_batch(
    http: httpx.Client, client: openai.OpenAI, request_body: dict[str, Any]
) -> None:
    with ThreadPoolExecutor(6) as threads:
        made = set(threads.map(lambda _: create(http, request_body, 1), range(6)))
    assert len(made) == 1
    assert batches_of(client, request_body) == list(made)


class _LosesTheFirstResponse(openai.DefaultHttpxClient):
    """Turns the first response to a creation into a 503, which the official client retries."""

    lost = 0

    def send(self, request: Any, **options: Any) -> Any:
        response = super().send(request, **options)
        if request.method == "POST" and self.lost == 0:
            self.lost += 1
            response.status_code = 503
        return response


class _LosesTheFirstResponseAsync(openai.DefaultAsyncHttpxClient):
    """Asynchronous form of ``_LosesTheFirstResponse``."""

    lost = 0

    async def send(self, request: Any, **options: Any) -> Any:
        response = await super().send(request, **options)
        if request.method == "POST" and self.lost == 0:
            self.lost += 1
            response.status_code = 503
        return response


def test_the_client_makes_one_batch_if_the_first_response_is_lost(
    target: Target, client: openai.OpenAI, request_body: dict[str, Any]
) -> None:
    with _LosesTheFirstResponse() as lossy, target.client(http_client=lossy, max_retries=2) as unlucky:
        made = unlucky.batches.create(**request_body).id
        assert lossy.lost == 1
    assert batches_of(client, request_body) == [made]


def test_the_async_client_makes_one_batch_if_the_first_response_is_lost(
    target: Target, client: openai.OpenAI, request_body: dict[str, Any]
) -> None:
    async def make() -> str:
        async with (
            _LosesTheFirstResponseAsync() as lossy,
            target.async_client(http_client=lossy, max_retries=2) as opened,
        ):
            return str((await opened.batches.create(**request_body)).id)

    made = asyncio.run(make())
    assert batches_of(client, request_body) == [made]
