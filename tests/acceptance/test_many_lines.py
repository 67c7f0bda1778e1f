"""Files of 5,000 lines with 100 bad ones: every error is reported, and no valid line is lost."""

import json
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from openai import OpenAI
from openai.types import Batch

from tests.acceptance.local_stack import LocalStack

pytestmark = pytest.mark.ray

LINES = 5_000
BAD_EVERY = 50
BAD = list(range(BAD_EVERY, LINES + 1, BAD_EVERY))
TIMEOUT_S = 600


@pytest.fixture
def client(stack: LocalStack) -> Iterator[OpenAI]:
    with OpenAI(base_url=stack.client.base_url, api_key=stack.client.api_key) as opened:
        yield opened


def _body(number: int) -> dict[str, Any]:
    messages = [{"role": "user", "content": f"Number {number}."}]
    return {"model": "demo", "messages": messages, "temperature": 0, "max_tokens": 2}


def _run(client: OpenAI, make_invalid: Callable[[dict[str, Any]], object]) -> Batch:
    lines = []
    for number in range(1, LINES + 1):
        body = _body(number)
        if number in BAD:
            make_invalid(body)
        lines.append({"custom_id": f"line-{number}", "method": "POST", "url": "/v1/chat/completions", "body": body})
    content = "\n".join(json.dumps(line) for line in lines).encode()
    file = client.files.create(file=("requests.jsonl", content), purpose="batch")
    batch = client.batches.create(input_file_id=file.id, endpoint="/v1/chat/completions", completion_window="24h")
    deadline_s = time.monotonic() + TIMEOUT_S
    while batch.status in {"validating", "in_progress", "finalizing"} and time.monotonic() < deadline_s:
        time.sleep(0.5)
        batch = client.batches.retrieve(batch.id)
    return batch


def test_file_with_invalid_lines_fails_with_all_of_them_and_runs_nothing(client: OpenAI) -> None:
    batch = _run(client, lambda body: body.update(model="no-such-model"))
    assert batch.status == "failed"
    assert batch.errors is not None
    assert batch.errors.data is not None
    assert [(error.line, error.code) for error in batch.errors.data] == [(line, "model_not_found") for line in BAD]
    assert batch.output_file_id is None
    assert batch.in_progress_at is None


def test_file_with_lines_that_the_engine_refuses_completes_with_all_others(client: OpenAI) -> None:
    batch = _run(client, lambda body: body.update(temperature=-1))
    assert batch.status == "completed"
    assert batch.request_counts is not None
    assert (batch.request_counts.completed, batch.request_counts.failed) == (LINES - len(BAD), len(BAD))
    assert batch.output_file_id is not None
    assert batch.error_file_id is not None
    answered = [json.loads(line)["custom_id"] for line in client.files.content(batch.output_file_id).text.splitlines()]
    refused = [json.loads(line) for line in client.files.content(batch.error_file_id).text.splitlines()]
    assert answered == [f"line-{number}" for number in range(1, LINES + 1) if number not in BAD]
    assert [line["custom_id"] for line in refused] == [f"line-{number}" for number in BAD]
    assert {line["response"]["status_code"] for line in refused} == {400}
