"""API processes on their own Postgres: many concurrent requests, and backends that fail."""

import asyncio
import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest
import uvicorn

from service.adapters.directory_object_store import DirectoryObjectStore
from service.api.app import create_app
from service.api_keys import create_api_key
from service.backends import Backends
from service.db import Pool, open_pool
from service.errors import ObjectStoreError
from service.local import postgres
from service.local.keys import make_keys
from service.local.layout import Layout, layout_of, make_directories
from service.local.processes import child_environment
from service.local.ray_head import free_ports
from service.ports import StoredObject
from service.projects import create_project

pytestmark = pytest.mark.slow

MODELS = "models:\n  - id: demo\n    source: /models/demo\n"
REQUEST = {"input_file_id": "file-none", "endpoint": "/v1/chat/completions", "completion_window": "24h"}
AT_ONCE = 200


class Postgres:
    """The embedded Postgres of a data directory, with commands to crash and start it."""

    def __init__(self, layout: Layout) -> None:
        self._environment = child_environment(layout, "postgres", os.environ, offline=True, gpu=False)
        self._layout = layout
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        command = postgres.prepare(self._layout, self._environment)
        with self._layout.log("postgres").open("ab") as log:
            self._process = subprocess.Popen(command, env=self._environment, stdout=log, stderr=log)
        deadline_s = time.monotonic() + 60
        while not postgres.answers(self._layout):
            assert time.monotonic() < deadline_s
            time.sleep(0.05)

    def crash(self) -> None:
        """Crash it: no backend finishes, and the next start recovers from the write-ahead log."""
        assert self._process is not None
        self._process.send_signal(signal.SIGQUIT)
        self._process.wait(60)


@pytest.fixture(scope="module")
def layout(tmp_path_factory: pytest.TempPathFactory) -> Layout:
    layout = layout_of(tmp_path_factory.mktemp("load") / "data")
    make_directories(layout)
    layout.models_file.write_text(MODELS)
    make_keys(layout)
    return layout


@pytest.fixture(scope="module")
def database(layout: Layout) -> Iterator[Postgres]:
    database = Postgres(layout)
    database.start()
    try:
        postgres.set_up(layout)
        yield database
    finally:
        database.crash()


@contextlib.contextmanager
def api_process(layout: Layout) -> Iterator[str]:
    """Run ``python -m service.api`` and return its base URL."""
    (port,) = free_ports(1)
    settings = {
        "CLOISTER_DATABASE_URL": layout.database_url("cloister"),
        "CLOISTER_OBJECT_STORE": f"file://{layout.objects}",
        "CLOISTER_MODELS": str(layout.models_file),
        "CLOISTER_PORT": str(port),
        "CLOISTER_RECEIPT_KEY_FILE": str(layout.receipt_key),
    }
    with layout.log(f"api-{port}").open("wb") as log:
        process = subprocess.Popen([sys.executable, "-m", "service.api"], env={**os.environ, **settings}, stdout=log)
    try:
        wait_until_ready(f"http://127.0.0.1:{port}")
        yield f"http://127.0.0.1:{port}"
    finally:
        process.terminate()
        process.wait(60)


def wait_until_ready(base_url: str) -> None:
    deadline_s = time.monotonic() + 60
    while time.monotonic() < deadline_s:
        with contextlib.suppress(httpx.TransportError):
            if httpx.get(f"{base_url}/readyz").status_code == 200:
                return
        time.sleep(0.1)
    pytest.fail(f"{base_url} was not ready within 60 s")


@pytest.fixture(scope="module")
def replicas(layout: Layout, database: Postgres) -> Iterator[list[str]]:
    """The base URLs of two API processes over the same database and store."""
    del database
    with api_process(layout) as one, api_process(layout) as other:
        yield [one, other]


@pytest.fixture
def headers(layout: Layout, database: Postgres, request: pytest.FixtureRequest) -> dict[str, str]:
    """Authorization header of a project that only this test uses."""
    del database
    with open_pool(layout.database_url("cloister"), max_size=1) as pool:
        project = create_project(pool, request.node.name)
        return {"authorization": f"Bearer {create_api_key(pool, project_id=project.id, name='test')}"}


def form(content: bytes, name: str = "input.jsonl") -> dict[str, Any]:
    return {"data": {"purpose": "batch"}, "files": {"file": (name, content)}}


def stored_files(layout: Layout) -> set[Path]:
    return {path for path in layout.objects.rglob("*") if path.is_file()}


def test_upload_cut_in_half_leaves_nothing(layout: Layout, replicas: list[str], headers: dict[str, str]) -> None:
    before = stored_files(layout)
    address = httpx.URL(replicas[0])
    head = (
        f"POST /v1/files HTTP/1.1\r\nHost: x\r\nAuthorization: {headers['authorization']}\r\n"
        "Content-Length: 8000000\r\nContent-Type: multipart/form-data; boundary=b\r\n\r\n"
        '--b\r\nContent-Disposition: form-data; name="purpose"\r\n\r\nbatch\r\n'
        '--b\r\nContent-Disposition: form-data; name="file"; filename="a.jsonl"\r\n\r\n'
    )
    with socket.create_connection((address.host, address.port or 80)) as connection:
        connection.sendall(head.encode() + b'{"custom_id":"a"}\n' * 200_000)
    time.sleep(0.5)  # the client cannot see when the server notices
    assert httpx.get(f"{replicas[0]}/v1/files", headers=headers).json()["data"] == []
    assert stored_files(layout) == before


async def _upload_and_list(base_url: str, headers: dict[str, str]) -> tuple[list[httpx.Response], list[httpx.Response]]:
    limits = httpx.Limits(max_connections=2 * AT_ONCE)
    async with httpx.AsyncClient(base_url=base_url, headers=headers, limits=limits, timeout=60) as http:
        uploads = [http.post("/v1/files", **form(b'{"custom_id":"%d"}\n' % number)) for number in range(AT_ONCE)]
        listings = [http.get("/v1/files?limit=20") for _ in range(AT_ONCE)]
        answers = await asyncio.gather(*uploads, *listings)
    return answers[:AT_ONCE], answers[AT_ONCE:]


def test_200_concurrent_uploads_and_listings_are_all_answered(replicas: list[str], headers: dict[str, str]) -> None:
    uploads, listings = asyncio.run(_upload_and_list(replicas[0], headers))
    assert Counter(answer.status_code for answer in uploads + listings) == {200: 2 * AT_ONCE}
    ids = [answer.json()["id"] for answer in uploads]
    with httpx.Client(base_url=replicas[0], headers=headers) as http:
        assert {file["id"] for file in http.get("/v1/files").json()["data"]} == set(ids)
        for number in range(0, AT_ONCE, 10):
            assert http.get(f"/v1/files/{ids[number]}/content").content == b'{"custom_id":"%d"}\n' % number


def test_creation_repeated_on_two_replicas_creates_one_batch(replicas: list[str], headers: dict[str, str]) -> None:
    repeated = {**headers, "x-stainless-retry-count": "1"}

    def create(base_url: str, number: int) -> str:
        answer = httpx.post(f"{base_url}/v1/batches", json=tagged(number), headers=repeated, timeout=30)
        return str(answer.raise_for_status().json()["id"])

    with ThreadPoolExecutor(8) as threads:
        for number in range(10):
            made = threads.map(lambda base_url, number=number: create(base_url, number), replicas * 4)
            assert len(set(made)) == 1
    batches = httpx.get(f"{replicas[1]}/v1/batches?limit=100", headers=headers).json()["data"]
    assert len(batches) == 10


def tagged(number: int | str) -> dict[str, Any]:
    return {**REQUEST, "metadata": {"number": str(number)}}


class Load:
    """Clients that create, retrieve and list without a pause, with the answers they received."""

    def __init__(self, base_url: str, headers: dict[str, str]) -> None:
        self._http = httpx.Client(base_url=base_url, headers=headers, timeout=60)
        self._stopping = threading.Event()
        self.created: dict[str, str] = {}
        self.statuses: Counter[int] = Counter()
        self.unenveloped: list[str] = []

    def send(self, method: str, path: str, **options: Any) -> httpx.Response:
        answer = self._http.request(method, path, **options)
        self.statuses[answer.status_code] += 1
        if answer.status_code != 200 and answer.json()["error"]["type"] != "server_error":
            self.unenveloped.append(answer.text)
        return answer

    def create(self, tag: str) -> None:
        """Create a batch as the official client does: repeat what was not acknowledged, marked as a retry."""
        for attempt in range(1_000):
            repetition = {"x-stainless-retry-count": str(attempt)}
            answer = self.send("POST", "/v1/batches", json=tagged(tag), headers=repetition)
            if answer.status_code == 200:
                self.created[tag] = answer.json()["id"]
                return
            time.sleep(0.1)

    def work(self, worker: int) -> None:
        number = 0
        while not self._stopping.is_set():
            tag = f"{worker}-{number}"
            self.create(tag)
            if tag in self.created:
                self.send("GET", f"/v1/batches/{self.created[tag]}")
            self.send("GET", "/v1/batches?limit=5")
            number += 1

    @contextlib.contextmanager
    def running(self, workers: int) -> Iterator[None]:
        with ThreadPoolExecutor(workers) as threads:
            running = [threads.submit(self.work, worker) for worker in range(workers)]
            try:
                yield
            finally:
                self._stopping.set()
            for worker in running:
                worker.result()
        self._http.close()


def all_batches(base_url: str, headers: dict[str, str]) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = []
    has_more = True
    while has_more:
        after = {"after": found[-1]["id"]} if found else {}
        page = httpx.get(f"{base_url}/v1/batches", params={"limit": 100, **after}, headers=headers, timeout=60).json()
        found += page["data"]
        has_more = page["has_more"]
    return found


def test_postgres_crash_under_load_causes_503s_but_loses_no_batch(
    replicas: list[str], headers: dict[str, str], database: Postgres
) -> None:
    load = Load(replicas[0], headers)
    with load.running(workers=6):
        for _ in range(2):
            time.sleep(1)
            database.crash()
            time.sleep(1)
            database.start()
        time.sleep(1)
    assert load.statuses.keys() <= {200, 503}
    assert load.unenveloped == []
    assert load.statuses[200] > 20
    # Each request, acknowledged or repeated, created exactly one batch: the one in its answer.
    found = [(batch["metadata"]["number"], batch["id"]) for batch in all_batches(replicas[1], headers)]
    assert sorted(found) == sorted(load.created.items())


def test_pool_recovers_at_once_from_the_loss_of_every_connection(layout: Layout, database: Postgres) -> None:
    with open_pool(layout.database_url("cloister"), max_size=8) as pool:
        with contextlib.ExitStack() as all_of_them:
            for _ in range(8):
                all_of_them.enter_context(pool.connection())
        database.crash()
        database.start()
        began_s = time.monotonic()
        with pool.connection() as connection:
            connection.execute("SELECT 1")
    assert time.monotonic() - began_s < 5


class EveryThirdCallFails:
    """A real store that fails every third call: before, after or in the middle of the operation."""

    def __init__(self, store: DirectoryObjectStore) -> None:
        self._store = store
        self._lock = threading.Lock()
        self.calls = 0

    def _breaks(self) -> bool:
        with self._lock:
            self.calls += 1
            return self.calls % 3 == 0

    def put(self, key: str, chunks: Iterable[bytes]) -> StoredObject:
        breaks = self._breaks()
        if breaks and self.calls % 2:
            raise ObjectStoreError("the store broke before it wrote")
        stored = self._store.put(key, chunks)
        if breaks:
            raise ObjectStoreError("the store broke after it wrote")
        return stored

    def read(self, key: str, *, start: int = 0) -> Iterator[bytes]:
        breaks = self._breaks()
        for number, chunk in enumerate(self._store.read(key, start=start)):
            if breaks and number == self.calls % 2:
                raise ObjectStoreError("the store broke while it was read")
            yield chunk

    def keys(self, prefix: str) -> Iterator[str]:
        if self._breaks():
            raise ObjectStoreError("the store broke at a listing")
        yield from self._store.keys(prefix)

    def delete(self, key: str) -> tuple[str, ...]:
        if self._breaks():
            raise ObjectStoreError("the store broke at a deletion")
        return self._store.delete(key)

    def check(self) -> None:
        if self._breaks():
            raise ObjectStoreError("the store broke at a check")

    def __getattr__(self, name: str) -> Any:
        return getattr(self._store, name)


@contextlib.contextmanager
def served(pool: Pool, store: Any) -> Iterator[str]:
    """Serve the application in this process and return its base URL."""
    app = create_app(Backends(pool=pool, store=store))
    server = uvicorn.Server(uvicorn.Config(app, host="127.0.0.1", port=0, log_config=None, access_log=False, ws="none"))
    thread = threading.Thread(target=server.run, daemon=True)
    thread.start()
    while not server.started:
        assert thread.is_alive()
        time.sleep(0.01)
    yield f"http://127.0.0.1:{server.servers[0].sockets[0].getsockname()[1]}"
    server.should_exit = True
    thread.join()


def test_store_failing_every_third_call_causes_503s_but_loses_no_file(
    layout: Layout, headers: dict[str, str], tmp_path: Path
) -> None:
    contents = {number: json.dumps({"custom_id": "x" * number * 60_000}).encode() for number in range(40)}
    store = EveryThirdCallFails(DirectoryObjectStore(tmp_path / "objects"))
    statuses: Counter[int] = Counter()
    with open_pool(layout.database_url("cloister"), max_size=4) as pool, served(pool, store) as base_url:
        http = httpx.Client(base_url=base_url, headers=headers, timeout=60)

        def upload(number: int) -> tuple[int, str | None]:
            answer = http.post("/v1/files", **form(contents[number]))
            statuses[answer.status_code] += 1
            return number, answer.json()["id"] if answer.status_code == 200 else None

        with http, ThreadPoolExecutor(8) as threads:
            acknowledged = [(number, file_id) for number, file_id in threads.map(upload, contents) if file_id]
            for number, file_id in acknowledged:
                answer = http.get(f"/v1/files/{file_id}/content")
                statuses[answer.status_code] += 1
                assert answer.status_code == 503 or answer.content == contents[number]
            listed = {file["id"] for file in http.get("/v1/files").json()["data"]}
    assert statuses.keys() == {200, 503}
    assert listed == {file_id for _, file_id in acknowledged}
    assert {path.name for path in (tmp_path / "objects" / "files").iterdir()} >= listed
