"""Batches whose processes are killed or stopped, and the check that each line has exactly one answer."""

import json
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress

import psutil
from openai import APIConnectionError, APIStatusError, OpenAI
from openai.types import Batch

from service.local.processes import marked_processes
from tests.acceptance.local_stack import LocalStack

BROKEN_EVERY = 40
TIMEOUT_S = 700
# Lines that the engine works on or that are in a part which is not written.
IN_FLIGHT = 48
_OVER = frozenset({"finalizing", "completed"})
POSTGRES = "postgres"
# Words in the command lines of each kind of process.
KINDS = {
    "api": "service.api",
    "reconciler": "service.reconciler",
    "coordinator": "service.coordinator",
    POSTGRES: "",
    "engine server": "ray_job.engines.engine_server",
    "engine core": "EngineCore",
    "actor": "ray::DirectEngine",
    "driver": "ray_job",
    "raylet": "raylet",
}


def open_client(stack: LocalStack) -> OpenAI:
    return OpenAI(base_url=stack.client.base_url, api_key=stack.client.api_key, max_retries=5)


def custom_ids(lines: int, *, broken: bool) -> list[str]:
    """Return the ids of the lines that the engine refuses, or of all others, in input order."""
    return [f"line-{number}" for number in range(lines) if (number % BROKEN_EVERY == 0) == broken]


def create(stack: LocalStack, lines: int) -> str:
    """Create a batch, and return its id."""
    content = "\n".join(map(json.dumps, _requests(lines))).encode()
    with open_client(stack) as client:
        file = client.files.create(file=("requests.jsonl", content), purpose="batch")
        return client.batches.create(input_file_id=file.id, endpoint="/v1/chat/completions", completion_window="24h").id


def _requests(lines: int) -> Iterator[dict[str, object]]:
    for number in range(lines):
        body = {
            "model": "demo",
            "messages": [{"role": "user", "content": f"Tell me about number {number}."}],
            "temperature": -1 if number % BROKEN_EVERY == 0 else 0,
            "max_tokens": 64,
            "ignore_eos": True,
        }
        yield {"custom_id": f"line-{number}", "method": "POST", "url": "/v1/chat/completions", "body": body}


def wait(stack: LocalStack, batch_id: str, until: Callable[[Batch], bool]) -> Batch:
    """Wait until a batch meets a condition; an API that is away for a while is no error."""
    deadline_s = time.monotonic() + TIMEOUT_S
    while time.monotonic() < deadline_s:
        try:
            with open_client(stack) as client:
                batch = client.batches.retrieve(batch_id)
        except (APIConnectionError, APIStatusError):
            time.sleep(0.5)
            continue
        assert batch.status not in {"failed", "expired", "cancelled"}, batch
        if until(batch):
            return batch
        time.sleep(0.2)
    raise AssertionError(f"the batch did not get there in time; logs: {stack.layout.logs}")


def done(batch: Batch) -> int:
    """Return how many lines are committed."""
    counts = batch.request_counts
    return 0 if counts is None else counts.completed + counts.failed


def in_the_middle(batch: Batch) -> bool:
    """Return whether some lines are committed, but not all."""
    assert batch.status != "completed", "the batch completed before the fault"
    return done(batch) > 0


def completed(stack: LocalStack, batch_id: str) -> Batch:
    """Wait until a batch is completed, and return it."""
    return wait(stack, batch_id, lambda batch: batch.status == "completed")


def answered_ids(stack: LocalStack, batch: Batch) -> tuple[list[str], list[str]]:
    """Return the ids of the lines in the output file and in the error file."""
    assert batch.output_file_id is not None
    assert batch.error_file_id is not None
    with open_client(stack) as client:
        texts = [client.files.content(file_id).text for file_id in (batch.output_file_id, batch.error_file_id)]
    output, errors = ([json.loads(line)["custom_id"] for line in text.splitlines()] for text in texts)
    return output, errors


def assert_every_line_once(stack: LocalStack, batch_id: str, lines: int) -> None:
    """Wait until a batch is completed, and check the lines of its files."""
    output, errors = answered_ids(stack, completed(stack, batch_id))
    assert errors == custom_ids(lines, broken=True)
    assert output == custom_ids(lines, broken=False)


class Workload:
    """Batches one after another, so that one is always at work.

    Args:
        stack: the stack.
        lines: lines of each batch.

    Attributes:
        batch_ids: all batches, in the order of creation.
    """

    def __init__(self, stack: LocalStack, lines: int) -> None:
        self._stack, self._lines = stack, lines
        self._seen = 0
        self.batch_ids: list[str] = []

    def wait_for_progress(self) -> None:
        """Wait until lines are committed that were not sent when this was called last."""
        while True:
            if not self.batch_ids:
                self.batch_ids.append(create(self._stack, self._lines))
            batch = wait(self._stack, self.batch_ids[-1], lambda now: done(now) > self._seen or now.status in _OVER)
            if batch.status not in _OVER:
                self._seen = done(batch) + IN_FLIGHT
                return
            self.batch_ids.append(create(self._stack, self._lines))
            self._seen = 0


def processes(stack: LocalStack, kind: str) -> list[psutil.Process]:
    """Return the running processes of a kind: one of ``KINDS``."""
    if kind == POSTGRES:
        # Postgres writes titles over the environment of its processes, and with it their mark.
        with suppress(FileNotFoundError, IndexError, psutil.NoSuchProcess):
            return [psutil.Process(int((stack.layout.postgres_data / "postmaster.pid").read_text().split()[0]))]
        return []
    found = []
    for process in marked_processes(stack.layout.local_id):
        with suppress(psutil.NoSuchProcess):
            words = process.cmdline()
            # The driver's engines run modules of the same package, and its shell has the same words.
            is_driver = words[-2:] == ["-m", "ray_job"]
            if is_driver if kind == "driver" else KINDS[kind] in " ".join([process.name(), *words]):
                found.append(process)
    return found


def kill(stack: LocalStack, kind: str) -> bool:
    """Kill all processes of a kind, and return whether one ran."""
    victims = processes(stack, kind)
    for victim in victims:
        with suppress(psutil.NoSuchProcess):
            victim.kill()
    return bool(victims)


def stop_for(seconds: float, stopped: Iterable[psutil.Process]) -> None:
    """Stop processes for a while, as a machine or a disk that hangs does."""
    found = list(stopped)
    for process in found:
        process.suspend()
    time.sleep(seconds)
    for process in found:
        process.resume()
