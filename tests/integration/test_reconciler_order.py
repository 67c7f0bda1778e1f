"""Whose batch is next: projects take turns, nobody waits for all of another's, and each job is launched once."""

import dataclasses
import time
from collections import Counter
from threading import Event

import pytest

from ray_job.contract.job_spec import JobSpec
from service.db import Pool
from service.ports import JobStatus
from service.reconciler.loop import _pass
from service.reconciler.steps import advance
from service.reconciler.workers import Workers
from service.reconciler.worklist import batches_to_advance
from tests.integration.reconciler_harness import CHAT, RUNNING, SUCCEEDED, Stack, commit, eventually, line, looping

# The order of creation.
QUEUED = ["a1", "a2", "a3", "a4", "b1", "b2", "c1"]


@pytest.fixture
def queued(stack: Stack) -> Stack:
    """Seven accepted batches of three projects, none launched."""
    nothing_runs = dataclasses.replace(stack.context, max_running_jobs=0)
    for batch_id in QUEUED:
        stack.create(line(1), batch_id=batch_id, project=batch_id[0])
        advance(nothing_runs, batch_id)
    return stack


def to_advance(stack: Stack, max_running_jobs: int = 2, busy: tuple[str, ...] = ()) -> list[str]:
    return batches_to_advance(stack.pool, max_running_jobs=max_running_jobs, busy=busy)


def insert_many(pool: Pool, project: str, count: int, status: str = "validating") -> None:
    with pool.connection() as connection:
        connection.execute("INSERT INTO projects (id, name) VALUES (%s, %s)", [project, project])
        connection.execute(
            "INSERT INTO batches (id, project_id, endpoint, input_file_id, completion_window, request_sha256, "
            "expires_at, status, attempt, launch_after, model) "
            "SELECT %(project)s || n, %(project)s, %(endpoint)s, 'file-none', '24h', '', now() + interval '1 day', "
            "%(status)s, CASE %(status)s WHEN 'in_progress' THEN 1 ELSE 0 END, "
            "CASE %(status)s WHEN 'in_progress' THEN now() END, 'demo' FROM generate_series(1, %(count)s) AS n",
            {"project": project, "count": count, "endpoint": CHAT, "status": status},
        )


def test_jobs_are_launched_in_turns_though_one_project_was_first_with_all_of_its(queued: Stack) -> None:
    def work(spec: JobSpec) -> JobStatus:
        commit(queued.store, spec.batch_id, 1)
        return SUCCEEDED

    queued.work = work
    context = dataclasses.replace(queued.context, max_running_jobs=1)
    with Workers(context) as workers:
        while queued.sql("SELECT id FROM batches WHERE status <> 'completed'"):
            _pass(context, workers, until=time.monotonic() + 1)
    launched = [spec.batch_id for spec in queued.launcher.launched]
    assert launched == ["a1", "b1", "c1", "a2", "b2", "a3", "a4"]


def test_a_job_that_runs_counts_as_a_turn_taken(queued: Stack) -> None:
    for batch_id in to_advance(queued, 1) + to_advance(queued, 2):
        advance(dataclasses.replace(queued.context, max_running_jobs=2), batch_id)
    queued.end_job(1, batch_id="a1")
    advance(queued.context, "a1")
    advance(dataclasses.replace(queued.context, max_running_jobs=9), "b1")
    # c has none, a none any more, b one
    assert to_advance(queued, 2)[-1:] == ["c1"]


def test_of_batches_that_wait_in_the_queue_only_those_with_a_free_slot_need_a_step(queued: Stack) -> None:
    assert to_advance(queued, 0) == []
    assert to_advance(queued, 3) == ["a1", "b1", "c1"]
    assert to_advance(queued, 3, busy=("b1",)) == ["a1", "c1"]


def test_a_batch_in_the_queue_past_its_deadline_needs_a_step(queued: Stack) -> None:
    queued.sql("UPDATE batches SET expires_at = now() WHERE id = 'a4'")
    assert to_advance(queued, 0) == ["a4"]


def test_a_job_that_waits_to_be_tried_again_holds_up_no_other(queued: Stack) -> None:
    queued.sql("UPDATE batches SET launch_after = now() + interval '1 h' WHERE id = 'a1'")
    assert to_advance(queued, 2) == ["a2", "b1"]


def test_a_launcher_that_refuses_one_job_takes_the_others(queued: Stack) -> None:
    def work(spec: JobSpec) -> JobStatus:
        if spec.batch_id == "a1":
            raise RuntimeError("refused")
        return RUNNING

    queued.work = work
    only_one = dataclasses.replace(queued.context, max_running_jobs=1)
    advance(only_one, "a1")
    [following] = to_advance(queued, 1)
    advance(only_one, following)
    assert queued.batch("a2")["launch_after"] is None


def test_a_project_with_thousands_of_new_batches_makes_no_other_wait_for_all_of_them(stack: Stack) -> None:
    insert_many(stack.pool, "many", 2_000)
    insert_many(stack.pool, "few", 2)
    assert to_advance(stack)[:4] == ["many1", "few1", "many2", "few2"]


def test_a_pass_over_thousands_of_waiting_batches_is_cheap(stack: Stack) -> None:
    insert_many(stack.pool, "many", 5_000, status="in_progress")
    insert_many(stack.pool, "few", 1, status="in_progress")
    context = dataclasses.replace(stack.context, max_running_jobs=2)
    with Workers(context) as workers:
        _pass(context, workers, until=time.monotonic() + 30)
    assert sorted(spec.batch_id for spec in stack.launcher.launched) == ["few1", "many1"]
    began = time.monotonic()
    assert len(to_advance(stack)) == 2
    assert time.monotonic() - began < 0.5


def test_two_reconcilers_at_once_launch_each_batch_once_and_no_more_than_are_allowed(
    stack: Stack, database_url: str
) -> None:
    most = 0

    def work(spec: JobSpec) -> JobStatus:
        nonlocal most
        running = stack.sql(
            "SELECT count(*) FROM batches WHERE attempt > 0 AND launch_after IS NULL AND status = %s", "in_progress"
        )
        most = max(most, running[0]["count"] + 1)
        commit(stack.store, spec.batch_id, 1)
        return SUCCEEDED

    stack.work = work
    other = dataclasses.replace(stack.context, stopping=Event())
    with looping(stack.context, database_url), looping(other, database_url):
        for number in range(12):
            stack.create(line(1), batch_id=f"b{number}", project=f"p{number % 3}")
        # Whoever leads loses its lock in between.
        stack.sql(
            "SELECT pg_terminate_backend(pid) FROM pg_locks WHERE locktype = 'advisory' AND objid = 7203002 AND granted"
        )
        eventually(lambda: len(stack.sql("SELECT id FROM batches WHERE status = 'completed'")) == 12)
    assert Counter(spec.batch_id for spec in stack.launcher.launched) == {f"b{number}": 1 for number in range(12)}
    assert most <= 2
    assert stack.sql("SELECT sum(jobs_launched) FROM usage_totals")[0]["sum"] == 12
