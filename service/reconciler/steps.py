"""One step of one batch: asks the pure core what to do, and does it."""

from datetime import datetime, timedelta
from typing import Final

import psycopg
import structlog
from psycopg.rows import DictRow

from ray_job.contract.job_spec import JobSpec
from ray_job.contract.object_keys import file_key, parts_prefix
from service.assembly import AssemblyError, committed_lines
from service.errors import LauncherError, LaunchRefusedError
from service.ports import JobState, JobStatus
from service.reconciler.context import Context, utc_now
from service.reconciler.finishing import delete_parts, finish, give_up
from service.reconciler.jobs import (
    gpus_of,
    note_job_over,
    note_launch,
    note_next_attempt,
    note_running,
    note_waiting,
    postpone_launch,
    turn_to_launch,
)
from service.reconciler.records import Batch, finalize, load_batch, note_giving_up
from service.reconciler.validation import MODEL_UNAVAILABLE, validate
from service.transitions import (
    ALIVE,
    FINAL,
    Assemble,
    AttemptFailed,
    Decision,
    Fail,
    Finalize,
    GiveUp,
    Launch,
    StopJob,
    Validate,
    Wait,
    after_failed_attempt,
    after_refused_launch,
    decide,
    needs_job_status,
)

logger = structlog.get_logger(__name__)

# A job that the launcher refuses must not keep the others from theirs.
_POSTPONED_PAUSES: Final = 5


def advance(context: Context, batch_id: str) -> None:
    """Takes a batch as far as it goes now.

    Raises:
        ObjectStoreError, LauncherError, psycopg.OperationalError: something is not to be reached; the batch stays as
            it is and can be advanced again later.
    """
    while not context.stopping.is_set() and step(context, batch_id):
        pass


def step(context: Context, batch_id: str) -> bool:
    """Does the next step of a batch; returns whether another may follow at once."""
    batch = load_batch(context.pool, batch_id)
    if batch is None:
        return False
    if batch.view.status in FINAL:
        if not _is_job_alive(context, batch):
            delete_parts(context, batch)
        return False
    now = utc_now()
    job = _job_status(context, batch, now) if needs_job_status(batch.view, now) else None
    if job is not None:
        _note_use(context, batch, job, now)
    match decide(batch.view, job, now):
        case Wait():
            return False
        case Launch():
            return _launch(context, batch)
        case StopJob():
            context.launcher.stop(batch.job_id)
            return False
        case decision:
            _move(context, batch, decision, now)
            return True


def _move(context: Context, batch: Batch, decision: Decision, now: datetime) -> None:
    """Carries out a decision that changes the batch."""
    match decision:
        case Validate():
            validate(context, batch)
        case Finalize(check_lines=True) if problem := _missing_lines(context, batch):
            _after_failure(context, batch, problem, now)
        case Finalize():
            finalize(context.pool, batch, now)
        case Assemble():
            finish(context, batch)
        case AttemptFailed(message):
            _after_failure(context, batch, message, now)
        case GiveUp() as reason:
            _begin_giving_up(context, batch, reason, now)
        case Fail(reason):
            give_up(context, batch, reason)


def _begin_giving_up(context: Context, batch: Batch, reason: GiveUp, now: datetime) -> None:
    with context.pool.connection() as connection:
        note_giving_up(connection, batch, reason, now)


def _is_job_alive(context: Context, batch: Batch) -> bool:
    """Whether the job of a batch that has ended still lives, and may write parts. One that does is told to stop."""
    if batch.view.attempt == 0 or context.launcher.status(batch.job_id).state not in ALIVE:
        return False
    context.launcher.stop(batch.job_id)
    return True


def _job_status(context: Context, batch: Batch, now: datetime) -> JobStatus:
    """The state of the newest job; a launcher that is gone for long keeps no batch from its end."""
    try:
        return context.launcher.status(batch.job_id)
    except LauncherError as error:
        if not batch.view.waited_long_enough_for_its_job(now):
            raise
        logger.warning("job.unknown", batch_id=batch.id, job_id=batch.job_id, error=str(error))
        return JobStatus(state=JobState.MISSING)


def _note_use(context: Context, batch: Batch, job: JobStatus, now: datetime) -> None:
    """Notes from when to when the job held its GPUs, and why it waits. Done before all that follows from its end."""
    if job.state in ALIVE and job.message:
        with context.pool.connection() as connection:
            note_waiting(connection, batch, job.message, now, type="job.waiting")
    is_over = job.state not in ALIVE or batch.view.waited_long_enough_for_its_job(now)
    if is_over and batch.job_running_since is not None:
        note_job_over(context.pool, batch, now)
    elif job.state is JobState.RUNNING and job.is_working and not is_over and batch.job_running_since is None:
        note_running(context.pool, batch, now)


def _launch(context: Context, batch: Batch) -> bool:
    model = context.catalogue.models.get(batch.model or "")
    if model is None:
        message = f"The model '{batch.model}' is no longer offered. Create the batch again with one that is."
        _begin_giving_up(context, batch, GiveUp(code="model_not_found", message=message), utc_now())
        return True
    if reason := context.launcher.refusal(model.spec):
        message = f"The model '{model.id}' can no longer run here: {reason}."
        _begin_giving_up(context, batch, GiveUp(code=MODEL_UNAVAILABLE, message=message), utc_now())
        return True
    spec = JobSpec(
        job_id=batch.job_id,
        batch_id=batch.id,
        attempt=batch.view.attempt,
        endpoint=batch.endpoint,
        input_key=file_key(batch.input_file_id),
        object_store=context.store.location(),
        database_url=context.job_database_url,
        model=model.spec,
    )
    with turn_to_launch(context.pool, batch, context.max_running_jobs) as connection:
        if connection is None:
            return False
        try:
            context.launcher.launch(spec)
        except Exception as error:  # noqa: BLE001 - whatever is wrong with one job, the others get their turn
            return _launch_failed(context, connection, batch, error)
        note_launch(connection, batch, gpus_of(model.spec), utc_now())
    context.metrics.launches.inc()
    return False


def _launch_failed(context: Context, connection: psycopg.Connection[DictRow], batch: Batch, error: Exception) -> bool:
    """Postpones a launch, or begins to give up the batch; returns whether another step may follow at once."""
    now = utc_now()
    is_refused = isinstance(error, LaunchRefusedError)
    if is_refused and (reason := after_refused_launch(batch.view, message=str(error), now=now)):
        note_giving_up(connection, batch, reason, now)
        return True
    pause_s = _POSTPONED_PAUSES * context.first_pause_s
    postpone_launch(connection, batch, now + timedelta(seconds=pause_s), refused=is_refused, now=now)
    if isinstance(error, LauncherError):
        note_waiting(connection, batch, str(error), now, type="job.waiting")
    context.metrics.step_failures.labels(kind=type(error).__name__).inc()
    event = logger.warning if isinstance(error, LauncherError) else logger.exception
    event("job.launch_failed", batch_id=batch.id, job_id=batch.job_id, error=str(error), retry_in_s=pause_s)
    return False


def _missing_lines(context: Context, batch: Batch) -> str:
    """Why a job that says it succeeded did not, or nothing."""
    try:
        lines = committed_lines(context.store, batch.id)
    except AssemblyError as error:
        return f"the job left a part that cannot be read: {error}"
    if lines != batch.total:
        return f"the job ended as if all were done, but {lines:,} of {batch.total:,} lines have a result"
    return ""


def _after_failure(context: Context, batch: Batch, message: str, now: datetime) -> None:
    parts = sum(1 for _ in context.store.keys(parts_prefix(batch.id)))
    following = after_failed_attempt(batch.view, message=message, parts=parts, now=now)
    if isinstance(following, GiveUp):
        _begin_giving_up(context, batch, following, now)
    else:
        note_next_attempt(context.pool, batch, following, message, now)
