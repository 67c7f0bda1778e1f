"""Order of batches: projects take turns, live jobs rotate, and each job is launched once."""

import dataclasses
import time
from collections import Counter
from datetime import UTC, datetime
from threading import Event

import pytest

from ray_job.contract.job_spec import JobSpec
from service.db import Pool
from service.errors import LauncherError
from service.ports import JobStatus
from service.reconciler.loop import Workers, batches_to_advance
from service.reconciler.steps import advance
from tests.integration.reconciler_harness import CHAT, RUNNING, SUCCEEDED, Stack, commit, eventually, line, looping

# In the order of their creation.
QUEUED = ["a1", "a2", "a3", "a4", "b1", "b2", "c1"]


@pytest.fixture
def queued(stack: Stack) -> Stack:
    """Seven accepted batches of three projects, without jobs."""
    nothing_runs = dataclasses.replace(stack.backends, max_running_jobs=0)
    for batch_id in QUEUED:
        stack.create(line(1), batch_id=batch_id, project=batch_id[0])
        advance(nothing_runs, batch_id)
    return stack


def to_advance(stack: Stack, max_running_jobs: int = 2, excluded: tuple[str, ...] = ()) -> list[str]:
    due = batches_to_advance(stack.pool, max_running_jobs=max_running_jobs, excluded=excluded)
    return [batch["id"] for batch in due]


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


def test_projects_take_turns_in_launching_jobs(queued: Stack) -> None:
    def work(spec: JobSpec) -> JobStatus:
        commit(queued.store, spec.batch_id, 1)
        return SUCCEEDED

    queued.work = work
    backends = dataclasses.replace(queued.backends, max_running_jobs=1)
    with Workers(backends) as workers:
        while queued.sql("SELECT id FROM batches WHERE status <> 'completed'"):
            workers.run_pass(until=time.monotonic() + 1)
    launched = [spec.batch_id for spec in queued.launcher.launched]
    assert launched == ["a1", "b1", "c1", "a2", "b2", "a3", "a4"]


def test_running_job_counts_as_a_turn(queued: Stack) -> None:
    for batch_id in to_advance(queued, 1) + to_advance(queued, 2):
        advance(dataclasses.replace(queued.backends, max_running_jobs=2), batch_id)
    queued.end_job(1, batch_id="a1")
    advance(queued.backends, "a1")
    advance(dataclasses.replace(queued.backends, max_running_jobs=9), "b1")
    # Running jobs: b has one, a and c have none.
    assert to_advance(queued, 2)[-1:] == ["c1"]


def test_only_queued_batches_with_a_free_slot_need_a_step(queued: Stack) -> None:
    assert to_advance(queued, 0) == []
    assert to_advance(queued, 3) == ["a1", "b1", "c1"]
    assert to_advance(queued, 3, excluded=("b1",)) == ["a1", "c1"]


def test_queued_batch_past_its_deadline_needs_a_step(queued: Stack) -> None:
    queued.sql("UPDATE batches SET expires_at = now() WHERE id = 'a4'")
    assert to_advance(queued, 0) == ["a4"]


def test_postponed_launch_does_not_delay_others(queued: Stack) -> None:
    queued.sql("UPDATE batches SET launch_after = now() + interval '1 h' WHERE id = 'a1'")
    assert to_advance(queued, 2) == ["a2", "b1"]


@pytest.mark.parametrize(("age_s", "pause_s"), [(0, 0.25), (4, 2), (3_600, 5)])
def test_launch_is_tried_again_sooner_for_a_new_batch(queued: Stack, age_s: float, pause_s: float) -> None:
    def work(_: JobSpec) -> JobStatus:
        raise LauncherError("Ray is starting")

    queued.work = work
    queued.sql("UPDATE batches SET created_at = now() - make_interval(secs => %s) WHERE id = 'a1'", age_s)
    advance(dataclasses.replace(queued.backends, first_pause_s=1.0), "a1")
    left_s = (queued.batch("a1")["launch_after"] - datetime.now(UTC)).total_seconds()
    assert pause_s - 0.5 < left_s <= pause_s + 0.5


def test_failed_launch_does_not_delay_others(queued: Stack) -> None:
    def work(spec: JobSpec) -> JobStatus:
        if spec.batch_id == "a1":
            raise RuntimeError("refused")
        return RUNNING

    queued.work = work
    only_one = dataclasses.replace(queued.backends, max_running_jobs=1, first_pause_s=60)
    advance(only_one, "a1")
    [following] = to_advance(queued, 1)
    advance(only_one, following)
    assert queued.batch("a2")["launch_after"] is None


def test_project_with_thousands_of_new_batches_does_not_delay_others(stack: Stack) -> None:
    insert_many(stack.pool, "many", 2_000)
    insert_many(stack.pool, "few", 2)
    assert to_advance(stack)[:4] == ["many1", "few1", "many2", "few2"]


def test_pass_over_thousands_of_waiting_batches_is_fast(stack: Stack) -> None:
    insert_many(stack.pool, "many", 5_000, status="in_progress")
    insert_many(stack.pool, "few", 1, status="in_progress")
    backends = dataclasses.replace(stack.backends, max_running_jobs=2)
    with Workers(backends) as workers:
        workers.run_pass(until=time.monotonic() + 30)
    assert sorted(spec.batch_id for spec in stack.launcher.launched) == ["few1", "many1"]
    began = time.monotonic()
    assert len(to_advance(stack)) == 2
    assert time.monotonic() - began < 0.5


def test_two_reconcilers_launch_each_batch_once_and_keep_to_the_limit(stack: Stack, database_url: str) -> None:
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
    other = dataclasses.replace(stack.backends, stopping=Event())
    with looping(stack.backends, database_url), looping(other, database_url):
        for number in range(12):
            stack.create(line(1), batch_id=f"b{number}", project=f"p{number % 3}")
        # The leader loses its lock in between.
        stack.sql(
            "SELECT pg_terminate_backend(pid) FROM pg_locks WHERE locktype = 'advisory' AND objid = 7203002 AND granted"
        )
        eventually(lambda: len(stack.sql("SELECT id FROM batches WHERE status = 'completed'")) == 12)
    assert Counter(spec.batch_id for spec in stack.launcher.launched) == {f"b{number}": 1 for number in range(12)}
    assert most <= 2
    assert stack.sql("SELECT sum(jobs_launched) FROM usage_totals")[0]["sum"] == 12


def insert_live_jobs(stack: Stack, project: str, count: int) -> None:
    """Insert batches whose jobs run."""
    insert_many(stack.pool, project, count, status="in_progress")
    stack.sql("UPDATE batches SET launch_after = NULL, total = 1 WHERE project_id = %s", project)
    for number in range(1, count + 1):
        stack.launcher.end(f"{project}{number}-1", RUNNING)


def test_each_live_job_gets_its_step_however_many_there_are(stack: Stack) -> None:
    insert_live_jobs(stack, "many", 450)
    insert_live_jobs(stack, "few", 1)
    for last in ("many450", "few1"):
        stack.end_job(1, batch_id=last)
    backends = dataclasses.replace(stack.backends, max_running_jobs=1_000)
    with Workers(backends) as workers:
        for _ in range(4):
            workers.run_pass(until=time.monotonic() + 30)
    assert stack.batch("few1")["status"] == "completed"
    assert stack.batch("many450")["status"] == "completed"


def test_live_jobs_and_new_batches_take_turns(stack: Stack) -> None:
    insert_live_jobs(stack, "live", 300)
    insert_many(stack.pool, "new", 300)
    due = batches_to_advance(stack.pool, max_running_jobs=1_000, limit=4)
    assert [batch["id"] for batch in due] == ["live1", "new1", "live2", "new2"]


def test_rotation_continues_after_the_last_batch_that_had_a_step(stack: Stack) -> None:
    insert_live_jobs(stack, "live", 3)
    (_, second, _) = batches_to_advance(stack.pool, max_running_jobs=9)
    following = batches_to_advance(stack.pool, max_running_jobs=9, after_seq=second["seq"])
    assert [batch["id"] for batch in following] == ["live3", "live1", "live2"]


def test_pass_returns_at_most_its_limit_however_many_batches_are_open(stack: Stack) -> None:
    insert_live_jobs(stack, "live", 450)
    assert len(to_advance(stack, 1_000)) == 200
