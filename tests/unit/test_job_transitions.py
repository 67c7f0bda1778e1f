from datetime import UTC, datetime, timedelta
from itertools import product
from typing import Any

import pytest

from service.job_transitions import (
    EXIT_LIMIT,
    MAX_FAILURES,
    SILENCE_LIMIT,
    JobAction,
    JobFailed,
    JobView,
    backoff_s,
    decide_job,
    give_up_message,
)
from service.ports import JobState, JobStatus

NOW = datetime(2026, 1, 2, 12, tzinfo=UTC)
SOON = NOW + timedelta(seconds=1)
RECENTLY = NOW - timedelta(seconds=5)
EARLIER = NOW - timedelta(hours=1)


def job(**facts: Any) -> JobView:
    return JobView(created_at=EARLIER, **facts)


def launched(**facts: Any) -> JobView:
    return job(launched_at=EARLIER, **facts)


def status(state: str, **facts: Any) -> JobStatus:
    return JobStatus(state=JobState(state), **facts)


LOST = JobFailed("the launcher no longer knows the job; Ray was restarted or lost it")

CASES: dict[str, tuple[JobView, JobStatus | None, JobAction | JobFailed]] = {
    "not due": (job(launch_after=SOON), None, JobAction.WAIT),
    "due": (job(launch_after=NOW), None, JobAction.LAUNCH),
    "due without work": (job(launch_after=NOW, has_work=False), None, JobAction.END),
    "drained before its launch": (job(launch_after=NOW, draining_at=RECENTLY), None, JobAction.END),
    "pending": (launched(), status("pending"), JobAction.WAIT),
    "pending without work": (launched(has_work=False), status("pending"), JobAction.STOP),
    "pending and drained": (launched(draining_at=NOW), status("pending"), JobAction.STOP),
    "working": (launched(seen_at=RECENTLY), status("running"), JobAction.WAIT),
    "warm": (launched(seen_at=RECENTLY, idle_since=EARLIER, has_work=False), status("running"), JobAction.WAIT),
    "stuck": (
        launched(),
        status("pending", message="no such image", is_stuck=True),
        JobFailed("the job cannot run: no such image", is_final=True, may_pass=True),
    ),
    "stuck after a commit": (
        launched(seen_at=RECENTLY, committed_at=EARLIER),
        status("running", message="a node is gone", is_stuck=True),
        JobAction.WAIT,
    ),
    "silent": (launched(seen_at=NOW - SILENCE_LIMIT), status("running"), JobAction.STOP),
    "stopped for its silence": (
        launched(seen_at=NOW - SILENCE_LIMIT),
        status("stopped"),
        JobFailed("the job was stopped after 10 minutes of silence"),
    ),
    "draining": (launched(seen_at=RECENTLY, draining_at=EARLIER), status("running"), JobAction.WAIT),
    "drained and idle": (
        launched(seen_at=RECENTLY, draining_at=NOW - EXIT_LIMIT, idle_since=RECENTLY),
        status("running"),
        JobAction.STOP,
    ),
    "ended": (launched(seen_at=RECENTLY, ended_at=RECENTLY), status("running"), JobAction.WAIT),
    "ended and still there": (
        launched(seen_at=EARLIER, ended_at=NOW - EXIT_LIMIT),
        status("running"),
        JobAction.STOP,
    ),
    "gone": (launched(seen_at=RECENTLY, ended_at=RECENTLY), status("succeeded"), JobAction.END),
    "gone after a drain": (launched(seen_at=RECENTLY, draining_at=RECENTLY), status("succeeded"), JobAction.END),
    "failed at its end": (launched(seen_at=RECENTLY, ended_at=RECENTLY), status("failed"), JobAction.END),
    "lost without work": (launched(has_work=False), status("missing"), JobAction.END),
    "succeeded with work left": (
        launched(seen_at=RECENTLY),
        status("succeeded"),
        JobFailed("the job ended while it still had work"),
    ),
    "failed": (launched(seen_at=RECENTLY), status("failed", message="last words"), JobFailed("last words")),
    "failed for good": (
        launched(),
        status("failed", message="no model", is_final=True),
        JobFailed("no model", is_final=True),
    ),
    "failed without a word": (launched(), status("failed"), JobFailed("the job failed and left no message")),
    "stopped": (
        launched(seen_at=RECENTLY),
        status("stopped"),
        JobFailed("the job was stopped by something other than cloister"),
    ),
    "lost": (launched(seen_at=RECENTLY), status("missing"), LOST),
}


@pytest.mark.parametrize("case", CASES)
def test_next_action(case: str) -> None:
    view, answer, expected = CASES[case]
    assert decide_job(view, answer, NOW) == expected


def test_every_job_that_is_gone_is_ended() -> None:
    # Otherwise it would hold its slot forever.
    times = (None, RECENTLY, EARLIER)
    gone = (JobState.SUCCEEDED, JobState.FAILED, JobState.STOPPED, JobState.MISSING)
    for state, seen, committed, draining, ended, work in product(gone, times, times, times, times, (True, False)):
        view = launched(seen_at=seen, committed_at=committed, draining_at=draining, ended_at=ended, has_work=work)
        decision = decide_job(view, JobStatus(state=state), NOW)
        assert decision is JobAction.END or isinstance(decision, JobFailed)


def test_every_job_without_work_ends_or_is_warm() -> None:
    for seen, idle, draining, ended in product((None, EARLIER), (None, EARLIER), (None, EARLIER), (None, EARLIER)):
        view = launched(seen_at=seen, idle_since=idle, draining_at=draining, ended_at=ended, has_work=False)
        assert decide_job(view, JobStatus(state=JobState.RUNNING), NOW) is JobAction.STOP


def test_backoff_doubles() -> None:
    assert [backoff_s(failures) for failures in (1, 2, 3, 4)] == [2, 4, 8, 16]


def test_batches_are_given_up_after_failures_in_a_row() -> None:
    failure = JobFailed("out of memory")
    assert give_up_message(failure, MAX_FAILURES - 1) == ""
    assert "4 jobs in a row failed" in give_up_message(failure, MAX_FAILURES)
    assert "out of memory" in give_up_message(failure, MAX_FAILURES)


def test_batches_are_given_up_at_once_if_a_retry_would_fail_too() -> None:
    message = give_up_message(JobFailed("no such model", is_final=True), 1)
    assert message == (
        "The batch's job failed, and a retry would fail too: no such model. Fix the cause, then create the batch again."
    )
