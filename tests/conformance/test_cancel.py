"""Cancelling batches."""

import asyncio
from typing import Any

import httpx
import openai
import pytest

from tests.conformance.prepared import Prepared
from tests.conformance.target import Target, Watched, contract_fields
from tests.conformance.test_files import UNKNOWN_IDS

pytestmark = pytest.mark.point("C1")


@pytest.fixture(scope="module")
def long_batch(prepared: Prepared, client: openai.OpenAI) -> Watched:
    """A batch that is cancelled right after its creation."""
    main = prepared.batch("main").look()
    batch = client.batches.create(
        input_file_id=main["input_file_id"],
        endpoint=main["endpoint"],
        completion_window="24h",
        metadata={"check": "cancel"},
    )
    return Watched(client=client, id=batch.id, timeout_s=prepared.target.timeout_s)


@pytest.fixture(scope="module")
def first_response(http: httpx.Client, long_batch: Watched) -> httpx.Response:
    """Response to the first cancel."""
    return http.post(f"batches/{long_batch.id}/cancel")


def test_a_cancel_returns_the_batch(first_response: httpx.Response, long_batch: Watched) -> None:
    assert (first_response.status_code, first_response.json()["id"]) == (200, long_batch.id)
    assert first_response.json()["object"] == "batch"


def test_the_status_after_a_cancel_is_cancelling_or_cancelled(first_response: httpx.Response) -> None:
    assert first_response.json()["status"] in {"cancelling", "cancelled"}


def test_a_cancel_sets_cancelling_at(first_response: httpx.Response) -> None:
    assert type(first_response.json()["cancelling_at"]) is int


@pytest.mark.usefixtures("first_response")
def test_a_cancel_can_be_repeated(http: httpx.Client, long_batch: Watched) -> None:
    answer = http.post(f"batches/{long_batch.id}/cancel")
    assert answer.status_code == 200
    assert answer.json()["status"] in {"cancelling", "cancelled"}


def test_cancelling_a_cancelled_batch_changes_nothing(client: openai.OpenAI, cancelled: dict[str, Any]) -> None:
    assert contract_fields(client.batches.cancel(cancelled["id"]).to_dict()) == contract_fields(cancelled)


def test_a_running_batch_can_be_cancelled(stopped: Watched) -> None:
    if stopped.ended()["status"] == "completed":
        pytest.skip("the batch completed before it could be cancelled")
    assert stopped.ended()["status"] == "cancelled"


def test_the_async_client_cancels(target: Target, cancelled: dict[str, Any]) -> None:
    async def cancel() -> str:
        async with target.async_client() as client:
            return (await client.batches.cancel(cancelled["id"])).status

    assert asyncio.run(cancel()) == "cancelled"


def _assert_conflict(answer: httpx.Response, status: str) -> None:
    assert answer.status_code == 409
    assert answer.headers.get("x-should-retry") == "false"
    assert f"status '{status}'" in answer.json()["error"]["message"]


@pytest.mark.point("C2")
def test_cancelling_a_failed_batch_is_a_conflict(http: httpx.Client, failed: dict[str, Any]) -> None:
    _assert_conflict(http.post(f"batches/{failed['id']}/cancel"), "failed")


@pytest.mark.late
@pytest.mark.point("C2")
def test_cancelling_a_completed_batch_is_a_conflict(http: httpx.Client, main: dict[str, Any]) -> None:
    _assert_conflict(http.post(f"batches/{main['id']}/cancel"), "completed")


@pytest.mark.late
@pytest.mark.point("C2")
def test_a_refused_cancel_changes_nothing(client: openai.OpenAI, main: dict[str, Any]) -> None:
    assert contract_fields(client.batches.retrieve(main["id"]).to_dict()) == contract_fields(main)


@pytest.mark.point("C2")
def test_the_client_does_not_retry_a_refused_cancel(target: Target, failed: dict[str, Any]) -> None:
    sent: list[str] = []
    with openai.DefaultHttpxClient(event_hooks={"request": [lambda request: sent.append(str(request.url))]}) as hooked:
        client = target.client(http_client=hooked, max_retries=2)
        with pytest.raises(openai.ConflictError):
            client.batches.cancel(failed["id"])
    assert len(sent) == 1


@pytest.mark.point("B8")
def test_cancelling_an_unknown_batch_is_a_404(http: httpx.Client) -> None:
    answer = http.post(f"batches/{UNKNOWN_IDS['id of a batch']}/cancel")
    assert answer.status_code == 404
    assert answer.json()["error"]["type"] == "invalid_request_error"
