"""The outermost layer: a request id, a log line and measures for every request, and an answer to unforeseen errors."""

import secrets
import time
import traceback
from dataclasses import dataclass, field
from typing import Final

import structlog
from starlette.datastructures import MutableHeaders
from starlette.requests import ClientDisconnect
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from service.api.error_mapping import error_response
from service.api.metrics import FinishedRequest, Metrics
from service.errors import ApiError

_log = structlog.get_logger(__name__)

_QUIET_ROUTES: Final = {"/healthz", "/readyz", "/metrics"}
# What nginx calls a request whose client went away; nobody gets to see it but the log.
_CLIENT_CLOSED_REQUEST: Final = 499


@dataclass(slots=True)
class _Exchange:
    """A request and its answer, as far as they got."""

    request_id: str = field(default_factory=lambda: f"req_{secrets.token_hex(16)}")
    started: float = field(default_factory=time.monotonic)
    status: int = 0
    bytes_in: int = 0
    bytes_out: int = 0

    def note_received(self, message: Message) -> None:
        """Counts what the client sent."""
        if message["type"] == "http.request":
            self.bytes_in += len(message.get("body", b""))

    def note_sent(self, message: Message) -> None:
        """Puts the request id on the answer, and counts what is sent."""
        if message["type"] == "http.response.start":
            self.status = message["status"]
            MutableHeaders(scope=message)["x-request-id"] = self.request_id
        elif message["type"] == "http.response.body":
            self.bytes_out += len(message.get("body", b""))


class RequestLog:
    """ASGI middleware around the whole application."""

    def __init__(self, app: ASGIApp, metrics: Metrics) -> None:
        self._app = app
        self._metrics = metrics

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serves one request."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        exchange = _Exchange()

        async def counted_receive() -> Message:
            message = await receive()
            exchange.note_received(message)
            return message

        async def counted_send(message: Message) -> None:
            exchange.note_sent(message)
            await send(message)

        is_upload = scope["method"] == "POST" and scope["path"] == "/v1/files"
        self._metrics.uploads_in_flight.inc(is_upload)
        with structlog.contextvars.bound_contextvars(request_id=exchange.request_id):
            try:
                await self._app(scope, counted_receive, counted_send)
            except ClientDisconnect:
                exchange.status = _CLIENT_CLOSED_REQUEST
            except Exception as error:
                _log_unforeseen(error)
                if exchange.status:
                    # Half an answer is out: the server must cut the connection, so that the client notices.
                    raise
                await error_response(_unforeseen(exchange.request_id))(scope, receive, counted_send)
            finally:
                self._metrics.uploads_in_flight.dec(is_upload)
                self._finish(scope, exchange)

    def _finish(self, scope: Scope, exchange: _Exchange) -> None:
        route = getattr(scope.get("route"), "path", None)
        duration_s = time.monotonic() - exchange.started
        # No answer at all: the client went away, or this process is ending.
        status = exchange.status or _CLIENT_CLOSED_REQUEST
        self._metrics.observe(
            FinishedRequest(
                method=scope["method"],
                route=route,
                status=status,
                duration_s=duration_s,
                bytes_in=exchange.bytes_in,
                bytes_out=exchange.bytes_out,
            )
        )
        state = scope.get("state", {})
        log = _log.debug if route in _QUIET_ROUTES else _log.info
        log(
            "request",
            method=scope["method"],
            route=route,
            # A path that no route has can hold anything, even a key.
            path=scope["path"] if route else None,
            status=status,
            duration_ms=round(duration_s * 1000, 1),
            bytes_in=exchange.bytes_in,
            bytes_out=exchange.bytes_out,
            key_id=state.get("key_id"),
            project_id=state.get("project_id"),
        )


def _unforeseen(request_id: str) -> ApiError:
    return ApiError(f"The server had an error while it processed your request. Its log tells more at {request_id}.")


def _log_unforeseen(error: BaseException) -> None:
    """Logs where an error came from, but not its message, which may quote what a client sent."""
    frames = [f"{frame.filename}:{frame.lineno} {frame.name}" for frame in traceback.extract_tb(error.__traceback__)]
    cause = error.__cause__ or error.__context__
    _log.error(
        "unforeseen error",
        error=type(error).__qualname__,
        cause=type(cause).__qualname__ if cause else None,
        frames=frames,
    )
