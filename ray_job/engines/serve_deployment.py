"""The deployment of the serve engine. Importing it imports Ray Serve's LLM library, which takes many seconds."""

from collections.abc import AsyncIterator
from typing import Any

from ray.serve.llm.deployment import LLMServer

from ray_job.engines.application_client import ApplicationClient


class EngineDeployment(LLMServer):  # type: ignore[misc]
    """Ray's LLM server with a method that returns vLLM's own HTTP response to a body.

    Ray's chat method accepts only vLLM's request objects, so an invalid body would never get vLLM's response. This
    method sends the body through vLLM's OpenAI application, in this process and without a socket.
    """

    async def start(self) -> None:
        """Start the engine and build vLLM's application around it."""
        await super().start()
        self._client = ApplicationClient(await self.engine.build_asgi_app())

    async def answer(self, request: dict[str, Any]) -> AsyncIterator[dict[str, Any]]:
        """Yield one ``{status_code, response_body}`` for ``{path, body, timeout_s, tokens}``."""
        timeout_s, tokens = request["timeout_s"], request["tokens"]
        status_code, body = await self._client.post(request["path"], request["body"], timeout_s, tokens=tokens)
        yield {"status_code": status_code, "response_body": body}
