import dataclasses
from datetime import UTC, datetime, timedelta
from itertools import product

import pytest

from service.ports import JobState, JobStatus
from service.transitions import (
    ALIVE,
    ALLOWED,
    FINAL,
    Action,
    AttemptFailed,
    BatchStatus,
    BatchView,
    Decision,
    GiveUp,
    NextAttempt,
    after_failed_attempt,
    after_refused_launch,
    decide,
    needs_job_status,
)

NOW = datetime(2026, 1, 2, 12, tzinfo=UTC)
LATER = NOW + timedelta(hours=1)
EARLIER = NOW - timedelta(hours=1)
JUST_NOW = NOW - timedelta(minutes=1)

TABLE = """
    validating → in_progress, failed, cancelling
    in_progress → finalizing, failed, cancelling
    finalizing → completed, expired, failed, cancelling
    cancelling → cancelled
"""


@pytest.mark.parametrize(("before", "after"), list(product(BatchStatus, BatchStatus)))
def test_allowed_transitions(before: BatchStatus, after: BatchStatus) -> None:
    table = dict(line.split(" → ") for line in TABLE.strip().replace("    ", "").splitlines())
    assert (after in ALLOWED[before]) == (after.value in table.get(before.value, "").split(", "))


LOST = AttemptFailed("the launcher no longer knows the job; Ray was restarted or lost it")

# status, deadline, launch_after, job state, next action
DECISIONS: list[tuple[str, datetime, datetime | None, str | None, Decision]] = [
    ("validating", LATER, None, None, Action.VALIDATE),
    ("validating", EARLIER, None, None, Action.VALIDATE),
    ("in_progress", LATER, EARLIER, "missing", Action.LAUNCH),
    ("in_progress", LATER, NOW, "missing", Action.LAUNCH),
    ("in_progress", LATER, LATER, "missing", Action.WAIT),
    ("in_progress", LATER, LATER, None, Action.WAIT),
    ("in_progress", LATER, EARLIER, None, Action.LAUNCH),
    ("in_progress", LATER, None, "pending", Action.WAIT),
    ("in_progress", LATER, None, "running", Action.WAIT),
    ("in_progress", LATER, None, "succeeded", Action.CHECK_LINES),
    ("in_progress", LATER, None, "failed", AttemptFailed("last words")),
    ("in_progress", LATER, None, "stopped", AttemptFailed("last words")),
    ("in_progress", LATER, None, "missing", LOST),
    ("in_progress", NOW, None, "running", Action.STOP_JOB),
    ("in_progress", JUST_NOW, None, "pending", Action.STOP_JOB),
    ("in_progress", EARLIER, None, "stopped", Action.FINALIZE),
    ("in_progress", EARLIER, None, "succeeded", Action.FINALIZE),
    ("in_progress", EARLIER, LATER, "missing", Action.FINALIZE),
    ("in_progress", JUST_NOW, LATER, "running", Action.STOP_JOB),
    ("cancelling", LATER, None, None, Action.ASSEMBLE),
    ("cancelling", LATER, None, "pending", Action.STOP_JOB),
    ("cancelling", EARLIER, NOW, "running", Action.STOP_JOB),
    ("cancelling", LATER, None, "stopped", Action.ASSEMBLE),
    ("cancelling", LATER, None, "succeeded", Action.ASSEMBLE),
    ("cancelling", LATER, None, "missing", Action.ASSEMBLE),
    ("finalizing", LATER, None, None, Action.ASSEMBLE),
    ("finalizing", EARLIER, None, None, Action.ASSEMBLE),
    ("completed", EARLIER, None, None, Action.DELETE_PARTS),
    ("completed", EARLIER, None, "succeeded", Action.DELETE_PARTS),
    ("completed", EARLIER, None, "pending", Action.STOP_JOB),
    ("completed", EARLIER, None, "running", Action.STOP_JOB),
    ("failed", EARLIER, None, None, Action.DELETE_PARTS),
    ("expired", EARLIER, None, None, Action.DELETE_PARTS),
    ("cancelled", EARLIER, None, None, Action.DELETE_PARTS),
    ("cancelled", EARLIER, None, "succeeded", Action.DELETE_PARTS),
    ("cancelled", EARLIER, None, "pending", Action.STOP_JOB),
    ("cancelled", EARLIER, None, "running", Action.STOP_JOB),
]


@pytest.mark.parametrize(("status", "expires_at", "launch_after", "job", "expected"), DECISIONS)
def test_next_action(
    status: str, expires_at: datetime, launch_after: datetime | None, job: str | None, expected: Decision
) -> None:
    batch = BatchView(
        status=BatchStatus(status), expires_at=expires_at, launch_after=launch_after, attempt=1 if job else 0
    )
    job_status = JobStatus(state=JobState(job), message="last words") if job else None
    assert decide(batch, job_status, NOW) == expected


@pytest.mark.parametrize(
    ("state", "message"),
    [
        ("failed", "the job failed and left no message"),
        ("stopped", "the job was stopped by something other than cloister"),
    ],
)
def test_job_without_a_message_gets_one(state: str, message: str) -> None:
    batch = BatchView(status=BatchStatus.IN_PROGRESS, expires_at=LATER, attempt=1)
    assert decide(batch, JobStatus(state=JobState(state)), NOW) == AttemptFailed(message)


@pytest.mark.parametrize("state", [JobState.PENDING, JobState.RUNNING])
def test_stuck_job_ends_its_batch_with_the_reason(state: JobState) -> None:
    batch = BatchView(status=BatchStatus.IN_PROGRESS, expires_at=LATER, attempt=1)
    following = decide(batch, JobStatus(state=state, message="no such image", is_stuck=True), NOW)
    assert isinstance(following, GiveUp)
    assert following.code == "job_failed"
    assert following.message == (
        "The batch's job cannot run: no such image. Fix the cause, then create the batch again."
    )


@pytest.mark.parametrize("state", [JobState.PENDING, JobState.RUNNING])
def test_stuck_job_of_a_batch_with_results_is_waited_for(state: JobState) -> None:
    batch = BatchView(status=BatchStatus.IN_PROGRESS, expires_at=LATER, attempt=1, has_results=True)
    assert decide(batch, JobStatus(state=state, message="no such image", is_stuck=True), NOW) == Action.WAIT


def test_final_failure_of_a_job_ends_its_batch_with_its_message() -> None:
    batch = BatchView(status=BatchStatus.IN_PROGRESS, expires_at=LATER, attempt=1, has_results=True)
    following = decide(batch, JobStatus(state=JobState.FAILED, message="no such model", is_final=True), NOW)
    assert following == GiveUp(
        "job_failed",
        "The batch's job failed, and a retry would fail too: no such model. "
        "Fix the cause, then create the batch again.",
    )


# given up at, deadline, launch_after, job state, next action
GIVING_UP: list[tuple[datetime, datetime, datetime | None, str, Decision]] = [
    (JUST_NOW, LATER, None, "pending", Action.STOP_JOB),
    (JUST_NOW, LATER, None, "running", Action.STOP_JOB),
    (JUST_NOW, LATER, None, "succeeded", Action.ASSEMBLE),
    (JUST_NOW, LATER, None, "failed", Action.ASSEMBLE),
    (JUST_NOW, LATER, None, "stopped", Action.ASSEMBLE),
    (JUST_NOW, LATER, None, "missing", Action.ASSEMBLE),
    (JUST_NOW, LATER, EARLIER, "running", Action.STOP_JOB),
    (JUST_NOW, LATER, EARLIER, "missing", Action.ASSEMBLE),
    (JUST_NOW, EARLIER, None, "running", Action.STOP_JOB),
    (JUST_NOW, EARLIER, None, "missing", Action.ASSEMBLE),
    (EARLIER, LATER, None, "running", Action.ASSEMBLE),
]


@pytest.mark.parametrize(("giving_up_at", "expires_at", "launch_after", "job", "expected"), GIVING_UP)
def test_next_action_of_a_batch_that_is_given_up(
    giving_up_at: datetime, expires_at: datetime, launch_after: datetime | None, job: str, expected: Decision
) -> None:
    batch = BatchView(
        status=BatchStatus.IN_PROGRESS,
        expires_at=expires_at,
        attempt=1,
        launch_after=launch_after,
        giving_up_at=giving_up_at,
    )
    assert needs_job_status(batch, NOW)
    assert decide(batch, JobStatus(state=JobState(job), message="last words", is_stuck=True), NOW) == expected


def test_cancel_of_a_batch_that_is_given_up_wins() -> None:
    batch = BatchView(status=BatchStatus.CANCELLING, expires_at=LATER, attempt=1, giving_up_at=JUST_NOW)
    assert decide(batch, JobStatus(state=JobState.STOPPED), NOW) == Action.ASSEMBLE


@pytest.mark.parametrize("status", ["cancelling", "in_progress"])
def test_stuck_job_of_an_ending_batch_is_stopped(status: str) -> None:
    batch = BatchView(status=BatchStatus(status), expires_at=NOW, cancelling_at=NOW, attempt=1)
    assert decide(batch, JobStatus(state=JobState.PENDING, is_stuck=True), NOW) == Action.STOP_JOB


@pytest.mark.parametrize("status", list(BatchStatus))
def test_job_status_is_needed_only_while_a_job_may_be_alive(status: BatchStatus) -> None:
    batch = BatchView(status=status, expires_at=LATER, attempt=1)
    assert needs_job_status(batch, NOW) == (status not in ("validating", "finalizing"))
    assert not needs_job_status(dataclasses.replace(batch, attempt=0), NOW)


@pytest.mark.parametrize(("expires_at", "is_needed"), [(LATER, False), (NOW, True), (EARLIER, True)])
def test_job_status_before_a_launch_is_needed_only_from_the_deadline_on(expires_at: datetime, is_needed: bool) -> None:
    batch = BatchView(status=BatchStatus.IN_PROGRESS, expires_at=expires_at, attempt=1, launch_after=NOW)
    assert needs_job_status(batch, NOW) == is_needed


@pytest.mark.parametrize(("status", "following"), [("cancelling", Action.ASSEMBLE), ("in_progress", Action.FINALIZE)])
def test_job_that_does_not_stop_is_waited_for_five_minutes(status: str, following: Decision) -> None:
    began = NOW - timedelta(minutes=5)
    job = JobStatus(state=JobState.RUNNING)
    batch = BatchView(status=BatchStatus(status), expires_at=began, cancelling_at=began, attempt=1)
    assert decide(batch, job, NOW - timedelta(seconds=1)) == Action.STOP_JOB
    assert decide(batch, job, NOW) == following


def running(*, failed_attempts: int, committed_parts: int = 0) -> BatchView:
    return BatchView(
        status=BatchStatus.IN_PROGRESS,
        expires_at=LATER,
        attempt=7,
        failed_attempts=failed_attempts,
        committed_parts=committed_parts,
    )


@pytest.mark.parametrize(("failed_before", "pause_s"), [(0, 2), (1, 4), (2, 8)])
def test_failed_attempt_is_followed_by_another_after_a_doubled_pause(failed_before: int, pause_s: int) -> None:
    following = after_failed_attempt(running(failed_attempts=failed_before), message="killed", parts=0, now=NOW)
    assert following == NextAttempt(
        launch_after=NOW + timedelta(seconds=pause_s), failed_attempts=failed_before + 1, committed_parts=0
    )


def test_new_parts_reset_the_count_of_failures() -> None:
    batch = running(failed_attempts=3, committed_parts=5)
    following = after_failed_attempt(batch, message="killed", parts=6, now=NOW)
    assert following == NextAttempt(launch_after=NOW + timedelta(seconds=2), failed_attempts=1, committed_parts=6)


def test_fourth_failure_without_new_parts_gives_the_batch_up() -> None:
    batch = running(failed_attempts=3, committed_parts=5)
    following = after_failed_attempt(batch, message="CUDA out of memory", parts=5, now=NOW)
    assert following == GiveUp(
        "job_failed",
        "The batch was given up after 4 failed attempts in a row without progress (7 attempts in total). "
        "Error of the last attempt: CUDA out of memory",
    )


REFUSED = GiveUp(
    "job_failed",
    "The batch's job was refused for 30 minutes: answered 403: forbidden. Fix the cause, then create the batch again.",
)


@pytest.mark.parametrize(
    ("refused_at", "is_given_up"),
    [
        (None, False),
        (NOW - timedelta(minutes=30) + timedelta(microseconds=1), False),
        (NOW - timedelta(minutes=30), True),
        (EARLIER, True),
    ],
)
def test_launch_refused_for_half_an_hour_ends_its_batch(refused_at: datetime | None, is_given_up: bool) -> None:
    batch = BatchView(
        status=BatchStatus.IN_PROGRESS, expires_at=LATER, attempt=1, launch_after=NOW, launch_refused_at=refused_at
    )
    following = after_refused_launch(batch, message="answered 403: forbidden", now=NOW)
    assert following == (REFUSED if is_given_up else None)


def test_final_states_are_those_without_a_following_state() -> None:
    assert {"completed", "failed", "expired", "cancelled"} == FINAL


def test_only_pending_and_running_jobs_are_alive() -> None:
    assert {JobState.PENDING, JobState.RUNNING} == ALIVE


@pytest.mark.parametrize(
    ("finalizing_at", "missed"),
    [(None, False), (NOW - timedelta(microseconds=1), False), (NOW, True), (LATER, True)],
)
def test_deadline_is_missed_if_finalizing_began_at_it_or_later(finalizing_at: datetime | None, *, missed: bool) -> None:
    batch = BatchView(status=BatchStatus.FINALIZING, expires_at=NOW, finalizing_at=finalizing_at)
    assert batch.missed_deadline == missed


GRACE = timedelta(minutes=5)

# status, deadline, cancelled at, given up at, is the grace over
GRACES: list[tuple[str, datetime, datetime | None, datetime | None, bool]] = [
    ("in_progress", NOW - GRACE, None, None, True),
    ("in_progress", NOW - GRACE + timedelta(microseconds=1), None, None, False),
    ("in_progress", LATER, None, NOW - GRACE, True),
    ("in_progress", EARLIER, None, JUST_NOW, False),
    ("cancelling", LATER, NOW - GRACE, None, True),
    ("cancelling", EARLIER, JUST_NOW, EARLIER, False),
    ("cancelling", EARLIER, None, None, False),
    ("validating", EARLIER, EARLIER, EARLIER, False),
    ("finalizing", EARLIER, EARLIER, EARLIER, False),
    ("completed", EARLIER, EARLIER, EARLIER, False),
]


@pytest.mark.parametrize(("status", "expires_at", "cancelling_at", "giving_up_at", "is_over"), GRACES)
def test_grace_for_a_job_to_stop(
    status: str, expires_at: datetime, cancelling_at: datetime | None, giving_up_at: datetime | None, *, is_over: bool
) -> None:
    batch = BatchView(
        status=BatchStatus(status), expires_at=expires_at, cancelling_at=cancelling_at, giving_up_at=giving_up_at
    )
    assert batch.stop_grace_is_over(NOW) == is_over


@pytest.mark.parametrize(
    ("status", "attempt", "launch_after", "giving_up_at", "is_needed"),
    [
        ("in_progress", 0, None, None, False),
        ("in_progress", 1, None, None, True),
        ("in_progress", 1, NOW, None, False),
        ("in_progress", 1, NOW, JUST_NOW, True),
        ("cancelling", 0, None, None, False),
        ("cancelling", 1, NOW, None, True),
        ("finalizing", 1, None, JUST_NOW, False),
    ],
)
def test_need_of_the_job_status(
    status: str, attempt: int, launch_after: datetime | None, giving_up_at: datetime | None, *, is_needed: bool
) -> None:
    batch = BatchView(
        status=BatchStatus(status),
        expires_at=LATER,
        attempt=attempt,
        launch_after=launch_after,
        giving_up_at=giving_up_at,
    )
    assert needs_job_status(batch, NOW) == is_needed


@pytest.mark.parametrize(("failed_attempts", "is_given_up"), [(2, False), (3, True), (4, True)])
def test_batch_is_given_up_at_the_fourth_failure(failed_attempts: int, *, is_given_up: bool) -> None:
    following = after_failed_attempt(running(failed_attempts=failed_attempts), message="killed", parts=0, now=NOW)
    assert isinstance(following, GiveUp) == is_given_up


def test_fewer_parts_than_before_are_no_progress() -> None:
    batch = running(failed_attempts=1, committed_parts=5)
    following = after_failed_attempt(batch, message="killed", parts=4, now=NOW)
    assert following == NextAttempt(launch_after=NOW + timedelta(seconds=4), failed_attempts=2, committed_parts=4)


def test_new_batch_has_no_job_and_no_failures() -> None:
    batch = BatchView(status=BatchStatus.VALIDATING, expires_at=LATER)
    assert (batch.attempt, batch.failed_attempts, batch.committed_parts) == (0, 0, 0)


# launch_after, given up at, deadline, next action, is the job's state needed
ALL_REPORTED: list[tuple[datetime | None, datetime | None, datetime, Decision, bool]] = [
    (None, None, LATER, Action.CHECK_LINES, False),
    (NOW, None, LATER, Action.LAUNCH, False),
    (LATER, None, LATER, Action.WAIT, False),
    (None, JUST_NOW, LATER, Action.STOP_JOB, True),
    (None, None, NOW, Action.STOP_JOB, True),
]


@pytest.mark.parametrize(("launch_after", "giving_up_at", "expires_at", "expected", "is_needed"), ALL_REPORTED)
def test_lines_are_checked_while_the_job_runs_if_all_are_reported(
    launch_after: datetime | None,
    giving_up_at: datetime | None,
    expires_at: datetime,
    expected: Decision,
    *,
    is_needed: bool,
) -> None:
    batch = BatchView(
        status=BatchStatus.IN_PROGRESS,
        expires_at=expires_at,
        attempt=1,
        launch_after=launch_after,
        giving_up_at=giving_up_at,
        all_reported=True,
    )
    assert needs_job_status(batch, NOW) == is_needed
    job = JobStatus(state=JobState.RUNNING, message="no such image", is_stuck=True) if is_needed else None
    assert decide(batch, job, NOW) == expected


A_MINUTE_AGO, FIVE_MINUTES_AGO = NOW - timedelta(minutes=1), NOW - timedelta(minutes=5)
SECOND = timedelta(seconds=1)

# status, since when the job is ending, job state, next action, is the grace over
ENDING: list[tuple[str, datetime, str, Decision, bool]] = [
    ("finalizing", NOW, "running", Action.ASSEMBLE, False),
    ("finalizing", FIVE_MINUTES_AGO + SECOND, "pending", Action.ASSEMBLE, False),
    ("finalizing", FIVE_MINUTES_AGO, "running", Action.ASSEMBLE, True),
    ("finalizing", NOW, "failed", Action.ASSEMBLE, False),
    ("cancelling", NOW, "running", Action.STOP_JOB, False),
    ("cancelling", NOW, "succeeded", Action.ASSEMBLE, False),
    ("completed", NOW, "running", Action.WAIT, False),
    ("completed", A_MINUTE_AGO + SECOND, "running", Action.WAIT, False),
    ("completed", A_MINUTE_AGO, "running", Action.STOP_JOB, False),
    ("completed", FIVE_MINUTES_AGO + SECOND, "pending", Action.STOP_JOB, False),
    ("completed", FIVE_MINUTES_AGO, "running", Action.STOP_JOB, True),
    ("completed", NOW, "succeeded", Action.DELETE_PARTS, False),
    ("failed", NOW, "running", Action.WAIT, False),
    ("cancelled", FIVE_MINUTES_AGO, "missing", Action.DELETE_PARTS, True),
]


@pytest.mark.parametrize(("status", "since", "job", "expected", "is_over"), ENDING)
def test_job_that_is_ending_beside_finalizing(
    status: str, since: datetime, job: str, expected: Decision, *, is_over: bool
) -> None:
    batch = BatchView(
        status=BatchStatus(status), expires_at=LATER, attempt=1, cancelling_at=JUST_NOW, job_ending_since=since
    )
    assert needs_job_status(batch, NOW)
    assert decide(batch, JobStatus(state=JobState(job)), NOW) == expected
    assert batch.stop_grace_is_over(NOW) == (is_over and status != "cancelling")


@pytest.mark.parametrize(
    ("job", "decision"),
    [
        ("pending", Action.STOP_JOB),
        ("running", Action.STOP_JOB),
        ("succeeded", Action.CHECK_LINES),
        ("stopped", AttemptFailed("the batch was paused")),
        ("failed", AttemptFailed("the batch was paused")),
        ("missing", AttemptFailed("the batch was paused")),
    ],
)
def test_job_of_a_paused_batch_is_stopped(job: str, decision: Decision) -> None:
    batch = dataclasses.replace(BatchView(status=BatchStatus.IN_PROGRESS, expires_at=LATER), attempt=1)
    paused = dataclasses.replace(batch, is_paused=True, was_paused=True)
    status = JobStatus(state=JobState(job), message="last words", is_final=job == "failed")
    assert decide(paused, status, NOW) == decision
    assert decide(dataclasses.replace(paused, expires_at=JUST_NOW), status, NOW) in {Action.STOP_JOB, Action.FINALIZE}
    assert decide(dataclasses.replace(paused, all_reported=True), status, NOW) is Action.CHECK_LINES


@pytest.mark.parametrize("job", ["pending", "running"])
def test_stuck_job_of_a_paused_batch_is_stopped(job: str) -> None:
    batch = BatchView(status=BatchStatus.IN_PROGRESS, expires_at=LATER, attempt=1, is_paused=True)
    assert decide(batch, JobStatus(state=JobState(job), is_stuck=True), NOW) is Action.STOP_JOB
    resumed = dataclasses.replace(batch, is_paused=False, was_paused=True)
    assert decide(resumed, JobStatus(state=JobState(job)), NOW) is Action.WAIT


@pytest.mark.parametrize(("is_paused", "decision"), [(True, Action.WAIT), (False, Action.LAUNCH)])
def test_paused_batch_is_not_launched(is_paused: bool, decision: Action) -> None:
    batch = BatchView(status=BatchStatus.IN_PROGRESS, expires_at=LATER, launch_after=NOW, is_paused=is_paused)
    assert decide(batch, None, NOW) is decision


def test_end_of_a_paused_job_is_no_failure() -> None:
    batch = BatchView(status=BatchStatus.IN_PROGRESS, expires_at=LATER, attempt=7, failed_attempts=3, committed_parts=2)
    paused = dataclasses.replace(batch, was_paused=True)
    following = after_failed_attempt(paused, message="", parts=9, now=NOW)
    assert following == NextAttempt(launch_after=NOW, failed_attempts=3, committed_parts=2)
    job = JobStatus(state=JobState.FAILED, message="last words", is_final=True)
    assert decide(paused, job, NOW) == AttemptFailed("last words")
    assert decide(paused, JobStatus(state=JobState.MISSING), NOW) == AttemptFailed("the batch was paused")
    assert isinstance(after_failed_attempt(batch, message="", parts=2, now=NOW), GiveUp)
