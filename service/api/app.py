"""The application: routes, error mapping and request log, around the parts it is handed."""

import contextlib
from collections.abc import AsyncIterator

from fastapi import FastAPI

from service.api import (
    audit_logs,
    batches,
    events,
    files,
    health,
    metrics,
    models,
    openapi,
    results,
    webhook_endpoints,
)
from service.api.body_limit import BodyLimit
from service.api.error_mapping import add_error_mapping
from service.api.health import Readiness
from service.api.metrics import Metrics
from service.api.parts import Parts
from service.api.request_log import RequestLog
from service.api.watching import StreamTimes, Watching


def create_app(parts: Parts, *, stream_times: StreamTimes | None = None) -> FastAPI:
    """Makes the ASGI application.

    Args:
        parts: the database, object store and models; who opened them closes them.
        stream_times: of event streams; the usual ones by default.
    """
    watching = Watching(parts.pool, stream_times or StreamTimes())

    @contextlib.asynccontextmanager
    async def lifespan(_app: FastAPI) -> AsyncIterator[None]:
        yield
        watching.stop()
        await watching.stopped()

    # The documentation pages would load scripts from the internet.
    app = FastAPI(
        title="cloister", openapi_url=None, docs_url=None, redoc_url=None, redirect_slashes=False, lifespan=lifespan
    )
    app.state.parts = parts
    app.state.watching = watching
    app.state.readiness = Readiness(parts)
    app.state.metrics = Metrics(parts.pool, watching)
    routes = (files, batches, results, events, models, audit_logs, webhook_endpoints, health, metrics, openapi)
    for module in routes:
        app.include_router(module.router)
    add_error_mapping(app)
    # The middleware that was added last is the outermost.
    app.add_middleware(BodyLimit)
    app.add_middleware(RequestLog, metrics=app.state.metrics)
    return app
