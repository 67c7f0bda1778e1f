"""Posts to an engine server, over a real socket and without an engine."""

import asyncio
import os
import resource
import signal
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import psutil
import pytest

from ray_job.engines.engine_process import EngineDiedError, EngineProcess
from ray_job.errors import EngineUnavailableError

SERVER = str(Path(__file__).with_name("echo_engine_server.py"))
POSTS = 64


@asynccontextmanager
async def running_engine(*options: str) -> AsyncIterator[EngineProcess]:
    engine = EngineProcess(options, program=[SERVER], exit_grace_s=0.2)
    try:
        await engine.wait_ready()
        yield engine
    finally:
        await engine.stop()


async def post_many(engine: EngineProcess) -> list[tuple[int, bytes]]:
    return await asyncio.gather(*(engine.post("/echo", b"%d" % n) for n in range(POSTS)))


ANSWERS = [(200, b"%d" % n) for n in range(POSTS)]


@pytest.mark.slow
def test_server_keeps_connections_while_the_caller_stalls() -> None:
    async def run() -> None:
        async with running_engine() as engine:
            assert await post_many(engine) == ANSWERS
            (server,) = psutil.Process(engine.pid).children()
            open_files = server.num_fds()
            time.sleep(6)  # noqa: ASYNC251 - the caller's event loop stalls; uvicorn's default is 5 s
            assert server.num_fds() == open_files
            assert await post_many(engine) == ANSWERS

    asyncio.run(run())


def test_limit_of_open_files_does_not_limit_the_requests_in_flight() -> None:
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (256, limits[1]))

    async def run() -> None:
        async with running_engine() as engine:
            answers = await asyncio.gather(*(engine.post("/echo", b"x") for _ in range(600)))
            assert answers == [(200, b"x")] * 600

    try:
        asyncio.run(run())
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)


def test_posts_on_connections_that_the_server_closed_are_answered() -> None:
    async def run() -> None:
        async with running_engine("0.3") as engine:
            await post_many(engine)
            time.sleep(1)  # noqa: ASYNC251 - the server closes its connections, and this loop does not notice
            assert await post_many(engine) == ANSWERS

    asyncio.run(run())


@pytest.mark.parametrize("parent", [False, True], ids=["server", "its parent"])
def test_killed_engine_raises_and_starts_again(parent: bool) -> None:
    async def run() -> None:
        async with running_engine() as engine:
            (server,) = psutil.Process(engine.pid).children()
            post = asyncio.create_task(engine.post("/sleep", b"{}"))
            await asyncio.sleep(0.2)
            os.kill(engine.pid if parent else server.pid, signal.SIGKILL)
            with pytest.raises(EngineDiedError):
                await post
            assert not engine.alive()
            await engine.restart()
            assert not server.is_running() or server.status() == psutil.STATUS_ZOMBIE
            assert await engine.post("/echo", b"again") == (200, b"again")

    asyncio.run(run())


def test_engine_ends_with_its_caller() -> None:
    async def run() -> None:
        engine = EngineProcess([], program=[SERVER])
        await engine.wait_ready()
        (server,) = psutil.Process(engine.pid).children()
        await engine.stop()
        assert not server.is_running()
        assert not engine.directory.exists()

    asyncio.run(run())


def test_post_is_not_repeated_after_half_an_answer() -> None:
    async def run() -> None:
        async with running_engine() as engine:
            with pytest.raises(EngineDiedError):
                await engine.post("/half", b"{}")
            assert engine.alive()
            assert (engine.directory / "halves").read_text() == "x"

    asyncio.run(run())


CORE_LOG = """\
(EngineCore pid=628) INFO 11-21 17:50:34 [core.py:133] Initializing a V1 LLM engine
(EngineCore pid=628) ERROR 11-21 17:50:36 [core.py:1510] Traceback (most recent call last):
(EngineCore pid=628) ERROR 11-21 17:50:36 [core.py:1510] AttributeError: no attribute 'init_cpu_memory_env'
"""
FAILED = "RuntimeError: Engine core initialization failed. See root cause above."


@pytest.mark.parametrize(
    ("log", "end"),
    [
        (CORE_LOG + FAILED, "source and engine_args: AttributeError: no attribute 'init_cpu_memory_env'"),
        (FAILED, "source and engine_args"),
    ],
)
def test_failed_start_is_reported_with_the_last_error_of_the_engine_core(log: str, end: str) -> None:
    async def run() -> None:
        engine = EngineProcess([], program=["-c", "import sys; sys.exit(sys.argv[1])", log])
        try:
            with pytest.raises(EngineUnavailableError, match=FAILED) as caught:
                await engine.wait_ready()
            assert str(caught.value).endswith(end)
        finally:
            await engine.stop()

    asyncio.run(run())
