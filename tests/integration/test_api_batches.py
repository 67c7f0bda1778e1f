"""The Batches and Models endpoints, through the official client."""

from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import openai
import pytest
from openai.types import Batch

from service.db import Pool

REQUEST = {"input_file_id": "file-none", "endpoint": "/v1/completions", "completion_window": "24h"}
OPEN = ("validating", "in_progress", "finalizing")


def create(client: openai.OpenAI, **options: Any) -> Batch:
    return client.batches.create(**{**REQUEST, **options})


def set_status(api_pool: Pool, batch: Batch, status: str, **columns: Any) -> None:
    with api_pool.connection() as connection:
        connection.execute("UPDATE batches SET status = %s WHERE id = %s", [status, batch.id])
        for column, value in columns.items():
            connection.execute(f"UPDATE batches SET {column} = %s WHERE id = %s", [value, batch.id])  # type: ignore[arg-type] # noqa: S608


def test_new_batch_has_every_field_of_the_contract(http: httpx.Client) -> None:
    batch = http.post("/v1/batches", json={**REQUEST, "metadata": {"team": "ü"}}).json()
    assert batch.pop("id").startswith("batch_")
    created_at = batch.pop("created_at")
    assert batch == {
        "object": "batch", "endpoint": "/v1/completions", "model": None, "errors": None,
        "input_file_id": "file-none", "completion_window": "24h", "status": "validating",
        "output_file_id": None, "error_file_id": None,
        "in_progress_at": None, "expires_at": created_at + 24 * 3600, "finalizing_at": None, "completed_at": None,
        "failed_at": None, "expired_at": None, "cancelling_at": None, "cancelled_at": None,
        "request_counts": {"total": 0, "completed": 0, "failed": 0}, "usage": None, "metadata": {"team": "ü"},
    }  # fmt: skip


def test_batch_is_retrieved_as_created_and_leaves_an_event(client: openai.OpenAI, api_pool: Pool) -> None:
    batch = create(client, output_expires_after={"anchor": "created_at", "seconds": 3600})
    retrieved = client.batches.retrieve(batch.id).to_dict()
    retrieved.pop("x_cloister")
    assert retrieved == batch.to_dict()
    with api_pool.connection() as connection:
        row = connection.execute(
            "SELECT output_expires_after_s, type FROM batches JOIN batch_events ON batch_id = batches.id"
            " WHERE batches.id = %s",
            [batch.id],
        ).fetchone()
    assert row == {"output_expires_after_s": 3600, "type": "batch.validating"}


@pytest.mark.parametrize(
    ("change", "code", "param"),
    [
        ({"input_file_id": ...}, "missing_required_parameter", "input_file_id"),
        ({"endpoint": ...}, "missing_required_parameter", "endpoint"),
        ({"completion_window": ...}, "missing_required_parameter", "completion_window"),
        ({"input_file_id": 7}, "invalid_type", "input_file_id"),
        ({"input_file_id": "a\0b"}, "invalid_value", "input_file_id"),
        ({"endpoint": "/v1/poems"}, "invalid_value", "endpoint"),
        ({"completion_window": "48h"}, "invalid_value", "completion_window"),
        ({"metadata": {"x": 1}}, "invalid_type", "metadata.x"),
        ({"metadata": "x"}, "invalid_type", "metadata"),
        ({"metadata": {"x": "v" * 513}}, "string_above_max_length", "metadata.x"),
        ({"metadata": {str(n): "v" for n in range(17)}}, "object_above_max_properties", "metadata"),
        ({"output_expires_after": {"seconds": 3600}}, "missing_required_parameter", "output_expires_after.anchor"),
        (
            {"output_expires_after": {"anchor": "created_at", "seconds": 1}},
            "integer_below_min_value",
            "output_expires_after.seconds",
        ),
        ({"completion_windw": "24h"}, "unknown_parameter", "completion_windw"),
    ],
)
def test_invalid_request_is_refused(http: httpx.Client, change: dict[str, Any], code: str, param: str) -> None:
    body = {name: value for name, value in {**REQUEST, **change}.items() if value is not ...}
    answer = http.post("/v1/batches", json=body)
    assert answer.status_code == 400
    error = answer.json()["error"]
    assert (error["type"], error["code"], error["param"]) == ("invalid_request_error", code, param)
    assert param in error["message"]


@pytest.mark.parametrize("body", [b"", b"{", b"[]", b'"x"', b"\xff", b'{"input_file_id":"\\ud800"}', b"null"])
def test_body_that_is_not_a_json_object_is_refused(http: httpx.Client, body: bytes) -> None:
    answer = http.post("/v1/batches", content=body)
    assert answer.status_code == 400
    assert "JSON object" in answer.json()["error"]["message"]


def test_refusal_of_an_endpoint_lists_the_supported_ones(client: openai.OpenAI) -> None:
    with pytest.raises(openai.BadRequestError, match="'/v1/chat/completions', '/v1/completions' or '/v1/embeddings'"):
        create(client, endpoint="/v1/images/edits")


def test_pages_hold_every_batch_once_newest_first(client: openai.OpenAI, api_pool: Pool) -> None:
    ids = [create(client).id for _ in range(5)]
    with api_pool.connection() as connection:
        connection.execute("UPDATE batches SET created_at = '2026-01-01'")
    assert [batch.id for batch in client.batches.list(limit=2)] == ids[::-1]


@pytest.mark.parametrize(
    ("query", "code"),
    [
        ("limit=101", "integer_above_max_value"),
        ("limit=-1", "integer_below_min_value"),
        ("limit=1.5", "invalid_type"),
        ("after=17", "invalid_value"),
    ],
)
def test_invalid_listing_is_refused(http: httpx.Client, query: str, code: str) -> None:
    answer = http.get(f"/v1/batches?{query}")
    assert answer.status_code == 400
    assert (answer.json()["error"]["code"], answer.json()["error"]["param"]) == (code, query.split("=", maxsplit=1)[0])


def test_limit_0_returns_an_empty_list(client: openai.OpenAI, http: httpx.Client) -> None:
    create(client)
    answer = http.get("/v1/batches?limit=0").json()
    assert answer == {"object": "list", "data": [], "first_id": None, "last_id": None, "has_more": False}


@pytest.mark.parametrize("status", OPEN)
def test_open_batch_can_be_cancelled_twice(client: openai.OpenAI, api_pool: Pool, status: str) -> None:
    batch = create(client)
    set_status(api_pool, batch, status)
    cancelling = client.batches.cancel(batch.id)
    assert cancelling.status == "cancelling"
    assert cancelling.cancelling_at
    assert client.batches.cancel(batch.id) == cancelling
    set_status(api_pool, batch, "cancelled")
    assert client.batches.cancel(batch.id).status == "cancelled"


@pytest.mark.parametrize("status", ["completed", "failed", "expired"])
def test_ended_batch_cannot_be_cancelled(client: openai.OpenAI, api_pool: Pool, status: str) -> None:
    batch = create(client)
    set_status(api_pool, batch, status)
    with pytest.raises(openai.ConflictError, match=f"Cannot cancel a batch with status '{status}'.") as caught:
        client.batches.cancel(batch.id)
    assert caught.value.response.headers["x-should-retry"] == "false"
    assert client.batches.retrieve(batch.id).status == status


def test_failed_batch_lists_its_errors(client: openai.OpenAI, api_pool: Pool) -> None:
    batch = create(client)
    set_status(api_pool, batch, "failed")
    with api_pool.connection() as connection:
        connection.execute(
            "INSERT INTO batch_errors (batch_id, ordinal, code, message, line)"
            " VALUES (%(id)s, 2, 'b', 'second', 9), (%(id)s, 1, 'a', 'first', NULL)",
            {"id": batch.id},
        )
    for retrieved in (client.batches.retrieve(batch.id), client.batches.list().data[0]):
        assert retrieved.errors is not None
        assert retrieved.errors.to_dict() == {
            "object": "list",
            "data": [
                {"code": "a", "message": "first", "param": None, "line": None},
                {"code": "b", "message": "second", "param": None, "line": 9},
            ],
        }


def test_finished_batch_reports_counts_and_usage(client: openai.OpenAI, api_pool: Pool) -> None:
    batch = create(client)
    numbers = {"total": 3, "completed": 2, "failed": 1}
    tokens = {"input_tokens": 10, "cached_tokens": 4, "output_tokens": 5, "reasoning_tokens": 2}
    set_status(api_pool, batch, "completed", in_progress_at="2026-01-01 00:00:00+00", **numbers, **tokens)
    retrieved = client.batches.retrieve(batch.id)
    assert retrieved.in_progress_at == 1767225600
    assert retrieved.request_counts is not None
    assert retrieved.request_counts.to_dict() == numbers
    assert retrieved.usage is not None
    assert retrieved.usage.to_dict() == {
        "input_tokens": 10,
        "input_tokens_details": {"cached_tokens": 4},
        "output_tokens": 5,
        "output_tokens_details": {"reasoning_tokens": 2},
        "total_tokens": 15,
    }


def test_same_request_twice_creates_two_batches(client: openai.OpenAI) -> None:
    assert create(client).id != create(client).id


@pytest.mark.parametrize("headers", [{"x-stainless-retry-count": count} for count in ("1", "2", "9" * 5_000)])
def test_retried_creation_returns_the_first_batch(client: openai.OpenAI, headers: dict[str, str]) -> None:
    first = create(client, metadata={"a": "b"})
    assert create(client, metadata={"a": "b"}, extra_headers=headers).id == first.id
    assert create(client, metadata={"a": "c"}, extra_headers=headers).id != first.id


@pytest.mark.parametrize("retry_count", [b"0", b"-1", b"000", "²".encode("latin-1")])
def test_request_without_a_positive_retry_count_creates_a_batch(http: httpx.Client, retry_count: bytes) -> None:
    first = http.post("/v1/batches", json=REQUEST)
    again = http.post("/v1/batches", json=REQUEST, headers=[(b"x-stainless-retry-count", retry_count)])
    assert (again.status_code, again.json()["id"] != first.json()["id"]) == (200, True)


def test_old_batch_is_not_mistaken_for_a_retry(client: openai.OpenAI, api_pool: Pool) -> None:
    first = create(client)
    with api_pool.connection() as connection:
        connection.execute("UPDATE batches SET created_at = now() - interval '26 minutes'")
    assert create(client, extra_headers={"x-stainless-retry-count": "1"}).id != first.id


def test_concurrent_creations_with_one_idempotency_key_create_one_batch(client: openai.OpenAI) -> None:
    with ThreadPoolExecutor(4) as threads:
        made = threads.map(lambda _: create(client, extra_headers={"Idempotency-Key": "k"}).id, range(4))
        assert len(set(made)) == 1
    assert create(client, extra_headers={"Idempotency-Key": "other"}).id != client.batches.list().data[1].id


def test_idempotency_key_returns_its_batch_at_any_time(client: openai.OpenAI, api_pool: Pool) -> None:
    headers = {"Idempotency-Key": "k"}
    first = create(client, metadata={"b": "1", "a": "2"}, extra_headers=headers)
    set_status(api_pool, first, "cancelled", created_at="2020-01-01 00:00:00+00")
    again = create(client, metadata={"a": "2", "b": "1"}, extra_headers=headers)
    assert (again.id, again.status) == (first.id, "cancelled")


def test_idempotency_key_of_another_request_is_refused(client: openai.OpenAI, stranger: openai.OpenAI) -> None:
    headers = {"Idempotency-Key": "k"}
    first = create(client, extra_headers=headers)
    with pytest.raises(openai.BadRequestError, match=first.id) as caught:
        create(client, metadata={"a": "b"}, extra_headers=headers)
    assert (caught.value.code, caught.value.param) == ("idempotency_key_reused", "Idempotency-Key")
    assert len(client.batches.list().data) == 1
    assert create(stranger, metadata={"a": "b"}, extra_headers=headers).id != first.id


@pytest.mark.parametrize("key", [b"k", b"a b", b"~" * 255])
def test_printable_idempotency_key_is_accepted(http: httpx.Client, key: bytes) -> None:
    assert http.post("/v1/batches", json=REQUEST, headers=[(b"idempotency-key", key)]).status_code == 200


@pytest.mark.parametrize("key", [b"", b"k" * 256, b"a\tb", "é".encode("latin-1")])
def test_other_idempotency_keys_are_refused(http: httpx.Client, key: bytes) -> None:
    answer = http.post("/v1/batches", json=REQUEST, headers=[(b"idempotency-key", key)])
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "Idempotency-Key")
    assert "1 to 255 printable ASCII characters" in answer.json()["error"]["message"]


def test_deleted_batch_is_still_a_cursor(client: openai.OpenAI, api_pool: Pool) -> None:
    ids = [create(client).id for _ in range(3)]
    with api_pool.connection() as connection:
        connection.execute(
            "WITH removed AS (DELETE FROM batches WHERE id = %s RETURNING *) "
            "INSERT INTO audit_log (project_id, actor, type, object_id, object_seq) "
            "SELECT project_id, 'retention', 'batch.deleted', id, seq FROM removed",
            [ids[1]],
        )
    assert [batch.id for batch in client.batches.list(after=ids[1])] == [ids[0]]


@pytest.mark.parametrize(
    "metadata",
    [None, {}, {"": ""}, {"k" * 64: "v" * 512}, {"ü" * 64: "😀" * 512}, {str(n): "v" for n in range(16)}],
)
def test_metadata_within_the_limits_is_returned_unchanged(
    client: openai.OpenAI, metadata: dict[str, str] | None
) -> None:
    assert client.batches.retrieve(create(client, metadata=metadata).id).metadata == metadata


def test_body_over_1_mb_is_refused(http: httpx.Client) -> None:
    answer = http.post("/v1/batches", content=b" " * ((1 << 20) + 1))
    assert answer.status_code == 413
    assert answer.json()["error"]["type"] == "invalid_request_error"


@pytest.mark.parametrize("seconds", [3_600, 2_592_000])
def test_results_can_expire_after_an_hour_to_a_month(http: httpx.Client, seconds: int) -> None:
    def answer(seconds_sent: Any) -> int:
        body = {**REQUEST, "output_expires_after": {"anchor": "created_at", "seconds": seconds_sent}}
        return http.post("/v1/batches", json=body).status_code

    beyond = seconds - 1 if seconds == 3_600 else seconds + 1
    assert [answer(seconds_sent) for seconds_sent in (seconds, beyond, str(seconds), seconds + 0.5)] == [
        200,
        400,
        400,
        400,
    ]


def test_batch_is_invisible_to_other_projects(client: openai.OpenAI, stranger: openai.OpenAI) -> None:
    batch = create(client)
    for act in (stranger.batches.retrieve, stranger.batches.cancel):
        with pytest.raises(openai.NotFoundError):
            act(batch.id)
    assert list(stranger.batches.list()) == []
    assert create(stranger, extra_headers={"x-stainless-retry-count": "1"}).id != batch.id
    assert client.batches.retrieve(batch.id).status == "validating"


def test_models_come_from_the_catalogue(client: openai.OpenAI) -> None:
    (model,) = client.models.list()
    assert (model.id, model.object, model.owned_by, model.created) == ("demo/small", "model", "cloister", 1767312000)
    assert client.models.retrieve("demo/small") == model
    with pytest.raises(openai.NotFoundError) as caught:
        client.models.retrieve("gpt-4")
    assert caught.value.code == "model_not_found"
