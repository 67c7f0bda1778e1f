"""Leases of segments: extended, given and ended.

Leasing is fair between the projects of a sharing domain by start-time fair queueing: a project's next turn starts at
its last finish, or at the domain's virtual time if it had no work until then, so nobody saves turns up. The project
with the smallest start is next, and its finish grows by the tokens that it gets.
Source: P. Goyal, H. M. Vin, H. Cheng, Start-time Fair Queueing, SIGCOMM 1996, https://doi.org/10.1145/248156.248171.
"""

import hashlib
import hmac
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Final

import psycopg
import structlog
from psycopg.rows import DictRow

from ray_job.contract.leases import EndRequest, EndResponse, Lease, LeasedFile, SegmentRef, SyncRequest, SyncResponse
from ray_job.contract.object_keys import file_key, job_prompt_rules_key, plan_key, prompt_rules_key
from service.coordinator.errors import JobEndedError
from service.coordinator.spans import trace_leases
from service.db import Pool, query
from service.errors import ObjectNotFoundError, ObjectStoreError
from service.ports import ObjectStore
from service.traces import OFF, Traces

logger = structlog.get_logger(__name__)

LEASE_S: Final = 60
URL_EXPIRES_S: Final = 3600
# What a project gets in one turn.
TURN_TOKENS: Final = 1 << 16
TURN_SEGMENTS: Final = 64
MAX_LEASES: Final = 256
# The backlog counts the tokens of so many segments at most.
BACKLOG_SEGMENTS: Final = 1_000
_SALT_CHARACTERS: Final = 32


@dataclass(frozen=True, slots=True, kw_only=True)
class ActiveJob:
    """A job whose token is valid."""

    id: str
    model: str
    domain: str
    model_key: str
    is_draining: bool


def authenticate(pool: Pool, token: str) -> ActiveJob:
    """Return the job with this token.

    Raises:
        JobEndedError: no running job has it.
    """
    digest = hashlib.sha256(token.encode(errors="surrogateescape")).digest()
    with pool.connection() as connection:
        row = connection.execute(query("job_by_token"), {"token_sha256": digest}).fetchone()
    if row is None or not hmac.compare_digest(row.pop("token_sha256"), digest):
        raise JobEndedError
    return ActiveJob(**row)


def sync(pool: Pool, store: ObjectStore, job_id: str, request: SyncRequest, traces: Traces = OFF) -> SyncResponse:
    """Extend the leases that a job holds, and give it new ones. Does not wait for work.

    Raises:
        JobEndedError: the job has ended.
    """
    started_at, begun = datetime.now(UTC), list[DictRow]()
    with pool.connection() as connection:
        leases: list[DictRow] = []
        # Rows are locked in the same order everywhere: the domain first. The job is read under the lock, because a job
        # that has just ended must not lease.
        virtual_time = _lock_domain(connection, job_id) if request.wanted_tokens > 0 else 0.0
        job = active_job(connection, job_id)
        domain = {"model": job.model, "domain": job.domain}
        lost = _extend(connection, job_id, request.held)
        if request.wanted_tokens > 0 and not job.is_draining:
            leases = _lease(connection, job, virtual_time, request.wanted_tokens)
        if leases:
            batch_ids = sorted({row["batch_id"] for row in leases})
            values = {"job_id": job_id, "batch_ids": batch_ids}
            begun = connection.execute(query("record_first_leases"), values).fetchall()
        connection.execute(query("record_sync"), {"job_id": job_id, "engines": request.engines})
        if request.wanted_tokens > 0:
            # Those who wait for the domain need not wait for the count.
            connection.commit()
        row = connection.execute(query("backlog_tokens"), {**domain, "limit": BACKLOG_SEGMENTS}).fetchone()
    trace_leases(traces, job, leases, begun, started_at)
    return SyncResponse(
        leases=tuple(_lease_message(store, job, row, traces) for row in leases),
        lost=lost,
        backlog_tokens=row["tokens"] if row and not job.is_draining else 0,
        drain=job.is_draining,
        prompt_rules_url=_prompt_rules_url(store, job),
    )


def active_job(connection: psycopg.Connection[DictRow], job_id: str) -> ActiveJob:
    """Return a job whose token is valid.

    Raises:
        JobEndedError: the job has ended.
    """
    row = connection.execute(query("active_job"), {"job_id": job_id}).fetchone()
    if row is None:
        raise JobEndedError
    return ActiveJob(**row)


def end(pool: Pool, job_id: str, request: EndRequest) -> EndResponse:
    """End a job, unless there is work for it, or it holds leases. A draining job ends at any time.

    Raises:
        JobEndedError: the job has ended already.
    """
    with pool.connection() as connection:
        _lock_domain(connection, job_id)
        job = active_job(connection, job_id)
        domain = {"model": job.model, "domain": job.domain}
        row = connection.execute(query("is_work_left"), {**domain, "job_id": job_id}).fetchone()
        if not job.is_draining and row is not None and row["is_left"]:
            return EndResponse(ended=False)
        values = {"job_id": job_id, "engine_s": request.engine_s, "busy_s": request.busy_s}
        connection.execute(query("release_leases"), values)
        connection.execute(query("finish_job"), values)
    return EndResponse(ended=True)


def _lock_domain(connection: psycopg.Connection[DictRow], job_id: str) -> float:
    row = connection.execute(query("lock_domain_of_job"), {"job_id": job_id}).fetchone()
    return row["virtual_time"] if row else 0.0


def _extend(connection: psycopg.Connection[DictRow], job_id: str, held: Sequence[SegmentRef]) -> tuple[SegmentRef, ...]:
    """Extend leases; return those that the job has lost."""
    if not held:
        return ()
    values = {
        "job_id": job_id,
        "batch_ids": [ref.batch_id for ref in held],
        "segments": [ref.segment for ref in held],
        "epochs": [ref.epoch for ref in held],
        "lease_s": LEASE_S,
    }
    kept = {SegmentRef(**row) for row in connection.execute(query("extend_leases"), values)}
    return tuple(ref for ref in held if ref not in kept)


def _lease(
    connection: psycopg.Connection[DictRow], job: ActiveJob, virtual_time: float, wanted_tokens: int
) -> list[DictRow]:
    """Lease segments of the projects in turn, until they have so many tokens."""
    domain = {"model": job.model, "domain": job.domain}
    values = {**domain, "virtual_time": virtual_time, "limit": MAX_LEASES}
    starts = {row["project_id"]: row["start"] for row in connection.execute(query("projects_to_lease"), values)}
    order = {project_id: place for place, project_id in enumerate(starts)}  # among equals the oldest batch
    leases: list[DictRow] = []
    finishes: dict[str, float] = {}
    leased = 0
    while starts and leased < wanted_tokens and len(leases) < MAX_LEASES:
        project_id = min(starts, key=lambda each: (starts[each], order[each]))
        # A project that is alone gets all that is wanted in one turn.
        most = wanted_tokens - leased if len(starts) == 1 else min(TURN_TOKENS, wanted_tokens - leased)
        values = {
            **domain,
            "job_id": job.id,
            "project_id": project_id,
            "tokens": most,
            "limit": min(TURN_SEGMENTS, MAX_LEASES - len(leases)),
            "lease_s": LEASE_S,
        }
        turn = connection.execute(query("lease_turn"), values).fetchall()
        if not turn:
            del starts[project_id]
            continue
        tokens = sum(row["tokens"] for row in turn)
        virtual_time = starts[project_id]
        starts[project_id] = finishes[project_id] = virtual_time + tokens
        leases += turn
        leased += tokens
    if finishes:
        values = {
            **domain,
            "virtual_time": virtual_time,
            "project_ids": list(finishes),
            "finishes": list(finishes.values()),
        }
        connection.execute(query("record_turns"), values)
    return leases


def _lease_message(store: ObjectStore, job: ActiveJob, row: DictRow, traces: Traces) -> Lease:
    # Without a salt of its own, a project could find out by time what others have in the prefix cache.
    salt = hashlib.sha256(f"cache_salt:{row['project_id']}".encode()).hexdigest()[:_SALT_CHARACTERS]
    files = tuple(
        LeasedFile(
            id=file_id,
            size_bytes=size_bytes or 0,
            url="" if size_bytes is None else store.read_url(file_key(file_id), expires_s=URL_EXPIRES_S),
        )
        for file_id, size_bytes in row["files"] or ()
    )
    return Lease(
        batch_id=row["batch_id"],
        segment=row["segment"],
        epoch=row["epoch"],
        endpoint=row["endpoint"],
        url=store.read_url(plan_key(row["batch_id"]), expires_s=URL_EXPIRES_S),
        start=row["start_byte"],
        end=row["end_byte"],
        rows=row["rows"],
        tokens=row["tokens"],
        done=row["rows_done"],
        cache_salt=salt if job.domain == "stack" else "",
        files=files,
        media_bytes=row["media_bytes"],
        is_traced=traces.samples(row["batch_id"], row["segment"]),
    )


_known_prompt_rules: set[str] = set()


def _prompt_rules_url(store: ObjectStore, job: ActiveJob) -> str:
    """Return where the job writes the prompt rules of its model; empty if they are known, or if that is unknown now."""
    if job.model_key not in _known_prompt_rules:
        try:
            next(store.read(prompt_rules_key(job.model_key)), b"")
        except ObjectNotFoundError:
            return store.write_url(job_prompt_rules_key(job.id), expires_s=URL_EXPIRES_S)
        except ObjectStoreError as error:
            # The leases of this answer are given already: without it, nobody would run them until they expire.
            logger.warning("coordinator.prompt_rules_unknown", job_id=job.id, error=str(error))
            return ""
        _known_prompt_rules.add(job.model_key)
    return ""
