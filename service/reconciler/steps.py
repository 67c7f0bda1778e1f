"""One step of one batch: decide the next action with ``service.transitions``, and carry it out."""

import dataclasses
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime
from typing import Final

import structlog

from ray_job.contract.object_keys import batch_prefix
from service.db import query
from service.errors import ObjectNotFoundError
from service.estimates import estimate_batch
from service.input_file import InputError
from service.job_transitions import ALIVE, JOB_FAILED
from service.model_reports import read_rates
from service.planning import PlanBuilder
from service.reconciler.backends import Backends
from service.reconciler.estimating import read_and_count
from service.reconciler.finishing import finish, trace_end
from service.reconciler.planning import accept, plan_again
from service.reconciler.records import Batch, load_batch, record, reporting_lack_of_room
from service.reconciler.state_changes import change_state
from service.transitions import Action, BatchStatus, decide

logger = structlog.get_logger(__name__)

MODEL_UNAVAILABLE: Final = "model_unavailable"
# Parts that are deleted at the same time.
_DELETERS: Final = 16


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
    now = batch.read_at
    match decide(batch, now):
        case Action.VALIDATE:
            validate(backends, batch)
        case Action.PLAN_AGAIN:
            return _plan_again(backends, batch)
        case Action.FINALIZE:
            with backends.pool.connection() as connection:
                change_state(connection, "finalize_batch", batch, BatchStatus.FINALIZING, now)
        case Action.ASSEMBLE:
            finish(backends, batch)
        case Action.DELETE_PARTS:
            _delete_parts(backends, batch)
            return False
        case Action.WAIT:
            return False
    return True


def _plan_again(backends: Backends, batch: Batch) -> bool:
    """Plan a batch that an earlier version accepted, once its job is gone. Return whether it was planned."""
    if not _is_earlier_job_gone(backends, batch):
        return False
    try:
        plan_again(backends, batch)
    except ObjectNotFoundError:
        message = f"The content of the input file '{batch.input_file_id}' is gone. Upload it again."
        values = {"batch_id": batch.id, "code": JOB_FAILED, "message": message}
        with backends.pool.connection() as connection:
            connection.execute(query("give_up_batch"), values)
    return True


def _is_earlier_job_gone(backends: Backends, batch: Batch) -> bool:
    """Return whether the job that an earlier version launched for a batch is gone; stop it if it is not."""
    job_id = f"{batch.id}-{batch.attempt}"
    if backends.launcher.status(job_id).state not in ALIVE:
        return True
    backends.launcher.stop(job_id)
    return False


def _delete_parts(backends: Backends, batch: Batch) -> None:
    if batch.is_unplanned and not _is_earlier_job_gone(backends, batch):
        return
    keys = list(backends.store.keys(batch_prefix(batch.id)))
    with ThreadPoolExecutor(_DELETERS, thread_name_prefix="parts") as pool:
        list(pool.map(backends.store.delete, keys))
    with backends.pool.connection() as connection:
        record(connection, "record_parts_deleted", batch, datetime.now(UTC))


def validate(backends: Backends, batch: Batch) -> None:
    """Read and plan the input file; accept the batch, or refuse it with every error of the file.

    A file that was deleted or expired after the batch was created is kept until the batch ends. Otherwise the result
    would depend on how soon the reconciler looks at a batch.

    Raises:
        ObjectStoreError, LauncherError: the object store or the launcher cannot be reached; the batch is unchanged.
        OSError: the workspace has no room; the batch is unchanged.
    """
    # Operators may change the models meanwhile.
    backends = dataclasses.replace(backends, catalogue=dict(backends.catalogue))
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
    errors: tuple[InputError, ...]
    with (
        reporting_lack_of_room(backends.pool, batch, "the batch cannot be planned now"),
        PlanBuilder(backends.workspace) as plan,
    ):
        if row is not None and not problem:
            try:
                with backends.traces.step(batch.id, "validate") as step:
                    facts = read_and_count(backends, batch, row, plan.add)
                    step.attributes |= {"cloister.lines": facts.total, "cloister.errors": facts.error_count}
            except ObjectNotFoundError:
                problem = f"The content of the input file '{file_id}' is gone. Upload it again."
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
            accept(backends, batch, plan, model=model, total=facts.total, estimate=found)
            return
    after, now = BatchStatus.FAILED, datetime.now(UTC)
    with backends.pool.connection() as connection:
        is_refused = change_state(connection, "refuse_batch", batch, after, now, errors=errors, error_count=error_count)
    if is_refused:
        trace_end(backends.traces, batch, after)
