"""A reconciler on real Postgres whose jobs are functions of their spec, and a client's view of its batches."""

import json
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import UTC, datetime, timedelta
from pathlib import Path
from threading import Thread
from typing import Any

from ray_job.contract.job_spec import JobSpec, ModelSpec
from ray_job.contract.lines import error_body, response_line
from ray_job.contract.object_keys import file_key, part_key
from ray_job.contract.parts import PartRow, Usage, encode_part
from service.adapters.directory_object_store import DirectoryObjectStore
from service.adapters.memory_launcher import MemoryLauncher
from service.db import Pool
from service.model_catalogue import CatalogueModel
from service.ports import JobState, JobStatus, ObjectStore
from service.reconciler.backends import Backends
from service.reconciler.loop import run
from service.reconciler.steps import advance
from service.workspace import Workspace

CHAT = "/v1/chat/completions"
BATCH = "batch_1"
SUCCEEDED = JobStatus(state=JobState.SUCCEEDED)
FAILED = JobStatus(state=JobState.FAILED, message="ValueError: no such model directory")
RUNNING = JobStatus(state=JobState.RUNNING)


def line(number: int, model: str = "demo") -> bytes:
    body = {"model": model, "messages": [{"role": "user", "content": "hi"}]}
    return json.dumps({"custom_id": f"id-{number}", "method": "POST", "url": CHAT, "body": body}).encode()


def commit(store: ObjectStore, batch_id: str, *lines: int, fails: bool = False) -> None:
    body = error_body("no", type="x", param=None, code=None) if fails else b'{"object":"chat.completion"}'
    rows = [
        PartRow(
            line=number,
            outcome="failed" if fails else "completed",
            data=response_line(batch_id, number, f"id-{number}", 400 if fails else 200, body),
            usage=Usage(input_tokens=10, output_tokens=2),
        )
        for number in lines
    ]
    store.put(part_key(batch_id, lines), [encode_part(batch_id, rows)])


class Stack:
    """Backends of a reconciler, and a client's view of the database."""

    def __init__(self, pool: Pool, store: ObjectStore, workspace: Path, **settings: Any) -> None:
        self.pool, self.store = pool, store
        self.work: Callable[[JobSpec], JobStatus] = lambda _: RUNNING
        self.launcher = MemoryLauncher(self._run)
        self.backends = Backends(
            pool=pool,
            store=store,
            launcher=self.launcher,
            catalogue={"demo": CatalogueModel(spec=ModelSpec(id="demo", source="x"))},
            job_database_url="",
            workspace=Workspace(workspace),
            **settings,
        )

    def _run(self, spec: JobSpec) -> JobStatus:
        return self.work(spec)

    def sql(self, text: str, *values: Any) -> list[dict[str, Any]]:
        with self.pool.connection() as connection:
            cursor = connection.execute(text, values)
            return cursor.fetchall() if cursor.description else []

    def create(self, *lines: bytes, batch_id: str = BATCH, hours: int = 24, project: str = "p") -> None:
        now = datetime.now(UTC)
        content = b"\n".join(lines)
        self.store.put(file_key(f"file-{batch_id}"), [content])
        self.sql("INSERT INTO projects (id, name) VALUES (%s, %s) ON CONFLICT DO NOTHING", project, project)
        self.sql(
            "INSERT INTO files (id, project_id, purpose, filename, size_bytes, sha256) "
            "VALUES (%s, %s, 'batch', 'in.jsonl', %s, '')",
            f"file-{batch_id}",
            project,
            len(content),
        )
        self.sql(
            "INSERT INTO batches "
            "(id, project_id, endpoint, input_file_id, completion_window, request_sha256, expires_at) "
            "VALUES (%s, %s, %s, %s, '24h', '', %s)",
            batch_id,
            project,
            CHAT,
            f"file-{batch_id}",
            now + timedelta(hours=hours),
        )

    def batch(self, batch_id: str = BATCH) -> dict[str, Any]:
        return self.sql("SELECT * FROM batches WHERE id = %s", batch_id)[0]

    def errors(self) -> list[dict[str, Any]]:
        return self.sql("SELECT * FROM batch_errors WHERE batch_id = %s ORDER BY ordinal", BATCH)

    def advance(self) -> dict[str, Any]:
        advance(self.backends, BATCH)
        return self.batch()

    def file(self, file_id: str) -> list[dict[str, Any]]:
        return [json.loads(raw) for raw in b"".join(self.store.read(file_key(file_id))).splitlines()]

    def forget_backoff(self) -> None:
        self.sql("UPDATE batches SET launch_after = now() WHERE launch_after IS NOT NULL")

    def cancel(self) -> None:
        self.sql(
            "UPDATE batches SET status = 'cancelling', cancelling_at = now() "
            "WHERE status IN ('validating', 'in_progress', 'finalizing')"
        )

    def end_job(self, *lines: int, batch_id: str = BATCH) -> None:
        """Commit these lines and end the newest job with success."""
        if lines:
            commit(self.store, batch_id, *lines)
        self.launcher.end(f"{batch_id}-{self.batch(batch_id)['attempt']}", SUCCEEDED)


class Meddling(DirectoryObjectStore):
    """Calls ``meddle`` once, when an object of the given kind is read or written."""

    meddle: Callable[[], None] | None = None
    when: tuple[str, str] = ("", "")

    def _happen(self, call: str, key: str) -> None:
        if self.meddle is not None and (call, key.partition("/")[0]) == self.when:
            meddle, self.meddle = self.meddle, None
            meddle()

    def keys(self, prefix: str) -> Iterator[str]:
        self._happen("keys", prefix)
        return super().keys(prefix)

    def read(self, key: str, *, start: int = 0) -> Iterator[bytes]:
        chunks = list(super().read(key, start=start))
        self._happen("read", key)
        return iter(chunks)

    def put(self, key: str, chunks: Any) -> Any:
        stored = super().put(key, chunks)
        self._happen("put", key)
        return stored


def eventually(condition: Callable[[], bool]) -> None:
    end = time.monotonic() + 15
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.02)


@contextmanager
def looping(backends: Backends, database_url: str) -> Iterator[None]:
    thread = Thread(target=run, args=(backends, database_url))
    thread.start()
    try:
        yield
    finally:
        backends.stopping.set()
        thread.join()
