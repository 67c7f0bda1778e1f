"""Ends of a batch: a cancel, the deadline or the loss of the input file in each of its states."""

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from ray_job.contract.object_keys import batch_prefix, file_key, parts_prefix
from service.assembly import read_headers
from service.db import Pool
from service.ports import JobState, JobStatus
from service.reconciler.steps import step
from service.workspace import Workspace
from tests.integration.reconciler_harness import BATCH, Job, Meddling, Stack, line


def validating(stack: Stack) -> None:
    stack.create(line(1), line(2))


def queued(stack: Stack) -> None:
    validating(stack)
    step(stack.backends, BATCH)


def running(stack: Stack) -> Job:
    job = stack.started(line(1), line(2))
    job.commit(2)
    return job


def waiting_for_another_job(stack: Stack) -> None:
    running(stack)
    stack.launcher.forget()
    stack.advance_jobs()


def finalizing(stack: Stack) -> None:
    running(stack).commit(1)
    step(stack.backends, BATCH)


def cancelling(stack: Stack) -> None:
    running(stack)
    stack.cancel()


def expiring(stack: Stack) -> None:
    running(stack)
    deadline(stack)


def given_up(stack: Stack) -> None:
    job = running(stack)
    stack.launcher.end(job.id, JobStatus(state=JobState.FAILED, message="no such image", is_final=True))
    stack.advance_jobs()


def cancel(stack: Stack) -> None:
    stack.cancel()


def deadline(stack: Stack) -> None:
    stack.sql("UPDATE batches SET expires_at = now()")


def file_deleted(stack: Stack) -> None:
    stack.sql("UPDATE files SET deleted_at = now(), deleted_by = 'key_1'")


def file_expired(stack: Stack) -> None:
    stack.sql("UPDATE files SET expires_at = now()")


# State, event, final state, lines in the output file, lines in the error file.
ENDS: list[tuple[Callable[[Stack], object], Callable[[Stack], None], str, int, int]] = [
    (validating, cancel, "cancelled", 0, 0),
    (validating, deadline, "expired", 0, 2),
    (validating, file_deleted, "completed", 2, 0),
    (validating, file_expired, "completed", 2, 0),
    (queued, cancel, "cancelled", 0, 0),
    (queued, deadline, "expired", 0, 2),
    (queued, file_deleted, "completed", 2, 0),
    (queued, file_expired, "completed", 2, 0),
    (running, cancel, "cancelled", 1, 0),
    (running, deadline, "expired", 1, 1),
    (running, file_deleted, "completed", 2, 0),
    (running, file_expired, "completed", 2, 0),
    (waiting_for_another_job, cancel, "cancelled", 1, 0),
    (waiting_for_another_job, deadline, "expired", 1, 1),
    (waiting_for_another_job, file_deleted, "completed", 2, 0),
    (finalizing, cancel, "cancelled", 2, 0),
    (finalizing, deadline, "completed", 2, 0),
    (finalizing, file_deleted, "completed", 2, 0),
    (finalizing, file_expired, "completed", 2, 0),
    (cancelling, cancel, "cancelled", 1, 0),
    (cancelling, deadline, "cancelled", 1, 0),
    (cancelling, file_deleted, "cancelled", 1, 0),
    (cancelling, file_expired, "cancelled", 1, 0),
]


def run_to_its_end(stack: Stack) -> dict[str, Any]:
    for _ in range(5):
        stack.forget_backoff()
        if stack.advance()["status"] == "in_progress":
            stack.job().answer_all()
    return stack.batch()


def lines_of(stack: Stack, file_id: str | None) -> list[dict[str, Any]]:
    return [] if file_id is None else stack.file(file_id)


@pytest.mark.parametrize(("state", "event", "status", "output", "error"), ENDS)
def test_end_of_a_batch(  # noqa: PLR0917 - the columns of the table
    stack: Stack,
    state: Callable[[Stack], object],
    event: Callable[[Stack], None],
    status: str,
    output: int,
    error: int,
) -> None:
    state(stack)
    event(stack)
    batch = run_to_its_end(stack)
    assert (batch["status"], batch["total"], batch[f"{status}_at"] is None) == (status, 2 * bool(batch["model"]), False)
    assert (batch["completed"], batch["failed"]) == (output, error)
    assert len(lines_of(stack, batch["output_file_id"])) == output
    assert [row["error"]["code"] for row in lines_of(stack, batch["error_file_id"])] == ["batch_expired"] * error
    assert list(stack.store.keys(batch_prefix(BATCH))) == []


def test_invalid_batch_past_its_deadline_fails_with_its_errors(stack: Stack) -> None:
    stack.create(line(1, model="none"), hours=-1)
    assert stack.advance()["status"] == "failed"
    assert stack.errors()[0]["code"] == "model_not_found"


@pytest.fixture
def meddled(pool: Pool, tmp_path: Path) -> tuple[Stack, Meddling]:
    store = Meddling(tmp_path / "objects")
    return Stack(pool, store, tmp_path), store


@pytest.mark.parametrize("when", [("read", "batches"), ("put", "files")])
def test_cancel_during_assembly_wins(meddled: tuple[Stack, Meddling], when: tuple[str, str]) -> None:
    stack, store = meddled
    finalizing(stack)
    store.meddle, store.when = stack.cancel, when
    batch = stack.advance()
    assert (batch["status"], batch["completed"], batch["completed_at"]) == ("cancelled", 2, None)
    assert len(stack.sql("SELECT id FROM files WHERE purpose = 'batch_output'")) == 1


def test_cancel_after_the_end_changes_nothing(stack: Stack) -> None:
    finalizing(stack)
    done = stack.advance()
    stack.cancel()
    assert stack.advance()["status"] == "completed"
    assert stack.batch()["completed_at"] == done["completed_at"]


def test_cancel_during_validation_wins(meddled: tuple[Stack, Meddling]) -> None:
    stack, store = meddled
    validating(stack)
    store.meddle, store.when = stack.cancel, ("read", "files")
    batch = stack.advance()
    assert (batch["status"], batch["in_progress_at"], stack.launcher.launched) == ("cancelled", None, [])


def test_cancel_of_an_expiring_batch_leaves_no_expired_lines(meddled: tuple[Stack, Meddling]) -> None:
    stack, store = meddled
    running(stack)
    deadline(stack)
    step(stack.backends, BATCH)
    assert stack.batch()["status"] == "finalizing"
    store.meddle, store.when = stack.cancel, ("put", "files")
    batch = stack.advance()
    assert (batch["status"], batch["failed"], batch["error_file_id"]) == ("cancelled", 0, None)
    assert len(list(stack.store.keys(file_key("file-")))) == 2


def test_overtaken_assembly_does_not_replace_the_files(meddled: tuple[Stack, Meddling]) -> None:
    stack, store = meddled
    cancelling(stack)

    def another_ends_it() -> None:
        assert run_to_its_end(stack)["status"] == "cancelled"

    store.meddle, store.when = another_ends_it, ("read", "batches")
    stack.advance()
    assert [row["custom_id"] for row in stack.file(stack.batch()["output_file_id"])] == ["id-2"]
    assert len(stack.sql("SELECT id FROM batch_events WHERE type = 'batch.cancelled'")) == 1


@pytest.mark.parametrize("where", [("read", "batches"), ("put", "files"), ("keys", "batches")])
@pytest.mark.parametrize("steps", [0, 1])
def test_reconciler_that_dies_in_a_step_is_continued(
    meddled: tuple[Stack, Meddling], where: tuple[str, str], steps: int
) -> None:
    def die() -> None:
        raise SystemExit

    stack, store = meddled
    running(stack).commit(1)
    for _ in range(steps):
        step(stack.backends, BATCH)
    store.meddle, store.when = die, where
    with pytest.raises(SystemExit):
        stack.advance()
    batch = stack.advance()
    assert (batch["status"], batch["completed"], batch["parts_deleted_at"] is None) == ("completed", 2, False)
    types = stack.sql("SELECT type FROM batch_events WHERE type IN ('batch.finalizing', 'batch.completed') ORDER BY id")
    assert [row["type"] for row in types] == ["batch.finalizing", "batch.completed"]


@pytest.mark.parametrize(("change", "status"), [(cancel, "cancelled"), (deadline, "expired")])
@pytest.mark.parametrize("steps", [1, 2])
def test_commit_after_a_cancel_or_the_deadline_changes_no_result(
    stack: Stack, change: Callable[[Stack], None], status: str, steps: int
) -> None:
    job = running(stack)
    change(stack)
    for _ in range(steps):
        step(stack.backends, BATCH)
    assert not job.commit(1)
    batch = stack.advance()
    assert (batch["status"], batch["completed"]) == (status, 1)
    assert [row["custom_id"] for row in stack.file(batch["output_file_id"])] == ["id-2"]


# State, final state, lines in the output file, lines in the error file, reported problems.
DAMAGED: list[tuple[Callable[[Stack], object], str, int, int, int]] = [
    (finalizing, "failed", 1, 0, 1),
    (cancelling, "cancelled", 0, 0, 1),
    (expiring, "expired", 0, 2, 1),
    (given_up, "failed", 0, 0, 2),
]


@pytest.mark.parametrize(("state", "status", "output", "error", "problems"), DAMAGED)
def test_damaged_part_loses_only_its_own_lines(  # noqa: PLR0917 - the columns of the table
    stack: Stack, state: Callable[[Stack], object], status: str, output: int, error: int, problems: int
) -> None:
    state(stack)
    headers = read_headers(stack.store, list(stack.store.keys(parts_prefix(BATCH))), BATCH)
    [key] = [key for key, header in headers if list(header.lines) == [2]]
    stack.store.put(key, [b"".join(stack.store.read(key))[:-1]])
    batch = run_to_its_end(stack)
    assert (batch["status"], batch["completed"], batch["failed"]) == (status, output, error)
    assert [row["custom_id"] for row in lines_of(stack, batch["output_file_id"])] == ["id-1"] * output
    assert (len(stack.errors()), batch["error_count"], stack.errors()[-1]["code"]) == (
        problems,
        problems,
        "assembly_failed",
    )
    assert f"{output} of 2 lines have a readable result" in stack.errors()[-1]["message"]
    assert key in stack.errors()[-1]["message"]


def test_full_workspace_is_reported_once_and_retried(stack: Stack, tmp_path: Path) -> None:
    finalizing(stack)
    missing = tmp_path / "workspace"
    stack.backends = dataclasses.replace(stack.backends, workspace=Workspace(missing))
    for _ in range(2):
        with pytest.raises(FileNotFoundError):
            stack.advance()
    (event,) = stack.sql("SELECT data ->> 'reason' AS reason FROM batch_events WHERE type = 'batch.waiting'")
    assert event["reason"].endswith("will be retried: No such file or directory")
    missing.mkdir()
    assert stack.advance()["status"] == "completed"
