"""``python -m service.coordinator``: serve the coordinator with the settings in the environment."""

import contextlib
import os
import sys

import uvicorn
from prometheus_client import start_http_server

from service.compose import open_backends
from service.coordinator.app import Server, create_app
from service.errors import CloisterError, SettingsError
from service.listening import asyncio_host, socket_host
from service.logging import configure_logging
from service.settings import read_settings


def main() -> int:
    """Serve until SIGINT or SIGTERM, then finish the running requests.

    Return the exit status: 0, 2 for invalid settings, or 3 if the port was unavailable.
    """
    try:
        settings = read_settings(os.environ)
        configure_logging(settings.log_level)
        with open_backends(settings, "coordinator", deletes=False) as backends:
            app = create_app(backends)
            config = uvicorn.Config(
                app,
                host=asyncio_host(settings.host),
                port=settings.coordinator_port,
                log_config=None,
                access_log=False,
                server_header=False,
                ws="none",
                # Longer than jobs keep idle connections, so that they do not write into a closed one.
                timeout_keep_alive=75,
                timeout_graceful_shutdown=10,
            )
            server = Server(config, app.state.waiting)
            if settings.coordinator_metrics_port:
                try:
                    start_http_server(settings.coordinator_metrics_port, socket_host(settings.host), app.state.metrics)
                except OSError as error:
                    address = f"{settings.host}:{settings.coordinator_metrics_port}"
                    raise SettingsError(
                        f"CLOISTER_COORDINATOR_METRICS_PORT: cannot listen on {address}: {error.strerror}. "
                        "Choose a free port"
                    ) from error
            # On SIGINT uvicorn shuts down as on SIGTERM, then raises KeyboardInterrupt.
            with contextlib.suppress(KeyboardInterrupt):
                server.run()
    except CloisterError as error:
        sys.stderr.write(f"cloister coordinator: {error}\n")
        return 2
    return 0 if server.started else 3


if __name__ == "__main__":
    sys.exit(main())
