"""Keeps a request body out of memory that is larger than any route but the upload takes."""

from typing import Final

from starlette.exceptions import HTTPException
from starlette.types import ASGIApp, Message, Receive, Scope, Send

MAX_BODY_BYTES: Final = 2 << 20
# An upload goes to disk as it comes in, and has limits of its own.
_UPLOAD: Final = ("POST", "/v1/files")
_WITH_BODY: Final = frozenset({"POST", "PUT", "PATCH"})


class BodyLimit:
    """ASGI middleware around the routes; a route that reads too much gets an HTTPException, which is mapped as any."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serves one request; 413 once its body is over the limit."""
        is_limited = (
            scope["type"] == "http" and scope["method"] in _WITH_BODY and (scope["method"], scope["path"]) != _UPLOAD
        )
        await self._app(scope, _limited(receive) if is_limited else receive, send)


def _limited(receive: Receive) -> Receive:
    received = 0

    async def limited() -> Message:
        nonlocal received
        message = await receive()
        received += len(message.get("body", b""))
        if received > MAX_BODY_BYTES:
            raise HTTPException(413, f"The request body is larger than {MAX_BODY_BYTES >> 20} MiB.")
        return message

    return limited
