"""Batches as a client of a stack uses them: lines, results and events."""

import json
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Final

import httpx
from openai import APIConnectionError, APIStatusError
from openai.types import Batch

from tests.cluster.whole_stack import WholeStack

ENDPOINT: Final = "/v1/chat/completions"
_OVER: Final = ("completed", "failed", "expired", "cancelled")
_PAUSE_S: Final = 0.5


@dataclass(frozen=True, slots=True, kw_only=True)
class Event:
    """Events of a batch."""

    type: str
    data: Mapping[str, Any]


def chat_lines(number: int, *, tokens: int, name: str) -> list[str]:
    """Return lines whose answers have exactly this many tokens, with custom ids ``name-0``, ``name-1`` and so on."""
    bodies = (
        {
            "model": "demo",
            "messages": [{"role": "user", "content": f"Tell me about number {index}."}],
            "temperature": 0,
            "max_tokens": tokens,
            "ignore_eos": True,
        }
        for index in range(number)
    )
    return [line(f"{name}-{index}", body) for index, body in enumerate(bodies)]


def line(custom_id: str, body: Mapping[str, Any]) -> str:
    """Return one line of an input file."""
    return json.dumps({"custom_id": custom_id, "method": "POST", "url": ENDPOINT, "body": body}) + "\n"


def submit(stack: WholeStack, lines: Iterable[str]) -> str:
    """Upload the lines and create a batch; return its id."""
    with stack.client() as client:
        file = client.files.create(file=("requests.jsonl", "".join(lines).encode()), purpose="batch")
        return client.batches.create(input_file_id=file.id, endpoint=ENDPOINT, completion_window="24h").id


def retrieve(stack: WholeStack, batch_id: str, *, within_s: float = 60) -> Batch:
    """Return the batch as it is now; retry as long as the API is unavailable."""
    end = time.monotonic() + within_s
    while True:
        try:
            with stack.client() as client:
                return client.batches.retrieve(batch_id)
        except (APIConnectionError, APIStatusError):
            if time.monotonic() > end:
                raise
            time.sleep(_PAUSE_S)


def wait(
    stack: WholeStack, batch_id: str, until: Callable[[Batch], bool], *, within_s: float, what: str = "its end"
) -> Batch:
    """Wait until a batch meets a condition.

    Args:
        stack: stack that runs the batch.
        batch_id: id of the batch.
        until: condition on the batch.
        within_s: timeout.
        what: description of the condition for the error message.

    Raises:
        AssertionError: the batch ended without meeting the condition, or the timeout expired.
    """
    end = time.monotonic() + within_s
    while not until(batch := retrieve(stack, batch_id)):
        progress = f"{batch.status} {batch.request_counts} {batch.errors}"
        assert batch.status not in _OVER, f"{batch_id} ended before {what}: {progress}"
        assert time.monotonic() < end, f"{batch_id}: no sign of {what} after {within_s:.0f} s: {progress}"
        time.sleep(_PAUSE_S)
    return batch


def wait_for_end(stack: WholeStack, batch_id: str, *, within_s: float) -> Batch:
    """Wait until the batch has reached a final state."""
    return wait(stack, batch_id, lambda batch: batch.status in _OVER, within_s=within_s)


def done(batch: Batch) -> int:
    """Return the number of lines with an answer."""
    return batch.request_counts.completed if batch.request_counts else 0


def results(stack: WholeStack, batch: Batch) -> list[dict[str, Any]]:
    """Return the lines of the output file and the error file, in this order."""
    found: list[dict[str, Any]] = []
    with stack.client() as client:
        for file_id in (batch.output_file_id, batch.error_file_id):
            if file_id:
                # splitlines would also split at Unicode line breaks inside answers.
                content = client.files.content(file_id).read()
                found += [json.loads(text) for text in content.split(b"\n") if text]
    return found


def events(stack: WholeStack, batch_id: str) -> list[Event]:
    """Return the events of a batch in a final state."""
    answer = httpx.get(
        f"{stack.base_url}/batches/{batch_id}/events",
        headers={"Authorization": f"Bearer {stack.api_key}"},
        timeout=30,
        trust_env=False,
    )
    answer.raise_for_status()
    found = []
    for block in answer.text.split("\n\n"):
        fields = dict(part.split(": ", 1) for part in block.splitlines() if ": " in part)
        if "id" in fields:
            found.append(Event(type=fields["event"], data=json.loads(fields["data"])["data"]))
    return found


def job_of(stack: WholeStack, batch_id: str) -> str | None:
    """Return the id of the job that works on a batch; None if there is none."""
    extension: dict[str, Any] = retrieve(stack, batch_id).to_dict()["x_cloister"]  # type: ignore[assignment]
    return extension.get("job_id")
