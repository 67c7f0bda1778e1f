"""The deployment of the serve lane. Importing it imports Ray Serve's LLM library, which takes many seconds."""

from collections.abc import AsyncIterator
from typing import Any

import httpx
from ray.serve.llm.deployment import LLMServer


class EngineDeployment(LLMServer):  # type: ignore[misc]
    """Ray's LLM server with one method more: a body in, vLLM's own HTTP answer out.

    Ray's own chat method takes vLLM's request objects, and a body that is no such object never gets vLLM's
    answer to it. So the body goes through vLLM's OpenAI application, in this process, without a socket.
    """

    async def start(self) -> None:
        """Starts the engine and builds vLLM's application around it."""
        await super().start()
        application = await self.engine.build_asgi_app()
        self._client = httpx.AsyncClient(
            transport=httpx.ASGITransport(app=application, raise_app_exceptions=False),
            base_url="http://engine",
            timeout=None,  # noqa: S113 - the engine is in this process; a long answer is no failure
        )

    async def answer(self, request: dict[str, Any]) -> AsyncIterator[dict[str, Any]]:
        """Answers ``{path, body}`` once, with ``{status_code, response_body}``."""
        response = await self._client.post(
            request["path"], content=request["body"].encode(), headers={"content-type": "application/json"}
        )
        yield {"status_code": response.status_code, "response_body": response.text}
