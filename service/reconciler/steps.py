"""One step of one batch: asks the pure core what to do, and does it."""

from datetime import datetime

import structlog

from ray_job.contract.job_spec import JobSpec
from ray_job.contract.object_keys import file_key, parts_prefix
from service.assembly import AssemblyError, committed_lines
from service.reconciler.context import Context, utc_now
from service.reconciler.finishing import delete_parts, finish, give_up
from service.reconciler.records import (
    Batch,
    finalize,
    launched_jobs,
    load_batch,
    note_launch,
    note_next_attempt,
)
from service.reconciler.validation import validate
from service.transitions import (
    FINAL,
    Assemble,
    AttemptFailed,
    Decision,
    Fail,
    Finalize,
    Launch,
    NextAttempt,
    StopJob,
    Validate,
    Wait,
    after_failed_attempt,
    decide,
    needs_job_status,
)

logger = structlog.get_logger(__name__)


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
        delete_parts(context, batch)
        return False
    job = context.launcher.status(batch.job_id) if needs_job_status(batch.view) else None
    now = utc_now()
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
        case NextAttempt() as attempt:
            note_next_attempt(context.pool, batch, attempt, "the launcher does not know the job any more", now)


def _launch(context: Context, batch: Batch) -> bool:
    model = context.catalogue.models.get(batch.model or "")
    if model is None:
        message = f"The model '{batch.model}' is no longer offered. Create the batch again with one that is."
        give_up(context, batch, Fail(code="model_not_found", message=message))
        return True
    with context.launching:
        if launched_jobs(context.pool, batch) >= context.max_running_jobs:
            return False
        context.launcher.launch(
            JobSpec(
                job_id=batch.job_id,
                batch_id=batch.id,
                attempt=batch.view.attempt,
                endpoint=batch.endpoint,
                input_key=file_key(batch.input_file_id),
                object_store=context.store.location(),
                database_url=context.job_database_url,
                model=model.spec,
            )
        )
        note_launch(context.pool, batch, utc_now())
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
    if isinstance(following, Fail):
        give_up(context, batch, following)
    else:
        note_next_attempt(context.pool, batch, following, message, now)
