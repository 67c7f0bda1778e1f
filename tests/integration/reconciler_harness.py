"""A reconciler on real Postgres with jobs that lease and commit, and a client's view of its batches."""

import json
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import UTC, datetime, timedelta
from ipaddress import ip_network
from pathlib import Path
from threading import Thread
from typing import Any, Final

from cryptography.fernet import Fernet, MultiFernet

from ray_job.contract.job_spec import JobSpec, ModelSpec
from ray_job.contract.leases import Commit, CommittedRows, EndRequest, Lease, SegmentTimes, SyncRequest, SyncResponse
from ray_job.contract.lines import response_line
from ray_job.contract.object_keys import file_key, new_part_key, plan_key
from ray_job.contract.parts import PartRow, Usage, encode_part
from ray_job.contract.plans import bitmap, bitmap_rows, decode_rows
from service.adapters.directory_object_store import DirectoryObjectStore
from service.adapters.memory_launcher import MemoryLauncher
from service.coordinator.commits import commit as commit_part
from service.coordinator.leasing import end, sync
from service.db import Pool
from service.model_catalogue import CatalogueModel
from service.ports import JobState, JobStatus, ObjectStore
from service.reconciler.backends import Backends
from service.reconciler.jobs import advance_job, create_jobs, jobs_to_advance
from service.reconciler.loop import run
from service.reconciler.steps import advance
from service.workspace import Workspace
from tests.conftest import as_service

CHAT = "/v1/chat/completions"
BATCH = "batch_1"
KEYS: Final = MultiFernet([Fernet(Fernet.generate_key())])
SUCCEEDED = JobStatus(state=JobState.SUCCEEDED)
FAILED = JobStatus(state=JobState.FAILED, message="ValueError: no such model directory")
RUNNING = JobStatus(state=JobState.RUNNING)


def line(number: int, model: str = "demo") -> bytes:
    body = {"model": model, "messages": [{"role": "user", "content": "hi"}]}
    return json.dumps({"custom_id": f"id-{number}", "method": "POST", "url": CHAT, "body": body}).encode()


class Job:
    """A job that leases and commits like a real one."""

    def __init__(self, stack: "Stack", job_id: str) -> None:
        self._stack = stack
        self.id = job_id
        self.leases: dict[tuple[str, int], Lease] = {}
        self._committed: set[tuple[str, int]] = set()  # batch and line
        self._plans: dict[str, bytes] = {}

    def lease(self, tokens: int = 10**9) -> SyncResponse:
        held = tuple(lease.ref for lease in self.leases.values())
        request = SyncRequest(wanted_tokens=tokens, wait_s=0, held=held, engines=1)
        answer = sync(self._stack.pool, self._stack.store, self.id, request, self._stack.backends.traces)
        for ref in answer.lost:
            del self.leases[ref.batch_id, ref.segment]
        for lease in answer.leases:
            self.leases[lease.batch_id, lease.segment] = lease
            self._plans[lease.batch_id] = b"".join(self._stack.store.read(plan_key(lease.batch_id)))
        return answer

    def commit(
        self,
        *lines: int,
        batch_id: str = BATCH,
        fails: bool = False,
        custom_id: str = "",
        body: bytes = b'{"object":"chat.completion"}',
    ) -> bool:
        """Write and commit a part with the results of some lines; all that are left of the batch if none is named."""
        key = new_part_key(batch_id, self.id)
        results: list[PartRow] = []
        segments: list[CommittedRows] = []
        times: list[SegmentTimes] = []
        for lease in self.leases.values():
            if lease.batch_id != batch_id:
                continue
            data = self._plans[batch_id][lease.start : lease.end]
            done = bitmap_rows(lease.done)
            chosen = {
                number: row
                for number, row in enumerate(decode_rows(data))
                if number not in done
                and (batch_id, row.line) not in self._committed
                and (not lines or row.line in lines)
            }
            if not chosen:
                continue
            rows = [
                PartRow(
                    line=row.line,
                    outcome="failed" if fails else "completed",
                    data=response_line(
                        batch_id,
                        row.line,
                        custom_id or json.loads(row.raw)["custom_id"],
                        400 if fails else 200,
                        body,
                    ),
                    usage=Usage(input_tokens=10, output_tokens=2),
                )
                for row in chosen.values()
            ]
            results += rows
            if lease.is_traced:
                times.append(SegmentTimes(segment=lease.segment, leased_s=0.4, read_s=0.3, sent_s=0.2, ready_s=0.1))
            segments.append(
                CommittedRows(
                    segment=lease.segment,
                    epoch=lease.epoch,
                    rows=bitmap(chosen),
                    lines=tuple(row.line for row in chosen.values()),
                    completed=0 if fails else len(rows),
                    failed=len(rows) if fails else 0,
                    usage=Usage(input_tokens=10 * len(rows), output_tokens=2 * len(rows)),
                )
            )
        if not results:
            return False
        self._stack.store.put(key, [encode_part(batch_id, results)])
        record = Commit(batch_id=batch_id, key=key, segments=tuple(segments), times=tuple(times))
        is_accepted = all(commit_part(self._stack.pool, self.id, record, self._stack.backends.traces).accepted)
        if is_accepted:
            self._committed |= {(batch_id, row.line) for row in results}
        return is_accepted

    def answer_all(self) -> None:
        """Lease everything, and commit a result for each line."""
        self.lease()
        for batch_id in {batch_id for batch_id, _ in self.leases}:
            self.commit(batch_id=batch_id)

    def end(self) -> bool:
        """Ask to end, as after some idle time."""
        return end(self._stack.pool, self.id, EndRequest(engine_s=1, busy_s=1)).ended

    def serve(self) -> JobStatus:
        """Answer everything until no work is left, and end."""
        self.answer_all()
        while not self.end():
            self.answer_all()
        return SUCCEEDED


class Stack:
    """Backends of a reconciler, and a client's view of the database."""

    def __init__(self, pool: Pool, store: ObjectStore, workspace: Path, **settings: Any) -> None:
        self.pool, self.store = pool, store
        self.work: Callable[[JobSpec], JobStatus] = lambda _: RUNNING
        self.launcher = MemoryLauncher(self._run)
        self._jobs: dict[str, Job] = {}
        self.backends = Backends(
            pool=pool,
            store=store,
            launcher=self.launcher,
            catalogue={"demo": CatalogueModel(spec=ModelSpec(id="demo", source="x"))},
            coordinator_url="http://127.0.0.1:1",
            webhook_networks=(ip_network("127.0.0.0/8"), ip_network("::1/128")),
            workspace=Workspace(workspace),
            encryption_keys=KEYS,
            **settings,
        )

    def _run(self, spec: JobSpec) -> JobStatus:
        return self.work(spec)

    def sql(self, text: str, *values: Any) -> list[dict[str, Any]]:
        with self.pool.connection() as connection:
            cursor = connection.execute(text, values)
            return cursor.fetchall() if cursor.description is not None else []

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

    def advance(self, batch_id: str = BATCH) -> dict[str, Any]:
        """Take all steps of a batch, then one of each job."""
        advance(self.backends, batch_id)
        self.advance_jobs()
        return self.batch(batch_id)

    def advance_jobs(self) -> None:
        create_jobs(self.backends)
        for row in jobs_to_advance(self.backends, limit=1_000):
            advance_job(self.backends, row["id"])

    def job(self, job_id: str = "") -> Job:
        """A job; the one that was launched last if none is named."""
        job_id = job_id or self.launcher.launched[-1].job_id
        return self._jobs.setdefault(job_id, Job(self, job_id))

    def jobs(self) -> list[dict[str, Any]]:
        return self.sql("SELECT * FROM jobs ORDER BY seq")

    def started(self, *lines: bytes, **options: Any) -> Job:
        """Create a batch, and return its job, which has leased all of it."""
        self.create(*lines, **options)
        self.advance(options.get("batch_id", BATCH))
        job = self.job()
        job.lease()
        return job

    def file(self, file_id: str) -> list[dict[str, Any]]:
        return [json.loads(raw) for raw in b"".join(self.store.read(file_key(file_id))).splitlines()]

    def forget_backoff(self) -> None:
        self.sql("UPDATE domains SET not_before = NULL")
        self.sql("UPDATE jobs SET launch_after = now() WHERE launch_after IS NOT NULL")

    def cancel(self) -> None:
        self.sql(
            "UPDATE batches SET status = 'cancelling', cancelling_at = now() "
            "WHERE status IN ('validating', 'in_progress', 'finalizing')"
        )


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
    thread = Thread(target=run, args=(backends, as_service(database_url)))
    thread.start()
    try:
        yield
    finally:
        backends.stopping.set()
        thread.join()
