"""The application and the server that runs it."""

import contextlib
import socket
from collections.abc import AsyncIterator, Sequence
from ipaddress import IPv4Network, IPv6Network

import uvicorn
from fastapi import FastAPI
from prometheus_client import CollectorRegistry, Gauge
from starlette.types import ASGIApp

from service.api import openapi
from service.api.errors import EXCEPTION_HANDLERS
from service.api.middleware import RequestMiddleware
from service.api.queue_positions import QueuePositions
from service.api.routes import (
    audit_logs,
    batches,
    capacity,
    deletion_receipts,
    estimates,
    events,
    files,
    health,
    jobs,
    metrics,
    models,
    results,
    usage,
    webhook_endpoints,
)
from service.api.transfers import Transfers
from service.api.watching import Watching
from service.api.wrong_keys import WrongKeys
from service.backends import Backends
from service.listening import asyncio_host
from service.process_metrics import register_process, register_workspace


def create_app(backends: Backends, *, watching: Watching | None = None, wrong_keys: WrongKeys | None = None) -> FastAPI:
    """Create the ASGI application.

    Args:
        backends: database, object store and models; the caller closes them.
        watching: the event streams; those of ``backends`` with the default intervals if None.
        wrong_keys: the limit of wrong API keys; of ``backends`` with the default limit if None.
    """
    streams = watching or Watching(backends.pool, max_key_lifetime=backends.max_key_lifetime)

    @contextlib.asynccontextmanager
    async def lifespan(_app: FastAPI) -> AsyncIterator[None]:
        yield
        streams.stop()
        await streams.stopped()

    # FastAPI's documentation pages would load scripts from the internet.
    app = FastAPI(
        title="cloister",
        openapi_url=None,
        docs_url=None,
        redoc_url=None,
        redirect_slashes=False,
        lifespan=lifespan,
        exception_handlers=EXCEPTION_HANDLERS,
    )
    app.state.backends = backends
    app.state.watching = streams
    app.state.transfers = Transfers(backends.workspace, max_per_key=backends.max_transfers_per_key)
    app.state.queue_positions = QueuePositions(backends.pool)
    app.state.wrong_keys = wrong_keys or WrongKeys(backends.pool, max_lifetime=backends.max_key_lifetime)
    app.state.readiness = health.Readiness(backends)
    app.state.metrics = CollectorRegistry()
    app.state.metrics.register(metrics.StackCollector(backends.pool))
    app.state.metrics.register(metrics.ReadinessCollector(app.state.readiness))
    register_process(app.state.metrics, "api")
    register_workspace(app.state.metrics, backends.workspace)
    watchers = Gauge("cloister_event_watchers", "Open event streams.", registry=app.state.metrics)
    watchers.set_function(lambda: streams.watchers)
    app.state.metrics.register(backends.spans_dropped)
    for module in (
        files,
        batches,
        results,
        events,
        estimates,
        jobs,
        models,
        usage,
        capacity,
        audit_logs,
        deletion_receipts,
        webhook_endpoints,
        health,
        metrics,
        openapi,
    ):
        app.include_router(module.router)
    app.add_middleware(RequestMiddleware, registry=app.state.metrics)
    return app


def server_config(
    app: ASGIApp, *, host: str, port: int, trusted_proxies: Sequence[IPv4Network | IPv6Network] = ()
) -> uvicorn.Config:
    """Return the configuration of the server of an application.

    Args:
        app: the application.
        host: the address to listen on; ``::`` for all, IPv4 and IPv6.
        port: the TCP port; 0 for any that is free.
        trusted_proxies: networks of the proxies that may state a client's address in ``X-Forwarded-For``. The client
            is the right-most address there that is in none of them. Source: https://uvicorn.dev/deployment/
    """
    return uvicorn.Config(
        app,
        host=asyncio_host(host),
        port=port,
        # All logs are configured in one place, and RequestMiddleware replaces uvicorn's access log.
        log_config=None,
        access_log=False,
        server_header=False,
        # Any client can send the headers of a proxy, so they do not change the address that wrong keys are counted by,
        # unless they come from a proxy that the operator names.
        proxy_headers=bool(trusted_proxies),
        forwarded_allow_ips=[str(network) for network in trusted_proxies],
        ws="none",
        # Longer than clients keep idle connections, so that they do not write into a closed one.
        timeout_keep_alive=75,
        timeout_graceful_shutdown=10,
    )


class Server(uvicorn.Server):
    """uvicorn, but it ends event streams on shutdown before it waits for the running requests."""

    def __init__(self, config: uvicorn.Config, watching: Watching) -> None:
        super().__init__(config)
        self._watching = watching

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Stop accepting connections, end the streams, and wait for the other requests."""
        self._watching.stop()
        await super().shutdown(sockets)
