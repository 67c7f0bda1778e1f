"""The loop: one leader, woken by Postgres or by time, that advances all open batches."""

import time
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from threading import Event
from typing import Final

import psycopg
import structlog

from service.errors import LauncherError, ObjectStoreError
from service.reconciler.context import Context
from service.reconciler.records import batches_to_reconcile
from service.reconciler.steps import advance
from service.transitions import backoff

logger = structlog.get_logger(__name__)

LEADER_LOCK: Final = 7_203_002
BUSY_INTERVAL_S: Final = 1.0
IDLE_INTERVAL_S: Final = 10.0
STANDBY_INTERVAL_S: Final = 1.0
# How long a signal may go unnoticed.
_STOP_CHECK_S: Final = 0.25
# Steps are waiting for the store or Postgres most of the time; two large assemblies leave two threads for the rest.
_WORKERS: Final = 4

_TRANSIENT = (ObjectStoreError, LauncherError, psycopg.OperationalError)


@dataclass(slots=True)
class _Trouble:
    """A batch that could not be advanced: how often in a row, and when to try again (monotonic seconds)."""

    failures: int = 0
    not_before: float = 0.0


def run(context: Context, database_url: str) -> None:
    """Reconciles until ``context.stopping`` is set. Only one process does; others wait for its lock."""
    failures = 0
    while not context.stopping.is_set():
        try:
            with psycopg.connect(database_url, autocommit=True, connect_timeout=5) as connection:
                failures = 0
                if _becomes_leader(connection, context.stopping):
                    logger.info("reconciler.leading")
                    connection.execute("LISTEN batches")
                    _lead(context, connection)
        except psycopg.OperationalError as error:
            failures += 1
            logger.warning("reconciler.database_unreachable", error=str(error).strip(), failures=failures)
            context.stopping.wait(min(failures, 5))


def _becomes_leader(connection: psycopg.Connection, stopping: Event) -> bool:
    is_told = False
    while not stopping.is_set():
        row = connection.execute("SELECT pg_try_advisory_lock(%s)", [LEADER_LOCK]).fetchone()
        if row and row[0]:
            return True
        if not is_told:
            logger.info("reconciler.standby", reason="another reconciler leads")
            is_told = True
        stopping.wait(STANDBY_INTERVAL_S)
    return False


def _lead(context: Context, connection: psycopg.Connection) -> None:
    running: dict[str, Future[None]] = {}
    troubles: dict[str, _Trouble] = {}
    with ThreadPoolExecutor(max_workers=_WORKERS, thread_name_prefix="batch") as executor:
        while not context.stopping.is_set():
            open_batches = batches_to_reconcile(context.pool)
            running = {batch_id: future for batch_id, future in running.items() if not future.done()}
            troubles = {batch_id: troubles.get(batch_id, _Trouble()) for batch_id in open_batches}
            for batch_id in open_batches:
                if batch_id not in running and time.monotonic() >= troubles[batch_id].not_before:
                    running[batch_id] = executor.submit(_advance_safely, context, batch_id, troubles[batch_id])
            _wait(connection, context.stopping, BUSY_INTERVAL_S if open_batches else IDLE_INTERVAL_S)


def _advance_safely(context: Context, batch_id: str, trouble: _Trouble) -> None:
    """Advances one batch; whatever goes wrong with it is logged and tried again later."""
    try:
        advance(context, batch_id)
    except Exception as error:  # noqa: BLE001 - the shell of the loop: one batch never stops the others
        trouble.failures += 1
        wait_s = backoff(trouble.failures).total_seconds() / 2
        trouble.not_before = time.monotonic() + wait_s
        event = logger.warning if isinstance(error, _TRANSIENT) else logger.exception
        event("batch.step_failed", batch_id=batch_id, error=str(error), failures=trouble.failures, retry_in_s=wait_s)
    else:
        trouble.failures, trouble.not_before = 0, 0.0


def _wait(connection: psycopg.Connection, stopping: Event, interval_s: float) -> None:
    """Until Postgres tells of a batch, ``interval_s`` passed or the process is to end."""
    end = time.monotonic() + interval_s
    while not stopping.is_set() and (left := end - time.monotonic()) > 0:
        for _ in connection.notifies(timeout=min(left, _STOP_CHECK_S), stop_after=1):
            return
