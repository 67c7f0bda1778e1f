"""The deployment of the serve engine. Importing it imports Ray Serve's LLM library, which takes many seconds."""

from collections.abc import AsyncIterator
from typing import Any

import httpx
from ray.serve.llm.deployment import LLMServer


class EngineDeployment(LLMServer):  # type: ignore[misc]
    """Ray's LLM server with a method that returns vLLM's own HTTP response to a body.

    Ray's chat method accepts only vLLM's request objects, so an invalid body would never get vLLM's response. This
    method sends the body through vLLM's OpenAI application, in this process and without a socket.
    """

    async def start(self) -> None:
        """Start the engine and build vLLM's application around it."""
        await super().start()
        application = await self.engine.build_asgi_app()
        self._client = httpx.AsyncClient(
            transport=httpx.ASGITransport(app=application, raise_app_exceptions=False),
            base_url="http://engine",
            timeout=None,  # noqa: S113 - the engine is in this process, and a long answer is not a failure
        )

    async def answer(self, request: dict[str, Any]) -> AsyncIterator[dict[str, Any]]:
        """Yield one ``{status_code, response_body}`` for ``{path, body}``."""
        response = await self._client.post(
            request["path"], content=request["body"].encode(), headers={"content-type": "application/json"}
        )
        yield {"status_code": response.status_code, "response_body": response.text}
