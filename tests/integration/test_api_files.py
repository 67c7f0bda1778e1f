"""The Files endpoints, through the official client."""

import gzip
import socket
from typing import Any

import httpx
import openai
import pytest
from openai.types import FileObject

from service.adapters.memory_object_store import MemoryObjectStore
from service.db import Pool
from service.errors import ObjectStoreError

LINE = b'{"custom_id":"a"}\n'
DAY_S = 24 * 3600


def upload(client: openai.OpenAI, content: bytes = LINE, **options: Any) -> FileObject:
    return client.files.create(file=("input.jsonl", content), **{"purpose": "batch", **options})


def test_an_upload_can_be_told_listed_read_and_deleted(client: openai.OpenAI, store: MemoryObjectStore) -> None:
    file = upload(client)
    assert file.id.startswith("file-")
    assert (file.bytes, file.filename, file.purpose, file.status) == (len(LINE), "input.jsonl", "batch", "processed")
    assert client.files.retrieve(file.id) == file
    assert [listed.id for listed in client.files.list()] == [file.id]
    assert client.files.content(file.id).read() == LINE
    assert client.files.delete(file.id).deleted
    with pytest.raises(openai.NotFoundError):
        client.files.retrieve(file.id)
    with pytest.raises(openai.NotFoundError):
        client.files.delete(file.id)
    assert list(store.keys("")) == []


def test_content_is_told_with_its_length_and_name(client: openai.OpenAI, http: httpx.Client) -> None:
    file = client.files.create(file=("ü x;.jsonl", LINE), purpose="batch")
    answer = http.get(f"/v1/files/{file.id}/content")
    assert answer.headers["content-length"] == str(len(LINE))
    assert answer.headers["content-disposition"].endswith("UTF-8''%C3%BC%20x%3B.jsonl")
    assert client.files.retrieve(file.id).filename == "ü x;.jsonl"


def test_a_file_of_many_megabytes_comes_back_unchanged(client: openai.OpenAI) -> None:
    content = LINE * (1 << 18)
    file = upload(client, content)
    assert file.bytes == len(content)
    assert client.files.content(file.id).read() == content


def test_a_batch_file_expires_after_30_days_unless_told_otherwise(client: openai.OpenAI) -> None:
    file = upload(client)
    assert file.expires_at == file.created_at + 30 * DAY_S
    file = upload(client, expires_after={"anchor": "created_at", "seconds": 3600})
    assert file.expires_at == file.created_at + 3600
    assert upload(client, purpose="user_data").expires_at is None


def test_an_expired_file_is_gone(client: openai.OpenAI, api_pool: Pool) -> None:
    file = upload(client)
    with api_pool.connection() as connection:
        connection.execute("UPDATE files SET expires_at = now()")
    assert list(client.files.list()) == []
    with pytest.raises(openai.NotFoundError):
        client.files.content(file.id)


@pytest.mark.parametrize("order", ["asc", "desc"])
def test_paging_gives_every_file_once(client: openai.OpenAI, api_pool: Pool, order: Any) -> None:
    ids = [upload(client).id for _ in range(5)]
    with api_pool.connection() as connection:
        connection.execute("UPDATE files SET created_at = '2026-01-01'")
    paged = [file.id for file in client.files.list(limit=2, order=order)]
    assert paged == (ids if order == "asc" else ids[::-1])
    page = client.files.list(limit=5)
    assert (page.has_more, page.model_extra) == (False, page.model_extra)
    assert {"first_id": ids[4], "last_id": ids[0]}.items() <= page.model_dump().items()


def test_files_can_be_deleted_while_they_are_paged(client: openai.OpenAI) -> None:
    ids = {upload(client).id for _ in range(5)}
    assert {client.files.delete(file.id).id for file in client.files.list(limit=2)} == ids


def test_a_listing_can_be_of_one_purpose(client: openai.OpenAI) -> None:
    upload(client)
    other = upload(client, purpose="user_data")
    assert [file.id for file in client.files.list(purpose="user_data")] == [other.id]


@pytest.mark.parametrize(
    ("query", "code", "param"),
    [
        ("limit=0", "integer_below_min_value", "limit"),
        ("limit=10001", "integer_above_max_value", "limit"),
        ("limit=x", "invalid_type", "limit"),
        ("order=up", "invalid_value", "order"),
        ("after=file-none", "invalid_value", "after"),
        ("after=a%00b", "invalid_value", "after"),
    ],
)
def test_a_wrong_listing_is_refused(http: httpx.Client, query: str, code: str, param: str) -> None:
    answer = http.get(f"/v1/files?{query}")
    assert answer.status_code == 400
    error = answer.json()["error"]
    assert (error["type"], error["code"], error["param"]) == ("invalid_request_error", code, param)


@pytest.mark.parametrize(
    ("content", "hint"),
    [(gzip.compress(LINE), "gzip"), (b' \n[{"a":1}]', "array"), (b"custom_id,x\n", "'{'"), (b"\xff\xfe{", "UTF-16")],
)
def test_a_batch_file_that_is_plainly_no_jsonl_is_refused(client: openai.OpenAI, content: bytes, hint: str) -> None:
    with pytest.raises(openai.BadRequestError, match=r"Invalid file format for Batch API. Must be .jsonl") as caught:
        upload(client, content)
    assert hint in str(caught.value)
    assert upload(client, content, purpose="user_data").bytes == len(content)


@pytest.mark.parametrize(
    ("data", "code", "param"),
    [
        ({}, "missing_required_parameter", "purpose"),
        ({"purpose": "poetry"}, "invalid_value", "purpose"),
        (
            {"purpose": "batch", "expires_after[anchor]": "created_at"},
            "missing_required_parameter",
            "expires_after[seconds]",
        ),
        ({"purpose": "batch", "expires_after[seconds]": "3600"}, "missing_required_parameter", "expires_after[anchor]"),
        (
            {"purpose": "batch", "expires_after[anchor]": "created_at", "expires_after[seconds]": "3599"},
            "integer_below_min_value",
            "expires_after[seconds]",
        ),
        ({"purpose": "batch", "colour": "red"}, "unknown_parameter", "colour"),
    ],
)
def test_wrong_form_fields_are_refused(http: httpx.Client, data: dict[str, str], code: str, param: str) -> None:
    answer = http.post("/v1/files", data=data, files={"file": ("a.jsonl", LINE)})
    assert answer.status_code == 400
    assert (answer.json()["error"]["code"], answer.json()["error"]["param"]) == (code, param)


def test_a_form_without_a_file_and_a_body_that_is_no_form_are_refused(http: httpx.Client) -> None:
    answer = http.post("/v1/files", data={"purpose": "batch"}, files={"other": (None, "x")})
    assert answer.json()["error"]["param"] == "file"
    for headers in ({"content-type": "application/json"}, {"content-type": "multipart/form-data"}):
        answer = http.post("/v1/files", content=b"{}", headers=headers)
        assert answer.status_code == 400
        assert answer.json()["error"]["type"] == "invalid_request_error"


def test_a_batch_file_over_200_mb_is_refused(client: openai.OpenAI, store: MemoryObjectStore) -> None:
    with pytest.raises(openai.APIStatusError, match="at most 200 MB") as caught:
        upload(client, b"{" + b" " * (200 << 20))
    assert caught.value.status_code == 413
    assert list(store.keys("")) == []


def test_another_project_does_not_see_a_file(client: openai.OpenAI, stranger: openai.OpenAI) -> None:
    file = upload(client)
    for act in (stranger.files.retrieve, stranger.files.content, stranger.files.delete):
        with pytest.raises(openai.NotFoundError):
            act(file.id)
    assert list(stranger.files.list()) == []
    assert client.files.content(file.id).read() == LINE


def test_a_file_whose_content_cannot_be_deleted_stays(
    client: openai.OpenAI, store: MemoryObjectStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = upload(client)

    def refuse(_key: str) -> None:
        raise ObjectStoreError("the store is down")

    with monkeypatch.context() as patch:
        patch.setattr(store, "delete", refuse)
        with pytest.raises(openai.InternalServerError) as caught:
            client.files.delete(file.id)
    assert caught.value.status_code == 503
    assert client.files.content(file.id).read() == LINE


def test_an_upload_that_breaks_off_leaves_nothing(
    base_url: str, api_key: str, client: openai.OpenAI, store: MemoryObjectStore
) -> None:
    address = httpx.URL(base_url)
    head = (
        f"POST /v1/files HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {api_key}\r\nContent-Length: 1000000\r\n"
        'Content-Type: multipart/form-data; boundary=b\r\n\r\n--b\r\nContent-Disposition: form-data; name="file"; '
        'filename="a"\r\n\r\n{"custom_id"'
    )
    with socket.create_connection((address.host, address.port or 80)) as connection:
        connection.sendall(head.encode())
    assert list(client.files.list()) == []
    assert list(store.keys("")) == []
