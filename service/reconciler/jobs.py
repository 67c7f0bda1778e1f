"""Jobs: created for sharing domains with work, launched when they have a slot, watched, and ended.

``service.job_transitions`` decides; this module carries it out. What a job does meanwhile is between it and the
coordinator.
"""

import hashlib
import secrets
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Any, Final

import psycopg
import structlog
from psycopg.rows import DictRow, class_row

from ray_job.contract.job_spec import JobSpec, ModelSpec
from service.db import Pool, query
from service.errors import LauncherError, LaunchRefusedError
from service.estimates import model_key
from service.job_transitions import (
    ALIVE,
    JOB_FAILED,
    LAUNCH_REFUSED_LIMIT,
    MAX_FAILURES,
    TURN,
    JobAction,
    JobFailed,
    JobView,
    backoff_s,
    decide_job,
    give_up_message,
)
from service.ports import JobState, JobStatus
from service.reconciler.backends import Backends

logger = structlog.get_logger(__name__)

LAUNCH_LOCK: Final = 7_203_003
# More batches or jobs than the workers can begin in a pass.
PASS_LIMIT: Final = 200
# More domains than a pass can launch jobs for.
_CREATE_LIMIT: Final = 200
# A job that cannot be launched waits half as long as it is old, within these limits, in first pauses of a step.
_LEAST_POSTPONED_PAUSES: Final = 0.25
_MOST_POSTPONED_PAUSES: Final = 5


@dataclass(frozen=True, slots=True, kw_only=True)
class Job(JobView):
    """A job as stored: the columns that decide its next action, and those that the actions need.

    Attributes:
        read_at: the database's time when it was read. The times of a job are those of the database, which the clock
            of this machine may differ from.
    """

    id: str
    model: str
    domain: str
    model_key: str
    project_id: str | None
    accelerator: str
    gpus: int
    read_at: datetime


def create_jobs(backends: Backends) -> None:
    """Create a job for each domain that has work and none; drain those that others wait for or that are out of date.

    Raises:
        psycopg.OperationalError: Postgres cannot be reached.
    """
    catalogue = dict(backends.catalogue)  # operators may change it meanwhile
    with backends.pool.connection() as connection:
        keys = [model_key(model.spec) for model in catalogue.values()]
        connection.execute(query("drain_useless_jobs"), {"model_keys": keys})
    # Another transaction: a commit locks the batch, then the job.
    with backends.pool.connection() as connection:
        for row in connection.execute(query("domains_without_job"), {"limit": _CREATE_LIMIT}).fetchall():
            domain = {"model": row["model"], "domain": row["domain"]}
            model = catalogue.get(row["model"])
            if model is None:
                message = (
                    f"The model '{row['model']}' is no longer offered. Create the batch again with an offered model."
                )
                values = {**domain, "code": "model_not_found", "message": message, "with_results": True}
                connection.execute(query("lock_domain"), domain)
                connection.execute(query("give_up_batches"), values)
                continue
            values = {
                **domain,
                "id": f"job-{secrets.token_hex(12)}",
                "model_key": model_key(model.spec),
                "project_id": row["project_id"],
                # Nobody knows a token with this digest. The job gets its token when it is launched.
                "token_sha256": secrets.token_bytes(32),
                "accelerator": model.spec.accelerator,
                "gpus": reserved_gpus(model.spec),
                "per_gpu_hour": model.price.per_gpu_hour if model.price else None,
                "currency": model.price.currency if model.price else None,
                "model_digest": model.spec.digest or None,
            }
            connection.execute(query("create_job"), values)
        values = {"turn_s": TURN.total_seconds(), **backends.slots.values()}
        for row in connection.execute(query("drain_for_waiting"), values).fetchall():
            logger.info("job.draining", job_id=row["id"], reason="another job waits for its slot")


def reserved_gpus(model: ModelSpec) -> int:
    """Return the GPUs that a job of a model may reserve. The http engine calls an endpoint that has its own."""
    return 0 if model.engine == "http" else model.num_gpus * model.concurrency


def jobs_to_advance(
    backends: Backends,
    *,
    excluded: Collection[str] = (),
    excluded_if_idle: Collection[str] = (),
    after_running: int = 0,
    after_ending: int = 0,
    limit: int = PASS_LIMIT,
    looks: int = PASS_LIMIT,
) -> list[DictRow]:
    """Return the jobs that a step can advance now: ``id``, ``seq``, ``kind`` and whether it ``is_idle``.

    The kinds are ``waiting`` for jobs that have a slot now, ``ending`` for those whose token is void, and ``running``.
    They alternate.

    Args:
        backends: the backends.
        excluded: ids of jobs to leave out.
        excluded_if_idle: ids of jobs to leave out while they are idle.
        after_running: ``seq`` of the last running job that had a step; the rotation continues after it.
        after_ending: the same for jobs that are ending.
        limit: the most jobs to return that wait, and that are ending.
        looks: the most running jobs to return.
    """
    values: dict[str, Any] = {"excluded": list(excluded), "excluded_if_idle": list(excluded_if_idle)}
    values |= {"after_running": after_running, "after_ending": after_ending, "limit": limit, "looks": looks}
    values |= backends.slots.values()
    with backends.pool.connection() as connection:
        return connection.execute(query("jobs_to_advance"), values).fetchall()


def load_job(pool: Pool, job_id: str) -> Job | None:
    """Return a job, or None if no job with that id is present."""
    with pool.connection() as connection, connection.cursor(row_factory=class_row(Job)) as cursor:
        return cursor.execute(query("job_to_reconcile"), {"job_id": job_id}).fetchone()


def advance_job(backends: Backends, job_id: str) -> None:
    """Take the next step of a job.

    Raises:
        LauncherError, psycopg.OperationalError: a backend cannot be reached; the job can be advanced again later.
    """
    job = load_job(backends.pool, job_id)
    if job is None:
        return
    now = job.read_at
    status = _status(backends, job, now) if job.launch_after is None else None
    decision = decide_job(job, status, now)
    if decision is JobAction.LAUNCH:
        decision = _launch(backends, job) or JobAction.WAIT
    if job.launch_after is not None and decision is not JobAction.WAIT:
        # A reconciler that died may have launched it without a record.
        backends.launcher.stop(job.id)
    match decision:
        case JobAction.STOP:
            backends.launcher.stop(job.id)
        case JobAction.END:
            with backends.pool.connection() as connection:
                _end(connection, job.id, now, reason=None, is_gone=True)
            logger.info("job.gone", job_id=job.id)
        case JobFailed():
            # A job whose launch failed has no status. One that is alive can never run.
            reason = "launch" if status is None else "stuck" if status.state in ALIVE else status.state.value
            backends.metrics.job_failures.labels(model=job.model, reason=reason).inc()
            _fail(backends, job, decision, now, is_gone=status is None or status.state not in ALIVE)


def split_gpu_seconds(connection: psycopg.Connection[DictRow], job_ids: Sequence[str], *, is_last: bool) -> None:
    """Give the GPU seconds of jobs since the last time, and their cost, to the batches that they committed tokens for.

    Seconds without a batch become overhead of a project or of the stack; ``docs/how-to/cost.md`` has the rule.
    """
    locked = connection.execute(query("lock_batches_to_split"), {"job_ids": list(job_ids)}).fetchall()
    batch_ids = [row["id"] for row in locked]
    for job_id in job_ids:
        values = {"job_id": job_id, "batch_ids": batch_ids, "is_last": is_last}
        connection.execute(query("split_gpu_seconds"), values)


def _status(backends: Backends, job: Job, now: datetime) -> JobStatus:
    """Return the launcher's answer, and record when the job starts and why it waits."""
    status = backends.launcher.status(job.id)
    with backends.pool.connection() as connection:
        values = {"job_id": job.id, "now": now}
        if status.state in ALIVE and status.message:
            connection.execute(query("record_job_waiting"), {**values, "reason": status.message})
        if job.running_since is None and status.state is JobState.RUNNING and status.is_working:
            # From now on its GPU seconds count.
            connection.execute(query("record_job_start"), values)
        elif job.running_since is not None and job.gpus:
            split_gpu_seconds(connection, [job.id], is_last=status.state not in ALIVE)
    return status


def _launch(backends: Backends, job: Job) -> JobFailed | None:
    """Launch a job if it has a slot; postpone a launch that fails.

    Returns:
        The failure, if its model can no longer run or launches have been refused for too long.
    """
    offered = backends.catalogue.get(job.model)
    if offered is None or model_key(offered.spec) != job.model_key:
        return None  # its model was changed meanwhile: the next pass drains it
    model = offered.spec
    if problem := backends.launcher.refusal(model):
        return JobFailed(f"the model '{job.model}' can no longer run here: {problem}", is_final=True)
    spec = JobSpec(job_id=job.id, coordinator_url=backends.coordinator_url, model=model)
    token = backends.tokens.setdefault(job.id, secrets.token_urlsafe(32))
    with backends.pool.connection() as connection:
        # Before the launch: the job may call the coordinator before the launch is recorded.
        values: dict[str, Any] = {"job_id": job.id, "token_sha256": hashlib.sha256(token.encode()).digest()}
        if connection.execute(query("set_job_token"), values).fetchone() is None:
            return None
    with _launch_turn(backends, job) as turn:
        if turn is None:
            return None
        try:
            backends.launcher.launch(spec, token)
        except Exception as error:  # noqa: BLE001 - a defect in one launch must not block the others
            now = job.read_at
            is_refused = isinstance(error, LaunchRefusedError)
            if is_refused and job.refused_at is not None and now >= job.refused_at + LAUNCH_REFUSED_LIMIT:
                minutes = LAUNCH_REFUSED_LIMIT // timedelta(minutes=1)
                return JobFailed(f"its launch was refused for {minutes} minutes: {error}", is_final=True)
            # Other jobs get their turn meanwhile. A Ray that is just starting is ready in a second or two.
            first_s, age_s = backends.first_pause_s, (now - job.created_at).total_seconds()
            pause_s = min(_MOST_POSTPONED_PAUSES * first_s, max(_LEAST_POSTPONED_PAUSES * first_s, age_s / 2))
            values = {"job_id": job.id, "now": now, "refused": is_refused, "pause_s": pause_s}
            turn.execute(query("postpone_launch"), values)
            log = logger.exception
            if isinstance(error, LauncherError):
                turn.execute(query("record_job_waiting"), {"job_id": job.id, "now": now, "reason": str(error)})
                log = logger.warning
            backends.metrics.step_failures.labels(kind=type(error).__name__).inc()
            log("job.launch_failed", job_id=job.id, error=str(error), retry_in_s=pause_s)
            return None
        turn.execute(query("record_launch"), {"job_id": job.id})
    backends.tokens.pop(job.id, None)
    backends.metrics.launches.inc()
    logger.info("job.launched", job_id=job.id, model=job.model, domain=job.domain)
    return None


@contextmanager
def _launch_turn(backends: Backends, job: Job) -> Iterator[psycopg.Connection[DictRow] | None]:
    """Open the transaction in which a job is launched and recorded; yield None if it has no slot.

    No process launches another job between the check of the slots and the record. If this process dies before it
    records the launch, the same job id is launched again, which starts no second one.
    """
    values = {"job_id": job.id, "lock": LAUNCH_LOCK, **backends.slots.values()}
    with backends.pool.connection() as connection:
        connection.execute(query("lock_launches"), values)
        row = connection.execute(query("may_launch"), values).fetchone()
        yield connection if row is not None and row["may_launch"] else None


def _fail(backends: Backends, job: Job, failure: JobFailed, now: datetime, *, is_gone: bool) -> None:
    """End a failed job. The next one of its domain waits for a pause, or the domain's batches are given up."""
    if not is_gone:
        backends.launcher.stop(job.id)  # it holds its slot until it is gone
    with backends.pool.connection() as connection:
        values: dict[str, Any] = {"job_id": job.id, "now": now}
        has_committed = job.committed_at is not None
        row = connection.execute(query("record_failure"), {**values, "has_committed": has_committed}).fetchone()
        failures = row["failures"] if row else 1
        event = {**values, "reason": failure.message, "failures": failures}
        connection.execute(query("record_job_failure"), event)
        not_before = now + timedelta(seconds=backoff_s(failures))
        connection.execute(query("postpone_domain"), {**values, "not_before": not_before})
        if message := give_up_message(failure, failures):
            with_results = not failure.may_pass or failures >= MAX_FAILURES
            domain = {"model": job.model, "domain": job.domain}
            given_up = {**values, **domain, "code": JOB_FAILED, "message": message, "with_results": with_results}
            connection.execute(query("give_up_batches"), given_up)
        _end(connection, job.id, now, reason=failure.message, is_gone=is_gone)
    logger.warning("job.failed", job_id=job.id, failures=failures, is_final=failure.is_final)


def _end(
    connection: psycopg.Connection[DictRow], job_id: str, now: datetime, *, reason: str | None, is_gone: bool
) -> None:
    """Void a job's token and release its leases. Rows are locked in the order of coordinator.sql."""
    values = {"job_id": job_id, "now": now, "reason": reason, "is_gone": is_gone}
    for name in ("lock_domain_of_job", "release_leases", "end_job"):
        connection.execute(query(name), values)
