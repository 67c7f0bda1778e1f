"""Probes for whoever runs the service. They need no API key and tell nothing of what is stored."""

import time
from collections.abc import Callable, Mapping
from concurrent.futures import Future, wait
from threading import Lock, Thread
from typing import Annotated, Final, Literal

import psycopg
from fastapi import APIRouter, Request
from fastapi.responses import JSONResponse
from pydantic import BaseModel, Field

from service.api.error_mapping import error_response
from service.api.parts import Parts
from service.db import migration_names, query
from service.errors import ObjectStoreError, UnavailableError

router = APIRouter()

CHECK_TIMEOUT_S: Final = 2.0
# However many probe at once, each check runs once in this time.
CACHED_FOR_S: Final = 1.0
# It beats every second while there is something to do, else every ten.
_HEARTBEAT_IS_OLD_S: Final = 60.0


class Check(BaseModel):
    """What one check found. ``degraded`` does not make the service unready."""

    status: Literal["ok", "degraded", "failed"]
    message: Annotated[str | None, Field(description="What is wrong and what to do about it.")] = None


class Alive(BaseModel):
    """The process answers."""

    status: Literal["ok"] = "ok"


class Ready(BaseModel):
    """Requests can be served; a check that is ``degraded`` says what suffers."""

    status: Literal["ready"] = "ready"
    checks: dict[str, Check]


def _check_database(parts: Parts) -> Check:
    try:
        with parts.pool.connection(timeout=CHECK_TIMEOUT_S) as connection:
            connection.execute("SELECT 1")
    except psycopg.OperationalError as error:
        # A message of libpq may hold the user and address of the database.
        return Check(
            status="failed",
            message=f"Postgres does not answer, or no connection to it is free ({type(error).__name__}). See that it "
            "runs and that CLOISTER_DATABASE_URL names it; the log of this process tells more.",
        )
    return Check(status="ok")


def _check_schema(parts: Parts) -> Check:
    try:
        with parts.pool.connection(timeout=CHECK_TIMEOUT_S) as connection:
            ran = {row["name"] for row in connection.execute(query("migrations_that_ran"))}
    except psycopg.errors.UndefinedTable:
        ran = set()
    except psycopg.OperationalError:
        return Check(status="failed", message="Not known: Postgres does not answer.")
    missing = [name for name in migration_names() if name not in ran]
    if missing:
        return Check(
            status="failed",
            message=f"The database lacks the migrations {', '.join(missing)}. Run `cloister migrate`.",
        )
    return Check(status="ok")


def _check_object_store(parts: Parts) -> Check:
    try:
        parts.store.check()
    except ObjectStoreError as error:
        return Check(status="failed", message=f"The object store is not usable: {error}.")
    return Check(status="ok")


def _check_reconciler(parts: Parts) -> Check:
    try:
        with parts.pool.connection(timeout=CHECK_TIMEOUT_S) as connection:
            row = connection.execute(query("heartbeat_age")).fetchone()
    except (psycopg.OperationalError, psycopg.errors.UndefinedTable):
        return Check(status="degraded", message="Not known: Postgres does not answer, or lacks its schema.")
    consequence = "Uploads and downloads work, batches stay as they are. See that a reconciler runs."
    if row is None:
        return Check(status="degraded", message=f"No reconciler has ever led here. {consequence}")
    if row["age_s"] > _HEARTBEAT_IS_OLD_S:
        return Check(status="degraded", message=f"No reconciler has led for {row['age_s']:.0f} s. {consequence}")
    return Check(status="ok")


CHECKS: Final[Mapping[str, Callable[[Parts], Check]]] = {
    "database": _check_database,
    "schema": _check_schema,
    "object_store": _check_object_store,
    "reconciler": _check_reconciler,
}


class Readiness:
    """Runs all checks side by side, each in a bounded time, and never twice at once."""

    def __init__(self, parts: Parts) -> None:
        self._parts = parts
        self._lock = Lock()
        self._running: dict[str, Future[Check]] = {}
        self._found: dict[str, Check] = {}
        self._found_at = float("-inf")

    def checks(self) -> dict[str, Check]:
        """What the checks found within the last second."""
        with self._lock:
            if time.monotonic() - self._found_at >= CACHED_FOR_S:
                for name, check in CHECKS.items():
                    # One that hangs is not started again beside itself.
                    if name not in self._running:
                        self._running[name] = _in_thread(check, self._parts)
                wait(self._running.values(), timeout=CHECK_TIMEOUT_S + 0.5)
                self._found = {name: self._result(name) for name in CHECKS}
                self._found_at = time.monotonic()
            return self._found

    def _result(self, name: str) -> Check:
        if not self._running[name].done():
            status: Literal["degraded", "failed"] = "degraded" if name == "reconciler" else "failed"
            return Check(status=status, message=f"No answer within {CHECK_TIMEOUT_S:.0f} s.")
        return self._running.pop(name).result()


def _in_thread(check: Callable[[Parts], Check], parts: Parts) -> Future[Check]:
    """A daemon thread: one that hangs does not keep the process from ending."""
    future: Future[Check] = Future()

    def run() -> None:
        try:
            future.set_result(check(parts))
        except Exception as error:  # noqa: BLE001 - whatever a check raises is its result
            future.set_result(Check(status="failed", message=f"The check itself failed: {type(error).__name__}."))

    Thread(target=run, name="readiness", daemon=True).start()
    return future


@router.get("/healthz")
def healthz() -> Alive:
    """The process answers. Says nothing of what it needs: a restart would not help with that."""
    return Alive()


@router.get("/readyz", response_model=Ready)
def readyz(request: Request) -> JSONResponse:
    """Database, schema and object store answer; 503 otherwise, with what is wrong and what to do.

    Without a reconciler no batch moves, but files and batches can still be created and read: that is told as
    ``degraded`` and leaves the service ready, because no request would go better elsewhere.
    """
    readiness: Readiness = request.app.state.readiness
    checks = readiness.checks()
    told = {name: check.model_dump() for name, check in checks.items()}
    failed = [name for name, check in checks.items() if check.status == "failed"]
    if not failed:
        return JSONResponse({"status": "ready", "checks": told})
    error = UnavailableError(f"Not ready: {', '.join(failed)}. 'checks' says what is wrong.", code="not_ready")
    return error_response(error, checks=told)
