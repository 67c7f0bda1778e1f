"""The outermost layer: a request id on every answer, one log line per request, and an answer to unforeseen errors."""

import secrets
import time
import traceback
from typing import Final

import structlog
from starlette.datastructures import MutableHeaders
from starlette.requests import ClientDisconnect
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from service.api.error_mapping import error_response
from service.errors import ApiError

_log = structlog.get_logger(__name__)

_QUIET_PATHS: Final = {"/healthz", "/readyz"}
# What nginx calls a request whose client went away; nobody gets to see it but the log.
_CLIENT_CLOSED_REQUEST: Final = 499


class RequestLog:
    """ASGI middleware around the whole application."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serves one request."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        request_id = f"req_{secrets.token_hex(16)}"
        started = time.monotonic()
        status = 0

        async def send_with_id(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                MutableHeaders(scope=message)["x-request-id"] = request_id
            await send(message)

        with structlog.contextvars.bound_contextvars(request_id=request_id):
            try:
                await self._app(scope, receive, send_with_id)
            except ClientDisconnect:
                status = _CLIENT_CLOSED_REQUEST
            except Exception as error:
                _log_unforeseen(error)
                if status:
                    # Half an answer is out: the server must cut the connection, so that the client notices.
                    raise
                await error_response(_unforeseen(request_id))(scope, receive, send_with_id)
            finally:
                log = _log.debug if scope["path"] in _QUIET_PATHS else _log.info
                log(
                    "request",
                    method=scope["method"],
                    path=scope["path"],
                    status=status,
                    duration_ms=round((time.monotonic() - started) * 1000, 1),
                    project_id=scope.get("state", {}).get("project_id"),
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
