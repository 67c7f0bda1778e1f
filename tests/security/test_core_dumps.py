"""Memory of processes that hold prompts: a crash writes none of it to a disk."""

import asyncio
import contextlib
import os
import re
import resource
import signal
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import psutil
import pytest

from ray_job.engines.engine_process import EngineProcess
from tests.ray.job_harness import MakeJob, chat

ECHO_SERVER = str(Path(__file__).parents[1] / "unit" / "echo_engine_server.py")
HARD_LIMIT = resource.getrlimit(resource.RLIMIT_CORE)[1]
WAIT_S = 300


@pytest.fixture(autouse=True)
def _dumps_are_on() -> Iterator[None]:
    before = resource.getrlimit(resource.RLIMIT_CORE)
    if before[1] == 0:
        pytest.skip("this machine writes no core dumps")
    resource.setrlimit(resource.RLIMIT_CORE, (before[1], before[1]))
    yield
    resource.setrlimit(resource.RLIMIT_CORE, before)


def core_limit(pid: int) -> int:
    return resource.prlimit(pid, resource.RLIMIT_CORE)[0]


@pytest.mark.slow
def test_crashed_engine_leaves_no_core_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PYTHONPATH", os.fspath(Path(__file__).parents[2]))

    async def crash() -> set[int]:
        engine = EngineProcess([], program=[ECHO_SERVER])
        try:
            await engine.wait_ready()
            servers = psutil.Process(engine.pid).children(recursive=True)
            limits = {core_limit(server.pid) for server in servers}
            servers[0].send_signal(signal.SIGSEGV)
            while engine.alive():  # noqa: ASYNC110 - a process sets no asyncio.Event
                await asyncio.sleep(0.05)
            return limits
        finally:
            await engine.stop()

    limits = asyncio.run(crash())
    assert (limits, list(tmp_path.iterdir())) == ({0}, [])


# For the direct engine see test_local_stack.py.
@pytest.mark.ray
@pytest.mark.parametrize("engine", ["processor", "serve"])
def test_driver_workers_and_engines_of_a_job_dump_no_core(
    engine: str, make_job: MakeJob, running_ray: dict[str, str]
) -> None:
    # Ray as a machine starts it, with dumps.
    raylets = [each for each in psutil.process_iter(["cmdline"]) if is_raylet(each, running_ray["RAY_ADDRESS"])]
    assert raylets
    for raylet in raylets:
        resource.prlimit(raylet.pid, resource.RLIMIT_CORE, (HARD_LIMIT, HARD_LIMIT))
    before = {each.pid for raylet in raylets for each in raylet.children(recursive=True)}
    job = make_job([chat("Hello")], engine=engine, keep_warm_s=600)
    job = replace(job, environment={**job.environment, **running_ray})
    limits: dict[str, int] = {}
    with job.running() as process:
        end = time.monotonic() + WAIT_S
        while job.coordinator.left and process.poll() is None and time.monotonic() < end:
            # Engines of some kinds end with their work. A worker has its limit before its name.
            for each in (child for raylet in raylets for child in raylet.children(recursive=True)):
                with contextlib.suppress(psutil.Error, ProcessLookupError):
                    name = " ".join(each.cmdline())
                    if each.pid not in before and re.match(
                        "ray::(?!IDLE)|VLLM::|.*ray_job.engines.engine_server", name
                    ):
                        limits[f"{each.pid} {name[:40]}"] = core_limit(each.pid)
            time.sleep(0.2)
        assert job.coordinator.left == 0
        assert core_limit(process.pid) == 0
        job.server.change(drain=True)
        process.communicate(timeout=WAIT_S)
    assert limits
    assert [name for name, limit in limits.items() if limit] == []


def is_raylet(process: psutil.Process, address: str) -> bool:
    command = process.info["cmdline"] or []
    return bool(command) and command[0].endswith("raylet") and any(address in argument for argument in command)
