"""Ends of jobs name no content: its errors reach the job's log, the batch's events and the status of a RayJob."""

import asyncio
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import aiohttp
import pytest

from ray_job.contract.leases import EndRequest
from ray_job.contract.plans import PlanError, decode_rows
from ray_job.coordinator import HttpCoordinator
from ray_job.engines.engine_process import EngineDiedError, EngineProcess
from ray_job.errors import EngineUnavailableError, JobError, describe_unexpected_error
from ray_job.object_urls import put_object, read_range

CANARY = "CANARY-4711-zebra"
SERVER = (str(Path(__file__).with_name("talkative_engine_server.py")),)


def test_failed_restart_of_an_engine_does_not_quote_what_killed_it() -> None:
    async def run() -> str:
        engine = EngineProcess((), program=SERVER)
        try:
            await engine.wait_ready()
            with pytest.raises(EngineDiedError) as died:
                await engine.post("/v1/completions", CANARY.encode())
            with pytest.raises(EngineUnavailableError) as unavailable:
                await engine.restart()
            return f"{died.value} {unavailable.value}"
        finally:
            await engine.stop()

    message = asyncio.run(run())
    assert "no memory is left" in message
    assert CANARY not in message


class _Echo(BaseHTTPRequestHandler):
    """Answers with the content, as a proxy or a store in trouble might."""

    def do_GET(self) -> None:
        self.send_response(int(self.path.split("/")[1]), CANARY)
        self.send_header("content-type", "application/xml")
        self.end_headers()
        self.wfile.write(f"<Error><Message>{CANARY}</Message></Error>".encode())

    def do_PUT(self) -> None:
        self.rfile.read(int(self.headers["content-length"]))
        self.do_GET()

    def do_POST(self) -> None:
        self.do_PUT()

    def log_message(self, format: str, *args: object) -> None:
        pass


@pytest.fixture
def url() -> Iterator[str]:
    server = ThreadingHTTPServer(("127.0.0.1", 0), _Echo)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    thread.join()
    server.server_close()


@pytest.mark.parametrize("status", [403, 404, 400])
def test_answers_of_the_store_are_not_quoted(url: str, status: int) -> None:
    async def run(*, writes: bool) -> None:
        async with aiohttp.ClientSession() as session:
            if writes:
                await put_object(session, f"{url}/{status}/key?sign=x", CANARY.encode())
            else:
                await read_range(session, f"{url}/{status}/key?sign=x", 0, 10)

    for writes in (False, True):
        with pytest.raises(JobError) as caught:
            asyncio.run(run(writes=writes))
        assert CANARY not in str(caught.value) + describe_unexpected_error(caught.value)


@pytest.mark.parametrize("status", [200, 400, 409])
def test_answers_of_the_coordinator_are_not_quoted(url: str, status: int) -> None:
    async def run() -> None:
        async with HttpCoordinator(f"{url}/{status}", "token") as coordinator:
            await coordinator.end(EndRequest(engine_s=0, busy_s=0))

    with pytest.raises(JobError) as caught:
        asyncio.run(run())
    assert CANARY not in str(caught.value)


@pytest.mark.parametrize(
    "data", [CANARY.encode(), b'{"line":"%s"}\n' % CANARY.encode(), b'{"line":1,"length":9}\nzebra']
)
def test_unreadable_plan_is_not_quoted(data: bytes) -> None:
    with pytest.raises(PlanError) as caught:
        list(decode_rows(data))
    assert "zebra" not in str(caught.value)
