"""The loop: one leader, woken by Postgres or by time, that takes all open batches further.

A pass asks Postgres which batches a step may take further, in a fair order, and hands them to a few threads for as
long as these have room. Beside it the leader deletes what is too old and delivers webhooks.
"""

import dataclasses
import os
import socket
import time
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from threading import Event, Thread
from typing import Final

import psycopg
import structlog

from service.db import CONNECTION_LIMITS, query
from service.reconciler.context import Context
from service.reconciler.patient_store import PatientStore
from service.reconciler.retention import keep_sweeping
from service.reconciler.webhooks import keep_delivering
from service.reconciler.workers import Workers
from service.reconciler.worklist import batches_to_advance, is_any_batch_open

logger = structlog.get_logger(__name__)

LEADER_LOCK: Final = 7_203_002
BUSY_INTERVAL_S: Final = 1.0
IDLE_INTERVAL_S: Final = 10.0
STANDBY_INTERVAL_S: Final = 1.0
# How long a signal may go unnoticed.
_STOP_CHECK_S: Final = 0.25
# Batches are often created, and change, several at a time: one pass serves them all.
_GATHER_S: Final = 0.02
_BEAT_INTERVAL_S: Final = 1.0
# A leader whose machine is lost says no goodbye: Postgres must notice, or its lock would be held for two hours.
_NOTICE_LOSS: Final = (
    "SET tcp_keepalives_idle = 10",
    "SET tcp_keepalives_interval = 5",
    "SET tcp_keepalives_count = 3",
    "SET tcp_user_timeout = 25000",
)


def run(context: Context, database_url: str) -> None:
    """Reconciles until ``context.stopping`` is set. Only one process does; others wait for its lock."""
    context = dataclasses.replace(context, store=PatientStore(context.store))
    failures = 0
    while not context.stopping.is_set():
        context.pulse.beat_at = time.monotonic()
        try:
            with psycopg.connect(database_url, autocommit=True, **CONNECTION_LIMITS) as connection:
                failures = 0
                for setting in _NOTICE_LOSS:
                    connection.execute(setting)
                if _becomes_leader(context, connection):
                    logger.info("reconciler.leading")
                    connection.execute("LISTEN batches")
                    with _leading(context):
                        _lead(context, connection)
        except psycopg.OperationalError as error:
            failures += 1
            logger.warning("reconciler.database_unreachable", error=str(error).strip(), failures=failures)
            context.stopping.wait(min(failures, 5))


def _becomes_leader(context: Context, connection: psycopg.Connection) -> bool:
    is_told = False
    while not context.stopping.is_set():
        context.pulse.beat_at = time.monotonic()
        row = connection.execute("SELECT pg_try_advisory_lock(%s)", [LEADER_LOCK]).fetchone()
        if row and row[0]:
            return True
        if not is_told:
            logger.info("reconciler.standby", reason="another reconciler leads")
            is_told = True
        context.stopping.wait(STANDBY_INTERVAL_S)
    return False


@contextmanager
def _leading(context: Context) -> Iterator[None]:
    """What a leader does beside its passes, each in a thread of its own, until it leads no more."""
    over = Event()
    threads = [
        Thread(target=work, args=(context, over), name=work.__name__) for work in (keep_sweeping, keep_delivering)
    ]
    for thread in threads:
        thread.start()
    context.pulse.is_leading = True
    context.metrics.leading.set(1)
    try:
        yield
    finally:
        context.metrics.leading.set(0)
        context.pulse.is_leading = False
        over.set()
        for thread in threads:
            thread.join()


def _lead(context: Context, connection: psycopg.Connection) -> None:
    leader = f"{socket.gethostname()}:{os.getpid()}"
    beat_at = 0.0
    with Workers(context) as workers:
        while not context.stopping.is_set():
            began = context.pulse.beat_at = time.monotonic()
            if began - beat_at >= _BEAT_INTERVAL_S:
                connection.execute(query("beat"), {"leader": leader})
                beat_at = began
            _pass(context, workers, until=began + BUSY_INTERVAL_S)
            interval_s = BUSY_INTERVAL_S if is_any_batch_open(context.pool) else IDLE_INTERVAL_S
            _wait(connection, context.stopping, until=began + interval_s)


def _pass(context: Context, workers: Workers, *, until: float) -> None:
    """Hands batches to the workers until none is left, or it is time for a new list."""
    began = time.monotonic()
    due = deque(
        batches_to_advance(context.pool, max_running_jobs=context.max_running_jobs, busy=workers.not_to_be_given())
    )
    while due and not context.stopping.is_set() and (left := until - time.monotonic()) > 0:
        if workers.has_room():
            workers.begin(due.popleft())
        else:
            workers.wait_for_room(min(left, _STOP_CHECK_S))
    context.metrics.pass_duration_s.observe(time.monotonic() - began)


def _wait(connection: psycopg.Connection, stopping: Event, *, until: float) -> None:
    """Until Postgres tells of a batch, the time has come or the process is to end."""
    while not stopping.is_set() and (left := until - time.monotonic()) > 0:
        if list(connection.notifies(timeout=min(left, _STOP_CHECK_S), stop_after=1)):
            list(connection.notifies(timeout=_GATHER_S))
            return
