"""``make demo``: run two batches from upload to download, on this machine, with the official OpenAI client."""

import argparse
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

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
REQUESTS, OUTPUT, ERRORS = "requests.jsonl", "output.jsonl", "errors.jsonl"
START_TIMEOUT_S = 180.0
BATCH_TIMEOUT_S = 900.0
STOP_TIMEOUT_S = 90.0
POLL_S = 0.5
ANSWERS_SHOWN = 5
FINAL = {"completed", "failed", "expired", "cancelled"}
PHASES = {
    "validating": "checking the lines",
    "in_progress": "generating",
    "finalizing": "assembling the output",
}


@contextmanager
def running_stack(model: Path, data_dir: Path, console: Console) -> Iterator[Client]:
    """Run ``cloister local`` on a free port until the context ends."""
    layout = layout_of(data_dir)
    before_ns = layout.client_env.stat().st_mtime_ns if layout.client_env.exists() else 0
    port = free_ports(1)[0]
    command = [sys.executable, "-m", "service.cli", "local", f"--port={port}", f"--data-dir={data_dir}"]
    command += [f"--model={model}", f"--model-id={MODEL_ID}"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, start_new_session=True, env=os.environ)
    try:
        assert process.stdout is not None  # noqa: S101 - it is a pipe
        for line in process.stdout:
            if line.startswith("cloister is ready"):
                break
            if line.strip():
                console.print(f"  {line.rstrip()}", style="dim", highlight=False, markup=False)
        else:
            raise LocalError(
                f"cloister local ended with exit code {process.wait()} before it was ready; the reason is above"
            )
        client = read_client_env(layout.client_env)
        if client is None or layout.client_env.stat().st_mtime_ns == before_ns:
            raise LocalError(f"cloister local did not write {layout.client_env}")
        yield client
    finally:
        console.print("stopping everything")
        process.send_signal(signal.SIGTERM)
        process.communicate(timeout=STOP_TIMEOUT_S)


def run_batch(client: "OpenAI", directory: Path, console: Console) -> "Batch":
    """Upload the example file, show the progress of its batch until it ends, and download both result files.

    Raises:
        LocalError: the batch has not ended in time, or not with the results that the example file should give.
    """
    path = directory / REQUESTS
    path.write_text("".join(demo_lines(MODEL_ID)))
    with path.open("rb") as requests:
        file = client.files.create(file=requests, purpose="batch")
    console.print(f"uploaded {path} ({TOTAL} lines) as {file.id}", soft_wrap=True, highlight=False)
    batch = client.batches.create(input_file_id=file.id, endpoint=ENDPOINT, completion_window="24h")
    console.print(f"created {batch.id}")
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    deadline_s = time.monotonic() + BATCH_TIMEOUT_S
    with Progress(*columns, console=console) as progress:
        task = progress.add_task("", total=TOTAL)
        while True:
            batch = client.batches.retrieve(batch.id)
            counts = batch.request_counts
            done = counts.completed + counts.failed if counts else 0
            phase = PHASES.get(batch.status, batch.status)
            if batch.status == "in_progress" and done == 0:
                phase = "waiting for the engine"
            progress.update(task, completed=done, description=f"{phase:<28}")
            if batch.status in FINAL:
                break
            if time.monotonic() > deadline_s:
                raise LocalError(f"the batch is still {batch.status} after {BATCH_TIMEOUT_S:.0f} s")
            time.sleep(POLL_S)
    for file_id, name in ((batch.output_file_id, OUTPUT), (batch.error_file_id, ERRORS)):
        (directory / name).write_bytes(client.files.content(file_id).read() if file_id else b"")
    logs = f"the logs are in {directory / 'data' / 'logs'}"
    if batch.status != "completed" or counts is None:
        reasons = [error.message for error in (batch.errors.data or [])] if batch.errors else []
        reason = "; ".join(filter(None, reasons)) or "no reason given"
        raise LocalError(f"the batch ended as {batch.status}: {reason}; {logs}")
    found = (counts.total, counts.completed, counts.failed)
    expected = (TOTAL, TOTAL - BROKEN, BROKEN)
    if found != expected:
        raise LocalError(f"(total, completed, failed) is {found}, but should be {expected}; {logs}")
    return batch


def show(batch: "Batch", directory: Path, console: Console) -> None:
    """Print some answers, the errors, and the paths of the files."""
    answers = Table("custom_id", "finish", "answer of the demo model (random weights: nonsense)", title="some answers")
    output = [json.loads(line) for line in (directory / OUTPUT).read_text().splitlines()]
    for line in output[:: max(1, len(output) // ANSWERS_SHOWN)][:ANSWERS_SHOWN]:
        choice = line["response"]["body"]["choices"][0]
        answer = " ".join(str(choice["message"]["content"]).split())[:80]
        answers.add_row(line["custom_id"], str(choice["finish_reason"]), Text(answer))
    console.print(answers)
    failures = Table("custom_id", "status", "message", title="the error file: lines that fail on purpose")
    for line in map(json.loads, (directory / ERRORS).read_text().splitlines()):
        response = line["response"] or {}
        error = line["error"] or response["body"]["error"]
        message = " ".join(str(error["message"]).split())[:100]
        failures.add_row(line["custom_id"], str(response.get("status_code", "")), Text(message))
    console.print(failures)
    counts = batch.request_counts
    if counts is not None:
        console.print(f"{counts.total} lines: {counts.completed} completed, {counts.failed} failed as intended")
    for name in (REQUESTS, OUTPUT, ERRORS):
        console.print(f"  {name.removesuffix('.jsonl'):<9} {directory / name}", soft_wrap=True, highlight=False)


def main() -> int:
    """Run the command line; return the exit code."""
    from openai import OpenAI

    parser = argparse.ArgumentParser(description="Run two batches on this machine, from upload to download.")
    parser.add_argument("--model", type=Path, required=True, help="directory of the model")
    parser.add_argument("--directory", type=Path, required=True, help="directory for the files of the demo")
    arguments = parser.parse_args()
    directory: Path = arguments.directory
    console = Console()
    began_s = time.monotonic()
    try:
        directory.mkdir(parents=True, exist_ok=True)
        console.print("starting `cloister local`: Postgres, Ray, API, reconciler and coordinator")
        with running_stack(arguments.model, directory / "data", console) as found:
            times_s = []
            with OpenAI(base_url=found.base_url, api_key=found.api_key) as client:
                for what in ("the first batch, which starts an engine", "the second batch, on the warm engine"):
                    console.print(what, style="bold")
                    batch_s = time.monotonic()
                    batch = run_batch(client, directory, console)
                    times_s.append(time.monotonic() - batch_s)
            show(batch, directory, console)
    except LocalError as error:
        console.print(f"error: {error}", style="red", markup=False)
        return 1
    except KeyboardInterrupt:
        return 130
    cold_s, warm_s = times_s
    console.print(
        f"the first batch took {cold_s:.0f} s, the second, on the warm engine, {warm_s:.0f} s; the whole demo "
        f"{time.monotonic() - began_s:.0f} s"
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
