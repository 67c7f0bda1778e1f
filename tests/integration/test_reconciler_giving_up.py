"""Giving up a batch: the reason is recorded first, and no result or job is lost or left behind."""

import dataclasses
from pathlib import Path

import pytest
import structlog

from ray_job.contract.object_keys import batch_prefix
from service.adapters.directory_object_store import DirectoryObjectStore
from service.adapters.memory_launcher import MemoryLauncher
from service.db import Pool
from service.errors import LauncherError, LaunchRefusedError, ObjectStoreError
from service.ports import JobState, JobStatus
from service.reconciler.steps import step
from tests.integration.reconciler_harness import BATCH, FAILED, Stack, commit, line

JOB = f"{BATCH}-1"
STUCK = JobStatus(state=JobState.RUNNING, message="no such image", is_stuck=True)
NO_MODEL = JobStatus(state=JobState.FAILED, message="the model is not in the object store", is_final=True)


class AwayStore(DirectoryObjectStore):
    """Cannot delete while it is away."""

    is_away = False

    def delete(self, key: str) -> None:
        if self.is_away:
            raise ObjectStoreError("the store is away")
        super().delete(key)


class StubbornLauncher(MemoryLauncher):
    """Has jobs that do not stop."""

    def stop(self, job_id: str) -> None:
        """Takes no effect."""


@pytest.fixture
def stuck(stack: Stack) -> Stack:
    """A batch of three lines whose first job is stuck."""
    stack.create(line(1), line(2), line(3))
    stack.work = lambda _: STUCK
    stack.advance()
    return stack


def reasons(stack: Stack) -> list[str]:
    return [error["message"] for error in stack.errors()]


def parts(stack: Stack) -> list[str]:
    return list(stack.store.keys(batch_prefix(BATCH)))


def test_results_committed_before_the_job_stops_are_delivered(stuck: Stack) -> None:
    commit(stuck.store, BATCH, 1)
    assert stuck.advance()["status"] == "in_progress"
    assert stuck.launcher.status(JOB).state is JobState.STOPPED
    commit(stuck.store, BATCH, 3)
    failed = stuck.advance()
    assert (failed["status"], failed["completed"], parts(stuck)) == ("failed", 2, [])
    assert [row["custom_id"] for row in stuck.file(failed["output_file_id"])] == ["id-1", "id-3"]


def test_reason_survives_an_outage_of_the_store_and_the_loss_of_the_job(pool: Pool, tmp_path: Path) -> None:
    store = AwayStore(tmp_path / "objects")
    stack = Stack(pool, store, tmp_path)
    stack.create(line(1))
    stack.work = lambda _: STUCK
    stack.advance()
    stack.advance()
    store.is_away = True
    with pytest.raises(ObjectStoreError):
        stack.advance()
    stack.launcher.forget()
    store.is_away = False
    failed = stack.advance()
    assert (failed["status"], failed["attempt"], len(reasons(stack))) == ("failed", 1, 1)
    assert "no such image" in reasons(stack)[0]


def test_job_is_stopped_after_a_crash_that_followed_the_decision(stuck: Stack) -> None:
    step(stuck.backends, BATCH)
    assert (stuck.batch()["giving_up_code"], stuck.launcher.status(JOB)) == ("job_failed", STUCK)
    stuck.launcher.end(JOB, JobStatus(state=JobState.RUNNING))  # it is no longer stuck, but too late
    stuck.advance()
    assert stuck.advance()["status"] == "failed"
    assert "no such image" in reasons(stuck)[0]


def test_job_that_does_not_stop_delays_the_deletion_of_parts_only(stuck: Stack) -> None:
    stubborn = StubbornLauncher(lambda _: STUCK)
    stubborn.launch(stuck.launcher.launched[0])
    stuck.backends = dataclasses.replace(stuck.backends, launcher=stubborn)
    assert stuck.advance()["status"] == "in_progress"
    stuck.sql("UPDATE batches SET giving_up_at = giving_up_at - interval '6 min'")
    assert stuck.advance()["status"] == "failed"
    commit(stuck.store, BATCH, 2)
    assert stuck.advance()["parts_deleted_at"] is None
    stubborn.forget()
    assert stuck.advance()["parts_deleted_at"] is not None
    assert parts(stuck) == []


def test_cancel_of_a_batch_that_is_given_up_wins(stuck: Stack) -> None:
    stuck.advance()
    stuck.cancel()
    assert stuck.advance()["status"] == "cancelled"
    assert reasons(stuck) == []


def test_stuck_job_of_a_batch_with_results_is_not_given_up(stuck: Stack) -> None:
    stuck.sql("UPDATE batches SET completed = 1")
    assert stuck.advance()["giving_up_at"] is None
    (event,) = stuck.sql("SELECT data FROM batch_events WHERE type = 'job.waiting'")
    assert event["data"] == {"job_id": JOB, "reason": "no such image"}


def test_final_failure_is_not_retried(stack: Stack) -> None:
    stack.create(line(1))
    stack.work = lambda _: NO_MODEL
    stack.advance()
    failed = stack.advance()
    assert (failed["status"], failed["attempt"], len(stack.launcher.launched)) == ("failed", 1, 1)
    assert "a retry would fail too: the model is not in the object store. Fix" in reasons(stack)[0]


def test_unrecorded_launch_is_stopped_if_its_model_can_no_longer_run(stack: Stack) -> None:
    stack.create(line(1))
    stack.advance()
    stack.sql("UPDATE batches SET launch_after = now()")  # as if killed between launching and recording it
    stack.launcher.refusals["demo"] = "its node pool is gone"
    batch = stack.advance()
    assert (batch["status"], batch["launch_after"]) == ("in_progress", None)
    assert stack.launcher.status(JOB).state is JobState.STOPPED
    assert stack.advance()["status"] == "failed"


def test_refused_launch_is_reported_and_ends_the_batch_after_half_an_hour(stack: Stack) -> None:
    def refuse(_: object) -> JobStatus:
        raise LaunchRefusedError("answered 403: forbidden")

    stack.create(line(1))
    stack.work = refuse
    first = stack.advance()["launch_refused_at"]
    stack.forget_backoff()
    assert stack.advance()["launch_refused_at"] == first is not None
    (event,) = stack.sql("SELECT data FROM batch_events WHERE type = 'job.waiting'")
    assert event["data"] == {"job_id": JOB, "reason": "answered 403: forbidden"}
    stack.forget_backoff()
    stack.sql("UPDATE batches SET launch_refused_at = now() - interval '30 min'")
    assert stack.advance()["status"] == "failed"
    assert "was refused for 30 minutes: answered 403: forbidden." in reasons(stack)[0]


def test_unreachable_launcher_resets_the_time_of_refusal(stack: Stack) -> None:
    def away(_: object) -> JobStatus:
        raise LauncherError("cannot reach the Kubernetes API")

    stack.create(line(1))
    stack.advance()
    stack.sql("UPDATE batches SET launch_after = now(), launch_refused_at = now() - interval '1 h'")
    stack.launcher.forget()
    stack.work = away
    batch = stack.advance()
    assert (batch["status"], batch["launch_refused_at"]) == ("in_progress", None)


def test_log_omits_the_messages_of_jobs(stack: Stack) -> None:
    stack.create(line(1))
    stack.work = lambda _: FAILED
    with structlog.testing.capture_logs() as logged:
        for _ in range(9):
            stack.advance()
            stack.forget_backoff()
    assert [entry["event"] for entry in logged].count("job.ended") == 3
    assert "batch.giving_up" in [entry["event"] for entry in logged]
    assert "no such model directory" not in str(logged)
    assert "no such model directory" in reasons(stack)[0]
