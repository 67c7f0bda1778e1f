"""The runners. Each is a function ``(Setup, run number) -> Result``."""

import dataclasses
import json
import os
import re
import shutil
import subprocess
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any

import openai
import yaml
from openai.types import Batch

from ray_job.contract.job_spec import ModelSpec
from ray_job.engines.engine_args import effective_engine_args, engine_flags
from service.local.models import detect_accelerator
from tests.bench.figures import between, device_figures
from tests.bench.measure import Progress, Result, Usage, watch_processes
from tests.bench.processes import LineCounter, finish, free_port, run_environment, running
from tests.bench.simulated_gpu.device_report import read_reports
from tests.bench.simulation import Simulation
from tests.bench.workloads import CHAT, WORKLOADS

MODEL_ID = "bench"
POLL_S = 0.1
# As often as progress is reported. Each poll costs CPU time that is not part of the work.
BATCH_POLL_S = 0.5
START_TIMEOUT_S = 180
TQDM_COUNT = re.compile(rb"Running batch:.*?(\d+)/\d+")


@dataclass(frozen=True, slots=True, kw_only=True)
class Setup:
    """Settings that all runners of a case share.

    Attributes:
        case: the name of the case in results.
        lines: lines of the file.
        model: a directory or a model id of vLLM.
        workload: the name of the workload.
        input: the file.
        directory: where outputs, logs and reports go.
        engine_args: vLLM's arguments; on a simulated GPU, in addition to those of the simulation.
        simulation: the simulated GPU; None to use this machine's device.
        model_settings: settings of the model in cloister's catalogue.
        is_warm: whether cloister runs the same batch once before.
    """

    case: str
    lines: int
    model: str
    workload: str
    input: Path
    directory: Path
    engine_args: Mapping[str, Any]
    simulation: Simulation | None = None
    model_settings: Mapping[str, Any] = field(default_factory=dict)
    is_warm: bool = False

    def arguments(self, report: Path, runner: str) -> dict[str, Any]:
        """Return the engine arguments of a run whose devices write their reports to a directory."""
        if self.simulation is None:
            return dict(self.engine_args)
        return {**self.simulation.engine_args(WORKLOADS[self.workload], report, runner=runner), **self.engine_args}

    def effective_arguments(self, report: Path, runner: str) -> dict[str, Any]:
        """Return the engine arguments as cloister passes them to vLLM, which all runners share."""
        arguments = self.arguments(report, runner)
        spec = ModelSpec(id=MODEL_ID, source=self.model, engine_args=arguments, accelerator=detect_accelerator().name)
        return effective_engine_args(spec)


class Run:
    """One run of one runner: its files, its progress and its result."""

    def __init__(self, setup: Setup, runner: str, number: int) -> None:
        self.setup = setup
        self.runner = runner
        self._number = number
        self.path = setup.directory / f"{setup.case}-{runner}-{number}"
        self.output = self.path.with_suffix(".jsonl")
        self.log = self.path.with_suffix(".log")
        self.report = self.path.with_suffix(".devices")
        shutil.rmtree(self.report, ignore_errors=True)
        self.output.unlink(missing_ok=True)
        self.environment, self.token = run_environment()
        self.progress = Progress(lines=setup.lines)

    def result(self, total_s: float, usage: Usage) -> Result:
        """Return the result."""
        reports = read_reports(self.report)
        engines = int(self.setup.model_settings.get("concurrency", 1))
        device = device_figures(reports, engines=engines) if reports else None
        cpu_ms = None
        if reports:
            starts_at = min(report.first_step_at for report in reports)
            ends_at = max(report.last_step_ends_at for report in reports)
            cpu_ms = round(1000 * between(usage.cpu_s, starts_at, ends_at) / self.setup.lines, 1)
        return Result(
            runner=self.runner,
            run=self._number,
            case=self.setup.case,
            lines=self.setup.lines,
            total_s=round(total_s, 2),
            first_row_s=round(self.progress.first_row_s(), 2),
            rows_per_s=round(self.progress.rows_per_s(), 1),
            peak_mb=round(usage.peak_mb),
            cpu_ms_per_row=cpu_ms,
            device=device,
        )

    def check_output(self) -> None:
        """Check that the output has a line for each line of the input.

        Raises:
            RuntimeError: lines are missing.
        """
        found = self.output.read_bytes().count(b"\n")
        if found != self.setup.lines:
            raise RuntimeError(f"{self.output} has {found} lines instead of {self.setup.lines}")


def run_batch(setup: Setup, number: int) -> Result:
    """Run vLLM's run_batch and count rows by its progress bar."""
    run = Run(setup, "run_batch", number)
    options = engine_flags(setup.effective_arguments(run.report, run.runner))
    program = ["-m", "vllm.entrypoints.openai.run_batch", "-i", str(setup.input), "-o", str(run.output), *options]
    run.progress = Progress(lines=setup.lines)
    with (
        watch_processes(run.token) as usage,
        running(program, run.environment, run.log, stderr=subprocess.PIPE) as process,
    ):
        reader = threading.Thread(target=_follow_bar, args=(process.stderr, run.progress, run.log), daemon=True)
        reader.start()
        finish(process, run.log)
        total_s = time.monotonic() - run.progress.start
        reader.join()
    run.check_output()
    return run.result(total_s, usage)


def limit(setup: Setup, number: int) -> Result:
    """Run AsyncLLM with all lines at once."""
    run = Run(setup, "limit", number)
    arguments = setup.effective_arguments(run.report, run.runner)
    arguments.pop("served_model_name")
    program = ["-m", "tests.bench.engine_limit", str(setup.input), str(run.output), json.dumps(arguments)]
    return _run_script(run, program)


def http(setup: Setup, number: int) -> Result:
    """Run vLLM's API server and a client that posts all lines at once."""
    run = Run(setup, "http", number)
    options = engine_flags(setup.effective_arguments(run.report, run.runner))
    return _run_script(run, ["-m", "tests.bench.http_client", str(setup.input), str(run.output), *options])


def stock(setup: Setup, number: int) -> Result:
    """Run the stock script of ray.data.llm."""
    run = Run(setup, "stock", number)
    script = Path(__file__).with_name("stock_ray_data_llm.py")
    arguments = {
        name: value
        for name, value in setup.effective_arguments(run.report, run.runner).items()
        if name not in _SEPARATE_ARGUMENTS
    }
    return _run_script(run, [str(script), str(setup.input), str(run.output), setup.model, json.dumps(arguments)])


def _run_script(run: Run, program: list[str]) -> Result:
    """Run a script that writes one line for each row as soon as it is finished."""
    run.progress = Progress(lines=run.setup.lines)
    counter = LineCounter(run.output)
    with watch_processes(run.token) as usage, running(program, run.environment, run.log) as process:
        while process.poll() is None:
            time.sleep(POLL_S)
            run.progress.note(counter.count())
        finish(process, run.log)
        total_s = time.monotonic() - run.progress.start
    run.progress.note(counter.count())
    counter.close()
    run.check_output()
    return run.result(total_s, usage)


def cloister(setup: Setup, number: int) -> Result:
    """Run a new ``cloister local`` with a new Ray and count rows by the batch's request_counts.

    A warm run measures the second of two batches with the same lines.
    """
    run = Run(setup, "cloister", number)
    data = run.path.with_suffix(".data")
    shutil.rmtree(data, ignore_errors=True)
    models = run.path.with_suffix(".yaml")
    models.write_text(yaml.safe_dump(_catalogue(setup, run.report)))
    program = ["-m", "service.cli", "local", "--data-dir", str(data), "--port", str(free_port())]
    with (
        watch_processes(run.token) as usage,
        running([*program, "--models", str(models)], run.environment, run.log) as process,
    ):
        client = _client(data, process, run.log)
        uploaded = client.files.create(file=setup.input, purpose="batch")
        if setup.is_warm:
            _run_one_batch(client, run, uploaded.id)
            shutil.rmtree(run.report)  # the figures of the first batch
        total_s, batch = _run_one_batch(client, run, uploaded.id)
    estimate = ((batch.model_extra or {}).get("x_cloister") or {}).get("estimate") or {}
    return dataclasses.replace(
        run.result(total_s, usage),
        prompt_tokens=batch.usage.input_tokens if batch.usage else None,
        estimated_s=estimate.get("duration_s"),
        estimated_prompt_tokens=estimate.get("input_tokens"),
    )


def _run_one_batch(client: openai.OpenAI, run: Run, file_id: str) -> tuple[float, Batch]:
    """Run a batch and follow it.

    Returns:
        Its seconds and its last state.

    Raises:
        RuntimeError: it did not complete, or lines failed that should not.
    """
    run.progress = Progress(lines=run.setup.lines)
    batch = client.batches.create(
        input_file_id=file_id,
        endpoint=WORKLOADS[run.setup.workload].endpoint,  # type: ignore[arg-type]
        completion_window="24h",
    )
    while batch.status not in ("completed", "failed", "expired", "cancelled"):
        time.sleep(BATCH_POLL_S)
        batch = client.batches.retrieve(batch.id)
        if batch.request_counts is not None:
            run.progress.note(batch.request_counts.completed)
    total_s = time.monotonic() - run.progress.start
    failed = 1 if run.setup.workload == "poisoned" else 0
    if batch.status != "completed" or batch.request_counts is None or batch.request_counts.failed > failed:
        raise RuntimeError(f"the batch ended as {batch.status}: {batch.request_counts} {batch.errors}")
    return total_s, batch


def _catalogue(setup: Setup, report: Path) -> dict[str, Any]:
    """Return cloister's model catalogue. Its own engine arguments for a CPU are those of ``cloister local``."""
    endpoint = WORKLOADS[setup.workload].endpoint
    arguments = setup.arguments(report, "cloister")
    model = {
        "id": MODEL_ID,
        "source": setup.model,
        "accelerator": detect_accelerator().name,
        "endpoints": [CHAT, "/v1/completions"] if endpoint == CHAT else [endpoint],
        "engine_args": arguments,
        # The simulated GPU is a class of the benchmarks, and so is not one of vLLM's usual executors.
        "unsafe_engine_args": [name for name in ("worker_cls", "distributed_executor_backend") if name in arguments],
        "keep_warm_s": 0,  # a second batch starts its own engine
        **setup.model_settings,
    }
    return {"models": [model]}


RUNNERS: Mapping[str, Callable[[Setup, int], Result]] = {
    "limit": limit,
    "run_batch": run_batch,
    "http": http,
    "stock": stock,
    "cloister": cloister,
}

# The stock script takes these as separate arguments.
_SEPARATE_ARGUMENTS = ("model", "served_model_name")


def _follow_bar(stream: "IO[bytes] | None", progress: Progress, log: Path) -> None:
    if stream is None:
        return
    tail = b""
    with log.with_suffix(".stderr").open("wb") as copy:
        while chunk := os.read(stream.fileno(), 65_536):
            copy.write(chunk)
            *_, tail = (tail + chunk)[-4_096:].rpartition(b"\n")
            for count in TQDM_COUNT.findall(chunk):
                progress.note(int(count))


def _client(data: Path, process: "subprocess.Popen[bytes]", log: Path) -> openai.OpenAI:
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
    raise RuntimeError(f"cloister local did not start; see {log}")
