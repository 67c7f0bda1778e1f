"""Runs the HTTP API: ``python -m service.api``, with the settings in its environment."""

import contextlib
import os
import sys

import uvicorn

from service.api.app import create_app
from service.api.parts import Parts
from service.api.server import Server
from service.compose import open_backends
from service.errors import CloisterError
from service.logging import configure_logging
from service.settings import Settings, read_settings


def serve(settings: Settings) -> bool:
    """Serves until SIGINT or SIGTERM, then ends the requests that run. False: the port could not be had."""
    with open_backends(settings) as backends:
        models = dict.fromkeys(backends.catalogue.models, backends.catalogue_changed_at)
        parts = Parts(
            pool=backends.pool,
            store=backends.store,
            models=models,
            retention_s=settings.retention_days * 24 * 3600,
        )
        app = create_app(parts)
        config = uvicorn.Config(
            app,
            host=settings.host,
            port=settings.port,
            # One logging setup for all, and RequestLog's line instead of uvicorn's.
            log_config=None,
            access_log=False,
            server_header=False,
            ws="none",
            # Longer than clients keep an idle connection, so that they never write into one that just closed.
            timeout_keep_alive=75,
            timeout_graceful_shutdown=10,
        )
        # uvicorn ends on SIGINT as it does on SIGTERM, and then raises it for whoever runs it.
        server = Server(config, app.state.watching)
        with contextlib.suppress(KeyboardInterrupt):
            server.run()
        return server.started


def main() -> int:
    """Reads the settings and serves; tells in one line what is wrong with them."""
    try:
        settings = read_settings(os.environ)
        configure_logging(settings.log_level)
        is_served = serve(settings)
    except CloisterError as error:
        sys.stderr.write(f"cloister api: {error}\n")
        return 2
    return 0 if is_served else 3


if __name__ == "__main__":
    sys.exit(main())
