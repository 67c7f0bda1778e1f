"""Batches, segments and jobs in a real database, and jobs that lease and commit without running anything."""

import hashlib
import itertools
from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Any

from ray_job.contract.leases import (
    Commit,
    CommitResponse,
    CommittedRows,
    EndRequest,
    Failure,
    Lease,
    SegmentRef,
    SyncRequest,
    SyncResponse,
)
from ray_job.contract.object_keys import new_part_key, prompt_rules_key
from ray_job.contract.parts import Usage
from ray_job.contract.plans import bitmap
from service.adapters.memory_object_store import MemoryObjectStore
from service.coordinator import commits, leasing
from service.db import Pool
from service.ports import ObjectStore

MODEL = "demo"
MODEL_KEY = "known-model"
ROWS = 4
TOKENS = 1_000

STOPPED = {
    "paused": "paused_at = now()",
    "cancelled": "status = 'cancelling'",
    "given up": "giving_up_at = now(), giving_up_code = 'x', giving_up_message = 'x'",
    "expired": "expires_at = now() - interval '1 s'",
    "finalizing": "status = 'finalizing'",
    "failed": "status = 'failed'",
}
"""What stops the work on a batch, as columns that a test sets."""

_numbers = itertools.count(1)


def lines_of(segment: int, rows: Iterable[int] = range(ROWS), *, rows_per_segment: int = ROWS) -> tuple[int, ...]:
    """Return the line numbers of rows of a segment: a batch counts them through its segments."""
    return tuple(segment * rows_per_segment + row + 1 for row in rows)


def committed(ref: SegmentRef | Lease, rows: Iterable[int] = range(ROWS), *, failed: int = 0) -> CommittedRows:
    """Return rows of a segment as a commit names them, each with 10 input and 2 output tokens."""
    chosen = list(rows)
    usage = Usage(input_tokens=10, output_tokens=2, cached_tokens=3, reasoning_tokens=1)
    return CommittedRows(
        segment=ref.segment,
        epoch=ref.epoch,
        rows=bitmap(chosen),
        lines=lines_of(ref.segment, chosen),
        completed=len(chosen) - failed,
        failed=failed,
        usage=sum((usage for _ in chosen), Usage()),
    )


class FakeJob:
    """A job that leases and commits without running anything."""

    def __init__(self, pool: Pool, store: ObjectStore, job_id: str, token: str) -> None:
        self._pool, self._store = pool, store
        self.id, self.token = job_id, token

    def sync(self, tokens: int = 10**9, *, held: Sequence[SegmentRef] = (), engines: int = 1) -> SyncResponse:
        request = SyncRequest(wanted_tokens=tokens, wait_s=0, held=tuple(held), engines=engines)
        return leasing.sync(self._pool, self._store, self.id, request)

    def lease(self, tokens: int = 10**9) -> tuple[Lease, ...]:
        return self.sync(tokens).leases

    def leased(self, tokens: int = 1) -> list[tuple[str, int]]:
        """Lease, and return the batch and the number of each segment."""
        return [(lease.batch_id, lease.segment) for lease in self.lease(tokens)]

    def lost(self, *held: Lease) -> tuple[SegmentRef, ...]:
        return self.sync(0, held=[lease.ref for lease in held]).lost

    def part_key(self, batch_id: str) -> str:
        return new_part_key(batch_id, self.id)

    def send(self, batch_id: str, *entries: CommittedRows, key: str = "") -> CommitResponse:
        record = Commit(batch_id=batch_id, key=key or self.part_key(batch_id), segments=entries)
        return commits.commit(self._pool, self.id, record)

    def commit(self, lease: Lease, rows: Iterable[int] = range(ROWS), *, failed: int = 0) -> bool:
        """Commit rows of one lease, and return whether they count."""
        return self.send(lease.batch_id, committed(lease, rows, failed=failed)).accepted == (True,)

    def give_back(self, lease: Lease, reason: str = "the plan is unreadable") -> None:
        message = Failure(batch_id=lease.batch_id, segment=lease.segment, epoch=lease.epoch, reason=reason)
        commits.fail(self._pool, self.id, message)

    def end(self) -> bool:
        return leasing.end(self._pool, self.id, EndRequest(engine_s=2.5, busy_s=1.5)).ended


class Coordinated:
    """A database with the rows that a test puts into it, and an object store."""

    def __init__(self, pool: Pool, store: ObjectStore | None = None) -> None:
        self.pool, self.store = pool, store or MemoryObjectStore()
        self.store.put(prompt_rules_key(MODEL_KEY), [b"{}"])

    def sql(self, text: str, *values: Any) -> list[dict[str, Any]]:
        with self.pool.connection() as connection:
            cursor = connection.execute(text, values)  # type: ignore[arg-type]
            return cursor.fetchall() if cursor.description else []

    def batch(self, batch_id: str = "b") -> dict[str, Any]:
        return self.sql("SELECT * FROM batches WHERE id = %s", batch_id)[0]

    def segment(self, number: int = 0, batch_id: str = "b") -> dict[str, Any]:
        return self.sql("SELECT * FROM segments WHERE batch_id = %s AND number = %s", batch_id, number)[0]

    def change(self, batch_id: str, columns: str) -> None:
        """Set columns of a batch, e.g. ``paused_at = now()``."""
        self.sql(f"UPDATE batches SET {columns} WHERE id = %s", batch_id)  # noqa: S608 - the tests' own text

    def project(self, project: str) -> None:
        self.sql("INSERT INTO projects (id, name) VALUES (%s, %s) ON CONFLICT DO NOTHING", project, project)

    def domain(self, domain: str) -> None:
        self.sql("INSERT INTO domains (model, domain) VALUES (%s, %s) ON CONFLICT DO NOTHING", MODEL, domain)

    def add(
        self,
        batch_id: str = "b",
        *,
        project: str = "p",
        domain: str = "stack",
        tokens: Sequence[int] = (TOKENS,),
        priority: int = 0,
        expires_in_s: float = 86_400,
        duration_s: float = 60,
    ) -> None:
        """Add a batch that runs, with a segment of ``ROWS`` rows for each of ``tokens``."""
        self.add_many([batch_id], project=project, domain=domain, tokens=tokens)
        self.sql(
            "UPDATE batches SET priority = %s, expires_at = now() + make_interval(secs => %s),"
            " estimate = jsonb_build_object('duration_s', %s::float) WHERE id = %s",
            priority,
            expires_in_s,
            duration_s,
            batch_id,
        )

    def add_many(
        self, batch_ids: list[str], *, project: str = "p", domain: str = "stack", tokens: Sequence[int] = (TOKENS,)
    ) -> None:
        """Add batches that run, in one transaction."""
        self.project(project)
        self.domain(domain)
        with self.pool.connection() as connection:
            connection.execute(
                "INSERT INTO batches (id, project_id, endpoint, input_file_id, completion_window, request_sha256, "
                "expires_at, status, model, domain, segments_left, total, in_progress_at) "
                "SELECT id, %s, '/v1/chat/completions', 'file', '24h', '', now() + interval '1 day', 'in_progress', "
                "%s, %s, %s, %s, now() FROM unnest(%s::text[]) WITH ORDINALITY AS batch (id, place) ORDER BY place",
                [project, MODEL, domain, len(tokens), ROWS * len(tokens), batch_ids],
            )
            connection.execute(
                "INSERT INTO segments (batch_id, number, start_byte, end_byte, rows, tokens) "
                "SELECT id, number - 1, (number - 1) * 100, number * 100, %s, tokens "
                "FROM unnest(%s::text[]) AS id, unnest(%s::bigint[]) WITH ORDINALITY AS segment (tokens, number)",
                [ROWS, batch_ids, list(tokens)],
            )

    def start_job(self, domain: str = "stack", *, model_key: str = MODEL_KEY) -> FakeJob:
        """Add a launched job; one of the same domain that takes work begins to drain."""
        self.domain(domain)
        number = next(_numbers)
        job_id, token = f"job-{number}", f"token-{number}"
        self.sql("UPDATE jobs SET draining_at = now() WHERE domain = %s AND draining_at IS NULL", domain)
        self.sql(
            "INSERT INTO jobs (id, model, domain, model_key, token_sha256, launched_at) "
            "VALUES (%s, %s, %s, %s, %s, now())",
            job_id,
            MODEL,
            domain,
            model_key,
            hashlib.sha256(token.encode()).digest(),
        )
        return FakeJob(self.pool, self.store, job_id, token)

    def expire_leases(self) -> None:
        """Let all leases expire."""
        self.sql("UPDATE segments SET leased_until = now() - interval '1 s' WHERE leased_until IS NOT NULL")

    def tokens_by_project(self, leases: Iterable[Lease]) -> Counter[str]:
        """Return the tokens of leases by the project of their batch."""
        projects = {row["id"]: row["project_id"] for row in self.sql("SELECT id, project_id FROM batches")}
        tokens: Counter[str] = Counter()
        for lease in leases:
            tokens[projects[lease.batch_id]] += lease.tokens
        return tokens
