"""An API on a free loopback port, as ``service.api`` serves it."""

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

from fastapi import FastAPI

from service.api.app import Server, server_config


@contextmanager
def served(app: FastAPI) -> Iterator[str]:
    """Serve an application, and yield its URL."""
    server = Server(server_config(app, host="127.0.0.1", port=0), app.state.watching)
    thread = threading.Thread(target=server.run, daemon=True)
    thread.start()
    while not server.started:
        assert thread.is_alive()
        time.sleep(0.01)
    port = server.servers[0].sockets[0].getsockname()[1]
    try:
        yield f"http://127.0.0.1:{port}"
    finally:
        server.should_exit = True
        thread.join()
