"""Processes are killed or stopped in the middle of a batch, which completes with every line exactly once."""

import json
import time
from collections.abc import Callable

import psutil
import pytest
from openai import APIConnectionError, APIStatusError, OpenAI
from openai.types import Batch

from service.coordinator.leasing import LEASE_S
from service.local.processes import marked_processes
from tests.acceptance.local_stack import LocalStack

pytestmark = pytest.mark.ray

LINES = 320
BROKEN_EVERY = 40
TIMEOUT_S = 700
AWAY_S = 60
# The end of its command line: its engines run modules of the same package.
DRIVER = "-m ray_job"


def _requests() -> bytes:
    lines = []
    for number in range(LINES):
        body = {
            "model": "demo",
            "messages": [{"role": "user", "content": f"Tell me about number {number}."}],
            "temperature": -1 if number % BROKEN_EVERY == 0 else 0,
            "max_tokens": 64,
            "ignore_eos": True,
        }
        lines.append({"custom_id": f"line-{number}", "method": "POST", "url": "/v1/chat/completions", "body": body})
    return "\n".join(json.dumps(line) for line in lines).encode()


def _client(stack: LocalStack) -> OpenAI:
    return OpenAI(base_url=stack.client.base_url, api_key=stack.client.api_key, max_retries=5)


def _create(stack: LocalStack) -> str:
    with _client(stack) as client:
        file = client.files.create(file=("requests.jsonl", _requests()), purpose="batch")
        return client.batches.create(input_file_id=file.id, endpoint="/v1/chat/completions", completion_window="24h").id


def _wait(stack: LocalStack, batch_id: str, until: Callable[[Batch], bool]) -> Batch:
    deadline_s = time.monotonic() + TIMEOUT_S
    while time.monotonic() < deadline_s:
        try:
            with _client(stack) as client:
                batch = client.batches.retrieve(batch_id)
        except (APIConnectionError, APIStatusError):
            time.sleep(0.5)
            continue
        assert batch.status not in {"failed", "expired", "cancelled"}, batch
        if until(batch):
            return batch
        time.sleep(0.2)
    pytest.fail(f"the batch did not get there in time; logs: {stack.layout.logs}")


def _in_the_middle(batch: Batch) -> bool:
    assert batch.status != "completed", "the batch completed before the kill"
    return batch.request_counts is not None and batch.request_counts.completed > 0


def _assert_every_line_once(stack: LocalStack, batch: Batch) -> None:
    assert batch.output_file_id is not None
    assert batch.error_file_id is not None
    with _client(stack) as client:
        texts = [client.files.content(file_id).text for file_id in (batch.output_file_id, batch.error_file_id)]
    output, errors = ([json.loads(line)["custom_id"] for line in text.splitlines()] for text in texts)
    broken = [f"line-{number}" for number in range(LINES) if number % BROKEN_EVERY == 0]
    assert errors == broken
    assert output == [f"line-{number}" for number in range(LINES) if number % BROKEN_EVERY]


def _processes(stack: LocalStack, words: str) -> list[psutil.Process]:
    found = []
    for process in marked_processes(stack.layout.local_id):
        try:
            command = " ".join([process.name(), *process.cmdline()])
            if command.endswith(DRIVER) if words == DRIVER else words in command:
                found.append(process)
        except psutil.NoSuchProcess:
            continue
    return found


def _kill(stack: LocalStack, words: str) -> None:
    victims = _processes(stack, words)
    assert victims, f"no process matches {words!r}"
    for victim in victims:
        victim.kill()


@pytest.mark.parametrize(
    "words",
    [
        ("service.api", "service.reconciler", "service.coordinator"),
        ("ray_job.engines.engine_server",),
        ("EngineCore",),
        ("ray::DirectEngine",),
        (DRIVER,),
        ("raylet",),
    ],
)
def test_batch_completes_after_processes_were_killed(stack: LocalStack, words: tuple[str, ...]) -> None:
    batch_id = _create(stack)
    for victim in words:
        _wait(stack, batch_id, _in_the_middle)
        _kill(stack, victim)
    _assert_every_line_once(stack, _wait(stack, batch_id, lambda batch: batch.status == "completed"))


def _postmaster(stack: LocalStack) -> psutil.Process:
    return psutil.Process(int((stack.layout.postgres_data / "postmaster.pid").read_text().split()[0]))


def test_batch_completes_after_postgres_was_killed(stack: LocalStack) -> None:
    batch_id = _create(stack)
    _wait(stack, batch_id, _in_the_middle)
    _postmaster(stack).kill()
    _assert_every_line_once(stack, _wait(stack, batch_id, lambda batch: batch.status == "completed"))


def _stop_for(seconds: float, processes: list[psutil.Process]) -> None:
    for process in processes:
        process.suspend()
    time.sleep(seconds)
    for process in processes:
        process.resume()


def test_batch_completes_after_postgres_did_not_answer_for_a_minute(stack: LocalStack) -> None:
    batch_id = _create(stack)
    _wait(stack, batch_id, _in_the_middle)
    postmaster = _postmaster(stack)
    _stop_for(AWAY_S, [postmaster, *postmaster.children()])
    _assert_every_line_once(stack, _wait(stack, batch_id, lambda batch: batch.status == "completed"))


def test_leases_of_a_stopped_driver_expire_and_its_late_commits_do_no_harm(stack: LocalStack) -> None:
    batch_id = _create(stack)
    _wait(stack, batch_id, _in_the_middle)
    drivers = _processes(stack, DRIVER)
    assert drivers
    _stop_for(LEASE_S + 5, drivers)
    _assert_every_line_once(stack, _wait(stack, batch_id, lambda batch: batch.status == "completed"))


def test_batch_continues_after_the_supervisor_was_killed_and_restarted(stack: LocalStack) -> None:
    batch_id, key = _create(stack), stack.client.api_key
    _wait(stack, batch_id, _in_the_middle)
    stack.kill()
    stack.start()
    assert stack.client.api_key == key
    _assert_every_line_once(stack, _wait(stack, batch_id, lambda batch: batch.status == "completed"))


def test_paused_batch_makes_no_progress_and_completes_after_it_is_resumed(stack: LocalStack) -> None:
    batch_id = _create(stack)
    _wait(stack, batch_id, _in_the_middle)
    stack.cloister("pause", batch_id)
    time.sleep(2)  # parts that were being written still count
    with _client(stack) as client:
        paused = client.batches.retrieve(batch_id)
        time.sleep(3)
        assert client.batches.retrieve(batch_id).request_counts == paused.request_counts
    assert paused.request_counts is not None
    assert paused.request_counts.completed < LINES
    stack.cloister("resume", batch_id)
    _assert_every_line_once(stack, _wait(stack, batch_id, lambda batch: batch.status == "completed"))


def test_killed_supervisor_leaves_nothing_behind(stack: LocalStack) -> None:
    stack.kill()
    deadline_s = time.monotonic() + 60
    while stack.layout.runtime_dir.exists() and time.monotonic() < deadline_s:
        time.sleep(0.2)
    assert marked_processes(stack.layout.local_id) == []
    assert not stack.layout.runtime_dir.exists()
