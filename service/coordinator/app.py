"""The HTTP application of the coordinator: the paths and messages of ``ray_job.contract.leases``."""

import asyncio
import contextlib
import functools
import socket
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Final

import psycopg
import structlog
import uvicorn
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram
from starlette.applications import Starlette
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from ray_job.contract.leases import (
    COMMITS_PATH,
    END_PATH,
    FAILURES_PATH,
    PART_URLS_PATH,
    SYNC_PATH,
    Commit,
    EndRequest,
    Failure,
    Message,
    MessageError,
    PartUrlsRequest,
    SyncRequest,
    SyncResponse,
)
from service.backends import Backends
from service.coordinator import commits, leasing
from service.coordinator.errors import RefusedError
from service.coordinator.leasing import ActiveJob
from service.coordinator.tokens import Tokens
from service.coordinator.waiting import Waiting
from service.db import query
from service.errors import ObjectStoreError
from service.process_metrics import register_process

logger = structlog.get_logger(__name__)

MAX_BODY_BYTES: Final = 1 << 20
# More engines than a job has. A job parses untrusted input: it must not choose the value of a counter.
MAX_ENGINE_RESTARTS: Final = 100
# Longer than any job asks for.
MAX_WAIT_S: Final = 60.0
_BEARER: Final = "bearer "

_Answer = Callable[[Request, ActiveJob, Any], Awaitable[Any]]


def create_app(backends: Backends) -> Starlette:
    """Create the ASGI application.

    Args:
        backends: database, object store and models; the caller closes them.
    """
    pool, store, traces = backends.pool, backends.store, backends.traces
    waiting, tokens = Waiting(pool), Tokens(pool)
    metrics = Metrics(waiting, backends.catalogue)
    metrics.registry.register(backends.spans_dropped)

    @contextlib.asynccontextmanager
    async def lifespan(_app: Starlette) -> AsyncIterator[None]:
        # A request mostly waits for Postgres, so each connection gets a thread; by default processors would count.
        threads = ThreadPoolExecutor(pool.max_size, thread_name_prefix="request")
        asyncio.get_running_loop().set_default_executor(threads)
        waiting.start()
        yield
        waiting.stop()
        await waiting.stopped()

    async def sync(request: Request, job: ActiveJob, message: SyncRequest) -> SyncResponse:
        """Lease segments; wait until there is one, if the job asks for that."""
        deadline = time.monotonic() + min(message.wait_s, MAX_WAIT_S)
        while True:
            changed = waiting.change_of(job.model, job.domain)
            answer = await asyncio.to_thread(leasing.sync, pool, store, job.id, message, traces)
            left_s = deadline - time.monotonic()
            is_empty = not (answer.leases or answer.lost or answer.drain)
            if not is_empty or not await waiting.wait(changed, left_s):
                return answer
            # Leases for a driver that has hung up would be lost until they expire.
            if await request.is_disconnected():
                return answer

    app = Starlette(
        routes=[
            _route(metrics, tokens, SYNC_PATH, SyncRequest, sync),
            _route(metrics, tokens, PART_URLS_PATH, PartUrlsRequest, _in_thread(commits.part_urls, pool, store)),
            _route(
                metrics,
                tokens,
                COMMITS_PATH,
                Commit,
                _in_thread(functools.partial(commits.commit, traces=traces), pool),
            ),
            _route(metrics, tokens, FAILURES_PATH, Failure, _in_thread(commits.fail, pool)),
            _route(metrics, tokens, END_PATH, EndRequest, _in_thread(leasing.end, pool)),
            Route("/healthz", lambda _: JSONResponse({"status": "ok"})),
            Route("/readyz", lambda _: _readyz(backends)),
        ],
        lifespan=lifespan,
    )
    app.state.waiting = waiting
    app.state.metrics = metrics.registry
    return app


class Metrics:
    """Measurements of one coordinator. No label holds an id.

    Args:
        waiting: the jobs that wait for work.
        models: the models of the catalogue.

    Attributes:
        registry: the registry of all of them.
        requests: answered requests by path and status.
        durations_s: seconds until the answer, by path; a sync waits until there is work.
        engine_restarts: engines that died and were started again, by model.
    """

    def __init__(self, waiting: Waiting, models: Iterable[str]) -> None:
        self.registry = CollectorRegistry()
        self.requests = Counter(
            "cloister_coordinator_requests", "Answered requests of jobs.", ("path", "status"), registry=self.registry
        )
        self.durations_s = Histogram(
            "cloister_coordinator_request_duration_seconds",
            "From a request to its answer; a sync waits until there is work.",
            ("path",),
            buckets=(0.005, 0.025, 0.1, 0.25, 1, 2.5, 10, 30, 60),
            registry=self.registry,
        )
        self.engine_restarts = Counter(
            "cloister_engine_restarts",
            "Engines that died and were started again, as jobs report them.",
            ("model",),
            registry=self.registry,
        )
        for model in models:
            self.engine_restarts.labels(model)  # a rate needs the zero before the first restart
        listening = Gauge(
            "cloister_coordinator_listening", "Whether Postgres notifies it of new work.", registry=self.registry
        )
        listening.set_function(lambda: waiting.is_listening)
        register_process(self.registry, "coordinator")


class Server(uvicorn.Server):
    """uvicorn, but it answers waiting jobs on shutdown before it waits for the running requests."""

    def __init__(self, config: uvicorn.Config, waiting: Waiting) -> None:
        super().__init__(config)
        self._waiting = waiting

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Stop accepting connections, answer the waiting jobs, and wait for the other requests."""
        self._waiting.stop()
        await super().shutdown(sockets)


def _in_thread(work: Callable[..., Any], *backends: Any) -> _Answer:
    async def answer(_request: Request, job: ActiveJob, message: Any) -> Any:
        return await asyncio.to_thread(work, *backends, job.id, message)

    return answer


def _route(metrics: Metrics, tokens: Tokens, path: str, kind: type[Message], answer: _Answer) -> Route:
    """Return the route of a message."""

    async def endpoint(request: Request) -> Response:
        status = 500
        try:
            with metrics.durations_s.labels(path).time():
                response = await respond(request)
            status = response.status_code
        finally:
            metrics.requests.labels(path, str(status)).inc()
        return response

    async def respond(request: Request) -> Response:
        try:
            token = _token(request)
            if (job := tokens.known(token)) is None:
                job = await asyncio.to_thread(tokens.authenticate, token)
            message = kind.from_json(await _body(request))
            if isinstance(message, SyncRequest | EndRequest):
                restarts = min(message.engine_restarts, MAX_ENGINE_RESTARTS)
                metrics.engine_restarts.labels(job.model).inc(restarts)
            result = await answer(request, job, message)
            if path == END_PATH:
                tokens.forget(token)
        except ClientDisconnect:
            return Response(status_code=400)  # nobody reads it
        except MessageError as error:
            return _refusal(400, str(error))
        except RefusedError as error:
            return _refusal(error.status_code, str(error))
        except psycopg.DataError as error:
            # The message of the error may quote the value.
            logger.warning("coordinator.refused", path=path, error=type(error).__name__)
            return _refusal(400, f"a number of the {kind.__name__} is larger than the database can store")
        except (psycopg.OperationalError, ObjectStoreError) as error:
            logger.warning("coordinator.unavailable", path=path, error=type(error).__name__)
            return _refusal(503, "the database or the object store cannot be reached; try again", {"retry-after": "1"})
        return Response(result.to_json() if result is not None else b"{}", media_type="application/json")

    return Route(path, endpoint, methods=["POST"])


async def _body(request: Request) -> bytes:
    body = bytearray()
    async for chunk in request.stream():
        body += chunk
        if len(body) > MAX_BODY_BYTES:
            raise RefusedError(f"the body is larger than {MAX_BODY_BYTES:,} bytes", status_code=413)
    return bytes(body)


def _token(request: Request) -> str:
    header = request.headers.get("authorization", "")
    return header[len(_BEARER) :].strip() if header.lower().startswith(_BEARER) else ""


def _refusal(status_code: int, message: str, headers: dict[str, str] | None = None) -> Response:
    return JSONResponse({"error": message}, status_code=status_code, headers=headers)


def _readyz(backends: Backends) -> Response:
    try:
        with backends.pool.connection(timeout=5) as connection:
            connection.execute(query("check_schema"))
        backends.store.check()
    except (psycopg.Error, ObjectStoreError) as error:
        logger.warning("coordinator.not_ready", error=type(error).__name__)
        return _refusal(503, "the database or the object store cannot be reached")
    return JSONResponse({"status": "ready"})
