"""HTTP endpoints of the reconciler for operators: /healthz, /readyz and /metrics.

The metrics name projects by their ids. Network policies allow them to Prometheus only.
"""

import json
import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Thread
from typing import Final
from urllib.parse import urlsplit

import psycopg
import structlog
from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, generate_latest

from service.db import query
from service.errors import ObjectStoreError
from service.listening import socket_host
from service.process_metrics import register_process, register_workspace
from service.reconciler.backends import Backends
from service.reconciler.stored_metrics import StoredMetrics

logger = structlog.get_logger(__name__)

# Three passes of an idle loop.
MAX_SILENCE_S: Final = 30.0


@contextmanager
def serve_health(backends: Backends, *, host: str, port: int) -> Iterator[int]:
    """Serve the endpoints in a thread until the context ends.

    Yields:
        The port; a free one if ``port`` is 0.

    Raises:
        OSError: the port is in use.
    """
    registry = metrics_registry(backends)

    class Handler(_Handler):
        served = backends
        metrics = registry

    server = _Server((host, port), Handler)
    thread = Thread(target=server.serve_forever, kwargs={"poll_interval": 0.1}, name="health")
    thread.start()
    try:
        yield server.server_address[1]
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


def metrics_registry(backends: Backends) -> CollectorRegistry:
    """Return a registry of all metrics of a reconciler."""
    registry = CollectorRegistry()
    registry.register(backends.metrics.registry)
    registry.register(StoredMetrics(backends))
    register_process(registry, "reconciler")
    register_workspace(registry, backends.workspace)
    return registry


class _Server(ThreadingHTTPServer):
    daemon_threads = True

    def __init__(self, address: tuple[str, int], handler: type[BaseHTTPRequestHandler]) -> None:
        host, port = socket_host(address[0]), address[1]
        self.address_family = socket.AF_INET6 if ":" in host else socket.AF_INET
        super().__init__((host, port), handler)

    def server_bind(self) -> None:
        """Bind the socket, ``::`` for IPv4 too."""
        if self.address_family == socket.AF_INET6:
            self.socket.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0)
        super().server_bind()


class _Handler(BaseHTTPRequestHandler):
    served: Backends
    metrics: CollectorRegistry
    # A client that sends nothing must not hold a thread forever.
    timeout = 10

    def do_GET(self) -> None:
        """Answer one request."""
        match urlsplit(self.path).path:
            case "/healthz":
                silence_s = time.monotonic() - self.served.metrics.beat_at
                is_alive = silence_s < MAX_SILENCE_S
                self._report([] if is_alive else [f"the loop has not run for {silence_s:.0f} s"])
            case "/readyz":
                missing = []
                try:
                    with self.served.pool.connection(timeout=5) as connection:
                        connection.execute(query("check_schema"))
                except psycopg.Error as error:
                    logger.warning("readyz.database", error=str(error).strip())
                    missing.append("database")
                try:
                    self.served.store.check()
                except ObjectStoreError as error:
                    logger.warning("readyz.object_store", error=str(error))
                    missing.append("object store")
                self._report(missing)
            case "/metrics":
                self._send(200, CONTENT_TYPE_LATEST, generate_latest(self.metrics))
            case _:
                self._send_json(404, {"status": "not found; the paths are /healthz, /readyz and /metrics"})

    def log_message(self, *_: object) -> None:
        """Log nothing: a line for each probe would hide the others."""

    def _report(self, problems: list[str]) -> None:
        is_leading = self.served.metrics.registry.get_sample_value("cloister_reconciler_leading")
        role = "leading" if is_leading else "standby"
        if problems:
            self._send_json(503, {"status": "unavailable", "role": role, "missing": problems})
        else:
            self._send_json(200, {"status": "ok", "role": role})

    def _send_json(self, status: int, content: dict[str, object]) -> None:
        self._send(status, "application/json", json.dumps(content).encode())

    def _send(self, status: int, content_type: str, content: bytes) -> None:
        self.send_response(status)
        self.send_header("content-type", content_type)
        self.send_header("content-length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)
