"""The loop: one leader, woken by Postgres or by time, advances all open batches and jobs.

A pass asks Postgres which batches and jobs a step can advance now, in a fair order, and hands them to a few threads
until its time is over. Beside its passes, the leader deletes what has expired, delivers webhooks and seals the audit
log.
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
from typing import Final, Literal, Self

import psycopg
import structlog

from service.db import CONNECTION_LIMITS, Pool, query
from service.db.login import connection_string
from service.errors import LauncherError, ObjectStoreError
from service.logging import error_text
from service.reconciler.backends import Backends
from service.reconciler.jobs import PASS_LIMIT, advance_job, create_jobs, jobs_to_advance
from service.reconciler.orphans import keep_searching
from service.reconciler.retention import keep_sweeping
from service.reconciler.retrying_store import RetryingStore
from service.reconciler.sealing import keep_sealing
from service.reconciler.steps import advance
from service.reconciler.webhooks import keep_delivering

logger = structlog.get_logger(__name__)

LEADER_LOCK: Final = 7_203_002
BUSY_INTERVAL_S: Final = 1.0
IDLE_INTERVAL_S: Final = 10.0
STANDBY_INTERVAL_S: Final = 1.0
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
# How many running jobs are looked at in a second. With more jobs than that, each waits longer for its
# turn: 20 s for one of 1,000. Most requests to a launcher are these looks.
LOOKS_PER_S: Final = 50.0
_MAX_PAUSE_S: Final = 30.0
# Finding domains without a job takes longer the longer the queue is: a tenth of a second with 10,000 batches. It is
# repeated after so many times as long, and a new batch waits no longer than that for its job.
_PAUSE_PER_CREATION: Final = 9.0
_TRANSIENT: Final = (ObjectStoreError, LauncherError, psycopg.OperationalError)


def run(backends: Backends, database_url: str) -> None:
    """Reconcile until ``backends.stopping`` is set. Only one process leads; others wait for its lock."""
    backends = dataclasses.replace(backends, store=RetryingStore(backends.store))
    failures = 0
    while not backends.stopping.is_set():
        backends.metrics.beat_at = time.monotonic()
        try:
            with psycopg.connect(connection_string(database_url), autocommit=True, **CONNECTION_LIMITS) as connection:
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
    """Run passes until the process stops. Retention, orphans, webhooks and the audit log have a thread each."""
    logger.info("reconciler.leading")
    connection.execute("LISTEN batches")
    leader, beat_at = f"{socket.gethostname()}:{os.getpid()}", 0.0
    over = Event()
    threads = [
        Thread(target=work, args=(backends, over), name=work.__name__)
        for work in (keep_sweeping, keep_searching, keep_delivering, keep_sealing)
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
                    row = pooled.execute(query("is_anything_open")).fetchone()
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


def batches_to_advance(pool: Pool, *, excluded: Collection[str] = (), limit: int = PASS_LIMIT) -> list[str]:
    """Return the ids of the batches that a step can advance now, in a fair order.

    Args:
        pool: connections to Postgres.
        excluded: ids of batches to leave out.
        limit: the most batches to return.
    """
    with pool.connection() as connection:
        rows = connection.execute(query("batches_to_advance"), {"excluded": list(excluded), "limit": limit})
        return [row["id"] for row in rows]


class Workers:
    """A few threads that each advance one batch or one job at a time. Use it in one thread, as a context manager.

    Args:
        backends: the backends.
        looks_per_s: how many running jobs are looked at in a second, at most.
    """

    def __init__(self, backends: Backends, *, looks_per_s: float = LOOKS_PER_S) -> None:
        self._backends = backends
        self._looks_per_s = looks_per_s
        self._executor = ThreadPoolExecutor(max_workers=_WORKERS, thread_name_prefix="step")
        self._running: dict[str, Future[bool]] = {}
        self._failures: Counter[str] = Counter()  # of a batch's or a job's steps in a row
        self._not_before: dict[str, float] = {}  # when to try one again, in monotonic seconds
        self._idle_until: dict[str, float] = {}  # when to look at an idle job again, in monotonic seconds
        self._last_seq = Counter[str]()  # of the last job that had a step, by its kind
        self._launching: Future[bool] | None = None  # launches wait for each other, so one thread is enough
        self._jobs_due = 0.0  # when to look again for domains without a job, in monotonic seconds
        self._looks = looks_per_s  # at running jobs
        self._looks_at = time.monotonic()  # when they were counted

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        """Wait for the steps in progress."""
        self._executor.shutdown()

    def run_pass(self, *, until: float) -> None:
        """Hand due batches and jobs to the threads until each had one, or until a time in monotonic seconds."""
        began = time.monotonic()
        self._collect()
        self._not_before = {key: at for key, at in self._not_before.items() if began < at or self._failures[key]}
        excluded = {key for key, at in self._not_before.items() if began < at} | set(self._running)
        self._idle_until = {key: at for key, at in self._idle_until.items() if began < at}
        self._looks = min(self._looks_per_s, self._looks + self._looks_per_s * (began - self._looks_at))
        self._looks_at = began
        if began >= self._jobs_due:
            create_jobs(self._backends)
            self._jobs_due = time.monotonic() + _PAUSE_PER_CREATION * (time.monotonic() - began)
        batches = deque(batches_to_advance(self._backends.pool, excluded=excluded))
        found = jobs_to_advance(
            self._backends,
            excluded=excluded,
            excluded_if_idle=self._idle_until,
            after_running=self._last_seq["running"],
            after_ending=self._last_seq["ending"],
            looks=int(self._looks),
        )
        launches = deque(job for job in found if job["kind"] == "waiting")
        jobs = deque(job for job in found if job["kind"] != "waiting")
        while (
            (batches or jobs or launches)
            and not self._backends.stopping.is_set()
            and (left := until - time.monotonic()) > 0
        ):
            may_launch = bool(launches) and (self._launching is None or self._launching.done())
            if len(self._running) >= _WORKERS or not (batches or jobs or may_launch):
                wait(self._running.values(), timeout=min(left, _STOP_CHECK_S), return_when=FIRST_COMPLETED)
                self._collect()
                continue
            # They alternate: none can keep the others waiting.
            if may_launch:
                job_id = launches.popleft()["id"]
                self._launching = self._running[job_id] = self._executor.submit(self._advance, "job", job_id)
            if jobs:
                job = jobs.popleft()
                self._last_seq[job["kind"]] = job["seq"]
                self._looks -= job["kind"] == "running"
                self._running[job["id"]] = self._executor.submit(self._advance, "job", job["id"])
                if job["is_idle"]:
                    self._idle_until[job["id"]] = time.monotonic() + IDLE_INTERVAL_S
            if batches:
                batch_id = batches.popleft()
                self._running[batch_id] = self._executor.submit(self._advance, "batch", batch_id)
        self._backends.metrics.pass_duration_s.observe(time.monotonic() - began)

    def _collect(self) -> None:
        """Take back those whose step has ended; after a failed one there is a pause."""
        for key in [key for key, future in self._running.items() if future.done()]:
            if self._running.pop(key).result():
                if self._failures.pop(key, None):
                    self._not_before.pop(key, None)
            else:
                self._failures[key] += 1
                self._not_before[key] = time.monotonic() + self._pause_s(self._failures[key])

    def _advance(self, kind: Literal["batch", "job"], key: str) -> bool:
        """Advance one batch or job; log an error and return False if it failed, whatever the error is."""
        try:
            if kind == "batch":
                advance(self._backends, key)
            else:
                advance_job(self._backends, key)
        except Exception as error:  # noqa: BLE001 - the shell of the loop: one must not stop the others
            self._backends.metrics.step_failures.labels(kind=type(error).__name__).inc()
            failures = self._failures[key] + 1
            log = logger.warning if isinstance(error, _TRANSIENT) else logger.exception
            log(
                f"{kind}.step_failed",
                **{f"{kind}_id": key},
                error=error_text(error),
                failures=failures,
                retry_in_s=self._pause_s(failures),
            )
            return False
        return True

    def _pause_s(self, failures: int) -> float:
        return min(_MAX_PAUSE_S, self._backends.first_pause_s * 2.0 ** min(failures - 1, 10))
