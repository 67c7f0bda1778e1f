"""The reconciler's own HTTP: /healthz, /readyz and /metrics, for whoever runs it. Nothing of what is stored is told."""

import json
import time
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Thread
from typing import Final
from urllib.parse import urlsplit

import psycopg
import structlog
from prometheus_client import CONTENT_TYPE_LATEST, generate_latest

from service.db import query
from service.errors import ObjectStoreError
from service.reconciler.context import Context

logger = structlog.get_logger(__name__)

# Three passes of an idle loop.
MAX_SILENCE_S: Final = 30.0

_Answer = tuple[int, str, bytes]


@contextmanager
def serve_health(context: Context, *, host: str, port: int) -> Iterator[int]:
    """Answers in a thread of its own until the end of the block; gives the port, a free one for port 0.

    Raises:
        OSError: the port is taken.
    """

    class Handler(_Handler):
        served = context

    server = ThreadingHTTPServer((host, port), Handler)
    server.daemon_threads = True
    thread = Thread(target=server.serve_forever, kwargs={"poll_interval": 0.1}, name="health")
    thread.start()
    try:
        yield server.server_address[1]
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


class _Handler(BaseHTTPRequestHandler):
    served: Context
    # A probe that says nothing must not hold a thread for ever.
    timeout = 10

    def do_GET(self) -> None:
        """Answers one probe."""
        status, content_type, content = _answer(self.served, urlsplit(self.path).path)
        self.send_response(status)
        self.send_header("content-type", content_type)
        self.send_header("content-length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    def log_message(self, *_: object) -> None:
        """A line for each probe would bury the rest."""


def _answer(context: Context, path: str) -> _Answer:
    match path:
        case "/healthz":
            silence_s = time.monotonic() - context.pulse.beat_at
            problems = [] if silence_s < MAX_SILENCE_S else [f"the loop gave no sign of life for {silence_s:.0f} s"]
            return _report(context, problems)
        case "/readyz":
            return _report(context, list(_missing(context)))
        case "/metrics":
            return 200, CONTENT_TYPE_LATEST, generate_latest(context.metrics.registry)
        case _:
            return _json(404, {"status": "there are /healthz, /readyz and /metrics"})


def _report(context: Context, problems: list[str]) -> _Answer:
    role = "leading" if context.pulse.is_leading else "standby"
    if problems:
        return _json(503, {"status": "unavailable", "role": role, "missing": problems})
    return _json(200, {"status": "ok", "role": role})


def _missing(context: Context) -> Iterator[str]:
    try:
        with context.pool.connection(timeout=5) as connection:
            connection.execute(query("check_schema"))
    except psycopg.Error as error:
        logger.warning("readyz.database", error=str(error).strip())
        yield "database"
    try:
        context.store.check()
    except ObjectStoreError as error:
        logger.warning("readyz.object_store", error=str(error))
        yield "object store"


def _json(status: int, content: dict[str, object]) -> _Answer:
    return status, "application/json", json.dumps(content).encode()
