"""Batches whose lines are all reported while their job is still ending."""

import dataclasses
from pathlib import Path

import psycopg
import pytest

from ray_job.contract.object_keys import batch_prefix, part_key
from service.db import Pool
from service.errors import LauncherError
from service.ports import JobState
from service.reconciler.loop import batches_to_advance
from service.reconciler.steps import advance, step
from service.workspace import Workspace
from tests.integration.reconciler_harness import (
    BATCH,
    FAILED,
    RUNNING,
    Meddling,
    Stack,
    commit,
    eventually,
    line,
    looping,
)

JOB = f"{BATCH}-1"


@pytest.fixture
def stack(pool: Pool, tmp_path: Path) -> Stack:
    """A batch with two lines whose job runs."""
    stack = Stack(pool, Meddling(tmp_path / "objects"), tmp_path)
    stack.create(line(1), line(2))
    stack.advance()
    return stack


def report(stack: Stack, rows: int = 2, attempt: int = 1) -> bool:
    call = "SELECT report_progress(%s, %s, %s, 0, 0, 0, 0, 0) AS accepted"
    return bool(stack.sql(call, BATCH, attempt, rows)[0]["accepted"])


def finalizing(stack: Stack) -> None:
    commit(stack.store, BATCH, 1)
    commit(stack.store, BATCH, 2)
    report(stack)
    step(stack.backends, BATCH)
    assert stack.batch()["status"] == "finalizing"


def parts(stack: Stack) -> int:
    return len(list(stack.store.keys(batch_prefix(BATCH))))


def events(stack: Stack, *types: str) -> list[str]:
    found = stack.sql("SELECT type FROM batch_events WHERE type = ANY (%s) ORDER BY id", list(types))
    return [row["type"] for row in found]


def test_batch_completes_while_its_job_ends_and_its_parts_stay_until_then(stack: Stack) -> None:
    finalizing(stack)
    for _ in range(2):
        batch = stack.advance()
        assert (batch["status"], batch["completed"], batch["parts_deleted_at"]) == ("completed", 2, None)
        assert (parts(stack), stack.launcher.status(JOB)) == (2, RUNNING)
    stack.end_job()
    batch = stack.advance()
    assert (batch["parts_deleted_at"] is None, batch["job_ending_since"], parts(stack)) == (False, None, 0)
    assert [row["custom_id"] for row in stack.file(batch["output_file_id"])] == ["id-1", "id-2"]


@pytest.mark.parametrize("where", [("keys", "batches"), ("read", "batches"), ("put", "files")])
@pytest.mark.parametrize("steps", [0, 1])
def test_reconciler_that_dies_in_a_step_is_continued(stack: Stack, where: tuple[str, str], steps: int) -> None:
    def die() -> None:
        raise SystemExit

    commit(stack.store, BATCH, 1, 2)
    report(stack)
    for _ in range(steps):
        step(stack.backends, BATCH)
    assert isinstance(stack.store, Meddling)
    stack.store.meddle, stack.store.when = die, where
    with pytest.raises(SystemExit):
        stack.advance()
    batch = stack.advance()
    assert (batch["status"], batch["completed"], batch["attempt"], parts(stack)) == ("completed", 2, 1, 1)
    assert events(stack, "batch.finalizing", "batch.completed") == ["batch.finalizing", "batch.completed"]
    stack.end_job()
    assert stack.advance()["parts_deleted_at"] is not None


def test_reported_line_without_a_part_is_looked_for_once_and_then_waited_for(stack: Stack) -> None:
    commit(stack.store, BATCH, 2)
    report(stack)
    for _ in range(3):
        assert stack.advance()["status"] == "in_progress"
    assert events(stack, "batch.results_missing") == ["batch.results_missing"]
    stack.end_job(1)
    assert stack.advance()["status"] == "completed"


def test_job_that_ends_without_a_reported_line_is_followed_by_another(stack: Stack) -> None:
    report(stack)
    stack.end_job(1)
    batch = stack.advance()
    assert (batch["status"], batch["attempt"], batch["completed"]) == ("in_progress", 2, 2)
    stack.forget_backoff()
    assert stack.advance()["status"] == "in_progress"  # the counts are those of the first attempt
    assert not report(stack)
    stack.end_job(2)
    report(stack, attempt=2)
    assert stack.advance()["status"] == "completed"


def test_unreadable_part_is_waited_for(stack: Stack) -> None:
    commit(stack.store, BATCH, 1)
    stack.store.put(part_key(BATCH, [2]), [b"{}"])
    report(stack)
    assert stack.advance()["status"] == "in_progress"
    stack.end_job(2)
    assert stack.advance()["status"] == "completed"


def test_job_that_fails_after_all_lines_are_reported_needs_no_other_attempt(stack: Stack) -> None:
    commit(stack.store, BATCH, 1, 2)
    report(stack)
    stack.launcher.end(JOB, FAILED)
    batch = stack.advance()
    assert (batch["status"], batch["attempt"], parts(stack)) == ("completed", 1, 0)


def test_cancel_while_finalizing_stops_the_job_and_keeps_all_results(stack: Stack) -> None:
    finalizing(stack)
    stack.cancel()
    assert (stack.advance()["status"], parts(stack)) == ("cancelling", 2)
    batch = stack.advance()
    assert (batch["status"], batch["completed"], batch["job_ending_since"]) == ("cancelled", 2, None)
    assert (stack.launcher.status(JOB).state, parts(stack)) == (JobState.STOPPED, 0)


@pytest.mark.parametrize("status", ["finalizing", "completed"])
def test_late_part_of_a_line_changes_no_result_and_is_deleted(stack: Stack, status: str) -> None:
    finalizing(stack)
    while stack.batch()["status"] != status:
        step(stack.backends, BATCH)
    commit(stack.store, BATCH, 1, 2)
    batch = stack.advance()
    assert (batch["completed"], batch["failed"], len(stack.file(batch["output_file_id"]))) == (2, 0, 2)
    assert parts(stack) == 3
    stack.end_job()
    stack.advance()
    assert parts(stack) == 0


def test_part_that_is_replaced_while_it_is_read_fails_no_batch(stack: Stack) -> None:
    finalizing(stack)
    key = part_key(BATCH, [2])
    whole = b"".join(stack.store.read(key))
    stack.store.put(key, [whole[:-1]])
    batch = stack.advance()
    assert (batch["status"], stack.launcher.status(JOB).state) == ("finalizing", JobState.STOPPED)
    stack.store.put(key, [whole])
    assert stack.advance()["status"] == "completed"


@pytest.mark.parametrize("ending_s", [0, 301])
def test_part_that_stays_damaged_fails_its_batch_once_the_job_cannot_write(stack: Stack, ending_s: int) -> None:
    finalizing(stack)
    stack.store.put(part_key(BATCH, [2]), [b"".join(stack.store.read(part_key(BATCH, [2])))[:-1]])
    stack.sql("UPDATE batches SET job_ending_since = job_ending_since - make_interval(secs => %s)", ending_s)
    if not ending_s:
        stack.end_job()
    batch = stack.advance()
    assert (batch["status"], batch["completed"], stack.errors()[0]["code"]) == ("failed", 1, "assembly_failed")


def test_another_reconciler_that_ends_the_batch_during_the_check_wins(stack: Stack) -> None:
    commit(stack.store, BATCH, 1, 2)
    report(stack)

    def another_ends_it() -> None:
        stack.advance()
        stack.end_job()
        assert stack.advance()["parts_deleted_at"] is not None

    assert isinstance(stack.store, Meddling)
    stack.store.meddle, stack.store.when = another_ends_it, ("keys", "batches")
    batch = stack.advance()
    assert (batch["status"], batch["attempt"], batch["completed"]) == ("completed", 1, 2)
    types = ("batch.finalizing", "batch.completed", "batch.results_missing")
    assert events(stack, *types) == ["batch.finalizing", "batch.completed"]


def test_unreachable_launcher_delays_only_the_deletion_of_the_parts(stack: Stack) -> None:
    commit(stack.store, BATCH, 1, 2)
    report(stack)
    stack.launcher.is_reachable = False
    for _ in range(2):
        with pytest.raises(LauncherError):
            stack.advance()
        assert (stack.batch()["status"], parts(stack)) == ("completed", 1)
        stack.sql("UPDATE batches SET job_ending_since = now() - interval '1 h'")
    stack.launcher.is_reachable = True
    stack.advance()
    assert stack.launcher.status(JOB).state is JobState.STOPPED
    assert stack.advance()["parts_deleted_at"] is not None


def test_job_that_does_not_end_is_stopped_after_a_minute(stack: Stack) -> None:
    finalizing(stack)
    stack.sql("UPDATE batches SET job_ending_since = job_ending_since - interval '1 min'")
    assert stack.advance()["parts_deleted_at"] is None
    assert stack.launcher.status(JOB).state is JobState.STOPPED
    assert stack.advance()["parts_deleted_at"] is not None


def test_next_job_is_launched_when_the_ending_one_is_gone(stack: Stack) -> None:
    stack.create(line(1), batch_id="next", project="q")
    finalizing(stack)
    stack.advance()
    step(stack.backends, "next")

    def due() -> list[str]:
        return [batch["id"] for batch in batches_to_advance(stack.pool, max_running_jobs=1)]

    assert due() == [BATCH]
    stack.sql("UPDATE batches SET job_ending_since = now() - interval '5 min' WHERE id = %s", BATCH)
    stack.advance()  # a job that does not stop holds its slot no longer than the grace
    assert sorted(due()) == [BATCH, "next"]


def test_job_that_has_ended_holds_no_slot_while_the_workspace_is_full(stack: Stack, tmp_path: Path) -> None:
    finalizing(stack)
    stack.end_job()
    full = dataclasses.replace(stack.backends, workspace=Workspace(tmp_path / "missing"))
    with pytest.raises(FileNotFoundError):
        step(full, BATCH)
    assert (stack.batch()["status"], stack.batch()["job_ending_since"]) == ("finalizing", None)
    assert stack.advance()["status"] == "completed"


def test_gpu_seconds_count_until_the_job_has_ended(stack: Stack) -> None:
    stack.sql("UPDATE batches SET gpus = 6, job_running_since = now() - interval '10 s'")

    def totals() -> float:
        return float(stack.sql("SELECT gpu_seconds FROM usage_totals")[0]["gpu_seconds"])

    finalizing(stack)
    stack.advance()
    assert totals() == stack.batch()["gpu_seconds"] == pytest.approx(60, abs=30)
    stack.sql("UPDATE batches SET job_running_since = job_running_since - interval '100 s'")
    stack.end_job()
    batch = stack.advance()
    assert batch["job_running_since"] is None
    assert totals() == batch["gpu_seconds"] == pytest.approx(660, abs=60)


def test_report_of_the_last_line_wakes_the_reconciler_once(stack: Stack, database_url: str) -> None:
    with psycopg.connect(database_url, autocommit=True) as connection:
        connection.execute("LISTEN batches")
        for rows in (0, 1, 2, 2):
            assert report(stack, rows)
        assert len(list(connection.notifies(timeout=0.2))) == 1
        finalizing(stack)
        assert report(stack)  # the job is ending, not superseded
        assert not report(stack, attempt=2)
        stack.end_job()
        advance(stack.backends, BATCH)
        assert not report(stack)


def test_loop_finalizes_when_the_last_line_is_reported(stack: Stack, database_url: str) -> None:
    commit(stack.store, BATCH, 1, 2)
    with looping(stack.backends, database_url):
        eventually(lambda: bool(stack.sql("SELECT beat_at FROM reconciler_heartbeat")))
        report(stack)
        eventually(lambda: stack.batch()["status"] == "completed")
        assert stack.launcher.status(JOB) == RUNNING
        stack.end_job()
        eventually(lambda: parts(stack) == 0)
