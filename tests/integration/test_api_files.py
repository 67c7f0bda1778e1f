"""The Files endpoints, through the official client."""

import contextlib
import gzip
import hashlib
import socket
import tempfile
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
from openai.types import Batch, FileObject

from service.adapters.memory_object_store import MemoryObjectStore
from service.db import Pool
from service.errors import ObjectNotFoundError, ObjectStoreError
from service.projects import Project, set_project

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
    file = upload(client, purpose="user_data")
    assert file.expires_at == file.created_at + 30 * DAY_S


def test_a_project_may_keep_files_for_a_shorter_time(client: openai.OpenAI, api_pool: Pool, project: Project) -> None:
    set_project(api_pool, project, {"retention_s": 7 * DAY_S})
    for purpose in ("batch", "user_data"):
        file = upload(client, purpose=purpose)
        assert file.expires_at == file.created_at + 7 * DAY_S
    file = upload(client, expires_after={"anchor": "created_at", "seconds": 20 * DAY_S})
    assert file.expires_at == file.created_at + 20 * DAY_S


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


def test_a_file_whose_content_cannot_be_deleted_now_is_hidden_and_left_to_the_reconciler(
    client: openai.OpenAI, store: MemoryObjectStore, api_pool: Pool, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = upload(client)

    def refuse(_key: str) -> None:
        raise ObjectStoreError("the store is down")

    with monkeypatch.context() as patch:
        patch.setattr(store, "delete", refuse)
        assert client.files.delete(file.id).deleted
    with pytest.raises(openai.NotFoundError):
        client.files.content(file.id)
    with api_pool.connection() as connection:
        row = connection.execute("SELECT deleted_at, deleted_by FROM files WHERE id = %s", [file.id]).fetchone()
        logged = connection.execute("SELECT FROM audit_log WHERE object_id = %s", [file.id]).fetchone()
    assert row is not None
    assert row["deleted_at"]
    assert row["deleted_by"].startswith("key_")
    assert logged is None


def in_use(client: openai.OpenAI, file: FileObject) -> Batch:
    return client.batches.create(input_file_id=file.id, endpoint="/v1/completions", completion_window="24h")


@pytest.mark.parametrize("status", ["validating", "in_progress", "finalizing", "cancelling"])
def test_a_deleted_file_of_an_open_batch_is_hidden_but_kept(
    client: openai.OpenAI, api_pool: Pool, store: MemoryObjectStore, status: str
) -> None:
    file = upload(client)
    batch = in_use(client, file)
    with api_pool.connection() as connection:
        connection.execute("UPDATE batches SET status = %s WHERE id = %s", [status, batch.id])
    assert client.files.delete(file.id).deleted
    for act in (client.files.retrieve, client.files.content, client.files.delete):
        with pytest.raises(openai.NotFoundError):
            act(file.id)
    assert list(client.files.list()) == []
    assert list(store.keys("")) == [f"files/{file.id}"]
    with api_pool.connection() as connection:
        row = connection.execute("SELECT deleted_at, deleted_by FROM files WHERE id = %s", [file.id]).fetchone()
        logged = connection.execute("SELECT FROM audit_log WHERE object_id = %s", [file.id]).fetchone()
    assert row is not None
    assert row["deleted_at"]
    assert row["deleted_by"].startswith("key_")
    assert logged is None


def test_a_new_batch_cannot_use_a_file_that_is_only_kept_for_another(client: openai.OpenAI, api_pool: Pool) -> None:
    file = upload(client)
    batches = [in_use(client, file)]
    client.files.delete(file.id)
    batches.append(in_use(client, file))
    with api_pool.connection() as connection:
        rows = connection.execute(
            "SELECT enqueued_requests, files.deleted_at <= batches.created_at AS too_late FROM batches"
            " JOIN files ON files.id = input_file_id WHERE batches.id = ANY (%s) ORDER BY batches.seq",
            [[batch.id for batch in batches]],
        ).fetchall()
    assert rows == [{"enqueued_requests": 1, "too_late": False}, {"enqueued_requests": 0, "too_late": True}]


@pytest.mark.parametrize("status", ["completed", "failed", "expired", "cancelled"])
def test_a_file_of_a_batch_that_has_ended_is_deleted_at_once(
    client: openai.OpenAI, api_pool: Pool, store: MemoryObjectStore, status: str
) -> None:
    file = upload(client)
    batch = in_use(client, file)
    with api_pool.connection() as connection:
        connection.execute("UPDATE batches SET status = %s WHERE id = %s", [status, batch.id])
    client.files.delete(file.id)
    assert list(store.keys("")) == []


def test_a_file_is_deleted_or_used_and_never_both(
    client: openai.OpenAI, api_pool: Pool, store: MemoryObjectStore
) -> None:
    for _ in range(10):
        file = upload(client)
        with ThreadPoolExecutor(2) as threads:
            deletion = threads.submit(client.files.delete, file.id)
            batch = threads.submit(in_use, client, file).result()
            assert deletion.result().deleted
        with api_pool.connection() as connection:
            row = connection.execute("SELECT enqueued_requests FROM batches WHERE id = %s", [batch.id]).fetchone()
        assert row is not None
        assert list(store.keys(f"files/{file.id}")) == [f"files/{file.id}"] * row["enqueued_requests"]


def test_a_deletion_leaves_a_record_of_what_is_gone(client: openai.OpenAI, api_pool: Pool, project: Project) -> None:
    file = upload(client)
    client.files.delete(file.id)
    with api_pool.connection() as connection:
        assert connection.execute("SELECT FROM files WHERE id = %s", [file.id]).fetchone() is None
        row = connection.execute("SELECT * FROM audit_log WHERE object_id = %s", [file.id]).fetchone()
    assert row is not None
    assert (row["type"], row["project_id"], row["size_bytes"]) == ("file.deleted", project.id, len(LINE))
    assert row["sha256"] == hashlib.sha256(LINE).digest()
    assert row["actor"].startswith("key_")
    assert row["data"] == {"purpose": "batch", "created_at": file.created_at, "reason": "api"}


def test_content_that_is_deleted_while_it_is_asked_for_is_not_found(
    client: openai.OpenAI, store: MemoryObjectStore, api_pool: Pool, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = upload(client)

    def read(_key: str, *, start: int) -> Iterator[bytes]:
        with api_pool.connection() as connection:
            connection.execute("DELETE FROM files WHERE id = %s", [file.id])
        raise ObjectNotFoundError(f"gone at {start}")

    with monkeypatch.context() as patch:
        patch.setattr(store, "read", read)
        with pytest.raises(openai.NotFoundError):
            client.files.content(file.id)


@pytest.mark.parametrize(
    ("content", "lines"), [(b"", 0), (b"{}", 1), (b"{}\n", 1), (b"{}\r\n{}", 2), (LINE * (1 << 17), 1 << 17)]
)
def test_lines_are_counted_as_they_come_in(client: openai.OpenAI, api_pool: Pool, content: bytes, lines: int) -> None:
    file = upload(client, content)
    with api_pool.connection() as connection:
        row = connection.execute("SELECT line_count FROM files WHERE id = %s", [file.id]).fetchone()
    assert row == {"line_count": lines}


@pytest.mark.parametrize("name", ["../../etc/passwd", "C:\\temp\\passwd", "/passwd"])
def test_a_path_is_no_part_of_a_filename(http: httpx.Client, name: str) -> None:
    answer = http.post("/v1/files", data={"purpose": "batch"}, files={"file": (name, LINE)})
    assert answer.json()["filename"] == "passwd"


def send_form(http: httpx.Client, *parts: tuple[str, bytes], end: bytes = b"--b--\r\n") -> httpx.Response:
    """A multipart form, byte by byte: each part is what follows ``name=`` in its header, and its content."""
    body = b"".join(
        b"--b\r\nContent-Disposition: form-data; name=" + header.encode() + b"\r\n\r\n" + content + b"\r\n"
        for header, content in parts
    )
    return http.post("/v1/files", content=body + end, headers={"content-type": "multipart/form-data; boundary=b"})


PURPOSE = ('"purpose"', b"batch")
FILE = ('"file"; filename="a.jsonl"', LINE)


@pytest.mark.parametrize("parts", [(PURPOSE, FILE), (FILE, PURPOSE)])
@pytest.mark.parametrize("end", [b"--b--\r\n", b"--b--"])
def test_the_order_of_a_form_does_not_matter(http: httpx.Client, parts: Any, end: bytes) -> None:
    assert send_form(http, *parts, end=end).json()["bytes"] == len(LINE)


@pytest.mark.parametrize(
    ("parts", "hint"),
    [
        ((PURPOSE, FILE, FILE), "Too many files"),
        ((PURPOSE, ('"file"', LINE)), "Send it as a file"),
        ((FILE, ('"purpose"; filename="p"', b"batch")), "Too many files"),
        ((PURPOSE, ('"file"', b"x" * (2 << 20))), "Part exceeded maximum size"),
        ((), "Missing required parameter: 'file'"),
    ],
)
def test_an_odd_form_is_refused(http: httpx.Client, store: MemoryObjectStore, parts: Any, hint: str) -> None:
    answer = send_form(http, *parts)
    assert answer.status_code == 400
    assert hint in answer.json()["error"]["message"]
    assert list(store.keys("")) == []


def test_a_form_that_lacks_its_end_is_refused(http: httpx.Client, store: MemoryObjectStore) -> None:
    for end in (b"", b"--"):
        answer = send_form(http, PURPOSE, FILE, end=end)
        assert answer.status_code == 400
        assert "breaks off" in answer.json()["error"]["message"]
    assert list(store.keys("")) == []


def test_a_file_without_a_name_or_content_is_taken(http: httpx.Client) -> None:
    told = send_form(http, PURPOSE, ('"file"; filename=""', b"")).json()
    assert (told["filename"], told["bytes"]) == ("upload", 0)


def test_a_wrong_key_is_told_before_a_large_upload_is_read(base_url: str) -> None:
    client = openai.OpenAI(base_url=f"{base_url}/v1", api_key="sk-wrong", max_retries=0)
    with client, pytest.raises(openai.AuthenticationError):
        upload(client, LINE * (1 << 20))


def temporary_files() -> list[str]:
    """Those that this process, and so the served API, has open without a name."""
    names = []
    for entry in Path("/proc/self/fd").iterdir():
        with contextlib.suppress(FileNotFoundError):  # closed meanwhile
            names.append(str(entry.readlink()))
    return [name for name in names if name.startswith(tempfile.gettempdir()) and name.endswith("(deleted)")]


def wait_for(is_so: Callable[[], bool]) -> None:
    for _ in range(500):
        if is_so():
            return
        time.sleep(0.01)
    pytest.fail("it did not come within 5 s")


def test_an_upload_that_breaks_off_leaves_nothing(
    base_url: str, api_key: str, client: openai.OpenAI, store: MemoryObjectStore
) -> None:
    address = httpx.URL(base_url)
    head = (
        f"POST /v1/files HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {api_key}\r\nContent-Length: 9000000\r\n"
        'Content-Type: multipart/form-data; boundary=b\r\n\r\n--b\r\nContent-Disposition: form-data; name="file"; '
        'filename="a"\r\n\r\n{"custom_id"'
    )
    before = len(temporary_files())
    with socket.create_connection((address.host, address.port or 80)) as connection:
        connection.sendall(head.encode() + b" " * 3_000_000)
        wait_for(lambda: len(temporary_files()) > before)
    wait_for(lambda: len(temporary_files()) == before)
    assert list(client.files.list()) == []
    assert list(store.keys("")) == []
