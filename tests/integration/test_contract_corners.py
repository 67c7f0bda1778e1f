"""Corners of the contract that only odd requests reach, with OpenAI's codes and messages."""

from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import openai
import pytest

from service.db import Pool, query
from service.projects import Project
from tests.integration.reconciler_harness import eventually

LINE = b'{"custom_id":"a","method":"POST","url":"/v1/completions","body":{"model":"demo/small","prompt":"x"}}\n'
REQUEST = {"input_file_id": "file-1", "endpoint": "/v1/completions", "completion_window": "24h"}


def refusal(http: httpx.Client, **change: Any) -> dict[str, Any]:
    answer = http.post("/v1/batches", json={**REQUEST, **change})
    assert answer.status_code == 400
    error: dict[str, Any] = answer.json()["error"]
    return error


def test_long_metadata_name_and_long_value_have_distinct_codes(http: httpx.Client) -> None:
    error = refusal(http, metadata={"k" * 65: "v"})
    assert (error["code"], error["param"]) == ("property_name_above_max_length", "metadata." + "k" * 65)
    assert "maximum length 64, but got a string with length 65 instead" in error["message"]
    error = refusal(http, metadata={"x": "€" * 513})
    assert (error["code"], error["param"]) == ("string_above_max_length", "metadata.x")
    assert "maximum length 512, but got a string with length 513 instead" in error["message"]


def test_too_many_metadata_pairs_are_counted(http: httpx.Client) -> None:
    error = refusal(http, metadata={str(number): "v" for number in range(17)})
    assert (error["code"], error["param"]) == ("object_above_max_properties", "metadata")
    assert "at most 16 properties, but got an object with 17 properties instead" in error["message"]


@pytest.mark.parametrize("param", ["endpoint", "completion_window"])
@pytest.mark.parametrize(("value", "kind"), [(None, "null"), (24, "an integer"), (["24h"], "an array")])
def test_choice_that_is_not_a_string_has_the_wrong_type(
    http: httpx.Client, param: str, value: object, kind: str
) -> None:
    error = refusal(http, **{param: value})
    assert (error["code"], error["param"]) == ("invalid_type", param)
    assert f"but got {kind} instead" in error["message"]


def test_empty_input_file_id_is_refused_at_creation(http: httpx.Client) -> None:
    error = refusal(http, input_file_id="")
    assert (error["code"], error["param"]) == ("empty_string", "input_file_id")


@pytest.mark.parametrize("name", ["body", "query", "path", "[key]"])
def test_parameter_is_named_in_full_for_any_name(http: httpx.Client, name: str) -> None:
    error = refusal(http, metadata={name: 1})
    assert (error["code"], error["param"]) == ("invalid_type", f"metadata.{name}")
    error = refusal(http, **{name: 1})
    assert (error["code"], error["param"]) == ("unknown_parameter", name)


def test_long_webhook_url_is_reported_as_a_long_string(http: httpx.Client, admin_key: str) -> None:
    body = {"url": "https://example.com/" + "x" * 10_000, "event_types": ["batch.completed"]}
    answer = http.post("/v1/webhook_endpoints", json=body, headers={"authorization": f"Bearer {admin_key}"})
    assert (answer.status_code, answer.json()["error"]["code"]) == (400, "string_above_max_length")


@pytest.mark.parametrize(("limit", "words"), [("101", "Expected a value <= 100."), ("-1", "Expected a value >= 0.")])
def test_invalid_limit_is_answered_with_the_limit(http: httpx.Client, limit: str, words: str) -> None:
    assert words in http.get("/v1/batches", params={"limit": limit}).json()["error"]["message"]


def test_content_type_is_case_insensitive(http: httpx.Client) -> None:
    form = httpx.Request("POST", "http://x", data={"purpose": "batch"}, files={"file": ("a.jsonl", LINE)})
    kind = form.headers["content-type"].replace("multipart/form-data; boundary", "Multipart/Form-Data; Boundary")
    answer = http.post("/v1/files", content=form.read(), headers={"content-type": kind})
    assert (answer.status_code, answer.json().get("bytes")) == (200, len(LINE))


@pytest.mark.slow
def test_file_of_exactly_200_mb_is_accepted_but_not_one_byte_more(client: openai.OpenAI) -> None:
    content = LINE + b" " * ((200 << 20) - len(LINE))
    assert client.files.create(file=("a.jsonl", content), purpose="batch").bytes == 200 << 20
    with pytest.raises(openai.APIStatusError, match="has 209,715,201 bytes") as caught:
        client.files.create(file=("a.jsonl", content + b" "), purpose="batch")
    assert caught.value.status_code == 413


@pytest.mark.parametrize("table", ["files", "batches"])
def test_creations_wait_for_earlier_transactions_and_get_higher_seqs(
    client: openai.OpenAI, api_pool: Pool, project: Project, table: str
) -> None:
    def create() -> str:
        if table == "files":
            return client.files.create(file=("a.jsonl", LINE), purpose="batch").id
        return client.batches.create(input_file_id="f", endpoint="/v1/completions", completion_window="24h").id

    waiting = "SELECT FROM pg_locks WHERE NOT granted"
    with ThreadPoolExecutor() as threads, api_pool.connection() as other:
        other.execute(query("lock_project"), {"id": project.id})
        created = threads.submit(create)
        eventually(lambda: other.execute(waiting).rowcount > 0)
        last = other.execute("SELECT clock_timestamp() AS at").fetchone()
        other.commit()
        found = f"SELECT created_at, expires_at FROM {table} WHERE id = %s"  # noqa: S608 - one of two names
        row = other.execute(found, [created.result()]).fetchone()  # type: ignore[arg-type]
    assert row is not None
    assert last is not None
    assert row["created_at"] > last["at"]
    assert (row["expires_at"] - row["created_at"]).total_seconds() == (30 if table == "files" else 1) * 24 * 3600
