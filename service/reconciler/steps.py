"""One step of one batch: decide the next action with ``service.transitions``, and carry it out."""

import dataclasses
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime, timedelta
from typing import Any, Final

import structlog
from psycopg.types.json import Jsonb

from ray_job.contract.job_spec import JobSpec
from ray_job.contract.object_keys import batch_prefix, file_key, parts_prefix
from service.assembly import missing_results
from service.db import query
from service.errors import LauncherError, LaunchRefusedError, ObjectNotFoundError
from service.estimates import estimate_batch
from service.input_file import InputError
from service.model_reports import read_rates
from service.ports import JobState, JobStatus
from service.reconciler.backends import Backends
from service.reconciler.estimating import read_and_count
from service.reconciler.finishing import finish
from service.reconciler.records import Batch, launch_turn, load_batch, record
from service.reconciler.state_changes import change_state
from service.transitions import (
    ALIVE,
    FINAL,
    Action,
    AttemptFailed,
    BatchStatus,
    Decision,
    GiveUp,
    NextAttempt,
    after_failed_attempt,
    after_refused_launch,
    decide,
    needs_job_status,
)

logger = structlog.get_logger(__name__)

MODEL_UNAVAILABLE: Final = "model_unavailable"
# Parts that are deleted at the same time.
_DELETERS: Final = 16
# A job that cannot be launched waits half as long as its batch is old, within these limits, in first pauses of a step.
_LEAST_POSTPONED_PAUSES: Final = 0.25
_MOST_POSTPONED_PAUSES: Final = 5


def advance(backends: Backends, batch_id: str) -> None:
    """Take steps of a batch until it has to wait.

    Raises:
        ObjectStoreError, LauncherError, psycopg.OperationalError: a backend cannot be reached; the batch is unchanged
            and can be advanced again later.
    """
    while not backends.stopping.is_set() and step(backends, batch_id):
        pass


def step(backends: Backends, batch_id: str) -> bool:
    """Take the next step of a batch.

    Returns:
        Whether another step may follow at once.
    """
    batch = load_batch(backends.pool, batch_id)
    if batch is None:
        return False
    now = datetime.now(UTC)
    job = _job_status(backends, batch, now) if needs_job_status(batch, now) else None
    decision: Decision = decide(batch, job, now)
    if decision is Action.CHECK_LINES:
        problem = missing_results(backends.store, batch.id, batch.total)
        if problem and batch.all_reported:
            with backends.pool.connection() as connection:
                missing = {"reason": problem}
                record(connection, "record_misreport", batch, now, event=("batch.results_missing", missing))
            return True
        decision = AttemptFailed(problem) if problem else Action.FINALIZE
    elif decision is Action.LAUNCH:
        decision = _launch(backends, batch) or Action.WAIT
    if isinstance(decision, AttemptFailed):
        parts = sum(1 for _ in backends.store.keys(parts_prefix(batch.id)))
        following = after_failed_attempt(batch, message=decision.message, parts=parts, now=now)
        if isinstance(following, NextAttempt):
            event = ("job.ended", {"reason": decision.message, "failed_attempts": following.failed_attempts})
            with backends.pool.connection() as connection:
                record(connection, "record_next_attempt", batch, now, event=event, **dataclasses.asdict(following))
            return True
        decision = following
    match decision:
        case Action.VALIDATE:
            validate(backends, batch)
        case Action.STOP_JOB:
            backends.launcher.stop(batch.job_id)
            return False
        case Action.FINALIZE:
            after = BatchStatus.FINALIZING
            with backends.pool.connection() as connection:
                # Nobody asked for the state of a job that has reported all lines, so it may still be ending.
                change_state(connection, "finalize_batch", batch, after, now, is_job_ending=job is None)
        case Action.ASSEMBLE:
            is_job_ending = job is not None and job.state in ALIVE and not batch.stop_grace_is_over(now)
            if not finish(backends, batch, is_job_ending=is_job_ending):
                backends.launcher.stop(batch.job_id)
                return False
        case Action.DELETE_PARTS:
            _delete_parts(backends, batch)
            return False
        case GiveUp(code, message):
            # The batch fails once its job has stopped.
            event = ("batch.giving_up", {"code": code, "reason": message})
            with backends.pool.connection() as connection:
                record(connection, "record_giving_up", batch, now, event=event, code=code, message=message)
        case _:
            return False
    return True


def _delete_parts(backends: Backends, batch: Batch) -> None:
    keys = list(backends.store.keys(batch_prefix(batch.id)))
    with ThreadPoolExecutor(_DELETERS, thread_name_prefix="parts") as pool:
        list(pool.map(backends.store.delete, keys))
    with backends.pool.connection() as connection:
        record(connection, "record_parts_deleted", batch, datetime.now(UTC))


def validate(backends: Backends, batch: Batch) -> None:
    """Read the input file; accept the batch, or refuse it with every error of the file.

    A file that was deleted or expired after the batch was created is kept until the batch ends. Otherwise the result
    would depend on how soon the reconciler looks at a batch.

    Raises:
        ObjectStoreError, LauncherError: the object store or the launcher cannot be reached; the batch is unchanged.
    """
    file_id, facts, problem = batch.input_file_id, None, ""
    with backends.pool.connection() as connection:
        values = {"file_id": file_id, "project_id": batch.project_id}
        row = connection.execute(query("input_file_of_batch"), values).fetchone()
    if row is None:
        problem = f"The input file '{file_id}' does not exist. Upload it with purpose 'batch'."
    elif row["deleted_at"] is not None and row["deleted_at"] <= batch.created_at:
        problem = f"The input file '{file_id}' was deleted. Upload it again."
    elif row["expires_at"] is not None and row["expires_at"] <= batch.created_at:
        problem = f"The input file '{file_id}' has expired. Upload it again."
    elif row["purpose"] != "batch":
        problem = f"The file '{file_id}' has purpose '{row['purpose']}'. Upload the input file with purpose 'batch'."
    else:
        try:
            facts = read_and_count(backends, batch, row)
        except ObjectNotFoundError:
            problem = f"The content of the input file '{file_id}' is gone. Upload it again."
    errors: tuple[InputError, ...]
    if facts is None:
        errors, error_count = (InputError(message=problem, param="file_id"),), 1
    elif facts.errors:
        errors, error_count = facts.errors, facts.error_count
    elif reason := backends.launcher.refusal(backends.catalogue[facts.model or ""].spec):
        message = f"The model '{facts.model}' cannot run here: {reason}."
        errors, error_count = (InputError(code=MODEL_UNAVAILABLE, message=message, param="body.model"),), 1
    else:
        model = backends.catalogue[facts.model or ""].spec
        found = estimate_batch(model, facts.total, facts.tokens, read_rates(backends.pool, model))
        accepted: dict[str, Any] = {
            "model": facts.model,
            "total": facts.total,
            "estimate": Jsonb(dataclasses.asdict(found)),
        }
        after, now = BatchStatus.IN_PROGRESS, datetime.now(UTC)
        with backends.pool.connection() as connection:
            change_state(connection, "accept_batch", batch, after, now, **accepted)
        return
    after, now = BatchStatus.FAILED, datetime.now(UTC)
    with backends.pool.connection() as connection:
        change_state(connection, "refuse_batch", batch, after, now, errors=errors, error_count=error_count)


def _job_status(backends: Backends, batch: Batch, now: datetime) -> JobStatus:
    """Return the state of the newest job, and record when it starts, waits and ends.

    A launcher that cannot be reached keeps no batch from being finalized and, after the grace period, none from its
    end. Only the parts stay until it answers.
    """
    grace_is_over = batch.stop_grace_is_over(now)
    try:
        job = backends.launcher.status(batch.job_id)
    except LauncherError as error:
        is_finalizing = batch.status is BatchStatus.FINALIZING
        if batch.status in FINAL or not (grace_is_over or is_finalizing):
            raise
        logger.warning("job.unknown", batch_id=batch.id, job_id=batch.job_id, error=str(error))
        job = JobStatus(state=JobState.MISSING if grace_is_over else JobState.RUNNING)
    is_alive = job.state in ALIVE
    if is_alive and job.message and batch.status in {BatchStatus.IN_PROGRESS, BatchStatus.CANCELLING}:
        with backends.pool.connection() as connection:
            record(connection, "record_waiting", batch, now, reason=job.message, type="job.waiting")
    if not is_alive or grace_is_over:
        if batch.job_running_since is not None or batch.job_ending_since is not None:
            with backends.pool.connection() as connection:
                record(connection, "record_job_end", batch, now)
    elif batch.job_running_since is None and job.state is JobState.RUNNING and job.is_working:
        # From now on its GPU seconds count.
        with backends.pool.connection() as connection:
            record(connection, "record_job_start", batch, now, event=("job.running", {}))
    return job


def _launch(backends: Backends, batch: Batch) -> GiveUp | None:
    """Launch the batch's job if it is its turn; postpone a launch that fails.

    Returns:
        Why to give the batch up: its model can no longer run, or launches have been refused for too long. None if not.
    """
    model = backends.catalogue.get(batch.model or "")
    if model is None:
        message = f"The model '{batch.model}' is no longer offered. Create the batch again with an offered model."
        return GiveUp(code="model_not_found", message=message)
    if problem := backends.launcher.refusal(model.spec):
        return GiveUp(code=MODEL_UNAVAILABLE, message=f"The model '{model.id}' can no longer run here: {problem}.")
    spec = JobSpec(
        job_id=batch.job_id,
        batch_id=batch.id,
        attempt=batch.attempt,
        endpoint=batch.endpoint,
        input_key=file_key(batch.input_file_id),
        object_store=backends.store.location(),
        database_url=backends.job_database_url,
        model=model.spec,
    )
    with launch_turn(backends.pool, batch, backends.max_running_jobs) as turn:
        if turn is None:
            return None
        queued_s = max(0.0, (datetime.now(UTC) - (batch.launch_after or batch.created_at)).total_seconds())
        try:
            backends.launcher.launch(spec)
        except Exception as error:  # noqa: BLE001 - a defect in one launch must not block the others
            now, text = datetime.now(UTC), str(error)
            is_refused = isinstance(error, LaunchRefusedError)
            if is_refused and (reason := after_refused_launch(batch, message=text, now=now)):
                return reason
            # Other batches get their turn meanwhile. A Ray that is just starting is ready in a second or two.
            first_s, age_s = backends.first_pause_s, (now - batch.created_at).total_seconds()
            pause_s = min(_MOST_POSTPONED_PAUSES * first_s, max(_LEAST_POSTPONED_PAUSES * first_s, age_s / 2))
            launch_after = now + timedelta(seconds=pause_s)
            record(turn, "postpone_launch", batch, now, launch_after=launch_after, refused=is_refused)
            log = logger.exception
            if isinstance(error, LauncherError):
                record(turn, "record_waiting", batch, now, reason=text, type="job.waiting")
                log = logger.warning
            backends.metrics.step_failures.labels(kind=type(error).__name__).inc()
            log("job.launch_failed", batch_id=batch.id, job_id=batch.job_id, error=text, retry_in_s=pause_s)
            return None
        # The http engine calls an endpoint that has its own GPUs.
        gpus = 0 if spec.model.engine == "http" else spec.model.num_gpus * spec.model.concurrency
        event = ("job.launched", {"queued_s": round(queued_s, 3)})
        record(turn, "record_launch", batch, datetime.now(UTC), event=event, gpus=gpus)
    backends.metrics.launches.inc()
    return None
