"""An endpoint of the http engine that sends prompts elsewhere, and an API key that is lost."""

import asyncio
import json
from pathlib import Path

import pytest
from aiohttp import web

from ray_job.engines.http import API_KEY_FILE_VARIABLE, API_KEY_VARIABLE, EndpointSession, api_key
from ray_job.errors import EngineUnavailableError
from tests.infra.ray_job_args import model, pods, rayjob

PROMPT = "canary"


@pytest.mark.parametrize("status", [301, 302, 303, 307, 308])
def test_prompt_is_not_sent_to_the_target_of_a_redirect(
    status: int, free_tcp_port: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(API_KEY_VARIABLE, "sk-canary")
    received: list[str] = []

    async def answer(request: web.Request) -> web.Response:
        if request.path == "/stolen":
            received.append(await request.text())
            return web.json_response({})
        return web.Response(status=status, headers={"location": "/stolen?sk-in-the-target"})

    async def run() -> None:
        app = web.Application()
        app.router.add_route("*", "/{path:.*}", answer)
        runner = web.AppRunner(app)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", free_tcp_port).start()
        try:
            async with EndpointSession(f"http://127.0.0.1:{free_tcp_port}/v1", 5) as session:
                payload = {"path": "/v1/completions", "body": json.dumps({"prompt": PROMPT})}
                await session.post("", headers={}, data=json.dumps(payload))
        finally:
            await runner.cleanup()

    with pytest.raises(EngineUnavailableError, match=rf"/v1/completions answers {status}.*base_url") as caught:
        asyncio.run(run())
    assert received == []
    assert PROMPT not in str(caught.value)
    assert "sk-" not in str(caught.value)


@pytest.mark.parametrize("content", [None, "", "\n"])
def test_lost_key_is_an_error_and_not_a_request_without_a_key(content: str | None, tmp_path: Path) -> None:
    path = tmp_path / "api_key"
    if content is not None:
        path.write_text(content)
    with pytest.raises(EngineUnavailableError, match=r"CLOISTER_HTTP_ENGINE_API_KEY_FILE.*http_engine_api_key"):
        api_key({API_KEY_FILE_VARIABLE: str(path)})


def test_unreadable_key_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(EngineUnavailableError, match="http_engine_api_key"):
        api_key({API_KEY_FILE_VARIABLE: str(tmp_path)})


@pytest.mark.parametrize("has_key", [False, True])
def test_worker_waits_for_the_key_that_the_stack_has(*, has_key: bool) -> None:
    pod = pods(rayjob(model(engine="http", base_url="http://10.0.0.1/v1"), has_http_engine_key=has_key))["cpu"]["spec"]
    volumes = [volume["secret"] for volume in pod["volumes"] if volume["name"] == "http-engine"]
    variables = {variable["name"] for variable in pod["containers"][0]["env"]}
    assert (API_KEY_FILE_VARIABLE in variables) == has_key
    assert [volume.get("optional", False) for volume in volumes] == [False] * has_key
