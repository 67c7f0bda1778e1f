"""One run of each of the three: ``(Setup, run number) -> Result``."""

import json
import os
import re
import secrets
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

import openai

from ray_job.contract.job_spec import ModelSpec
from ray_job.engines.engine_args import effective_engine_args, engine_flags
from service.local.models import detect_accelerator
from tests.bench.measure import MARK, Progress, Result, watch_memory

MODEL_ID = "bench"
POLL_S = 0.1
# As often as progress is reported; each poll costs the two cores a request that is not part of the work.
BATCH_POLL_S = 0.5
START_TIMEOUT_S = 180
STOP_TIMEOUT_S = 60
TQDM_COUNT = re.compile(rb"Running batch:.*?(\d+)/\d+")


@dataclass(frozen=True, slots=True, kw_only=True)
class Setup:
    """What all runs share."""

    lines: int
    model: str
    workload: Path
    directory: Path
    engine_args: Mapping[str, Any]

    @property
    def spec(self) -> ModelSpec:
        """The model as cloister's job is told."""
        return ModelSpec(id=MODEL_ID, source=self.model, engine_args=self.engine_args, accelerator=detect_accelerator())


def run_batch(setup: Setup, run: int) -> Result:
    """vLLM's run_batch; rows are counted by its progress bar."""
    output = setup.directory / f"run_batch-{run}.jsonl"
    options = engine_flags(effective_engine_args(setup.spec))
    program = ["-m", "vllm.entrypoints.openai.run_batch", "-i", str(setup.workload), "-o", str(output), *options]
    environment, token = _environment()
    progress = Progress(lines=setup.lines)
    with watch_memory(token) as memory, _process(program, environment, setup, f"run_batch-{run}") as process:
        reader = threading.Thread(target=_follow_bar, args=(process.stderr, progress), daemon=True)
        reader.start()
        _finish(process, f"run_batch-{run}", setup)
        total_s = time.monotonic() - progress.start
        reader.join()
    _check_lines(output, setup.lines)
    return _result("run_batch", run, total_s, progress, memory.peak_mb)


def stock(setup: Setup, run: int) -> Result:
    """The stock script; rows are counted in its output file."""
    output = setup.directory / f"stock-{run}.jsonl"
    script = Path(__file__).with_name("stock_ray_data_llm.py")
    arguments = {name: value for name, value in effective_engine_args(setup.spec).items() if name not in _GIVEN_APART}
    program = [str(script), str(setup.workload), str(output), setup.model, json.dumps(arguments)]
    environment, token = _environment()
    progress = Progress(lines=setup.lines)
    with watch_memory(token) as memory, _process(program, environment, setup, f"stock-{run}") as process:
        while process.poll() is None:
            time.sleep(POLL_S)
            progress.note(output.read_bytes().count(b"\n") if output.exists() else 0)
        _finish(process, f"stock-{run}", setup)
        total_s = time.monotonic() - progress.start
    _check_lines(output, setup.lines)
    return _result("stock", run, total_s, progress, memory.peak_mb)


def cloister(setup: Setup, run: int) -> Result:
    """A new ``cloister local`` with a new Ray; rows are counted by the batch's request_counts."""
    environment, token = _environment()
    data = setup.directory / f"cloister-{run}"
    shutil.rmtree(data, ignore_errors=True)
    program = ["-m", "service.cli", "local", "--data-dir", str(data), "--port", str(_free_port())]
    program += ["--model", setup.model, "--model-id", MODEL_ID]
    for name, value in setup.engine_args.items():
        program += ["--engine-arg", f"{name}={value if isinstance(value, str) else json.dumps(value)}"]
    with watch_memory(token) as memory, _process(program, environment, setup, f"cloister-{run}") as process:
        client = _client(data, process, setup, run)
        uploaded = client.files.create(file=setup.workload, purpose="batch")
        progress = Progress(lines=setup.lines)
        batch = client.batches.create(
            input_file_id=uploaded.id, endpoint="/v1/chat/completions", completion_window="24h"
        )
        while batch.status not in ("completed", "failed", "expired", "cancelled"):
            time.sleep(BATCH_POLL_S)
            batch = client.batches.retrieve(batch.id)
            if batch.request_counts is not None:
                progress.note(batch.request_counts.completed)
        total_s = time.monotonic() - progress.start
        if batch.status != "completed" or batch.request_counts is None or batch.request_counts.failed:
            raise RuntimeError(f"the batch ended as {batch.status}: {batch.request_counts} {batch.errors}")
    return _result("cloister", run, total_s, progress, memory.peak_mb)


RUNNERS: Mapping[str, Callable[[Setup, int], Result]] = {"run_batch": run_batch, "stock": stock, "cloister": cloister}

# The stock script takes these as arguments of its own.
_GIVEN_APART = ("model", "served_model_name")


def _result(runner: str, run: int, total_s: float, progress: Progress, peak_mb: float) -> Result:
    return Result(
        runner=runner,
        run=run,
        total_s=round(total_s, 2),
        first_row_s=round(progress.first_row_s(), 2),
        rows_per_s=round(progress.rows_per_s(), 1),
        peak_mb=round(peak_mb),
    )


def _free_port() -> int:
    with socket.socket() as opened:
        opened.bind(("127.0.0.1", 0))
        return int(opened.getsockname()[1])


def _environment() -> tuple[dict[str, str], str]:
    token = secrets.token_hex(8)
    quiet = {
        "RAY_USAGE_STATS_ENABLED": "0",
        "VLLM_NO_USAGE_STATS": "1",
        "DO_NOT_TRACK": "1",
        # Ray and vLLM rename their processes; without this that overwrites the environment with the mark.
        "SPT_NOENV": "1",
        "VLLM_CPU_KVCACHE_SPACE": os.environ.get("VLLM_CPU_KVCACHE_SPACE", "1"),
    }
    # Without compiled bytecode imports take twice as long, in all three.
    inherited = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
    return {**inherited, **quiet, MARK: token}, token


@contextmanager
def _process(
    arguments: list[str], environment: Mapping[str, str], setup: Setup, name: str
) -> "Iterator[subprocess.Popen[bytes]]":
    with (setup.directory / f"{name}.log").open("wb") as log:
        process = subprocess.Popen(
            [sys.executable, *arguments],
            env=dict(environment),
            stdout=log,
            stderr=subprocess.PIPE if name.startswith("run_batch") else log,
            start_new_session=True,
        )
        try:
            yield process
        finally:
            if process.poll() is None:
                process.send_signal(signal.SIGTERM)
                process.wait(STOP_TIMEOUT_S)


def _finish(process: "subprocess.Popen[bytes]", name: str, setup: Setup) -> None:
    if process.wait() != 0:
        raise RuntimeError(f"{name} ended with {process.returncode}; see {setup.directory / f'{name}.log'}")


def _follow_bar(stream: "IO[bytes] | None", progress: Progress) -> None:
    if stream is None:
        return
    tail = b""
    while chunk := os.read(stream.fileno(), 65_536):
        *_, tail = (tail + chunk)[-4_096:].rpartition(b"\n")
        for count in TQDM_COUNT.findall(chunk):
            progress.note(int(count))


def _check_lines(output: Path, lines: int) -> None:
    found = output.read_bytes().count(b"\n")
    if found != lines:
        raise RuntimeError(f"{output} has {found} lines instead of {lines}")


def _client(data: Path, process: "subprocess.Popen[bytes]", setup: Setup, run: int) -> openai.OpenAI:
    path, deadline = data / "client.env", time.monotonic() + START_TIMEOUT_S
    while time.monotonic() < deadline and process.poll() is None:
        values = dict(line.split("=", 1) for line in path.read_text().splitlines()) if path.exists() else {}
        if values:
            client = openai.OpenAI(base_url=values["OPENAI_BASE_URL"], api_key=values["OPENAI_API_KEY"])
            try:
                client.models.list()
            except openai.APIError:
                time.sleep(POLL_S)
            else:
                return client
        time.sleep(POLL_S)
    raise RuntimeError(f"cloister local did not start; see {setup.directory / f'cloister-{run}.log'}")
