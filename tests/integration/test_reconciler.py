"""The reconciler on real Postgres and a directory store, with jobs that the tests simulate."""

import threading
import time
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import psycopg
import pytest

from ray_job.contract.job_spec import JobSpec
from ray_job.contract.object_keys import batch_prefix, file_key
from service.adapters.directory_object_store import DirectoryObjectStore
from service.db import Pool
from service.errors import CloisterError, LauncherError, ObjectStoreError
from service.ports import JobState, JobStatus
from service.reconciler.loop import run
from service.reconciler.steps import advance, step
from tests.conftest import as_service
from tests.integration.reconciler_harness import BATCH, FAILED, RUNNING, SUCCEEDED, Job, Stack, eventually, line
from tests.integration.recorded_work import write_part


def test_batch_goes_from_validating_to_completed(stack: Stack) -> None:
    job = stack.started(line(1), b"", line(3), line(4))
    assert stack.batch()["status"] == "in_progress"
    assert job.commit(4, 1)
    assert job.commit(3, fails=True)
    done = stack.advance()
    assert (done["status"], done["model"], done["domain"]) == ("completed", "demo", "p")
    assert (done["total"], done["completed"], done["failed"]) == (3, 2, 1)
    assert (done["input_tokens"], done["output_tokens"]) == (30, 6)
    assert [row["custom_id"] for row in stack.file(done["output_file_id"])] == ["id-1", "id-4"]
    assert [row["custom_id"] for row in stack.file(done["error_file_id"])] == ["id-3"]
    assert None not in (done["in_progress_at"], done["finalizing_at"], done["completed_at"], done["parts_deleted_at"])
    assert list(stack.store.keys(batch_prefix(BATCH))) == []


def test_result_files_have_name_purpose_size_and_expiry(stack: Stack) -> None:
    stack.create(line(1))
    stack.sql("UPDATE batches SET output_expires_after_s = 3600")
    stack.advance()
    stack.job().answer_all()
    file = stack.sql("SELECT * FROM files WHERE id = %s", stack.advance()["output_file_id"])[0]
    assert (file["filename"], file["purpose"]) == ("batch_1_output.jsonl", "batch_output")
    assert file["expires_at"] - file["created_at"] == timedelta(hours=1)
    assert file["size_bytes"] == sum(map(len, stack.store.read(file_key(file["id"]))))


def test_each_transition_adds_an_event(stack: Stack) -> None:
    stack.started(line(1)).commit()
    stack.advance()
    types = [row["type"] for row in stack.sql("SELECT type FROM batch_events ORDER BY id")]
    assert types == ["batch.in_progress", "job.launched", "job.running", "batch.finalizing", "batch.completed"]


def test_invalid_input_file_fails_the_batch_with_all_its_errors(stack: Stack) -> None:
    stack.create(*[line(1, model="none")] * 1_100)
    failed = stack.advance()
    assert (failed["status"], failed["error_count"], len(stack.errors())) == ("failed", 2_199, 1_000)
    assert failed["failed_at"] is not None
    assert stack.launcher.launched == []


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ("DELETE FROM files", "does not exist"),
        ("UPDATE files SET deleted_at = now() - interval '1 h'", "was deleted"),
        ("UPDATE files SET expires_at = now() - interval '1 h'", "has expired"),
        ("UPDATE files SET purpose = 'batch_output'", "has purpose 'batch_output'"),
        ("UPDATE files SET project_id = 'q'", "does not exist"),
    ],
)
def test_unusable_input_file_fails_the_batch(stack: Stack, change: str, message: str) -> None:
    stack.create(line(1))
    stack.sql("INSERT INTO projects (id, name) VALUES ('q', 'q')")
    stack.sql(change)
    assert stack.advance()["status"] == "failed"
    [error] = stack.errors()
    assert (error["code"], error["param"]) == ("invalid_request", "file_id")
    assert message in error["message"]


def test_model_that_cannot_run_here_fails_the_batch_at_validation(stack: Stack) -> None:
    stack.launcher.refusals["demo"] = "no node pool has its accelerator a10g; add one"
    stack.create(line(1))
    assert stack.advance()["status"] == "failed"
    (error,) = stack.errors()
    assert error["code"] == "model_unavailable"
    assert error["message"] == "The model 'demo' cannot run here: no node pool has its accelerator a10g; add one."
    assert stack.launcher.launched == []


def test_model_that_can_no_longer_run_fails_the_batch_instead_of_a_retry(stack: Stack) -> None:
    stack.work = lambda _: FAILED
    stack.create(line(1))
    stack.advance()
    assert stack.advance()["status"] == "in_progress"
    stack.launcher.refusals["demo"] = "its node pool is gone"
    stack.forget_backoff()
    stack.advance()
    assert stack.advance()["status"] == "failed"
    assert "can no longer run here: its node pool is gone" in stack.errors()[0]["message"]


def test_missing_content_of_the_input_file_fails_the_batch(stack: Stack) -> None:
    stack.create(line(1))
    stack.store.delete(file_key(f"file-{BATCH}"))
    assert stack.advance()["status"] == "failed"
    assert "is gone. Upload it again." in stack.errors()[0]["message"]


def test_failed_job_is_followed_by_another_after_a_pause(stack: Stack) -> None:
    job = stack.started(line(1))
    stack.launcher.end(job.id, FAILED)
    stack.advance()
    stack.advance()
    assert len(stack.launcher.launched) == 1
    stack.forget_backoff()
    stack.advance()
    assert len({spec.job_id for spec in stack.launcher.launched}) == 2
    with pytest.raises(CloisterError):
        job.commit()
    stack.job().answer_all()
    assert stack.advance()["status"] == "completed"


def test_four_failures_without_progress_fail_the_batch_and_deliver_its_results(stack: Stack) -> None:
    job = stack.started(line(1), line(2))
    job.commit(2)
    stack.work = lambda _: FAILED
    stack.launcher.end(job.id, FAILED)
    for _ in range(10):
        stack.advance()
        stack.forget_backoff()
    failed = stack.advance()
    assert (failed["status"], failed["completed"], len(stack.launcher.launched)) == ("failed", 1, 4)
    assert [row["custom_id"] for row in stack.file(failed["output_file_id"])] == ["id-2"]
    assert stack.errors()[0]["code"] == "job_failed"
    assert stack.errors()[0]["message"].endswith("Error of the last job: ValueError: no such model directory")


def test_failures_with_progress_between_them_are_retried(stack: Stack) -> None:
    stack.create(*[line(number) for number in range(1, 9)])
    for number in range(1, 9):
        stack.advance()
        job = stack.job()
        job.lease()
        assert job.commit(number)
        stack.launcher.end(job.id, FAILED)
        stack.advance()
        stack.forget_backoff()
    assert stack.advance()["status"] == "completed"


def test_success_with_work_left_counts_as_failure(stack: Stack) -> None:
    job = stack.started(line(1))
    stack.launcher.end(job.id, SUCCEEDED)
    stack.advance()
    event = stack.sql("SELECT data FROM batch_events WHERE type = 'job.ended'")[0]
    assert "ended while it still had work" in event["data"]["reason"]


def test_lost_job_is_followed_by_another(stack: Stack) -> None:
    job = stack.started(line(1), line(2))
    stack.launcher.forget()
    stack.advance()
    assert stack.sql("SELECT failures FROM domains") == [{"failures": 1}]
    stack.forget_backoff()
    stack.advance()
    stack.job().lease()
    assert stack.job().id != job.id


def test_launcher_that_loses_each_job_fails_the_batch(stack: Stack) -> None:
    stack.create(line(1))
    for _ in range(6):
        stack.advance()
        stack.launcher.forget()
        batch = stack.advance()
        stack.forget_backoff()
    assert (batch["status"], len(stack.launcher.launched)) == ("failed", 4)
    assert "the launcher no longer knows the job" in stack.errors()[0]["message"]


def test_unreachable_launcher_changes_nothing(stack: Stack) -> None:
    stack.started(line(1))
    before = stack.batch(), stack.jobs()
    stack.launcher.is_reachable = False
    with pytest.raises(LauncherError):
        stack.advance()
    assert (stack.batch(), stack.jobs()) == before


def test_unreachable_launcher_does_not_delay_the_end_of_a_batch(stack: Stack) -> None:
    stack.started(line(1)).commit()
    stack.launcher.is_reachable = False
    advance(stack.backends, BATCH)
    assert stack.batch()["status"] == "completed"


def test_unrecorded_launch_makes_no_second_job(stack: Stack) -> None:
    stack.started(line(1))
    # As if killed between launching and recording it.
    stack.sql("UPDATE jobs SET launch_after = now(), launched_at = NULL")
    stack.advance()
    assert [job["launch_after"] for job in stack.jobs()] == [None]
    assert len(stack.launcher.launched) == 1


def test_next_job_starts_when_one_of_the_allowed_number_is_gone(stack: Stack) -> None:
    for number in (1, 2, 3):
        stack.create(line(1), batch_id=f"batch_{number}", project=f"p{number}")
        stack.advance(f"batch_{number}")
    assert len(stack.launcher.launched) == 2
    first = stack.launcher.launched[0].job_id
    Job(stack, first).answer_all()
    stack.advance()
    assert Job(stack, first).end()
    stack.launcher.end(first, SUCCEEDED)
    stack.advance_jobs()
    stack.advance_jobs()
    assert len(stack.launcher.launched) == 3


def test_cancelled_batch_delivers_its_results_without_waiting_for_its_job(stack: Stack) -> None:
    job = stack.started(line(1), line(2), line(3))
    job.commit(2)
    stack.cancel()
    cancelled = stack.advance()
    assert cancelled["status"] == "cancelled"
    assert (cancelled["total"], cancelled["completed"], cancelled["failed"]) == (3, 1, 0)
    assert (len(stack.file(cancelled["output_file_id"])), cancelled["error_file_id"]) == (1, None)
    assert not job.commit(1)
    assert stack.launcher.status(job.id).state is JobState.RUNNING
    assert [ref.segment for ref in job.lease().lost] == [0]


def test_batch_cancelled_before_its_job_has_no_files(stack: Stack) -> None:
    stack.create(line(1))
    stack.cancel()
    cancelled = stack.advance()
    assert (cancelled["status"], cancelled["output_file_id"], cancelled["error_file_id"]) == ("cancelled", None, None)


def test_job_whose_batch_was_cancelled_before_it_started_is_stopped(stack: Stack) -> None:
    stack.create(line(1))
    stack.advance()
    stack.cancel()
    stack.advance()
    stack.advance_jobs()
    assert stack.launcher.status(stack.job().id).state is JobState.STOPPED
    stack.advance_jobs()
    assert stack.jobs()[0]["gone_at"] is not None
    assert stack.sql("SELECT failures FROM domains") == [{"failures": 0}]


def test_expired_batch_has_an_error_line_for_each_request_that_did_not_run(stack: Stack) -> None:
    job = stack.started(line(1), line(2), line(3))
    job.commit(2)
    stack.sql("UPDATE batches SET expires_at = now()")
    expired = stack.advance()
    assert (expired["status"], expired["completed"], expired["failed"]) == ("expired", 1, 2)
    assert expired["expired_at"] is not None
    assert [row["error"]["code"] for row in stack.file(expired["error_file_id"])] == ["batch_expired"] * 2
    assert [row["custom_id"] for row in stack.file(expired["output_file_id"])] == ["id-2"]


def test_batch_that_never_ran_expires_at_its_deadline(stack: Stack) -> None:
    stack.create(line(1), hours=-1)
    expired = stack.advance()
    assert (expired["status"], expired["output_file_id"], expired["failed"]) == ("expired", None, 1)
    assert stack.launcher.launched == []


def test_batch_expires_without_its_input_file(stack: Stack) -> None:
    stack.create(line(1), hours=-1)
    step(stack.backends, BATCH)
    stack.store.delete(file_key(f"file-{BATCH}"))
    assert stack.advance()["status"] == "expired"


def test_batch_whose_lines_are_done_at_its_deadline_completes(stack: Stack) -> None:
    stack.started(line(1)).commit()
    step(stack.backends, BATCH)
    stack.sql("UPDATE batches SET expires_at = now() + interval '1 s'")
    assert stack.advance()["status"] == "completed"


def test_cancel_before_assembly_wins(stack: Stack) -> None:
    stack.started(line(1)).commit()
    step(stack.backends, BATCH)
    assert stack.batch()["status"] == "finalizing"
    stack.cancel()
    assert stack.advance()["status"] == "cancelled"


class DyingStore(DirectoryObjectStore):
    """Fails once, at the n-th call that reads or writes."""

    calls_left = -1

    def _count(self) -> None:
        self.calls_left -= 1
        if self.calls_left == 0:
            raise ObjectStoreError("the store went away")

    def put(self, key: str, chunks: Any) -> Any:
        stored = super().put(key, chunks)
        self._count()  # after the write, to interrupt what follows
        return stored

    def read(self, key: str, *, start: int = 0) -> Iterator[bytes]:
        self._count()
        return super().read(key, start=start)

    def delete(self, key: str) -> tuple[str, ...]:
        deleted = super().delete(key)
        self._count()
        return deleted


@pytest.mark.parametrize("call", range(1, 8))
def test_assembly_recovers_from_an_error_of_the_store_at_any_call(pool: Pool, tmp_path: Path, call: int) -> None:
    store = DyingStore(tmp_path / "objects")
    stack = Stack(pool, store, tmp_path)
    job = stack.started(line(1), line(2))
    job.commit(1)
    job.commit(2, fails=True)
    store.calls_left = call
    interrupted = 0
    for _ in range(4):
        try:
            done = stack.advance()
        except ObjectStoreError:
            interrupted += 1
    assert (interrupted, done["status"], done["completed"], done["failed"]) == (1, "completed", 1, 1)
    assert done["parts_deleted_at"] is not None
    assert len(stack.sql("SELECT id FROM files WHERE purpose = 'batch_output'")) == 2


def test_batch_of_an_earlier_version_completes_with_each_line_once_after_its_job_was_stopped(stack: Stack) -> None:
    stack.create(line(1), line(2), line(3))
    stack.sql("UPDATE batches SET status = 'in_progress', model = 'demo', total = 3, attempt = 1")
    write_part(stack.store, BATCH, 1)
    stack.launcher.end(f"{BATCH}-1", RUNNING)
    assert stack.advance()["domain"] is None
    assert stack.launcher.status(f"{BATCH}-1").state is JobState.STOPPED
    write_part(stack.store, BATCH, 1, 2)  # before it stopped
    assert (stack.advance()["completed"], stack.batch()["domain"]) == (2, "p")
    stack.job().answer_all()
    done = stack.advance()
    assert (done["status"], done["completed"], done["input_tokens"]) == ("completed", 3, 30)
    assert [row["custom_id"] for row in stack.file(done["output_file_id"])] == ["id-1", "id-2", "id-3"]


@pytest.mark.parametrize(
    ("change", "status", "completed", "failed"),
    [
        ("status = 'cancelling', cancelling_at = now()", "cancelled", 2, 0),
        ("status = 'finalizing', finalizing_at = now()", "completed", 2, 0),
        ("status = 'in_progress', expires_at = now()", "expired", 2, 1),
        ("status = 'in_progress', giving_up_at = now(), giving_up_code = 'x', giving_up_message = 'y'", "failed", 2, 0),
    ],
)
def test_batch_that_ends_under_another_version_has_its_results(
    *, stack: Stack, change: str, status: str, completed: int, failed: int
) -> None:
    stack.create(line(1), line(2), line(3))
    lines = completed if status == "completed" else 3
    stack.sql(f"UPDATE batches SET model = 'demo', total = {lines}, attempt = 1, {change}")  # noqa: S608 - constants
    write_part(stack.store, BATCH, 1)
    write_part(stack.store, BATCH, 1, 2)
    stack.launcher.end(f"{BATCH}-1", RUNNING)
    stack.advance()
    ended = stack.advance()
    assert (ended["status"], ended["completed"], ended["failed"]) == (status, completed, failed)
    assert [row["custom_id"] for row in stack.file(ended["output_file_id"])] == ["id-1", "id-2"]
    assert stack.launcher.status(f"{BATCH}-1").state is JobState.STOPPED
    assert ended["parts_deleted_at"] is not None


@pytest.fixture
def loop(stack: Stack, database_url: str) -> Iterator[threading.Thread]:
    thread = threading.Thread(target=run, args=(stack.backends, as_service(database_url)))
    thread.start()
    yield thread
    stack.backends.stopping.set()
    thread.join()


@pytest.mark.usefixtures("loop")
def test_new_batch_wakes_the_loop_and_a_defect_in_one_job_stops_no_other(stack: Stack) -> None:
    def work(spec: JobSpec) -> JobStatus:
        if stack.sql("SELECT FROM jobs WHERE domain = 'bad' AND id = %s", spec.job_id):
            raise RuntimeError("a defect")
        return RUNNING

    stack.work = work
    time.sleep(0.5)  # idle now: the next pass would begin after ten seconds
    began = time.monotonic()
    stack.create(line(1), batch_id="batch_bad", project="bad")
    stack.create(line(1))
    eventually(lambda: bool(stack.sql("SELECT FROM jobs WHERE domain = 'p' AND launch_after IS NULL")))
    Job(stack, stack.sql("SELECT id FROM jobs WHERE domain = 'p'")[0]["id"]).answer_all()
    eventually(lambda: stack.batch()["status"] == "completed")
    assert time.monotonic() - began < 5


@pytest.mark.usefixtures("loop")
def test_loop_continues_after_its_connections_were_cut(stack: Stack) -> None:
    time.sleep(0.5)
    stack.sql(
        "SELECT pg_terminate_backend(pid) FROM pg_stat_activity "
        "WHERE pid <> pg_backend_pid() AND datname = current_database()"
    )
    stack.create(line(1))
    eventually(lambda: stack.batch()["status"] == "in_progress")


def test_second_reconciler_waits_for_the_first(stack: Stack, database_url: str) -> None:
    with psycopg.connect(database_url, autocommit=True) as leader:
        leader.execute("SELECT pg_advisory_lock(7203002)")
        thread = threading.Thread(target=run, args=(stack.backends, as_service(database_url)))
        thread.start()
        stack.create(line(1))
        time.sleep(1.5)
        assert stack.batch()["status"] == "validating"
    eventually(lambda: stack.batch()["status"] == "in_progress")
    stack.backends.stopping.set()
    thread.join()
