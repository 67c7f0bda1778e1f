"""Uploads and partial results take their room from the workspace, and a key cannot take all of it."""

import contextlib
import os
import socket
import tempfile
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import pytest

from ray_job.contract.lines import response_line
from ray_job.contract.object_keys import new_part_key
from ray_job.contract.parts import PartError, PartRow, Usage, encode_part
from service.adapters.memory_object_store import MemoryObjectStore
from service.api.app import create_app
from service.api_keys import create_api_key
from service.assembly import PartRecord, committed_rows
from service.backends import Backends
from service.db import Pool
from service.projects import Project
from service.workspace import Workspace
from tests.security.serving import served

MIB = 1 << 20
ROOM = 8 * MIB
STORE = MemoryObjectStore()
HEAD = (
    b'--x\r\ncontent-disposition: form-data; name="purpose"\r\n\r\nuser_data\r\n'
    b'--x\r\ncontent-disposition: form-data; name="file"; filename="a"\r\n\r\n'
)
TAIL = b"\r\n--x--\r\n"


@pytest.fixture
def url(api_pool: Pool, tmp_path: Path) -> Iterator[str]:
    """An API with 8 MiB of room, which handles two transfers of a key at a time."""
    backends = Backends(pool=api_pool, store=STORE, workspace=Workspace(tmp_path, ROOM), max_transfers_per_key=2)
    with served(create_app(backends)) as opened:
        yield opened


def upload(url: str, key: str, *chunks: bytes, wait: threading.Event | None = None) -> httpx.Response:
    """Upload chunks without a Content-Length; wait for an event before the end of the form."""

    def body() -> Iterator[bytes]:
        yield HEAD
        yield from chunks
        if wait is not None:
            wait.wait(20)
        yield TAIL

    headers = {"authorization": f"Bearer {key}", "content-type": "multipart/form-data; boundary=x"}
    return httpx.post(f"{url}/v1/files", content=body(), headers=headers, timeout=30)


def assert_no_room(answer: httpx.Response) -> None:
    assert answer.status_code == 429
    assert answer.json()["error"]["type"] == "rate_limit_error"
    assert int(answer.headers["retry-after"]) >= 1


@contextlib.contextmanager
def unfinished(url: str, key: str, *chunks: bytes) -> Iterator[None]:
    """Uploads that send no end while the context lasts, one for each chunk."""
    finish = threading.Event()
    with ThreadPoolExecutor(len(chunks)) as threads:
        running = [threads.submit(upload, url, key, chunk, wait=finish) for chunk in chunks]
        time.sleep(0.5)
        try:
            yield
        finally:
            finish.set()
        assert [answer.result().status_code for answer in running] == [200] * len(chunks)


def test_upload_without_room_is_refused_and_frees_what_it_took(url: str, api_key: str) -> None:
    assert_no_room(upload(url, api_key, *[b"x" * MIB] * 9))
    assert upload(url, api_key, *[b"x" * MIB] * 6).status_code == 200
    assert upload(url, api_key, *[b"x" * MIB] * 6).status_code == 200


def test_upload_with_a_length_beyond_the_room_is_refused_before_it_is_received(url: str, api_key: str) -> None:
    address = httpx.URL(url)
    head = (
        f"POST /v1/files HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {api_key}\r\n"
        f"Content-Length: {2 * ROOM}\r\nContent-Type: multipart/form-data; boundary=x\r\n\r\n"
    )
    with socket.create_connection((address.host, address.port or 80), timeout=10) as connection:
        connection.sendall(head.encode())
        assert connection.recv(100).startswith(b"HTTP/1.1 429")


def test_room_is_shared_by_concurrent_uploads(url: str, api_key: str) -> None:
    with unfinished(url, api_key, b"x" * 5 * MIB):
        assert_no_room(upload(url, api_key, b"x" * 5 * MIB))
    assert upload(url, api_key, b"x" * 5 * MIB).status_code == 200


def test_aborted_upload_frees_its_room(url: str, api_key: str) -> None:
    def body() -> Iterator[bytes]:
        yield HEAD
        yield b"x" * 7 * MIB
        raise ConnectionAbortedError

    headers = {"authorization": f"Bearer {api_key}", "content-type": "multipart/form-data; boundary=x"}
    with pytest.raises(ConnectionAbortedError):
        httpx.post(f"{url}/v1/files", content=body(), headers=headers)
    time.sleep(0.5)
    assert upload(url, api_key, b"x" * 7 * MIB).status_code == 200


def test_key_with_many_uploads_is_refused_and_other_keys_are_not(
    url: str, api_pool: Pool, project: Project, api_key: str
) -> None:
    other = create_api_key(api_pool, project_id=project.id, name="other")
    with unfinished(url, api_key, b"x" * 2 * MIB, b"x" * 2 * MIB):
        assert_no_room(upload(url, api_key, b"x" * 2 * MIB))
        assert upload(url, other, b"x" * 2 * MIB).status_code == 200
        assert upload(url, api_key, b"small").status_code == 200
    assert upload(url, api_key, b"x" * 2 * MIB).status_code == 200


@pytest.fixture
def batch_id(api_pool: Pool, project: Project) -> str:
    """A running batch with a committed part of 5 MB."""
    batch_id = f"batch_{project.id.removeprefix('proj_')}"
    key = new_part_key(batch_id, "job-1")
    rows = [
        PartRow(
            line=line,
            outcome="completed",
            data=response_line(batch_id, line, f"id-{line}", 200, b'{"text":"%s"}' % (b"x" * 800_000)),
            usage=Usage(),
        )
        for line in range(1, 7)
    ]
    STORE.put(key, [encode_part(batch_id, rows)])
    with api_pool.connection() as connection:
        connection.execute(
            "INSERT INTO batches (id, project_id, endpoint, input_file_id, completion_window, request_sha256, status, "
            "expires_at) VALUES (%s, %s, '/v1/completions', 'f', '24h', '', 'in_progress', now() + interval '1 h')",
            [batch_id, project.id],
        )
        connection.execute(
            "INSERT INTO parts (key, batch_id, job_id, accepted) VALUES (%s, %s, NULL, '{true}')", [key, batch_id]
        )
    return batch_id


def results(url: str, key: str, batch_id: str) -> httpx.Response:
    return httpx.get(f"{url}/v1/batches/{batch_id}/results", headers={"authorization": f"Bearer {key}"}, timeout=30)


def test_partial_results_without_room_are_refused(url: str, api_key: str, batch_id: str) -> None:
    assert len(results(url, api_key, batch_id).content) > 4_800_000
    with unfinished(url, api_key, b"x" * 5 * MIB):
        assert_no_room(results(url, api_key, batch_id))
    for _ in range(3):
        assert results(url, api_key, batch_id).status_code == 200


def test_partial_results_that_a_client_does_not_read_to_the_end_free_their_room(
    url: str, api_key: str, batch_id: str
) -> None:
    for _ in range(3):
        headers = {"authorization": f"Bearer {api_key}"}
        with httpx.stream("GET", f"{url}/v1/batches/{batch_id}/results", headers=headers) as answer:
            assert answer.status_code == 200
        time.sleep(0.5)
    assert results(url, api_key, batch_id).status_code == 200


def test_partial_results_and_uploads_of_a_key_share_its_limit(url: str, api_key: str, batch_id: str) -> None:
    with unfinished(url, api_key, b"x" * (MIB + 1), b"x" * (MIB + 1)):
        assert_no_room(results(url, api_key, batch_id))


def test_part_that_is_larger_than_its_header_states_does_not_fill_the_disk() -> None:
    store = MemoryObjectStore()
    row = PartRow(line=1, outcome="completed", data=b"{}", usage=Usage())
    store.put("part", [encode_part("batch_1", [row]), b"x" * 32 * MIB])
    with tempfile.TemporaryFile() as file:
        with pytest.raises(PartError, match="damaged"):
            committed_rows(store, [PartRecord(key="part")], batch_id="batch_1", outcome="completed", file=file)
        assert file.seek(0, os.SEEK_END) < 2 * MIB
