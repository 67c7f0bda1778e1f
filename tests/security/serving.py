"""An API on a free loopback port, as ``service.api`` serves it."""

import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from ipaddress import ip_network

from fastapi import FastAPI

from service.api.app import Server, server_config


@contextmanager
def served(app: FastAPI, *, trusted_proxies: Sequence[str] = ()) -> Iterator[str]:
    """Serve an application, and yield its URL."""
    proxies = tuple(ip_network(proxy) for proxy in trusted_proxies)
    config = server_config(app, host="127.0.0.1", port=0, trusted_proxies=proxies)
    server = Server(config, app.state.watching)
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
