"""The loop: one leader, woken by Postgres or by time, advances all open batches.

A pass asks Postgres which batches a step can advance now, in a fair order, and hands them to a few threads until its
time is over. Beside its passes, the leader deletes what has expired and delivers webhooks.
"""

import dataclasses
import os
import socket
import time
from collections import Counter, deque
from collections.abc import Collection
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from threading import Event, Thread
from types import TracebackType
from typing import Final, Self

import psycopg
import structlog
from psycopg.rows import DictRow

from service.db import CONNECTION_LIMITS, Pool, query
from service.errors import LauncherError, ObjectStoreError
from service.reconciler.backends import Backends
from service.reconciler.retention import keep_sweeping
from service.reconciler.retrying_store import RetryingStore
from service.reconciler.steps import advance
from service.reconciler.webhooks import keep_delivering

logger = structlog.get_logger(__name__)

LEADER_LOCK: Final = 7_203_002
BUSY_INTERVAL_S: Final = 1.0
IDLE_INTERVAL_S: Final = 10.0
STANDBY_INTERVAL_S: Final = 1.0
# More batches than the workers can begin in a pass.
PASS_LIMIT: Final = 200
# The longest time until a signal is noticed.
_STOP_CHECK_S: Final = 0.25
# Batches are often created and changed several at a time: one pass handles them together.
_GATHER_S: Final = 0.02
_BEAT_INTERVAL_S: Final = 1.0
# A leader whose machine is lost closes no connection. Postgres must notice, or the lock stays held for two hours.
_DETECT_LOST_CLIENT: Final = (
    "SET tcp_keepalives_idle = 10",
    "SET tcp_keepalives_interval = 5",
    "SET tcp_keepalives_count = 3",
    "SET tcp_user_timeout = 25000",
)
# Steps mostly wait for the object store or Postgres. Two large assemblies leave two threads for the other batches.
_WORKERS: Final = 4
_MAX_PAUSE_S: Final = 30.0
_TRANSIENT: Final = (ObjectStoreError, LauncherError, psycopg.OperationalError)


def run(backends: Backends, database_url: str) -> None:
    """Reconcile until ``backends.stopping`` is set. Only one process leads; others wait for its lock."""
    backends = dataclasses.replace(backends, store=RetryingStore(backends.store))
    failures = 0
    while not backends.stopping.is_set():
        backends.metrics.beat_at = time.monotonic()
        try:
            with psycopg.connect(database_url, autocommit=True, **CONNECTION_LIMITS) as connection:
                failures = 0
                for setting in _DETECT_LOST_CLIENT:
                    connection.execute(setting)
                is_standby = False
                while not backends.stopping.is_set():
                    backends.metrics.beat_at = time.monotonic()
                    row = connection.execute("SELECT pg_try_advisory_lock(%s)", [LEADER_LOCK]).fetchone()
                    if row and row[0]:
                        _lead(backends, connection)
                    elif not is_standby:
                        logger.info("reconciler.standby", reason="another reconciler leads")
                        is_standby = True
                    backends.stopping.wait(STANDBY_INTERVAL_S)
        except psycopg.OperationalError as error:
            failures += 1
            logger.warning("reconciler.database_unreachable", error=str(error).strip(), failures=failures)
            backends.stopping.wait(min(failures, 5))


def _lead(backends: Backends, connection: psycopg.Connection) -> None:
    """Run passes until the process stops, with retention and webhook deliveries each in its own thread."""
    logger.info("reconciler.leading")
    connection.execute("LISTEN batches")
    leader, beat_at = f"{socket.gethostname()}:{os.getpid()}", 0.0
    over = Event()
    threads = [
        Thread(target=work, args=(backends, over), name=work.__name__) for work in (keep_sweeping, keep_delivering)
    ]
    for thread in threads:
        thread.start()
    backends.metrics.leading.set(1)
    try:
        with Workers(backends) as workers:
            while not backends.stopping.is_set():
                began = backends.metrics.beat_at = time.monotonic()
                if began - beat_at >= _BEAT_INTERVAL_S:
                    connection.execute(query("beat"), {"leader": leader})
                    beat_at = began
                workers.run_pass(until=began + BUSY_INTERVAL_S)
                with backends.pool.connection() as pooled:
                    row = pooled.execute(query("is_any_batch_open")).fetchone()
                is_busy = row is not None and bool(row["is_open"])
                until = began + (BUSY_INTERVAL_S if is_busy else IDLE_INTERVAL_S)
                # Wait until Postgres reports a change of a batch, the interval is over or the process stops.
                while not backends.stopping.is_set() and (left := until - time.monotonic()) > 0:
                    if list(connection.notifies(timeout=min(left, _STOP_CHECK_S), stop_after=1)):
                        list(connection.notifies(timeout=_GATHER_S))
                        break
    finally:
        backends.metrics.leading.set(0)
        over.set()
        for thread in threads:
            thread.join()


def batches_to_advance(
    pool: Pool, *, max_running_jobs: int, excluded: Collection[str] = (), after_seq: int = 0, limit: int = PASS_LIMIT
) -> list[DictRow]:
    """Return the batches that a step can advance now, in a fair order.

    Each row has the batch's ``id``; ``seq``, its place in the order of creation; and ``in_rotation``, whether it may
    need any number of steps in its state, such as a batch whose job runs.

    Args:
        pool: connections to Postgres.
        max_running_jobs: the most jobs that may run at the same time.
        excluded: ids of batches to leave out.
        after_seq: the last batch in rotation that had a step; the rotation continues after it.
        limit: the most batches to return.
    """
    values = {
        "max_running_jobs": max_running_jobs,
        "excluded": list(excluded),
        "after_seq": after_seq,
        "limit": limit,
    }
    with pool.connection() as connection:
        return connection.execute(query("batches_to_advance"), values).fetchall()


class Workers:
    """A few threads that each advance one batch at a time. Use it in one thread, as a context manager."""

    def __init__(self, backends: Backends) -> None:
        self._backends = backends
        self._executor = ThreadPoolExecutor(max_workers=_WORKERS, thread_name_prefix="batch")
        self._running: dict[str, Future[bool]] = {}
        self._failures: Counter[str] = Counter()  # of a batch's steps in a row
        self._not_before: dict[str, float] = {}  # when to try a batch again, in monotonic seconds
        self._last_seq = 0

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        """Wait for the steps in progress."""
        self._executor.shutdown()

    def run_pass(self, *, until: float) -> None:
        """Hand due batches to the threads until each has one, or until a time in monotonic seconds."""
        began = time.monotonic()
        self._collect()
        paused = {batch_id for batch_id, not_before in self._not_before.items() if began < not_before}
        due = deque(
            batches_to_advance(
                self._backends.pool,
                max_running_jobs=self._backends.max_running_jobs,
                excluded=paused | set(self._running),
                after_seq=self._last_seq,
            )
        )
        while due and not self._backends.stopping.is_set() and (left := until - time.monotonic()) > 0:
            if len(self._running) < _WORKERS:
                batch = due.popleft()
                self._running[batch["id"]] = self._executor.submit(self._advance, batch["id"])
                if batch["in_rotation"]:
                    self._last_seq = batch["seq"]
            else:
                wait(self._running.values(), timeout=min(left, _STOP_CHECK_S), return_when=FIRST_COMPLETED)
                self._collect()
        self._backends.metrics.pass_duration_s.observe(time.monotonic() - began)

    def _collect(self) -> None:
        """Take back the batches whose step has ended; a failed one pauses."""
        for batch_id in [batch_id for batch_id, future in self._running.items() if future.done()]:
            if self._running.pop(batch_id).result():
                self._failures.pop(batch_id, None)
                self._not_before.pop(batch_id, None)
            else:
                self._failures[batch_id] += 1
                self._not_before[batch_id] = time.monotonic() + self._pause_s(self._failures[batch_id])

    def _advance(self, batch_id: str) -> bool:
        """Advance one batch; log an error and return False if it failed, whatever the error is."""
        try:
            advance(self._backends, batch_id)
        except Exception as error:  # noqa: BLE001 - the shell of the loop: one batch must not stop the others
            self._backends.metrics.step_failures.labels(kind=type(error).__name__).inc()
            failures = self._failures[batch_id] + 1
            log = logger.warning if isinstance(error, _TRANSIENT) else logger.exception
            log(
                "batch.step_failed",
                batch_id=batch_id,
                error=str(error),
                failures=failures,
                retry_in_s=self._pause_s(failures),
            )
            return False
        return True

    def _pause_s(self, failures: int) -> float:
        return min(_MAX_PAUSE_S, self._backends.first_pause_s * 2.0 ** min(failures - 1, 10))
