"""Requests to an ASGI application in this process, without a socket."""

import asyncio
import math
from collections.abc import Awaitable, Callable
from typing import Any

import httpx

from ray_job.engines.deadlines import LineDeadlines, LineSize, LineTimeoutError, generated_tokens
from ray_job.rows import timed_out

ASGIApplication = Callable[[Any, Any, Any], Awaitable[None]]


class ApplicationClient:
    """A client of an application.

    Args:
        application: the application.
        deadlines: the deadlines of the lines that it answers.
    """

    def __init__(self, application: ASGIApplication, deadlines: LineDeadlines | None = None) -> None:
        self._deadlines = deadlines or LineDeadlines()
        self._client = httpx.AsyncClient(
            transport=httpx.ASGITransport(app=disconnecting(application), raise_app_exceptions=False),
            base_url="http://engine",
            timeout=None,  # noqa: S113 - it is for connections; post has a timeout of its own
        )

    async def post(self, path: str, body: str, timeout_s: float, *, tokens: float = math.inf) -> tuple[int, str]:
        """Return the status and the body of a response; see ``timed_out`` for a request without one.

        Args:
            path: the path of the request.
            body: its body, as JSON.
            timeout_s: how long the application may take at most.
            tokens: the most tokens that the request generates.
        """

        async def ask() -> tuple[int, str]:
            response = await self._client.post(
                path, content=body.encode(), headers={"content-type": "application/json"}
            )
            return response.status_code, response.text

        size = LineSize(tokens=tokens, prompt=len(body))
        try:
            return await self._deadlines.answer(
                size, ask, lambda answer: generated_tokens(*answer), ceiling_s=timeout_s
            )
        except LineTimeoutError as error:
            status_code, error_json = timed_out(str(error))
            return status_code, error_json.decode()


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
