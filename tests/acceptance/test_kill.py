"""Processes are killed or stopped in the middle of a batch, which completes with every line exactly once."""

import time

import psycopg
import pytest

from service.local.processes import marked_processes
from tests.acceptance.interruptions import (
    KINDS,
    POSTGRES,
    Workload,
    assert_every_line_once,
    create,
    done,
    in_the_middle,
    kill,
    open_client,
    processes,
    stop_for,
    wait,
)
from tests.acceptance.local_stack import LocalStack

pytestmark = pytest.mark.ray

LINES = 192
AWAY_S = 60


def test_every_line_is_answered_once_after_each_kind_of_process_was_killed(stack: LocalStack) -> None:
    workload = Workload(stack, LINES)
    for kind in KINDS:
        workload.wait_for_progress()
        assert kill(stack, kind), kind
    for batch_id in workload.batch_ids:
        assert_every_line_once(stack, batch_id, LINES)


def test_batch_completes_after_postgres_did_not_answer_for_a_minute(stack: LocalStack) -> None:
    batch_id = create(stack, LINES)
    wait(stack, batch_id, in_the_middle)
    (postmaster,) = processes(stack, POSTGRES)
    stop_for(AWAY_S, [postmaster, *postmaster.children()])
    assert_every_line_once(stack, batch_id, LINES)


def test_leases_of_a_stopped_driver_expire_and_its_late_commits_do_no_harm(stack: LocalStack) -> None:
    batch_id = create(stack, LINES)
    wait(stack, batch_id, in_the_middle)
    drivers = processes(stack, "driver")
    assert drivers
    for driver in drivers:
        driver.suspend()
    # As if a minute had passed, and another job had leased the segments and died.
    with psycopg.connect(stack.layout.database_url("cloister")) as connection:
        connection.execute(
            "UPDATE segments SET epoch = epoch + 1, job_id = NULL, leased_until = NULL"
            " WHERE batch_id = %s AND NOT is_done",
            [batch_id],
        )
    for driver in drivers:
        driver.resume()
    assert_every_line_once(stack, batch_id, LINES)


def test_paused_batch_makes_no_progress_and_completes_after_it_is_resumed(stack: LocalStack) -> None:
    batch_id = create(stack, LINES)
    wait(stack, batch_id, in_the_middle)
    stack.cloister("pause", batch_id)
    time.sleep(2)  # parts that were being written still count
    with open_client(stack) as client:
        paused = client.batches.retrieve(batch_id)
        time.sleep(3)
        assert client.batches.retrieve(batch_id).request_counts == paused.request_counts
    assert done(paused) < LINES
    stack.cloister("resume", batch_id)
    assert_every_line_once(stack, batch_id, LINES)


def test_killed_supervisor_leaves_nothing_behind_and_the_batch_continues_after_a_restart(stack: LocalStack) -> None:
    batch_id, key = create(stack, LINES), stack.client.api_key
    wait(stack, batch_id, in_the_middle)
    runtime_dir = stack.layout.runtime_dir
    stack.kill()
    deadline_s = time.monotonic() + 60
    while runtime_dir.exists() and time.monotonic() < deadline_s:
        time.sleep(0.2)
    assert marked_processes(stack.layout.local_id) == []
    assert not runtime_dir.exists()
    stack.start()
    assert stack.client.api_key == key
    assert_every_line_once(stack, batch_id, LINES)
