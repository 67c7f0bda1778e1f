"""Batches as a client of a stack has them: lines in, results out, and what is told in between."""

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
    """What the stack says happened to a batch."""

    type: str
    data: Mapping[str, Any]


def chat_lines(number: int, *, tokens: int, name: str) -> list[str]:
    """Lines whose answers have exactly so many tokens, with the custom ids ``name-0``, ``name-1`` and so on."""
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
    """A line of an input file."""
    return json.dumps({"custom_id": custom_id, "method": "POST", "url": ENDPOINT, "body": body}) + "\n"


def submit(stack: WholeStack, lines: Iterable[str]) -> str:
    """Uploads the lines and makes a batch of them; returns its id."""
    with stack.client() as client:
        file = client.files.create(file=("requests.jsonl", "".join(lines).encode()), purpose="batch")
        return client.batches.create(input_file_id=file.id, endpoint=ENDPOINT, completion_window="24h").id


def retrieve(stack: WholeStack, batch_id: str, *, within_s: float = 60) -> Batch:
    """The batch as it is now, however long the API is away."""
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
    """Waits for a batch.

    Args:
        stack: where it runs.
        batch_id: the batch.
        until: whether it is so far.
        within_s: how long that may take.
        what: is waited for, in words for the error.

    Raises:
        AssertionError: it did not get there, or ended before.
    """
    end = time.monotonic() + within_s
    while not until(batch := retrieve(stack, batch_id)):
        told = f"{batch.status} {batch.request_counts} {batch.errors}"
        assert batch.status not in _OVER, f"{batch_id} ended before {what}: {told}"
        assert time.monotonic() < end, f"{batch_id}: no sign of {what} after {within_s:.0f} s: {told}"
        time.sleep(_PAUSE_S)
    return batch


def wait_for_end(stack: WholeStack, batch_id: str, *, within_s: float) -> Batch:
    """Waits until the batch is over, whatever its end."""
    return wait(stack, batch_id, lambda batch: batch.status in _OVER, within_s=within_s)


def done(batch: Batch) -> int:
    """How many of its lines have an answer."""
    return batch.request_counts.completed if batch.request_counts else 0


def results(stack: WholeStack, batch: Batch) -> list[dict[str, Any]]:
    """The lines of output file and error file, in this order."""
    found: list[dict[str, Any]] = []
    with stack.client() as client:
        for file_id in (batch.output_file_id, batch.error_file_id):
            if file_id:
                # Not splitlines: answers have line breaks of Unicode's own.
                content = client.files.content(file_id).read()
                found += [json.loads(text) for text in content.split(b"\n") if text]
    return found


def events(stack: WholeStack, batch_id: str) -> list[Event]:
    """All that happened to a batch that is over."""
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


def batch_of(rayjob: Mapping[str, Any]) -> str:
    """The batch that a RayJob is for."""
    return str(rayjob["metadata"]["labels"]["cloister.dev/batch"])
