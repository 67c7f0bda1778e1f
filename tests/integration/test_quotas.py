"""Limits of a project, through the official client."""

import socket
import time
from concurrent.futures import ThreadPoolExecutor
from itertools import repeat
from typing import Any

import httpx
import openai
import pytest
from openai.types import Batch

from service.adapters.memory_object_store import MemoryObjectStore
from service.db import Pool
from service.projects import Project, set_project

LINE = b'{"custom_id":"a"}\n'


def upload(client: openai.OpenAI, lines: int) -> str:
    return client.files.create(file=("a.jsonl", LINE * lines), purpose="batch").id


def create(client: openai.OpenAI, file_id: str = "file-none", **options: Any) -> Batch:
    return client.batches.create(input_file_id=file_id, endpoint="/v1/completions", completion_window="24h", **options)


def end(api_pool: Pool, batch: Batch, status: str) -> None:
    with api_pool.connection() as connection:
        connection.execute("UPDATE batches SET status = %s WHERE id = %s", [status, batch.id])


def test_fifty_concurrent_creations_stay_within_the_limit(
    client: openai.OpenAI, api_pool: Pool, project: Project
) -> None:
    set_project(api_pool, project, {"max_enqueued_requests": 21})
    file_id = upload(client, 4)

    def is_created(_number: int) -> bool:
        try:
            create(client, file_id)
        except openai.RateLimitError:
            return False
        return True

    with ThreadPoolExecutor(16) as threads:
        assert sum(threads.map(is_created, range(50))) == 5
    assert len(list(client.batches.list())) == 5


def test_simultaneous_creations_cannot_both_take_the_last_room(
    client: openai.OpenAI, api_pool: Pool, project: Project
) -> None:
    set_project(api_pool, project, {"max_enqueued_requests": 7})
    file_id = upload(client, 4)

    def code_of(_number: int) -> str | None:
        try:
            create(client, file_id)
        except openai.RateLimitError as error:
            return error.code
        return None

    with ThreadPoolExecutor(3) as threads, api_pool.connection() as connection:
        connection.execute("SELECT FROM files WHERE id = %s FOR UPDATE", [file_id])
        codes = threads.map(code_of, range(3))
        time.sleep(0.3)  # now each waits for the file, or for the request that waits for it
        connection.commit()
        assert sorted(map(str, codes)) == ["None", "rate_limit_exceeded", "rate_limit_exceeded"]


@pytest.mark.parametrize(
    ("limit", "value", "code"),
    [
        ("max_batches_in_progress", 1, "rate_limit_exceeded"),
        ("max_enqueued_requests", 19, "rate_limit_exceeded"),
        ("max_enqueued_tokens", 89, "token_limit_exceeded"),
    ],
)
def test_limit_is_released_when_a_batch_ends(
    *, client: openai.OpenAI, api_pool: Pool, project: Project, limit: str, value: int, code: str
) -> None:
    set_project(api_pool, project, {limit: value})
    file_id = upload(client, 10)  # 180 bytes, 45 tokens
    first = create(client, file_id)
    with pytest.raises(openai.RateLimitError, match=limit.removeprefix("max_").replace("_", " ")) as caught:
        create(client, file_id)
    assert (caught.value.code, caught.value.type) == (code, "rate_limit_error")
    assert caught.value.response.headers["retry-after"] == "30"
    end(api_pool, first, "completed")
    assert create(client, file_id).status == "validating"


@pytest.mark.parametrize(
    ("status", "is_over"),
    [("in_progress", False), ("finalizing", False), ("cancelling", False)]
    + [(status, True) for status in ("completed", "failed", "expired", "cancelled")],
)
def test_batch_counts_until_it_has_ended(
    *, client: openai.OpenAI, api_pool: Pool, project: Project, status: str, is_over: bool
) -> None:
    set_project(api_pool, project, {"max_batches_in_progress": 1})
    end(api_pool, create(client), status)
    if is_over:
        assert create(client).status == "validating"
    else:
        with pytest.raises(openai.RateLimitError):
            create(client)


def test_retry_after_is_the_eta_of_the_first_batch(client: openai.OpenAI, api_pool: Pool, project: Project) -> None:
    set_project(api_pool, project, {"max_batches_in_progress": 2})
    batches = [create(client), create(client)]
    with api_pool.connection() as connection:
        connection.execute("UPDATE batches SET status = 'in_progress', total = 1000, completed = 400, rows_per_s = 10")
        connection.execute("UPDATE batches SET rows_per_s = 4 WHERE id = %s", [batches[0].id])
    with pytest.raises(openai.RateLimitError) as caught:
        create(client)
    assert caught.value.response.headers["retry-after"] == "60"


def test_batch_that_can_never_fit_must_not_be_retried(client: openai.OpenAI, api_pool: Pool, project: Project) -> None:
    set_project(api_pool, project, {"max_enqueued_requests": 4})
    with pytest.raises(openai.RateLimitError, match="split its input file") as caught:
        create(client, upload(client, 5))
    assert (caught.value.code, caught.value.type) == ("insufficient_quota", "insufficient_quota")
    assert caught.value.response.headers["x-should-retry"] == "false"
    assert list(client.batches.list()) == []


def test_retry_that_finds_its_batch_is_never_refused(client: openai.OpenAI, api_pool: Pool, project: Project) -> None:
    by_key, by_count = {"Idempotency-Key": "k"}, {"x-stainless-retry-count": "1"}
    named, unnamed = create(client, extra_headers=by_key), create(client)
    set_project(api_pool, project, {"max_batches_in_progress": 0})
    assert create(client, extra_headers=by_key).id == named.id
    assert create(client, extra_headers=by_count).id == unnamed.id
    with pytest.raises(openai.RateLimitError):
        create(client, metadata={"new": "batch"}, extra_headers=by_count)


def test_retry_of_a_refused_creation_does_not_find_an_older_batch(
    client: openai.OpenAI, api_pool: Pool, project: Project
) -> None:
    set_project(api_pool, project, {"max_batches_in_progress": 1})
    first = create(client)
    for headers in ({}, {"x-stainless-retry-count": "1"}, {"x-stainless-retry-count": "2"}):
        with pytest.raises(openai.RateLimitError):
            create(client, extra_headers=headers)
    end(api_pool, first, "completed")
    second = create(client, extra_headers={"x-stainless-retry-count": "2"})
    assert second.id != first.id
    assert create(client, extra_headers={"x-stainless-retry-count": "1"}).id == second.id


def test_removed_limit_refuses_nothing(client: openai.OpenAI, api_pool: Pool, project: Project) -> None:
    set_project(api_pool, project, {"max_batches_in_progress": 0})
    set_project(api_pool, project, {"max_batches_in_progress": None})
    assert create(client).status == "validating"


def test_limits_apply_to_one_project_only(
    stranger: openai.OpenAI, client: openai.OpenAI, api_pool: Pool, project: Project
) -> None:
    create(stranger)
    set_project(api_pool, project, {"max_batches_in_progress": 1})
    assert create(client).status == "validating"


def test_concurrent_uploads_stay_within_the_limit_and_leave_no_objects(
    client: openai.OpenAI, api_pool: Pool, project: Project, store: MemoryObjectStore
) -> None:
    set_project(api_pool, project, {"max_stored_bytes": len(LINE) * 35})

    def code_of(lines: int) -> str | None:
        try:
            upload(client, lines)
        except openai.RateLimitError as error:
            return error.code
        return None

    with ThreadPoolExecutor(8) as threads:
        codes = list(threads.map(code_of, repeat(10, 12)))
    assert sorted(map(str, codes)) == ["None"] * 3 + ["insufficient_quota"] * 9
    assert len(list(store.keys(""))) == len(list(client.files.list())) == 3


def test_upload_that_cannot_fit_is_refused_before_it_is_read(
    base_url: str, api_key: str, api_pool: Pool, project: Project, store: MemoryObjectStore
) -> None:
    set_project(api_pool, project, {"max_stored_bytes": 1 << 20})
    address = httpx.URL(base_url)
    head = (
        f"POST /v1/files HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {api_key}\r\nContent-Length: 2000000\r\n"
        "Content-Type: multipart/form-data; boundary=b\r\n\r\n"
    )
    with socket.create_connection((address.host, address.port or 80), timeout=10) as connection:
        connection.sendall(head.encode())
        answer = connection.recv(65_536)
    assert answer.startswith(b"HTTP/1.1 429")
    assert b"insufficient_quota" in answer
    assert list(store.keys("")) == []


def test_upload_without_content_length_is_refused_after_reading(
    http: httpx.Client, api_pool: Pool, project: Project, store: MemoryObjectStore
) -> None:
    set_project(api_pool, project, {"max_stored_bytes": 1000})
    start = b'--b\r\nContent-Disposition: form-data; name="purpose"\r\n\r\nbatch\r\n--b\r\nContent-Disposition: '
    chunks = (start, b'form-data; name="file"; filename="a"\r\n\r\n', LINE * 100, b"\r\n--b--\r\n")
    answer = http.post("/v1/files", content=iter(chunks), headers={"content-type": "multipart/form-data; boundary=b"})
    assert (answer.status_code, answer.json()["error"]["code"]) == (429, "insufficient_quota")
    assert list(store.keys("")) == []


def test_bytes_are_released_when_content_is_deleted_not_when_hidden(
    client: openai.OpenAI, api_pool: Pool, project: Project
) -> None:
    set_project(api_pool, project, {"max_stored_bytes": len(LINE) * 10})
    file_id = upload(client, 10)
    batch = create(client, file_id)
    client.files.delete(file_id)
    with pytest.raises(openai.RateLimitError, match="Delete files") as caught:
        upload(client, 1)
    assert caught.value.response.headers["x-should-retry"] == "false"
    end(api_pool, batch, "completed")
    with api_pool.connection() as connection:
        connection.execute("DELETE FROM files WHERE id = %s", [file_id])  # as the reconciler does now
    assert upload(client, 10)
