"""The reconciler on real Postgres and a directory store; the launcher's jobs write parts themselves."""

import threading
import time
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import psycopg
import pytest

from ray_job.contract.job_spec import JobSpec
from ray_job.contract.object_keys import file_key, parts_prefix
from service.adapters.directory_object_store import DirectoryObjectStore
from service.db import Pool
from service.errors import LauncherError, ObjectStoreError
from service.ports import JobState, JobStatus
from service.reconciler.loop import run
from service.reconciler.steps import advance, step
from tests.integration.reconciler_harness import BATCH, FAILED, SUCCEEDED, Stack, commit, eventually, line


def test_a_batch_goes_from_validating_to_completed(stack: Stack) -> None:
    def work(spec: JobSpec) -> JobStatus:
        commit(stack.store, spec.batch_id, 4, 1)
        commit(stack.store, spec.batch_id, 3, fails=True)
        return SUCCEEDED

    stack.work = work
    stack.create(line(1), b"", line(3), line(4))
    assert stack.advance()["status"] == "in_progress"
    done = stack.advance()
    assert (done["status"], done["model"], done["attempt"]) == ("completed", "demo", 1)
    assert (done["total"], done["completed"], done["failed"]) == (3, 2, 1)
    assert (done["input_tokens"], done["output_tokens"]) == (30, 6)
    assert [row["custom_id"] for row in stack.file(done["output_file_id"])] == ["id-1", "id-4"]
    assert [row["custom_id"] for row in stack.file(done["error_file_id"])] == ["id-3"]
    assert None not in (done["in_progress_at"], done["finalizing_at"], done["completed_at"], done["parts_deleted_at"])
    assert list(stack.store.keys(parts_prefix(BATCH))) == []


def test_its_files_are_told_with_name_purpose_size_and_expiry(stack: Stack) -> None:
    stack.create(line(1))
    stack.sql("UPDATE batches SET output_expires_after_s = 3600")
    stack.advance()
    commit(stack.store, BATCH, 1)
    stack.launcher.end(f"{BATCH}-1", SUCCEEDED)
    file = stack.sql("SELECT * FROM files WHERE id = %s", stack.advance()["output_file_id"])[0]
    assert (file["filename"], file["purpose"]) == ("batch_1_output.jsonl", "batch_output")
    assert file["expires_at"] - file["created_at"] == timedelta(hours=1)
    assert file["size_bytes"] == sum(map(len, stack.store.read(file_key(file["id"]))))


def test_each_transition_leaves_an_event(stack: Stack) -> None:
    test_a_batch_goes_from_validating_to_completed(stack)
    types = [row["type"] for row in stack.sql("SELECT type FROM batch_events ORDER BY id")]
    assert types == ["batch.in_progress", "job.launched", "batch.finalizing", "batch.completed"]


def test_a_bad_input_file_fails_the_batch_with_all_its_errors(stack: Stack) -> None:
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
def test_an_input_file_that_cannot_be_used_fails_the_batch(stack: Stack, change: str, message: str) -> None:
    stack.create(line(1))
    stack.sql("INSERT INTO projects (id, name) VALUES ('q', 'q')")
    stack.sql(change)
    assert stack.advance()["status"] == "failed"
    [error] = stack.errors()
    assert (error["code"], error["param"]) == ("invalid_request", "file_id")
    assert message in error["message"]


def test_a_model_that_cannot_run_here_fails_the_batch_at_validation(stack: Stack) -> None:
    stack.launcher.refusals["demo"] = "no node pool has its accelerator a10g; add one"
    stack.create(line(1))
    assert stack.advance()["status"] == "failed"
    (error,) = stack.errors()
    assert error["code"] == "model_unavailable"
    assert error["message"] == "The model 'demo' cannot run here: no node pool has its accelerator a10g; add one."
    assert stack.launcher.launched == []


def test_a_model_that_can_no_longer_run_fails_the_batch_instead_of_its_next_attempt(stack: Stack) -> None:
    stack.work = lambda _: FAILED
    stack.create(line(1))
    stack.advance()
    assert stack.advance()["attempt"] == 2
    stack.launcher.refusals["demo"] = "its node pool is gone"
    stack.forget_backoff()
    assert stack.advance()["status"] == "failed"
    assert [error["code"] for error in stack.errors()] == ["model_unavailable"]


def test_the_content_of_the_input_file_may_be_gone(stack: Stack) -> None:
    stack.create(line(1))
    stack.store.delete(file_key(f"file-{BATCH}"))
    assert stack.advance()["status"] == "failed"
    assert "is gone. Upload it again." in stack.errors()[0]["message"]


def test_a_failed_job_is_followed_by_another_after_a_while(stack: Stack) -> None:
    stack.create(line(1))
    stack.advance()
    stack.launcher.end(f"{BATCH}-1", FAILED)
    waiting = stack.advance()
    assert (waiting["attempt"], waiting["failed_attempts"], len(stack.launcher.launched)) == (2, 1, 1)
    stack.forget_backoff()
    assert stack.advance()["launch_after"] is None
    assert [spec.job_id for spec in stack.launcher.launched] == ["batch_1-1", "batch_1-2"]


def test_four_failures_without_progress_fail_the_batch_and_hand_over_what_there_is(stack: Stack) -> None:
    stack.work = lambda _: FAILED
    stack.create(line(1), line(2))
    commit(stack.store, BATCH, 2)
    for _ in range(5):
        stack.advance()
        stack.forget_backoff()
        failed = stack.advance()
    assert (failed["status"], failed["completed"], failed["attempt"]) == ("failed", 1, 4)
    assert [row["custom_id"] for row in stack.file(failed["output_file_id"])] == ["id-2"]
    assert stack.errors()[0]["code"] == "job_failed"
    assert stack.errors()[0]["message"].endswith("The last one said: ValueError: no such model directory")


def test_failures_with_progress_between_them_go_on(stack: Stack) -> None:
    def work(spec: JobSpec) -> JobStatus:
        commit(stack.store, BATCH, spec.attempt)
        return SUCCEEDED if spec.attempt == 8 else FAILED

    stack.work = work
    stack.create(*[line(number) for number in range(1, 9)])
    for _ in range(18):
        stack.advance()
        stack.forget_backoff()
    assert stack.advance()["status"] == "completed"


def test_a_job_that_says_it_succeeded_without_all_lines_has_failed(stack: Stack) -> None:
    stack.work = lambda _: SUCCEEDED
    stack.create(line(1))
    stack.advance()
    stack.advance()
    event = stack.sql("SELECT data FROM batch_events WHERE type = 'job.ended'")[0]
    assert "0 of 1 lines have a result" in event["data"]["reason"]


def test_a_forgotten_job_is_followed_by_another(stack: Stack) -> None:
    stack.create(line(1))
    stack.advance()
    stack.launcher.forget()
    batch = stack.advance()
    assert (batch["attempt"], batch["failed_attempts"]) == (2, 1)
    stack.forget_backoff()
    assert stack.advance()["launch_after"] is None
    stack.launcher.forget()
    commit(stack.store, BATCH, 1)  # it got on before it was lost
    assert stack.advance()["failed_attempts"] == 1


def test_a_launcher_that_forgets_each_job_fails_the_batch_in_the_end(stack: Stack) -> None:
    stack.create(line(1))
    for _ in range(6):
        stack.advance()
        stack.launcher.forget()
        batch = stack.advance()
        stack.forget_backoff()
    assert (batch["status"], batch["attempt"]) == ("failed", 4)
    assert "the launcher does not know the job any more" in stack.errors()[0]["message"]


def test_an_unreachable_launcher_changes_nothing(stack: Stack) -> None:
    stack.create(line(1))
    stack.advance()
    before = stack.batch()
    stack.launcher.is_reachable = False
    with pytest.raises(LauncherError):
        stack.advance()
    assert stack.batch() == before


def test_a_launch_that_was_not_noted_is_no_second_job(stack: Stack) -> None:
    stack.create(line(1))
    stack.advance()
    stack.sql("UPDATE batches SET launch_after = now()")  # as if killed between launching and noting it
    assert stack.advance()["launch_after"] is None
    assert len(stack.launcher.launched) == 1


def test_no_more_jobs_run_than_are_allowed_and_the_next_starts_when_one_ends(stack: Stack) -> None:
    for number in (1, 2, 3):
        stack.create(line(1), batch_id=f"batch_{number}")
        advance(stack.context, f"batch_{number}")
    assert len(stack.launcher.launched) == 2
    commit(stack.store, BATCH, 1)
    stack.launcher.end("batch_1-1", SUCCEEDED)
    stack.advance()
    advance(stack.context, "batch_3")
    assert [spec.batch_id for spec in stack.launcher.launched] == ["batch_1", "batch_2", "batch_3"]


def test_cancelling_keeps_what_is_there(stack: Stack) -> None:
    stack.create(line(1), line(2), line(3))
    stack.advance()
    commit(stack.store, BATCH, 2)
    stack.cancel()
    assert stack.advance()["status"] == "cancelling"
    assert stack.launcher.status(f"{BATCH}-1").state is JobState.STOPPED
    cancelled = stack.advance()
    assert cancelled["status"] == "cancelled"
    assert (cancelled["total"], cancelled["completed"], cancelled["failed"]) == (3, 1, 0)
    assert (len(stack.file(cancelled["output_file_id"])), cancelled["error_file_id"]) == (1, None)


def test_cancelling_before_anything_ran_leaves_no_files(stack: Stack) -> None:
    stack.create(line(1))
    stack.cancel()
    cancelled = stack.advance()
    assert (cancelled["status"], cancelled["output_file_id"], cancelled["error_file_id"]) == ("cancelled", None, None)


def test_a_batch_past_its_deadline_expires_with_a_line_for_each_request_that_did_not_run(stack: Stack) -> None:
    stack.create(line(1), line(2), line(3))
    stack.advance()
    commit(stack.store, BATCH, 2)
    stack.sql("UPDATE batches SET expires_at = now()")
    assert stack.advance()["status"] == "in_progress"
    expired = stack.advance()
    assert (expired["status"], expired["completed"], expired["failed"]) == ("expired", 1, 2)
    assert expired["expired_at"] is not None
    assert [row["error"]["code"] for row in stack.file(expired["error_file_id"])] == ["batch_expired"] * 2
    assert [row["custom_id"] for row in stack.file(expired["output_file_id"])] == ["id-2"]


def test_a_batch_that_never_ran_before_its_deadline_expires(stack: Stack) -> None:
    stack.create(line(1), hours=-1)
    expired = stack.advance()
    assert (expired["status"], expired["output_file_id"], expired["failed"]) == ("expired", None, 1)
    assert stack.launcher.launched == []


def test_expiry_survives_the_loss_of_the_input_file(stack: Stack) -> None:
    stack.create(line(1), hours=-1)
    step(stack.context, BATCH)
    stack.store.delete(file_key(f"file-{BATCH}"))
    assert stack.advance()["status"] == "expired"


def test_a_batch_that_was_done_at_its_deadline_is_completed(stack: Stack) -> None:
    stack.create(line(1))
    stack.advance()
    commit(stack.store, BATCH, 1)
    stack.launcher.end(f"{BATCH}-1", SUCCEEDED)
    stack.sql("UPDATE batches SET expires_at = now()")
    assert stack.advance()["status"] == "completed"


def test_a_cancel_during_assembly_wins(stack: Stack) -> None:
    stack.create(line(1))
    stack.advance()
    commit(stack.store, BATCH, 1)
    stack.launcher.end(f"{BATCH}-1", SUCCEEDED)
    step(stack.context, BATCH)
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
        self._count()  # after the write: what is interrupted is what follows
        return stored

    def read(self, key: str, *, start: int = 0) -> Iterator[bytes]:
        self._count()
        return super().read(key, start=start)

    def delete(self, key: str) -> None:
        super().delete(key)
        self._count()


@pytest.mark.parametrize("call", range(1, 9))
def test_an_interruption_anywhere_is_made_good(pool: Pool, tmp_path: Path, call: int) -> None:
    store = DyingStore(tmp_path / "objects")
    stack = Stack(pool, store, tmp_path)
    stack.create(line(1), line(2))
    commit(store, BATCH, 1)
    commit(store, BATCH, 2, fails=True)
    stack.work = lambda _: SUCCEEDED
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


@pytest.fixture
def loop(stack: Stack, database_url: str) -> Iterator[threading.Thread]:
    thread = threading.Thread(target=run, args=(stack.context, database_url))
    thread.start()
    yield thread
    stack.context.stopping.set()
    thread.join()


@pytest.mark.usefixtures("loop")
def test_the_loop_is_woken_by_a_new_batch_and_one_bad_batch_stops_no_other(stack: Stack) -> None:
    def work(spec: JobSpec) -> JobStatus:
        if spec.batch_id == "batch_bad":
            raise RuntimeError("a defect")
        commit(stack.store, spec.batch_id, 1)
        return SUCCEEDED

    stack.work = work
    time.sleep(0.5)  # idle now: it would look by itself only after ten seconds
    began = time.monotonic()
    stack.create(line(1), batch_id="batch_bad")
    stack.create(line(1))
    eventually(lambda: stack.batch()["status"] == "completed")
    assert time.monotonic() - began < 5


@pytest.mark.usefixtures("loop")
def test_the_loop_goes_on_after_its_connections_were_cut(stack: Stack) -> None:
    time.sleep(0.5)
    stack.sql(
        "SELECT pg_terminate_backend(pid) FROM pg_stat_activity "
        "WHERE pid <> pg_backend_pid() AND datname = current_database()"
    )
    stack.create(line(1))
    eventually(lambda: stack.batch()["status"] == "in_progress")


def test_a_second_reconciler_waits_for_the_first(stack: Stack, database_url: str) -> None:
    with psycopg.connect(database_url, autocommit=True) as leader:
        leader.execute("SELECT pg_advisory_lock(7203002)")
        thread = threading.Thread(target=run, args=(stack.context, database_url))
        thread.start()
        stack.create(line(1))
        time.sleep(1.5)
        assert stack.batch()["status"] == "validating"
    eventually(lambda: stack.batch()["status"] == "in_progress")
    stack.context.stopping.set()
    thread.join()
