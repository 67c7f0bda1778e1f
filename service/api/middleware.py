"""ASGI middleware, the outermost layer: request id, log, metrics and the limit of request bodies."""

import re
import secrets
import time
import traceback
from dataclasses import dataclass, field
from typing import Final

import structlog
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram
from starlette.datastructures import MutableHeaders
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from service.api.errors import error_response
from service.errors import ApiError

_log = structlog.get_logger(__name__)

MAX_BODY_BYTES: Final = 2 << 20
# An upload is written to disk as it arrives, and has its own limits.
_UPLOAD: Final = ("POST", "/v1/files")
_METHODS: Final = frozenset({"GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS"})
_METHODS_WITH_BODY: Final = frozenset({"POST", "PUT", "PATCH"})
_DURATION_BUCKETS_S: Final = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 300)
# The ids that the service gives to files, batches and webhook endpoints.
_OWN_ID: Final = re.compile(r"[a-z]+[-_][0-9a-f]{24,32}")
_QUIET_ROUTES: Final = {"/healthz", "/readyz", "/metrics"}
# nginx's status for a request whose client disconnected; it appears only in the log and in metrics.
_CLIENT_CLOSED_REQUEST: Final = 499


@dataclass(slots=True)
class _Exchange:
    """A request and its response so far."""

    request_id: str = field(default_factory=lambda: f"req_{secrets.token_hex(16)}")
    started: float = field(default_factory=time.monotonic)
    status: int = 0
    bytes_in: int = 0
    bytes_out: int = 0


class RequestMiddleware:
    """Give every request an id, a log line and metrics, limit its body, and answer unexpected errors."""

    def __init__(self, app: ASGIApp, registry: CollectorRegistry) -> None:
        self._app = app
        self._uploads_in_flight = Gauge(
            "cloister_uploads_in_flight", "Uploads that are being received or stored.", registry=registry
        )
        self._requests = Counter(
            "cloister_http_requests_total", "Answered requests.", ("method", "route", "status"), registry=registry
        )
        self._durations = Histogram(
            "cloister_http_request_duration_seconds", "From the first byte of a request to the last of its answer.",
            ("method", "route"), buckets=_DURATION_BUCKETS_S, registry=registry,
        )  # fmt: skip
        self._bytes_in = Counter(
            "cloister_http_request_bytes_total", "Bytes of request bodies.", ("route",), registry=registry
        )
        self._bytes_out = Counter(
            "cloister_http_response_bytes_total", "Bytes of response bodies.", ("route",), registry=registry
        )

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one request. A route that reads beyond the limit gets an HTTPException with status 413."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        exchange = _Exchange()
        is_upload = (scope["method"], scope["path"]) == _UPLOAD
        is_limited = scope["method"] in _METHODS_WITH_BODY and not is_upload

        async def counting_receive() -> Message:
            message = await receive()
            if message["type"] == "http.request":
                exchange.bytes_in += len(message.get("body", b""))
            # Before the body fills memory. No route except the upload accepts more.
            if is_limited and exchange.bytes_in > MAX_BODY_BYTES:
                raise HTTPException(413, f"The request body is larger than {MAX_BODY_BYTES >> 20} MiB.")
            return message

        async def counting_send(message: Message) -> None:
            if message["type"] == "http.response.start":
                exchange.status = message["status"]
                MutableHeaders(scope=message)["x-request-id"] = exchange.request_id
            elif message["type"] == "http.response.body":
                exchange.bytes_out += len(message.get("body", b""))
            await send(message)

        scope.setdefault("state", {})["request_id"] = exchange.request_id
        self._uploads_in_flight.inc(is_upload)
        with structlog.contextvars.bound_contextvars(request_id=exchange.request_id):
            try:
                await self._app(scope, counting_receive, counting_send)
            except ClientDisconnect:
                exchange.status = _CLIENT_CLOSED_REQUEST
            except Exception as error:
                # The origin without the message, which may quote a client's content.
                frames = traceback.extract_tb(error.__traceback__)
                cause = error.__cause__ or error.__context__
                _log.error(
                    "unexpected error",
                    error=type(error).__qualname__,
                    cause=type(cause).__qualname__ if cause else None,
                    frames=[f"{frame.filename}:{frame.lineno} {frame.name}" for frame in frames],
                )
                if exchange.status:
                    # A part of the answer was sent: the server must cut the connection so that the client notices.
                    raise
                message = "The server had an error while processing your request. Its log has details under"
                await error_response(ApiError(f"{message} {exchange.request_id}."))(scope, receive, counting_send)
            finally:
                self._uploads_in_flight.dec(is_upload)
                self._record(scope, exchange)

    def _record(self, scope: Scope, exchange: _Exchange) -> None:
        """Count and log a finished request."""
        route = getattr(scope.get("route"), "path", None)
        duration_s = time.monotonic() - exchange.started
        # Without any answer, the client disconnected or this process is stopping.
        status = exchange.status or _CLIENT_CLOSED_REQUEST
        # Unknown methods and paths share one label, so that clients cannot create labels.
        method_label = scope["method"] if scope["method"] in _METHODS else "other"
        route_label = route or "unknown"
        self._requests.labels(method_label, route_label, str(status)).inc()
        self._durations.labels(method_label, route_label).observe(duration_s)
        self._bytes_in.labels(route_label).inc(exchange.bytes_in)
        self._bytes_out.labels(route_label).inc(exchange.bytes_out)
        is_own = route and all(_OWN_ID.fullmatch(str(value)) for value in scope.get("path_params", {}).values())
        state = scope.get("state", {})
        log = _log.debug if route in _QUIET_ROUTES else _log.info
        log(
            "request",
            method=scope["method"],
            route=route,
            # Another path can hold anything, even a key or a prompt.
            path=scope["path"] if is_own else None,
            status=status,
            duration_ms=round(duration_s * 1000, 1),
            bytes_in=exchange.bytes_in,
            bytes_out=exchange.bytes_out,
            key_id=state.get("key_id"),
            project_id=state.get("project_id"),
        )
