"""The life of a job and the next action for it. Pure: ``now`` and the launcher's answer are arguments.

    waiting → launched → ended → gone
       └──────────────────────────┘        (discarded: nothing is left to do, or its model is no longer offered)

A job is created when its sharing domain has work and no job takes it. It waits for a free slot. Once it was launched it
holds its slot until the launcher reports that it is gone. It ends itself after some idle time, or when it is drained:
then it takes no more work and another job of the domain may be created. A job that ends otherwise has failed; its
leases are released, and the next job of the domain waits for a pause that doubles with each failure in a row.

A launcher that no longer knows a job reports it as missing, which counts as a failure: Ray may have been restarted, but
a Ray that dies each time must not keep batches forever.
"""

from dataclasses import dataclass
from datetime import datetime, timedelta
from enum import Enum, auto
from typing import Final

from service.ports import JobState, JobStatus

MAX_FAILURES: Final = 4
# The pause after the first failure; it doubles with each further failure in a row.
FIRST_BACKOFF_S: Final = 2
JOB_FAILED: Final = "job_failed"
# How long a refused launch is retried: a change of the stack may fix it in the meantime.
LAUNCH_REFUSED_LIMIT: Final = timedelta(minutes=30)
# How long a job has to end by itself when it has nothing left to do; it still holds its GPUs.
EXIT_LIMIT: Final = timedelta(minutes=1)
# A driver syncs every few seconds. One that was silent for this long has hung, or nothing reaches it.
SILENCE_LIMIT: Final = timedelta(minutes=10)
# How long a job may run before another one that waits for its slot may take its turn.
TURN: Final = timedelta(minutes=5)
# States of a job that may still run rows.
ALIVE: Final = frozenset({JobState.PENDING, JobState.RUNNING})


@dataclass(frozen=True, slots=True, kw_only=True)
class JobView:
    """The facts that decide a job's next action.

    Attributes:
        created_at: when it was created.
        launch_after: when its launch is due; None once the launcher accepted it.
        launched_at: when the launcher accepted it.
        refused_at: when its launch was first refused; None if it was not.
        running_since: since when it runs; None while it waits for a place.
        seen_at: when its driver last called the coordinator; None before that.
        idle_since: since when it holds no lease; None while it holds one.
        committed_at: its last commit; None before the first.
        draining_at: since when it takes no more work.
        ended_at: since when its token is void.
        has_work: whether its domain has rows that are not committed.
    """

    created_at: datetime
    launch_after: datetime | None = None
    launched_at: datetime | None = None
    refused_at: datetime | None = None
    running_since: datetime | None = None
    seen_at: datetime | None = None
    idle_since: datetime | None = None
    committed_at: datetime | None = None
    draining_at: datetime | None = None
    ended_at: datetime | None = None
    has_work: bool = True

    def is_silent(self, now: datetime) -> bool:
        """Return whether its driver has not called the coordinator for too long since it runs."""
        last_at = self.seen_at or self.running_since
        return last_at is not None and now >= last_at + SILENCE_LIMIT


class JobAction(Enum):
    """Next action for a job.

    Attributes:
        WAIT: do nothing now.
        LAUNCH: launch it when it has a slot.
        STOP: ask the launcher to stop it; the next action waits until it is gone.
        END: it is gone: void its token, release its leases and free its slot.
    """

    WAIT = auto()
    LAUNCH = auto()
    STOP = auto()
    END = auto()


@dataclass(frozen=True, slots=True)
class JobFailed:
    """The job ended without success, for the reason in ``message``.

    Attributes:
        message: the reason.
        is_final: the next job would fail too.
        may_pass: an earlier job ran here, so what is missing may come back: batches with results wait for it.
    """

    message: str
    is_final: bool = False
    may_pass: bool = False


def decide_job(job: JobView, status: JobStatus | None, now: datetime) -> JobAction | JobFailed:
    """Return the next action for a job.

    Args:
        job: the job.
        status: the launcher's answer; None if the job was not launched.
        now: aware, UTC.
    """
    if job.launch_after is not None or status is None:
        if job.draining_at is not None or not job.has_work:
            return JobAction.END
        return JobAction.LAUNCH if job.launch_after is not None and now >= job.launch_after else JobAction.WAIT
    if status.state in ALIVE:
        return _decide_alive(job, status, now)
    if job.ended_at is not None or job.draining_at is not None or not job.has_work:
        return JobAction.END
    match status.state:
        case _ if job.is_silent(now):
            return JobFailed(f"the job was stopped after {SILENCE_LIMIT // timedelta(minutes=1)} minutes of silence")
        case JobState.SUCCEEDED:
            return JobFailed("the job ended while it still had work")
        case JobState.FAILED:
            return JobFailed(status.message or "the job failed and left no message", is_final=status.is_final)
        case JobState.STOPPED:
            return JobFailed(status.message or "the job was stopped by something other than cloister")
        case _:
            return JobFailed("the launcher no longer knows the job; Ray was restarted or lost it")


def _decide_alive(job: JobView, status: JobStatus, now: datetime) -> JobAction | JobFailed:
    if job.ended_at is not None:
        return JobAction.STOP if now >= job.ended_at + EXIT_LIMIT else JobAction.WAIT
    # A job that has committed once had everything that it needs: what is missing now comes back.
    if status.is_stuck and job.committed_at is None:
        return JobFailed(f"the job cannot run: {status.message}", is_final=True, may_pass=True)
    if job.seen_at is None and (not job.has_work or job.draining_at is not None):
        return JobAction.STOP
    is_idle_and_drained = (
        job.draining_at is not None and job.idle_since is not None and now >= job.draining_at + EXIT_LIMIT
    )
    return JobAction.STOP if job.is_silent(now) or is_idle_and_drained else JobAction.WAIT


def backoff_s(failures: int) -> int:
    """Return the pause after so many failures in a row, in seconds."""
    return FIRST_BACKOFF_S << (failures - 1)


def give_up_message(failure: JobFailed, failures: int) -> str:
    """Return why the batches of a domain are given up, in words that their owners can act on; empty if they are not.

    Args:
        failure: the failure of the newest job.
        failures: failures in a row, this one included.
    """
    if failure.is_final:
        return (
            f"The batch's job failed, and a retry would fail too: {failure.message}. Fix the cause, then create the "
            "batch again."
        )
    if failures < MAX_FAILURES:
        return ""
    return (
        f"The batch was given up after {failures} jobs in a row failed without progress. Error of the last job: "
        f"{failure.message}"
    )
