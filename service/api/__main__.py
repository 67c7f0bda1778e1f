"""Runs the HTTP API: ``python -m service.api``, with the settings in its environment."""

import os
import sys

import uvicorn

from service.api.app import create_app
from service.api.parts import Parts
from service.compose import open_backends
from service.errors import CloisterError
from service.logging import configure_logging
from service.settings import Settings, read_settings


def serve(settings: Settings) -> None:
    """Serves until SIGINT or SIGTERM, then ends the requests that run."""
    with open_backends(settings) as backends:
        models = dict.fromkeys(backends.catalogue.models, backends.catalogue_changed_at)
        app = create_app(Parts(pool=backends.pool, store=backends.store, models=models))
        uvicorn.run(
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


def main() -> int:
    """Reads the settings and serves; tells in one line what is wrong with them."""
    try:
        settings = read_settings(os.environ)
        configure_logging(settings.log_level)
        serve(settings)
    except CloisterError as error:
        sys.stderr.write(f"cloister api: {error}\n")
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
