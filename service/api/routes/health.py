"""Probes for operators and orchestrators. They need no API key and reveal nothing about stored data."""

import time
from collections.abc import Callable, Mapping
from concurrent.futures import Future, wait
from threading import Lock, Thread
from typing import Annotated, Final, Literal

import psycopg
from fastapi import APIRouter, Request
from fastapi.responses import JSONResponse
from pydantic import Field

from service.api.errors import error_response
from service.api.openapi import PUBLIC, described
from service.api.schemas import Answer, Error
from service.backends import Backends
from service.db import migrations, query
from service.db.rows import fetch_value
from service.errors import ObjectStoreError, UnavailableError

router = APIRouter(tags=["Operation"], responses=PUBLIC)

CHECK_TIMEOUT_S: Final = 2.0
# Each check runs at most once in this time, however many clients probe.
CACHED_FOR_S: Final = 1.0
# The reconciler reports every second while it has work, otherwise every ten seconds.
_HEARTBEAT_IS_OLD_S: Final = 60.0


class Check(Answer):
    """Result of one check. ``degraded`` leaves the service ready."""

    status: Literal["ok", "degraded", "failed"]
    message: Annotated[str | None, Field(description="What is wrong and what to do about it.")] = None


class Alive(Answer):
    """The process answers."""

    status: Literal["ok"] = "ok"


class Ready(Answer):
    """The service can handle requests. A check that is ``degraded`` names what is impaired."""

    status: Literal["ready"] = "ready"
    checks: dict[str, Check]


class NotReady(Error):  # noqa: N818 - a schema, not an exception
    """OpenAI's error envelope with the result of each check."""

    checks: dict[str, Check]


def _check_database(backends: Backends) -> Check:
    try:
        with backends.pool.connection(timeout=CHECK_TIMEOUT_S) as connection:
            connection.execute("SELECT 1")
    except psycopg.OperationalError as error:
        # libpq's message can hold the user and the address of the database.
        return Check(
            status="failed",
            message=f"Postgres does not answer, or all connections are busy ({type(error).__name__}). Check that it "
            "runs and that CLOISTER_DATABASE_URL points to it; the log of this process has details.",
        )
    return Check(status="ok")


def _check_schema(backends: Backends) -> Check:
    try:
        with backends.pool.connection(timeout=CHECK_TIMEOUT_S) as connection:
            applied = {row["name"] for row in connection.execute(query("migrations_that_ran"))}
    except psycopg.errors.UndefinedTable:
        applied = set()
    except psycopg.OperationalError:
        return Check(status="failed", message="Unknown: Postgres does not answer.")
    missing = [name for name in migrations() if name not in applied]
    if missing:
        return Check(
            status="failed",
            message=f"The database lacks the migrations {', '.join(missing)}. Run `cloister migrate`.",
        )
    return Check(status="ok")


def _check_object_store(backends: Backends) -> Check:
    try:
        backends.store.check()
    except ObjectStoreError as error:
        return Check(status="failed", message=f"The object store is not usable: {error}.")
    return Check(status="ok")


def _check_reconciler(backends: Backends) -> Check:
    try:
        with backends.pool.connection(timeout=CHECK_TIMEOUT_S) as connection:
            age_s = fetch_value(connection, "heartbeat_age", {})
    except (psycopg.OperationalError, psycopg.errors.UndefinedTable):
        return Check(status="degraded", message="Unknown: Postgres does not answer, or lacks its schema.")
    consequence = "Uploads and downloads work, but batches make no progress. Check that a reconciler runs."
    if age_s is None:
        return Check(status="degraded", message=f"No reconciler has ever led here. {consequence}")
    if age_s > _HEARTBEAT_IS_OLD_S:
        return Check(status="degraded", message=f"No reconciler has led for {age_s:.0f} s. {consequence}")
    return Check(status="ok")


CHECKS: Final[Mapping[str, Callable[[Backends], Check]]] = {
    "database": _check_database,
    "schema": _check_schema,
    "object_store": _check_object_store,
    "reconciler": _check_reconciler,
}


class Readiness:
    """Runs all checks concurrently, each with a time limit and never twice at the same time."""

    def __init__(self, backends: Backends) -> None:
        self._backends = backends
        self._lock = Lock()
        self._running: dict[str, Future[Check]] = {}
        self._results: dict[str, Check] = {}
        self._checked_at = float("-inf")

    def checks(self) -> dict[str, Check]:
        """Return the results of the checks, at most a second old."""
        with self._lock:
            if time.monotonic() - self._checked_at >= CACHED_FOR_S:
                for name in CHECKS:
                    # A check that hangs is not started a second time.
                    if name not in self._running:
                        self._running[name] = self._start(name)
                wait(self._running.values(), timeout=CHECK_TIMEOUT_S + 0.5)
                self._results = {name: self._result(name) for name in CHECKS}
                self._checked_at = time.monotonic()
            return self._results

    def _start(self, name: str) -> Future[Check]:
        """Run a check in a daemon thread, so that one that hangs does not keep the process alive."""
        future: Future[Check] = Future()

        def run() -> None:
            try:
                future.set_result(CHECKS[name](self._backends))
            except Exception as error:  # noqa: BLE001 - an exception is the result of the check
                future.set_result(Check(status="failed", message=f"The check itself failed: {type(error).__name__}."))

        Thread(target=run, name=f"readiness-{name}", daemon=True).start()
        return future

    def _result(self, name: str) -> Check:
        if not self._running[name].done():
            status: Literal["degraded", "failed"] = "degraded" if name == "reconciler" else "failed"
            return Check(status=status, message=f"No answer within {CHECK_TIMEOUT_S:.0f} s.")
        return self._running.pop(name).result()


@router.get(
    "/healthz",
    operation_id="healthz",
    summary="Liveness probe",
    description="The process answers. The backends are not checked: restarting the process would not repair them.",
)
def healthz() -> Alive:
    """Report that the process answers."""
    return Alive()


@router.get(
    "/readyz",
    operation_id="readyz",
    summary="Readiness probe",
    description="Check the database, its schema, the object store and the reconciler. 503 names what is wrong and what "
    "to do.\n\nWithout a reconciler no batch makes progress, but files and batches can still be created and read. This "
    "is reported as `degraded` and leaves the service ready, because another replica would not do better.",
    response_model=Ready,
    responses=described({503: "Not ready. `checks` names what is wrong and what to do."}, error_model=NotReady),
)
def readyz(request: Request) -> JSONResponse:
    """Report whether the backends answer; 503 with the reasons if not."""
    readiness: Readiness = request.app.state.readiness
    results = readiness.checks()
    checks = {name: check.model_dump() for name, check in results.items()}
    failed = [name for name, check in results.items() if check.status == "failed"]
    if not failed:
        return JSONResponse({"status": "ready", "checks": checks})
    error = UnavailableError(f"Not ready: {', '.join(failed)}. See 'checks' for the reasons.", code="not_ready")
    return error_response(error, checks=checks)
