"""Requests to an ASGI application in this process, without a socket."""

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import httpx

from ray_job.rows import timed_out

ASGIApplication = Callable[[Any, Any, Any], Awaitable[None]]


class ApplicationClient:
    """A client of an application.

    Args:
        application: the application.
    """

    def __init__(self, application: ASGIApplication) -> None:
        self._client = httpx.AsyncClient(
            transport=httpx.ASGITransport(app=disconnecting(application), raise_app_exceptions=False),
            base_url="http://engine",
            timeout=None,  # noqa: S113 - it is for connections; post has a timeout of its own
        )

    async def post(self, path: str, body: str, timeout_s: float) -> tuple[int, str]:
        """Return the status and the body of a response; see ``timed_out`` for a request without one.

        Args:
            path: the path of the request.
            body: its body, as JSON.
            timeout_s: how long the application may take.
        """
        try:
            async with asyncio.timeout(timeout_s):
                response = await self._client.post(
                    path, content=body.encode(), headers={"content-type": "application/json"}
                )
        except TimeoutError:
            status_code, error = timed_out(timeout_s)
            return status_code, error.decode()
        return response.status_code, response.text


def disconnecting(application: ASGIApplication) -> ASGIApplication:
    """Wrap an application so that it receives a disconnect when its caller is cancelled, as it does on a socket.

    vLLM runs the handler of a request as a task of its own, which it cancels on a disconnect only.
    """

    async def wrapped(scope: Any, receive: Any, send: Any) -> None:
        over = asyncio.Event()
        is_read = False

        async def receive_until_over() -> Any:
            nonlocal is_read
            if is_read:
                await over.wait()
                return {"type": "http.disconnect"}
            message = await receive()
            is_read = not message.get("more_body", False)
            return message

        try:
            await asyncio.shield(application(scope, receive_until_over, send))
        finally:
            over.set()

    return wrapped
