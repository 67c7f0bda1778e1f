"""Requests that an engine never answers, with real servers instead of engines."""

import asyncio
import contextlib
import json
import socket
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web

from ray_job.contract.job_spec import ModelSpec
from ray_job.contract.leases import SegmentRef
from ray_job.engines import http
from ray_job.engines.application_client import ApplicationClient
from ray_job.engines.deadlines import LineDeadlines, ceiling_message
from ray_job.engines.direct import DirectEngine
from ray_job.engines.engine_process import EngineProcess
from ray_job.engines.http import EndpointSession
from ray_job.engines.row_window import Answer, RowWindow
from ray_job.errors import EngineUnavailableError
from ray_job.rows import NO_RESPONSE, Request, part_row, timed_out

SERVER = str(Path(__file__).with_name("echo_engine_server.py"))
TIMEOUT_S = 0.5
HOUR_S = 3_600.0
LINES = range(1, 21)
UNANSWERED = 7


def test_unanswered_request_becomes_an_error_line_without_a_response() -> None:
    row = part_row("batch_1", 1, "a", *timed_out(ceiling_message(3_600)))
    assert row.outcome == "failed"
    parsed = json.loads(row.data)
    assert (parsed["custom_id"], parsed["response"]) == ("a", None)
    assert parsed["error"] == {
        "code": "request_timeout",
        "message": "The engine did not answer this request within 3,600 s. Lower max_tokens, or have request_timeout_s "
        "of the model raised, and send the line again.",
    }


def quick_deadlines() -> LineDeadlines:
    return LineDeadlines(floor_s=TIMEOUT_S, check_interval_s=0.05)


@pytest.mark.parametrize(
    ("ceiling_s", "deadlines", "error"),
    [(TIMEOUT_S, LineDeadlines(), "within 0.5 s"), (HOUR_S, quick_deadlines(), "twice")],
)
def test_direct_engine_gives_up_only_the_request_that_is_never_answered(
    ceiling_s: float, deadlines: LineDeadlines, error: str
) -> None:
    model = ModelSpec(id="m", source="m", request_timeout_s=ceiling_s)
    segment = SegmentRef(batch_id="batch_1", segment=0, epoch=1)
    answers: dict[int, Answer] = {}

    async def finish(request: Request, answer: Answer) -> None:
        answers[request.line] = answer

    async def run() -> None:
        engine = DirectEngine(model, deadlines)
        process = engine._process = EngineProcess([], program=[SERVER])
        try:
            await process.wait_ready()
            window = RowWindow(engine, finish, rows=4, sequences=4, ahead=100)
            working = asyncio.create_task(window.run())
            await window.add(
                [
                    Request(
                        segment=segment,
                        row=n,
                        line=n,
                        custom_id=f"r{n}",
                        url="/sleep" if n == UNANSWERED else "/echo",
                        body=b"{}",
                        tokens=1,
                    )
                    for n in LINES
                ]
            )
            async with asyncio.timeout(10):
                while len(answers) < len(LINES):  # noqa: ASYNC110 - the window reports each answer by a call
                    await asyncio.sleep(0.01)
            working.cancel()
            assert process.alive()
            async with asyncio.timeout(10):
                while not (process.directory / "disconnected").exists():  # noqa: ASYNC110 - another process creates it
                    await asyncio.sleep(0.01)
        finally:
            await process.stop()

    asyncio.run(run())
    status_code, body = answers.pop(UNANSWERED)
    assert (status_code, json.loads(body)["code"], error in json.loads(body)["message"]) == (0, "request_timeout", True)
    assert answers == dict.fromkeys(set(LINES) - {UNANSWERED}, (200, b"{}"))


@pytest.mark.parametrize(("ceiling_s", "deadlines"), [(TIMEOUT_S, LineDeadlines()), (HOUR_S, quick_deadlines())])
def test_http_engine_gives_up_only_the_request_that_is_never_answered(
    free_tcp_port: int, ceiling_s: float, deadlines: LineDeadlines
) -> None:
    over = asyncio.Event()

    async def answer(request: web.Request) -> web.Response:
        if request.path == "/v1/sleep":
            await over.wait()
        return web.json_response({"path": request.path})

    async def run() -> list[dict[str, object]]:
        app = web.Application()
        app.router.add_post("/{path:.*}", answer)
        runner = web.AppRunner(app)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", free_tcp_port).start()
        try:
            async with EndpointSession(f"http://127.0.0.1:{free_tcp_port}/v1", ceiling_s, deadlines) as session:
                posts = [
                    session.post("", headers={}, data=json.dumps({"path": path, "body": "{}", "tokens": 1}))
                    for path in ("/v1/sleep", *["/v1/echo"] * len(LINES))
                ]
                return [await (await post).json() for post in posts]
        finally:
            over.set()
            await runner.cleanup()

    unanswered, *answered = asyncio.run(run())
    assert [each["status_code"] for each in answered] == [200] * len(LINES)
    assert unanswered["status_code"] == NO_RESPONSE
    assert json.loads(str(unanswered["response_body"]))["code"] == "request_timeout"


@pytest.mark.parametrize(
    ("ceiling_s", "deadlines", "error"),
    [(TIMEOUT_S, LineDeadlines(), "within 0.5 s"), (HOUR_S, quick_deadlines(), "twice")],
)
def test_application_gives_up_only_the_request_that_is_never_answered(
    ceiling_s: float, deadlines: LineDeadlines, error: str
) -> None:
    disconnected = asyncio.Event()

    async def answer(scope: Any, receive: Any, send: Any) -> None:
        body, more = b"", True
        while more:
            message = await receive()
            body, more = body + message["body"], message["more_body"]
        if scope["path"] == "/sleep":
            # As vLLM does: the handler waits in a task of its own.
            listening = asyncio.create_task(receive())
            await asyncio.wait({listening})
            assert listening.result() == {"type": "http.disconnect"}
            disconnected.set()
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": body})

    async def run() -> list[Any]:
        client = ApplicationClient(answer, deadlines)
        paths = ("/sleep", *["/echo"] * len(LINES))
        answers = await asyncio.gather(*(client.post(path, '{"a": 1}', ceiling_s, tokens=1) for path in paths))
        async with asyncio.timeout(10):
            await disconnected.wait()
        return answers

    (status_code, body), *answered = asyncio.run(run())
    assert (status_code, error in json.loads(body)["message"]) == (NO_RESPONSE, True)
    assert answered == [(200, '{"a": 1}')] * len(LINES)


def test_endpoint_that_accepts_no_connection_is_unavailable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http, "FIRST_PAUSE_S", 0)
    monkeypatch.setattr(http, "CONNECT_TIMEOUT_S", 0.05)

    async def run(port: int) -> None:
        async with EndpointSession(f"http://127.0.0.1:{port}/v1", TIMEOUT_S) as session:
            await session.post("", headers={}, data=json.dumps({"path": "/v1/echo", "body": "{}"}))

    with socket.create_server(("127.0.0.1", 0), backlog=0) as server, contextlib.ExitStack() as closing:
        for _ in range(4):  # nobody accepts them, so that further ones are left without an answer
            waiting = closing.enter_context(socket.socket())
            waiting.setblocking(False)
            waiting.connect_ex(server.getsockname())
        with pytest.raises(EngineUnavailableError, match=r"did not answer 6 times \(ConnectionTimeoutError"):
            asyncio.run(run(server.getsockname()[1]))
