"""The application: routes, error mapping and request log, around the parts it is handed."""

from fastapi import FastAPI

from service.api import batches, files, health, models
from service.api.error_mapping import add_error_mapping
from service.api.parts import Parts
from service.api.request_log import RequestLog


def create_app(parts: Parts) -> FastAPI:
    """Makes the ASGI application.

    Args:
        parts: the database, object store and models; who opened them closes them.
    """
    # The documentation pages would load scripts from the internet.
    app = FastAPI(title="cloister", openapi_url=None, docs_url=None, redoc_url=None, redirect_slashes=False)
    app.state.parts = parts
    for module in (files, batches, models, health):
        app.include_router(module.router)
    add_error_mapping(app)
    app.add_middleware(RequestLog)
    return app
