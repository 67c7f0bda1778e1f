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


def test_uploaded_file_is_listed_read_and_deleted(client: openai.OpenAI, store: MemoryObjectStore) -> None:
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


def test_content_has_its_length_and_name(client: openai.OpenAI, http: httpx.Client) -> None:
    file = client.files.create(file=("ü x;.jsonl", LINE), purpose="batch")
    answer = http.get(f"/v1/files/{file.id}/content")
    assert answer.headers["content-length"] == str(len(LINE))
    assert answer.headers["content-disposition"].endswith("UTF-8''%C3%BC%20x%3B.jsonl")
    assert client.files.retrieve(file.id).filename == "ü x;.jsonl"


def test_file_of_many_megabytes_is_returned_unchanged(client: openai.OpenAI) -> None:
    content = LINE * (1 << 18)
    file = upload(client, content)
    assert file.bytes == len(content)
    assert client.files.content(file.id).read() == content


@pytest.mark.parametrize(
    ("purpose", "expires_after_days", "retention_days", "kept_days"),
    [
        ("batch", None, None, 30),
        ("user_data", None, None, 30),
        ("batch", None, 7, 7),
        ("batch", None, 60, 30),
        ("user_data", None, 7, 7),
        ("user_data", None, 60, 60),
        ("user_data", 2, 60, 2),
        ("batch", 20, 7, 7),
    ],
)
def test_file_is_kept_for_its_own_expiry_or_the_retention(
    client: openai.OpenAI,
    api_pool: Pool,
    project: Project,
    *,
    purpose: str,
    expires_after_days: int | None,
    retention_days: int | None,
    kept_days: int,
) -> None:
    set_project(api_pool, project, {"retention_s": retention_days and retention_days * DAY_S})
    options: dict[str, Any] = {}
    if expires_after_days:
        options["expires_after"] = {"anchor": "created_at", "seconds": expires_after_days * DAY_S}
    file = upload(client, purpose=purpose, **options)
    assert file.expires_at == file.created_at + kept_days * DAY_S


def test_expired_file_is_not_found(client: openai.OpenAI, api_pool: Pool) -> None:
    file = upload(client)
    with api_pool.connection() as connection:
        connection.execute("UPDATE files SET expires_at = now()")
    assert list(client.files.list()) == []
    with pytest.raises(openai.NotFoundError):
        client.files.content(file.id)


@pytest.mark.parametrize("order", ["asc", "desc"])
def test_pages_hold_every_file_once(client: openai.OpenAI, api_pool: Pool, order: Any) -> None:
    ids = [upload(client).id for _ in range(5)]
    with api_pool.connection() as connection:
        connection.execute("UPDATE files SET created_at = '2026-01-01'")
    paged = [file.id for file in client.files.list(limit=2, order=order)]
    assert paged == (ids if order == "asc" else ids[::-1])
    page = client.files.list(limit=5)
    assert page.has_more is False
    assert {"first_id": ids[4], "last_id": ids[0]}.items() <= page.model_dump().items()


def test_files_can_be_deleted_while_paging(client: openai.OpenAI) -> None:
    ids = {upload(client).id for _ in range(5)}
    assert {client.files.delete(file.id).id for file in client.files.list(limit=2)} == ids


def test_listing_can_be_filtered_by_purpose(client: openai.OpenAI) -> None:
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
def test_invalid_listing_is_refused(http: httpx.Client, query: str, code: str, param: str) -> None:
    answer = http.get(f"/v1/files?{query}")
    assert answer.status_code == 400
    error = answer.json()["error"]
    assert (error["type"], error["code"], error["param"]) == ("invalid_request_error", code, param)


@pytest.mark.parametrize(
    ("content", "hint"),
    [
        (gzip.compress(LINE, mtime=0), "gzip"),
        (b' \n[{"a":1}]', "array"),
        (b"custom_id,x\n", "'{'"),
        (b"\xff\xfe{", "UTF-16"),
    ],
)
def test_batch_file_in_another_format_is_refused(client: openai.OpenAI, content: bytes, hint: str) -> None:
    with pytest.raises(openai.BadRequestError, match=r"Invalid file format for Batch API. Must be .jsonl") as caught:
        upload(client, content)
    assert hint in str(caught.value)
    assert upload(client, content, purpose="user_data").bytes == len(content)


@pytest.mark.parametrize(
    "content", [b"\x89PNG\r\n\x1a\n", b"\xff\xd8\xff\xe0", b"GIF89a", b"RIFF\0\0\0\0WEBPVP8 ", b"GIF87a"]
)
def test_image_is_accepted_with_purpose_vision(client: openai.OpenAI, content: bytes) -> None:
    assert client.files.content(upload(client, content, purpose="vision").id).read() == content


@pytest.mark.parametrize("content", [b"", LINE, b"<svg/>", b"%PDF-1.7", b"RIFF\0\0\0\0WAVE", b"BM"])
def test_vision_file_that_is_no_image_is_refused(
    client: openai.OpenAI, store: MemoryObjectStore, content: bytes
) -> None:
    with pytest.raises(openai.BadRequestError, match="PNG, JPEG, WebP or GIF") as caught:
        upload(client, content, purpose="vision")
    assert (caught.value.code, caught.value.param) == ("invalid_file_format", "file")
    assert list(store.keys("")) == []


def test_vision_file_over_20_mb_is_refused(client: openai.OpenAI, store: MemoryObjectStore) -> None:
    with pytest.raises(openai.APIStatusError, match="20 MB") as caught:
        upload(client, b"GIF89a" + bytes(20 << 20), purpose="vision")
    assert caught.value.status_code == 413
    assert list(store.keys("")) == []


@pytest.mark.parametrize("status", ["in_progress", "completed"])
def test_image_of_an_open_batch_is_hidden_but_kept(
    client: openai.OpenAI, api_pool: Pool, store: MemoryObjectStore, status: str
) -> None:
    image, batch = upload(client, b"GIF89a", purpose="vision"), in_use(client, upload(client))
    with api_pool.connection() as connection:
        connection.execute("UPDATE batches SET status = %s WHERE id = %s", [status, batch.id])
        connection.execute(
            "INSERT INTO segments (batch_id, number, start_byte, end_byte, rows, tokens, files)"
            " VALUES (%s, 0, 0, 1, 1, 1, %s)",
            [batch.id, ["file-0", image.id]],
        )
    assert client.files.delete(image.id).deleted
    with pytest.raises(openai.NotFoundError):
        client.files.retrieve(image.id)
    assert list(store.keys(f"files/{image.id}")) == [f"files/{image.id}"] * (status == "in_progress")


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
def test_invalid_form_fields_are_refused(http: httpx.Client, data: dict[str, str], code: str, param: str) -> None:
    answer = http.post("/v1/files", data=data, files={"file": ("a.jsonl", LINE)})
    assert answer.status_code == 400
    assert (answer.json()["error"]["code"], answer.json()["error"]["param"]) == (code, param)


def test_missing_file_and_missing_form_are_refused(http: httpx.Client) -> None:
    answer = http.post("/v1/files", data={"purpose": "batch"}, files={"other": (None, "x")})
    assert answer.json()["error"]["param"] == "file"
    for headers in ({"content-type": "application/json"}, {"content-type": "multipart/form-data"}):
        answer = http.post("/v1/files", content=b"{}", headers=headers)
        assert answer.status_code == 400
        assert answer.json()["error"]["type"] == "invalid_request_error"


def test_batch_file_over_200_mb_is_refused(client: openai.OpenAI, store: MemoryObjectStore) -> None:
    with pytest.raises(openai.APIStatusError, match="at most 200 MB") as caught:
        upload(client, b"{" + b" " * (200 << 20))
    assert caught.value.status_code == 413
    assert list(store.keys("")) == []


def test_file_is_invisible_to_other_projects(client: openai.OpenAI, stranger: openai.OpenAI) -> None:
    file = upload(client)
    for act in (stranger.files.retrieve, stranger.files.content, stranger.files.delete):
        with pytest.raises(openai.NotFoundError):
            act(file.id)
    assert list(stranger.files.list()) == []
    assert client.files.content(file.id).read() == LINE


def test_file_whose_content_cannot_be_deleted_is_hidden(
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
        logged = connection.execute(
            "SELECT type FROM audit_log WHERE object_id = %s ORDER BY seq", [file.id]
        ).fetchall()
    assert row is not None
    assert row["deleted_at"]
    assert row["deleted_by"].startswith("key_")
    assert [entry["type"] for entry in logged] == ["file.created", "file.deletion_requested"]


def in_use(client: openai.OpenAI, file: FileObject) -> Batch:
    return client.batches.create(input_file_id=file.id, endpoint="/v1/completions", completion_window="24h")


@pytest.mark.parametrize("status", ["validating", "in_progress", "finalizing", "cancelling"])
def test_deleted_file_of_an_open_batch_is_hidden_but_kept(
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
        logged = connection.execute(
            "SELECT type FROM audit_log WHERE object_id = %s ORDER BY seq", [file.id]
        ).fetchall()
    assert row is not None
    assert row["deleted_at"]
    assert row["deleted_by"].startswith("key_")
    assert [entry["type"] for entry in logged] == ["file.created", "file.deletion_requested"]


def test_new_batch_cannot_use_a_hidden_file(client: openai.OpenAI, api_pool: Pool) -> None:
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
def test_file_of_an_ended_batch_is_deleted_at_once(
    client: openai.OpenAI, api_pool: Pool, store: MemoryObjectStore, status: str
) -> None:
    file = upload(client)
    batch = in_use(client, file)
    with api_pool.connection() as connection:
        connection.execute("UPDATE batches SET status = %s WHERE id = %s", [status, batch.id])
    client.files.delete(file.id)
    assert list(store.keys("")) == []


def test_file_is_deleted_or_used_but_never_both(
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


def test_deletion_is_recorded_in_the_audit_log(client: openai.OpenAI, api_pool: Pool, project: Project) -> None:
    file = upload(client)
    client.files.delete(file.id)
    with api_pool.connection() as connection:
        assert connection.execute("SELECT FROM files WHERE id = %s", [file.id]).fetchone() is None
        [*_, row] = connection.execute("SELECT * FROM audit_log WHERE object_id = %s ORDER BY seq", [file.id])
    assert (row["type"], row["project_id"], row["size_bytes"]) == ("file.deleted", project.id, len(LINE))
    assert row["sha256"] == hashlib.sha256(LINE).digest()
    assert row["actor"].startswith("key_")
    assert row["data"] == {"purpose": "batch", "created_at": file.created_at, "reason": "api"}


def test_content_deleted_during_the_request_is_not_found(
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
def test_lines_are_counted_during_the_upload(client: openai.OpenAI, api_pool: Pool, content: bytes, lines: int) -> None:
    file = upload(client, content)
    with api_pool.connection() as connection:
        row = connection.execute("SELECT line_count FROM files WHERE id = %s", [file.id]).fetchone()
    assert row == {"line_count": lines}


@pytest.mark.parametrize(
    ("sent", "kept"),
    [
        ("a.jsonl", "a.jsonl"),
        ("../../etc/passwd", "passwd"),
        ("/passwd", "passwd"),
        ("C:\\x\\ü y.jsonl", "ü y.jsonl"),
        ("a\0b", "ab"),
        ("a/", "upload"),
    ],
)
def test_last_component_of_a_filename_is_kept(http: httpx.Client, sent: str, kept: str) -> None:
    answer = send_form(http, PURPOSE, (f'"file"; filename="{sent}"', LINE))
    assert answer.json()["filename"] == kept


def send_form(http: httpx.Client, *parts: tuple[str, bytes], end: bytes = b"--b--\r\n") -> httpx.Response:
    """Post a multipart form byte by byte. Each part is the text after ``name=`` in its header, and its content."""
    body = b"".join(
        b"--b\r\nContent-Disposition: form-data; name=" + header.encode() + b"\r\n\r\n" + content + b"\r\n"
        for header, content in parts
    )
    return http.post("/v1/files", content=body + end, headers={"content-type": "multipart/form-data; boundary=b"})


PURPOSE = ('"purpose"', b"batch")
FILE = ('"file"; filename="a.jsonl"', LINE)


@pytest.mark.parametrize("parts", [(PURPOSE, FILE), (FILE, PURPOSE)])
@pytest.mark.parametrize("end", [b"--b--\r\n", b"--b--"])
def test_order_of_form_fields_does_not_matter(http: httpx.Client, parts: Any, end: bytes) -> None:
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
def test_odd_form_is_refused(http: httpx.Client, store: MemoryObjectStore, parts: Any, hint: str) -> None:
    answer = send_form(http, *parts)
    assert answer.status_code == 400
    assert hint in answer.json()["error"]["message"]
    assert list(store.keys("")) == []


def test_form_without_its_end_is_refused(http: httpx.Client, store: MemoryObjectStore) -> None:
    for end in (b"", b"--"):
        answer = send_form(http, PURPOSE, FILE, end=end)
        assert answer.status_code == 400
        assert "ends before its closing boundary" in answer.json()["error"]["message"]
    assert list(store.keys("")) == []


def test_file_without_name_or_content_is_accepted(http: httpx.Client) -> None:
    created = send_form(http, PURPOSE, ('"file"; filename=""', b"")).json()
    assert (created["filename"], created["bytes"]) == ("upload", 0)


def test_wrong_key_is_refused_before_a_large_upload_is_read(base_url: str) -> None:
    client = openai.OpenAI(base_url=f"{base_url}/v1", api_key="sk-wrong", max_retries=0)
    with client, pytest.raises(openai.AuthenticationError):
        upload(client, LINE * (1 << 20))


def temporary_files() -> list[str]:
    """Unnamed temporary files that this process, which also serves the API, has open."""
    names = []
    for entry in Path("/proc/self/fd").iterdir():
        with contextlib.suppress(FileNotFoundError):  # closed in the meantime
            names.append(str(entry.readlink()))
    return [name for name in names if name.startswith(tempfile.gettempdir()) and name.endswith("(deleted)")]


def wait_for(is_so: Callable[[], bool]) -> None:
    for _ in range(500):
        if is_so():
            return
        time.sleep(0.01)
    pytest.fail("it did not come within 5 s")


def test_interrupted_upload_leaves_nothing(
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
