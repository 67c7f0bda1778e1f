from datetime import UTC, datetime, timedelta
from itertools import product

import pytest

from service.ports import JobState, JobStatus
from service.transitions import (
    Assemble,
    AttemptFailed,
    BatchStatus,
    BatchView,
    Decision,
    Fail,
    Finalize,
    GiveUp,
    Launch,
    NextAttempt,
    StopJob,
    Validate,
    Wait,
    after_failed_attempt,
    after_refused_launch,
    backoff,
    decide,
    is_allowed,
    needs_job_status,
)

NOW = datetime(2026, 1, 2, 12, tzinfo=UTC)
LATER = NOW + timedelta(hours=1)
EARLIER = NOW - timedelta(hours=1)
JUST_NOW = NOW - timedelta(minutes=1)

ALLOWED = """
    validating → in_progress, failed, cancelling
    in_progress → finalizing, failed, cancelling
    finalizing → completed, expired, failed, cancelling
    cancelling → cancelled
"""


@pytest.mark.parametrize(("before", "after"), list(product(BatchStatus, BatchStatus)))
def test_the_truth_table_of_transitions(before: BatchStatus, after: BatchStatus) -> None:
    table = dict(line.split(" → ") for line in ALLOWED.strip().replace("    ", "").splitlines())
    assert is_allowed(before, after) == (after.value in table.get(before.value, "").split(", "))


LOST = AttemptFailed("the launcher does not know the job any more; Ray was restarted or lost it")

# status, deadline, launch_after, job state, what to do
DECISIONS: list[tuple[str, datetime, datetime | None, str | None, Decision]] = [
    ("validating", LATER, None, None, Validate()),
    ("validating", EARLIER, None, None, Validate()),
    ("in_progress", LATER, EARLIER, "missing", Launch()),
    ("in_progress", LATER, NOW, "missing", Launch()),
    ("in_progress", LATER, LATER, "missing", Wait()),
    ("in_progress", LATER, LATER, None, Wait()),
    ("in_progress", LATER, EARLIER, None, Launch()),
    ("in_progress", LATER, None, "pending", Wait()),
    ("in_progress", LATER, None, "running", Wait()),
    ("in_progress", LATER, None, "succeeded", Finalize(check_lines=True)),
    ("in_progress", LATER, None, "failed", AttemptFailed("last words")),
    ("in_progress", LATER, None, "stopped", AttemptFailed("last words")),
    ("in_progress", LATER, None, "missing", LOST),
    ("in_progress", NOW, None, "running", StopJob()),
    ("in_progress", JUST_NOW, None, "pending", StopJob()),
    ("in_progress", EARLIER, None, "stopped", Finalize(check_lines=False)),
    ("in_progress", EARLIER, None, "succeeded", Finalize(check_lines=False)),
    ("in_progress", EARLIER, LATER, "missing", Finalize(check_lines=False)),
    ("in_progress", JUST_NOW, LATER, "running", StopJob()),
    ("cancelling", LATER, None, None, Assemble()),
    ("cancelling", LATER, None, "pending", StopJob()),
    ("cancelling", EARLIER, NOW, "running", StopJob()),
    ("cancelling", LATER, None, "stopped", Assemble()),
    ("cancelling", LATER, None, "succeeded", Assemble()),
    ("cancelling", LATER, None, "missing", Assemble()),
    ("finalizing", LATER, None, None, Assemble()),
    ("finalizing", EARLIER, None, None, Assemble()),
    ("completed", EARLIER, None, None, Wait()),
    ("failed", EARLIER, None, None, Wait()),
    ("expired", EARLIER, None, None, Wait()),
    ("cancelled", EARLIER, None, None, Wait()),
]


@pytest.mark.parametrize(("status", "expires_at", "launch_after", "job", "expected"), DECISIONS)
def test_the_truth_table_of_decisions(
    status: str, expires_at: datetime, launch_after: datetime | None, job: str | None, expected: Decision
) -> None:
    batch = BatchView(
        status=BatchStatus(status), expires_at=expires_at, launch_after=launch_after, attempt=1 if job else 0
    )
    job_status = JobStatus(state=JobState(job), message="last words") if job else None
    assert decide(batch, job_status, NOW) == expected


@pytest.mark.parametrize("state", [JobState.PENDING, JobState.RUNNING])
def test_a_job_that_is_stuck_ends_its_batch_with_the_reason(state: JobState) -> None:
    batch = BatchView(status=BatchStatus.IN_PROGRESS, expires_at=LATER, attempt=1)
    following = decide(batch, JobStatus(state=state, message="no such image", is_stuck=True), NOW)
    assert isinstance(following, GiveUp)
    assert following.code == "job_failed"
    assert "cannot run: no such image. Once that is put right" in following.message


@pytest.mark.parametrize("state", [JobState.PENDING, JobState.RUNNING])
def test_a_job_that_is_stuck_is_waited_for_where_lines_have_a_result(state: JobState) -> None:
    batch = BatchView(status=BatchStatus.IN_PROGRESS, expires_at=LATER, attempt=1, has_results=True)
    assert decide(batch, JobStatus(state=state, message="no such image", is_stuck=True), NOW) == Wait()


def test_a_job_that_would_fail_again_ends_its_batch_with_its_last_words() -> None:
    batch = BatchView(status=BatchStatus.IN_PROGRESS, expires_at=LATER, attempt=1, has_results=True)
    following = decide(batch, JobStatus(state=JobState.FAILED, message="no such model", is_final=True), NOW)
    assert following == GiveUp(
        "job_failed",
        "The batch's job failed, and would fail again: no such model. Once that is put right, create the batch again.",
    )


REASON = GiveUp("job_failed", "no such image")

# given up at, deadline, launch_after, job state, what to do
GIVING_UP: list[tuple[datetime, datetime, datetime | None, str, Decision]] = [
    (JUST_NOW, LATER, None, "pending", StopJob()),
    (JUST_NOW, LATER, None, "running", StopJob()),
    (JUST_NOW, LATER, None, "succeeded", Fail(REASON)),
    (JUST_NOW, LATER, None, "failed", Fail(REASON)),
    (JUST_NOW, LATER, None, "stopped", Fail(REASON)),
    (JUST_NOW, LATER, None, "missing", Fail(REASON)),
    (JUST_NOW, LATER, EARLIER, "running", StopJob()),
    (JUST_NOW, LATER, EARLIER, "missing", Fail(REASON)),
    (JUST_NOW, EARLIER, None, "running", StopJob()),
    (JUST_NOW, EARLIER, None, "missing", Fail(REASON)),
    (EARLIER, LATER, None, "running", Fail(REASON)),
]


@pytest.mark.parametrize(("giving_up_at", "expires_at", "launch_after", "job", "expected"), GIVING_UP)
def test_the_truth_table_of_giving_up(
    giving_up_at: datetime, expires_at: datetime, launch_after: datetime | None, job: str, expected: Decision
) -> None:
    batch = BatchView(
        status=BatchStatus.IN_PROGRESS,
        expires_at=expires_at,
        attempt=1,
        launch_after=launch_after,
        giving_up_at=giving_up_at,
        giving_up=REASON,
    )
    assert needs_job_status(batch, NOW)
    assert decide(batch, JobStatus(state=JobState(job), message="last words", is_stuck=True), NOW) == expected


def test_a_batch_that_is_cancelled_while_it_is_given_up_is_cancelled() -> None:
    batch = BatchView(
        status=BatchStatus.CANCELLING, expires_at=LATER, attempt=1, giving_up_at=JUST_NOW, giving_up=REASON
    )
    assert decide(batch, JobStatus(state=JobState.STOPPED), NOW) == Assemble()


@pytest.mark.parametrize("status", ["cancelling", "in_progress"])
def test_a_job_that_is_stuck_is_stopped_before_a_batch_that_is_to_end(status: str) -> None:
    batch = BatchView(status=BatchStatus(status), expires_at=NOW, cancelling_at=NOW, attempt=1)
    assert decide(batch, JobStatus(state=JobState.PENDING, is_stuck=True), NOW) == StopJob()


@pytest.mark.parametrize("status", list(BatchStatus))
def test_only_a_batch_that_may_have_a_live_job_asks_for_it(status: BatchStatus) -> None:
    batch = BatchView(status=status, expires_at=LATER, attempt=1)
    assert needs_job_status(batch, NOW) == (status in ("in_progress", "cancelling"))


@pytest.mark.parametrize(("expires_at", "is_needed"), [(LATER, False), (NOW, True)])
def test_a_batch_whose_launch_is_due_asks_for_its_job_only_past_its_deadline(
    expires_at: datetime, is_needed: bool
) -> None:
    batch = BatchView(status=BatchStatus.IN_PROGRESS, expires_at=expires_at, attempt=1, launch_after=NOW)
    assert needs_job_status(batch, NOW) == is_needed


@pytest.mark.parametrize(
    ("status", "following"), [("cancelling", Assemble()), ("in_progress", Finalize(check_lines=False))]
)
def test_a_job_that_does_not_stop_is_waited_for_five_minutes(status: str, following: Decision) -> None:
    began = NOW - timedelta(minutes=5)
    job = JobStatus(state=JobState.RUNNING)
    batch = BatchView(status=BatchStatus(status), expires_at=began, cancelling_at=began, attempt=1)
    assert decide(batch, job, NOW - timedelta(seconds=1)) == StopJob()
    assert decide(batch, job, NOW) == following


def running(*, failed_attempts: int, committed_parts: int = 0) -> BatchView:
    return BatchView(
        status=BatchStatus.IN_PROGRESS,
        expires_at=LATER,
        attempt=7,
        failed_attempts=failed_attempts,
        committed_parts=committed_parts,
    )


def test_a_failed_attempt_is_tried_again_after_a_while() -> None:
    following = after_failed_attempt(running(failed_attempts=1), message="out of memory", parts=0, now=NOW)
    assert following == NextAttempt(launch_after=NOW + timedelta(seconds=4), failed_attempts=2, committed_parts=0)


def test_new_parts_make_earlier_failures_forgotten() -> None:
    batch = running(failed_attempts=3, committed_parts=5)
    following = after_failed_attempt(batch, message="killed", parts=6, now=NOW)
    assert following == NextAttempt(launch_after=NOW + timedelta(seconds=2), failed_attempts=1, committed_parts=6)


def test_the_fourth_failure_without_new_parts_fails_the_batch_with_the_jobs_last_words() -> None:
    batch = running(failed_attempts=3, committed_parts=5)
    following = after_failed_attempt(batch, message="CUDA out of memory", parts=5, now=NOW)
    assert isinstance(following, GiveUp)
    assert following.code == "job_failed"
    assert following.message.endswith("The last one said: CUDA out of memory")


@pytest.mark.parametrize(
    ("refused_at", "is_given_up"),
    [(None, False), (NOW - timedelta(minutes=29), False), (NOW - timedelta(minutes=30), True)],
)
def test_a_launch_that_is_refused_for_half_an_hour_ends_its_batch(
    refused_at: datetime | None, is_given_up: bool
) -> None:
    batch = BatchView(
        status=BatchStatus.IN_PROGRESS, expires_at=LATER, attempt=1, launch_after=NOW, launch_refused_at=refused_at
    )
    following = after_refused_launch(batch, message="answered 403: forbidden", now=NOW)
    assert (following is not None) == is_given_up
    assert following is None or "was refused for 30 minutes: answered 403: forbidden. Once" in following.message


def test_backoff_doubles_up_to_a_minute() -> None:
    assert [backoff(n).total_seconds() for n in (1, 2, 3, 4, 5, 6, 1000)] == [2, 4, 8, 16, 32, 60, 60]
