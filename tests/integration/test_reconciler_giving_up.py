"""Giving up batches: the reason is recorded first, and no result or job is lost or left behind."""

import dataclasses
from pathlib import Path

import pytest
import structlog

from ray_job.contract.object_keys import batch_prefix
from service.adapters.directory_object_store import DirectoryObjectStore
from service.adapters.memory_launcher import MemoryLauncher
from service.coordinator.errors import JobEndedError
from service.db import Pool
from service.errors import LauncherError, LaunchRefusedError, ObjectStoreError
from service.ports import JobState, JobStatus
from tests.integration.reconciler_harness import BATCH, FAILED, RUNNING, Stack, line

STUCK = JobStatus(state=JobState.RUNNING, message="no such image", is_stuck=True)
NO_MODEL = JobStatus(state=JobState.FAILED, message="the model is not in the object store", is_final=True)


class AwayStore(DirectoryObjectStore):
    """Cannot delete while it is away."""

    is_away = False

    def delete(self, key: str) -> tuple[str, ...]:
        if self.is_away:
            raise ObjectStoreError("the store is away")
        return super().delete(key)


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


def objects(stack: Stack) -> list[str]:
    return list(stack.store.keys(batch_prefix(BATCH)))


def test_stuck_job_is_stopped_and_its_batch_fails(stuck: Stack) -> None:
    assert stuck.advance()["giving_up_code"] == "job_failed"
    assert stuck.launcher.status(stuck.job().id).state is JobState.STOPPED
    failed = stuck.advance()
    assert (failed["status"], failed["completed"], objects(stuck)) == ("failed", 0, [])
    assert "the job cannot run: no such image" in reasons(stuck)[0]
    assert [job["gone_at"] is None for job in stuck.jobs()] == [False]


def test_stuck_job_ends_every_batch_of_its_domain_and_no_other(stuck: Stack) -> None:
    stuck.create(line(1), batch_id="batch_2")
    stuck.create(line(1), batch_id="batch_q", project="q")
    stuck.work = lambda _: RUNNING
    for batch_id in ("batch_2", "batch_q", BATCH, "batch_2", "batch_q"):
        stuck.advance(batch_id)
    assert [stuck.batch(batch_id)["status"] for batch_id in (BATCH, "batch_2")] == ["failed"] * 2
    assert (stuck.batch("batch_q")["status"], stuck.batch("batch_q")["giving_up_at"]) == ("in_progress", None)


def test_job_that_committed_and_is_stuck_later_is_kept(stuck: Stack) -> None:
    job = stuck.job()
    job.lease()
    assert job.commit(1)
    assert stuck.advance()["giving_up_at"] is None
    assert stuck.launcher.status(job.id) == STUCK


def test_batch_with_results_waits_for_what_its_next_job_lacks(stack: Stack) -> None:
    first = stack.started(line(1), line(2))
    first.commit(1)
    stack.launcher.end(first.id, FAILED)
    stack.advance()
    stack.create(line(1), batch_id="batch_2")
    stack.advance("batch_2")
    stack.work = lambda _: STUCK
    stack.forget_backoff()
    for batch_id in ("batch_2", BATCH, "batch_2"):
        stack.advance(batch_id)
    assert [stack.batch(batch_id)["status"] for batch_id in (BATCH, "batch_2")] == ["in_progress", "failed"]
    stack.work = lambda _: RUNNING
    stack.forget_backoff()
    stack.advance()
    stack.job().answer_all()
    assert (stack.advance()["status"], stack.batch()["completed"]) == ("completed", 2)


def test_batch_with_results_is_given_up_after_the_fourth_stuck_job(stack: Stack) -> None:
    first = stack.started(line(1), line(2))
    first.commit(1)
    stack.launcher.end(first.id, FAILED)
    stack.work = lambda _: STUCK
    for _ in range(12):
        stack.forget_backoff()
        stack.advance()
    assert (stack.batch()["status"], stack.batch()["completed"]) == ("failed", 1)
    assert len(stack.launcher.launched) == 4


def test_new_batch_runs_after_its_domain_was_given_up(stuck: Stack) -> None:
    stuck.advance()
    stuck.advance()
    stuck.work = lambda _: RUNNING
    stuck.create(line(1), batch_id="batch_2")
    stuck.advance("batch_2")
    stuck.job().answer_all()
    assert stuck.advance("batch_2")["status"] == "completed"


def test_results_committed_before_the_failure_are_delivered(stack: Stack) -> None:
    job = stack.started(line(1), line(2), line(3))
    job.commit(1)
    job.commit(3)
    stack.launcher.end(job.id, NO_MODEL)
    stack.advance()
    failed = stack.advance()
    assert (failed["status"], failed["completed"], objects(stack)) == ("failed", 2, [])
    assert [row["custom_id"] for row in stack.file(failed["output_file_id"])] == ["id-1", "id-3"]


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
    assert (failed["status"], len(stack.launcher.launched), len(reasons(stack))) == ("failed", 1, 1)
    assert "no such image" in reasons(stack)[0]


def test_job_is_stopped_after_a_crash_that_followed_the_stop(stuck: Stack) -> None:
    stuck.advance()
    # As if the reconciler had died between recording the failure and the end of the job.
    stuck.launcher.end(stuck.job().id, RUNNING)
    stuck.advance_jobs()
    assert stuck.launcher.status(stuck.job().id) == RUNNING
    stuck.sql("UPDATE jobs SET ended_at = now() - interval '1 min'")
    stuck.advance_jobs()
    assert stuck.launcher.status(stuck.job().id).state is JobState.STOPPED


def test_unreachable_launcher_delays_giving_up(stuck: Stack) -> None:
    stuck.launcher.is_reachable = False
    with pytest.raises(LauncherError):
        stuck.advance()
    assert stuck.batch()["giving_up_at"] is None
    stuck.launcher.is_reachable = True
    stuck.advance()
    assert stuck.advance()["status"] == "failed"


def test_job_that_does_not_stop_holds_its_slot_and_delays_no_end(stuck: Stack) -> None:
    stubborn = StubbornLauncher(lambda _: STUCK)
    stubborn.launch(stuck.launcher.launched[0], "token")
    stuck.backends = dataclasses.replace(stuck.backends, launcher=stubborn)
    stuck.advance()
    failed = stuck.advance()
    assert (failed["status"], failed["parts_deleted_at"] is None) == ("failed", False)
    assert [job["gone_at"] for job in stuck.jobs()] == [None]
    with pytest.raises(JobEndedError):
        stuck.job().lease()
    stubborn.forget()
    stuck.advance_jobs()
    assert stuck.jobs()[0]["gone_at"] is not None


def test_cancel_of_a_batch_that_is_given_up_wins(stuck: Stack) -> None:
    stuck.advance()
    stuck.cancel()
    assert stuck.advance()["status"] == "cancelled"
    assert reasons(stuck) == []


def test_final_failure_is_not_retried(stack: Stack) -> None:
    stack.create(line(1))
    stack.work = lambda _: NO_MODEL
    stack.advance()
    stack.advance()
    assert (stack.advance()["status"], len(stack.launcher.launched)) == ("failed", 1)
    assert "a retry would fail too: the model is not in the object store. Fix" in reasons(stack)[0]


def test_unrecorded_launch_is_stopped_if_its_model_can_no_longer_run(stack: Stack) -> None:
    stack.create(line(1))
    stack.advance()
    stack.sql("UPDATE jobs SET launch_after = now()")  # as if killed between launching and recording it
    stack.launcher.refusals["demo"] = "its node pool is gone"
    stack.advance()
    assert stack.launcher.status(stack.job().id).state is JobState.STOPPED
    assert stack.advance()["status"] == "failed"


def test_unrecorded_launch_is_stopped_if_no_work_is_left(stack: Stack) -> None:
    stack.create(line(1))
    stack.advance()
    stack.sql("UPDATE jobs SET launch_after = now()")
    stack.cancel()
    stack.advance()
    assert stack.launcher.status(stack.job().id).state is JobState.STOPPED
    assert stack.jobs()[0]["gone_at"] is not None


def test_refused_launch_is_reported_and_ends_the_batch_after_half_an_hour(stack: Stack) -> None:
    def refuse(_: object) -> JobStatus:
        raise LaunchRefusedError("answered 403: forbidden")

    stack.create(line(1))
    stack.work = refuse
    stack.advance()
    first = stack.jobs()[0]["refused_at"]
    stack.forget_backoff()
    stack.advance()
    assert stack.jobs()[0]["refused_at"] == first is not None
    (event,) = stack.sql("SELECT data FROM batch_events WHERE type = 'job.waiting'")
    assert event["data"] == {"job_id": stack.jobs()[0]["id"], "reason": "answered 403: forbidden"}
    stack.forget_backoff()
    stack.sql("UPDATE jobs SET refused_at = now() - interval '30 min'")
    stack.advance()
    assert stack.advance()["status"] == "failed"
    assert "was refused for 30 minutes: answered 403: forbidden." in reasons(stack)[0]


def test_unreachable_launcher_resets_the_time_of_refusal(stack: Stack) -> None:
    def away(_: object) -> JobStatus:
        raise LauncherError("cannot reach the Kubernetes API")

    stack.create(line(1))
    stack.advance()
    stack.sql("UPDATE jobs SET launch_after = now(), refused_at = now() - interval '1 h'")
    stack.launcher.forget()
    stack.work = away
    assert stack.advance()["status"] == "in_progress"
    assert stack.jobs()[0]["refused_at"] is None


def test_log_omits_the_messages_of_jobs(stack: Stack) -> None:
    stack.create(line(1))
    stack.work = lambda _: FAILED
    with structlog.testing.capture_logs() as logged:
        for _ in range(9):
            stack.advance()
            stack.forget_backoff()
    assert [entry["event"] for entry in logged].count("job.failed") == 4
    assert "no such model directory" not in str(logged)
    assert "no such model directory" in reasons(stack)[0]
