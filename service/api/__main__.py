"""``python -m service.api``: serve the HTTP API with the settings in the environment."""

import contextlib
import os
import sys

from service.api.app import Server, create_app, server_config
from service.compose import open_backends
from service.errors import CloisterError
from service.logging import configure_logging
from service.settings import read_settings


def main() -> int:
    """Serve until SIGINT or SIGTERM, then finish the running requests.

    Return the exit status: 0, 2 for invalid settings, or 3 if the port was unavailable.
    """
    try:
        settings = read_settings(os.environ)
        configure_logging(settings.log_level)
        with open_backends(settings, "api") as backends:
            app = create_app(backends)
            config = server_config(
                app, host=settings.host, port=settings.port, trusted_proxies=settings.trusted_proxies
            )
            server = Server(config, app.state.watching)
            # On SIGINT uvicorn shuts down as on SIGTERM, then raises KeyboardInterrupt.
            with contextlib.suppress(KeyboardInterrupt):
                server.run()
    except CloisterError as error:
        sys.stderr.write(f"cloister api: {error}\n")
        return 2
    return 0 if server.started else 3


if __name__ == "__main__":
    sys.exit(main())
