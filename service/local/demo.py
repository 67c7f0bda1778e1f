"""``make demo``: one batch from upload to download, on this machine, with the official OpenAI client."""

import argparse
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table
from rich.text import Text

from service.local.client_env import Client, read_client_env
from service.local.demo_lines import BROKEN, ENDPOINT, TOTAL, demo_lines
from service.local.errors import LocalError
from service.local.layout import layout_of
from service.local.ray_head import free_ports

if TYPE_CHECKING:
    from openai import OpenAI
    from openai.types import Batch

MODEL_ID = "demo"
START_TIMEOUT_S = 180.0
BATCH_TIMEOUT_S = 900.0
STOP_TIMEOUT_S = 90.0
POLL_S = 0.5
ANSWERS_SHOWN = 5
FINAL = {"completed", "failed", "expired", "cancelled"}
PHASES = {
    "validating": "checking every line",
    "in_progress": "generating",
    "finalizing": "putting the output in order",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Paths:
    """The files of one demo."""

    requests: Path
    output: Path
    errors: Path


@contextmanager
def running_stack(model: Path, data_dir: Path, console: Console) -> Iterator[Client]:
    """A ``cloister local`` on a free port, until the block ends."""
    layout = layout_of(data_dir)
    before_ns = layout.client_env.stat().st_mtime_ns if layout.client_env.exists() else 0
    port = free_ports(1)[0]
    command = [sys.executable, "-m", "service.cli", "local", f"--port={port}", f"--data-dir={data_dir}"]
    command += [f"--model={model}", f"--model-id={MODEL_ID}"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, start_new_session=True, env=os.environ)
    try:
        _show_start(process, console)
        client = read_client_env(layout.client_env)
        if client is None or layout.client_env.stat().st_mtime_ns == before_ns:
            raise LocalError(f"cloister local did not write {layout.client_env}")
        yield client
    finally:
        console.print("stopping everything")
        process.send_signal(signal.SIGTERM)
        process.communicate(timeout=STOP_TIMEOUT_S)


def _show_start(process: "subprocess.Popen[str]", console: Console) -> None:
    assert process.stdout is not None  # noqa: S101 - it is a pipe
    for line in process.stdout:
        if line.startswith("cloister is ready"):
            return
        if line.strip():
            console.print(f"  {line.rstrip()}", style="dim", highlight=False, markup=False)
    raise LocalError(f"cloister local ended with exit code {process.wait()} before it was ready; it says why above")


def _watch(client: "OpenAI", batch: "Batch", console: Console) -> "Batch":
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
    )
    deadline_s = time.monotonic() + BATCH_TIMEOUT_S
    with Progress(*columns, console=console) as progress:
        task = progress.add_task("", total=TOTAL)
        while True:
            batch = client.batches.retrieve(batch.id)
            counts = batch.request_counts
            done = counts.completed + counts.failed if counts else 0
            phase = PHASES.get(batch.status, batch.status)
            if batch.status == "in_progress" and done == 0:
                phase = "starting the engine"
            progress.update(task, completed=done, description=f"{phase:<28}")
            if batch.status in FINAL:
                return batch
            if time.monotonic() > deadline_s:
                raise LocalError(f"the batch is still {batch.status} after {BATCH_TIMEOUT_S:.0f} s")
            time.sleep(POLL_S)


def run_batch(client: "OpenAI", paths: Paths, console: Console) -> "Batch":
    """Uploads the example file, watches its batch, and downloads both result files."""
    paths.requests.write_text("".join(demo_lines(MODEL_ID)))
    with paths.requests.open("rb") as requests:
        file = client.files.create(file=requests, purpose="batch")
    console.print(f"uploaded {paths.requests} ({TOTAL} lines) as {file.id}", soft_wrap=True, highlight=False)
    batch = client.batches.create(input_file_id=file.id, endpoint=ENDPOINT, completion_window="24h")
    console.print(f"created {batch.id}")
    batch = _watch(client, batch, console)
    for file_id, path in ((batch.output_file_id, paths.output), (batch.error_file_id, paths.errors)):
        path.write_bytes(client.files.content(file_id).read() if file_id else b"")
    return batch


def _lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def _answers(lines: list[dict[str, Any]]) -> Table:
    table = Table("custom_id", "finish", "answer of the demo model (random weights: nonsense)", title="some answers")
    for line in lines[:: max(1, len(lines) // ANSWERS_SHOWN)][:ANSWERS_SHOWN]:
        choice = line["response"]["body"]["choices"][0]
        answer = " ".join(str(choice["message"]["content"]).split())[:80]
        table.add_row(line["custom_id"], str(choice["finish_reason"]), Text(answer))
    return table


def _errors(lines: list[dict[str, Any]]) -> Table:
    table = Table("custom_id", "status", "message", title="the error file: lines that fail on purpose")
    for line in lines:
        response = line["response"] or {}
        error = line["error"] or response["body"]["error"]
        message = " ".join(str(error["message"]).split())[:100]
        table.add_row(line["custom_id"], str(response.get("status_code", "")), Text(message))
    return table


def show(batch: "Batch", paths: Paths, console: Console) -> None:
    """The last screen."""
    console.print(_answers(_lines(paths.output)))
    console.print(_errors(_lines(paths.errors)))
    counts = batch.request_counts
    if counts is not None:
        console.print(f"{counts.total} lines: {counts.completed} completed, {counts.failed} failed as they should")
    for name, path in (("requests", paths.requests), ("output", paths.output), ("errors", paths.errors)):
        console.print(f"  {name:<9} {path}", soft_wrap=True, highlight=False)


def problem_of(batch: "Batch") -> str | None:
    """What is not as the example file promises, or None."""
    counts = batch.request_counts
    if batch.status != "completed" or counts is None:
        reasons = [error.message for error in (batch.errors.data or [])] if batch.errors else []
        return f"the batch ended {batch.status}: {'; '.join(filter(None, reasons)) or 'no reason given'}"
    found = (counts.total, counts.completed, counts.failed)
    expected = (TOTAL, TOTAL - BROKEN, BROKEN)
    return None if found == expected else f"(total, completed, failed) are {found}, not {expected}"


def run_demo(model: Path, directory: Path, console: Console) -> int:
    """Runs the demo; returns the exit code."""
    from openai import OpenAI

    began_s = time.monotonic()
    directory.mkdir(parents=True, exist_ok=True)
    paths = Paths(
        requests=directory / "requests.jsonl", output=directory / "output.jsonl", errors=directory / "errors.jsonl"
    )
    console.print("starting `cloister local`: Postgres, Ray, the service and the reconciler")
    with running_stack(model, directory / "data", console) as found:
        with OpenAI(base_url=found.base_url, api_key=found.api_key) as client:
            batch_s = time.monotonic()
            batch = run_batch(client, paths, console)
            batch_s = time.monotonic() - batch_s
        problem = problem_of(batch)
        if problem is None:
            show(batch, paths, console)
    if problem is not None:
        console.print(f"error: {problem}; the logs are in {directory / 'data' / 'logs'}", style="red", markup=False)
        return 1
    console.print(f"the batch took {batch_s:.0f} s, everything {time.monotonic() - began_s:.0f} s")
    return 0


def main() -> int:
    """The command line."""
    parser = argparse.ArgumentParser(description="Run one batch on this machine, from upload to download.")
    parser.add_argument("--model", type=Path, required=True, help="the directory of the model")
    parser.add_argument("--directory", type=Path, required=True, help="where the files of the demo go")
    arguments = parser.parse_args()
    console = Console()
    try:
        return run_demo(arguments.model, arguments.directory, console)
    except LocalError as error:
        console.print(f"error: {error}", style="red", markup=False)
        return 1
    except KeyboardInterrupt:
        return 130


if __name__ == "__main__":
    sys.exit(main())
