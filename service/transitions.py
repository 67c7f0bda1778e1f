"""The states of a batch and what to do next with one. Pure: ``now`` and the job's state are arguments.

    validating → failed | in_progress → finalizing → completed
                             │              ├──────→ expired      (the deadline passed and lines are missing)
                             │              └──────→ failed       (the parts do not make a whole)
                             └→ failed                            (the batch was given up)
    validating | in_progress | finalizing → cancelling → cancelled

A batch that is still validating at its deadline is validated first: its owner hears of bad lines rather than of the
time. A batch that was done before its deadline, or is being cancelled, does not expire.

An attempt of a batch is one job. It is written down before its job is launched: ``launch_after`` is set while the
launch is still due and empty once the launcher took the job. A process that dies in between launches the same job id
again, which changes nothing. A job that the launcher does not know any more has failed like any other: Ray may have
been restarted under it, but a Ray that ends each time must not keep a batch for ever.

A batch is given up in two steps: first the reason is written down, then, once its job has stopped, it fails. Whatever
is interrupted in between, the reason stays, and what the job commits until it has stopped is handed over.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime, timedelta
from enum import StrEnum
from typing import Final

from service.ports import JobState, JobStatus


class BatchStatus(StrEnum):
    """OpenAI's words for the states of a batch."""

    VALIDATING = "validating"
    FAILED = "failed"
    IN_PROGRESS = "in_progress"
    FINALIZING = "finalizing"
    COMPLETED = "completed"
    EXPIRED = "expired"
    CANCELLING = "cancelling"
    CANCELLED = "cancelled"


ALLOWED: Final[Mapping[BatchStatus, frozenset[BatchStatus]]] = {
    BatchStatus.VALIDATING: frozenset({BatchStatus.FAILED, BatchStatus.IN_PROGRESS, BatchStatus.CANCELLING}),
    BatchStatus.IN_PROGRESS: frozenset({BatchStatus.FINALIZING, BatchStatus.FAILED, BatchStatus.CANCELLING}),
    BatchStatus.FINALIZING: frozenset(
        {BatchStatus.COMPLETED, BatchStatus.EXPIRED, BatchStatus.FAILED, BatchStatus.CANCELLING}
    ),
    BatchStatus.CANCELLING: frozenset({BatchStatus.CANCELLED}),
    BatchStatus.FAILED: frozenset(),
    BatchStatus.COMPLETED: frozenset(),
    BatchStatus.EXPIRED: frozenset(),
    BatchStatus.CANCELLED: frozenset(),
}
FINAL: Final = frozenset(status for status, following in ALLOWED.items() if not following)

MAX_FAILED_ATTEMPTS: Final = 4
FIRST_BACKOFF_S: Final = 2
MAX_BACKOFF_S: Final = 60
JOB_FAILED: Final = "job_failed"
# For how long a launch that is refused is tried again: whoever changes the stack meanwhile may put it right.
LAUNCH_REFUSED_LIMIT: Final = timedelta(minutes=30)
# How long a batch that is to end waits for its job to stop. What a job still writes after that is left out, and deleted
# once it has stopped; it is told to by its own next report of progress too.
STOP_GRACE: Final = timedelta(minutes=5)


def is_allowed(before: BatchStatus, after: BatchStatus) -> bool:
    """Whether a batch may go from ``before`` to ``after`` in one step."""
    return after in ALLOWED[before]


@dataclass(frozen=True, slots=True)
class GiveUp:
    """Write down why the batch will fail, a reason that its owner can act on; its job is stopped after that."""

    code: str
    message: str


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchView:
    """What decides a batch's next step.

    Attributes:
        status: its state.
        expires_at: its deadline.
        cancelling_at: when its owner cancelled it.
        finalizing_at: when its lines were taken to be done, or the deadline was found to have passed.
        attempt: the number of its newest job, 0 before the first.
        launch_after: when the newest job is to be launched; None once the launcher took it.
        failed_attempts: failed jobs in a row without a new part between them.
        committed_parts: parts that were there when the last of them failed.
        has_results: lines of it have a result.
        launch_refused_at: when the launch of the newest job was refused first; None while it was not.
        giving_up_at: when it was decided to give the batch up.
        giving_up: the reason that was written down then; None where it is not given up.
    """

    status: BatchStatus
    expires_at: datetime
    cancelling_at: datetime | None = None
    finalizing_at: datetime | None = None
    attempt: int = 0
    launch_after: datetime | None = None
    failed_attempts: int = 0
    committed_parts: int = 0
    has_results: bool = False
    launch_refused_at: datetime | None = None
    giving_up_at: datetime | None = None
    giving_up: GiveUp | None = None

    @property
    def missed_its_deadline(self) -> bool:
        """Whether it went to ``finalizing`` because of the deadline."""
        return self.finalizing_at is not None and self.finalizing_at >= self.expires_at

    def waited_long_enough_for_its_job(self, now: datetime) -> bool:
        """Whether it is to end, for long enough to do so whatever its job does."""
        match self.status:
            case BatchStatus.IN_PROGRESS:
                return now >= (self.giving_up_at or self.expires_at) + STOP_GRACE
            case BatchStatus.CANCELLING:
                return self.cancelling_at is not None and now >= self.cancelling_at + STOP_GRACE
            case _:
                return False


@dataclass(frozen=True, slots=True)
class Validate:
    """Read the input file."""


@dataclass(frozen=True, slots=True)
class Wait:
    """Nothing to do now."""


@dataclass(frozen=True, slots=True)
class Launch:
    """Launch the job of the newest attempt."""


@dataclass(frozen=True, slots=True)
class StopJob:
    """Ask the job to end; what follows waits until it has."""


@dataclass(frozen=True, slots=True)
class Finalize:
    """Go to ``finalizing``. ``check_lines``: only if each line has a result, else the attempt has failed."""

    check_lines: bool


@dataclass(frozen=True, slots=True)
class Assemble:
    """Write the output and error file from the parts and end the batch."""


@dataclass(frozen=True, slots=True)
class AttemptFailed:
    """The job ended without success; ``message`` holds its last words."""

    message: str


@dataclass(frozen=True, slots=True)
class NextAttempt:
    """Write down a new attempt, to be launched at ``launch_after``."""

    launch_after: datetime
    failed_attempts: int
    committed_parts: int


@dataclass(frozen=True, slots=True)
class Fail:
    """End the batch as failed, for the reason that was written down."""

    reason: GiveUp


Decision = Validate | Wait | Launch | StopJob | Finalize | Assemble | AttemptFailed | GiveUp | Fail

_NO_JOB: Final = JobStatus(state=JobState.MISSING)
ALIVE: Final = frozenset({JobState.PENDING, JobState.RUNNING})


def needs_job_status(batch: BatchView, now: datetime) -> bool:
    """Whether ``decide`` must be told the state of the batch's job."""
    if batch.attempt == 0:
        return False
    if batch.status is BatchStatus.IN_PROGRESS:
        # Before its deadline a batch whose launch is due is launched in any case: twice is once.
        return batch.launch_after is None or batch.giving_up is not None or now >= batch.expires_at
    return batch.status is BatchStatus.CANCELLING


def decide(batch: BatchView, job: JobStatus | None, now: datetime) -> Decision:
    """The next step of a batch.

    Args:
        batch: the batch.
        job: the state of its newest job; None when there is none or ``needs_job_status`` does not ask for it.
        now: aware, UTC.
    """
    job = job or _NO_JOB
    match batch.status:
        case BatchStatus.VALIDATING:
            return Validate()
        case BatchStatus.IN_PROGRESS:
            return _decide_in_progress(batch, job, now)
        case BatchStatus.CANCELLING:
            return StopJob() if _is_to_stop(batch, job, now) else Assemble()
        case BatchStatus.FINALIZING:
            return Assemble()
        case _:
            return Wait()


def _is_to_stop(batch: BatchView, job: JobStatus, now: datetime) -> bool:
    return job.state in ALIVE and not batch.waited_long_enough_for_its_job(now)


def _decide_in_progress(batch: BatchView, job: JobStatus, now: datetime) -> Decision:
    if batch.giving_up is not None:
        return StopJob() if _is_to_stop(batch, job, now) else Fail(batch.giving_up)
    if now >= batch.expires_at:
        return StopJob() if _is_to_stop(batch, job, now) else Finalize(check_lines=False)
    if batch.launch_after is not None:
        return Launch() if now >= batch.launch_after else Wait()
    return _decide_by_job(batch, job)


def _decide_by_job(batch: BatchView, job: JobStatus) -> Decision:
    if job.state in ALIVE:
        # A batch that has results already had all that its jobs want: what is away now comes back.
        is_hopeless = job.is_stuck and not batch.has_results
        return _given_up(f"cannot run: {job.message}") if is_hopeless else Wait()
    match job.state:
        case JobState.SUCCEEDED:
            return Finalize(check_lines=True)
        case JobState.FAILED if job.is_final:
            return _given_up(f"failed, and would fail again: {job.message}")
        case JobState.FAILED:
            return AttemptFailed(job.message or "the job failed and left no message")
        case JobState.STOPPED:
            return AttemptFailed(job.message or "the job was stopped from outside")
        case _:
            return AttemptFailed("the launcher does not know the job any more; Ray was restarted or lost it")


def _given_up(what: str) -> GiveUp:
    message = f"The batch's job {what}. Once that is put right, create the batch again."
    return GiveUp(code=JOB_FAILED, message=message)


def after_failed_attempt(batch: BatchView, *, message: str, parts: int, now: datetime) -> NextAttempt | GiveUp:
    """What follows a failed job: another attempt after a while, or the end of the batch.

    Args:
        batch: the batch.
        message: the job's last words.
        parts: how many parts are committed now; more than at the last failure means that the jobs get on.
        now: aware, UTC.
    """
    failed = 1 if parts > batch.committed_parts else batch.failed_attempts + 1
    if failed >= MAX_FAILED_ATTEMPTS:
        return GiveUp(
            code=JOB_FAILED,
            message=f"The batch was given up after {failed} failed attempts in a row without progress "
            f"({batch.attempt} attempts in all). The last one said: {message}",
        )
    return NextAttempt(launch_after=now + backoff(failed), failed_attempts=failed, committed_parts=parts)


def after_refused_launch(batch: BatchView, *, message: str, now: datetime) -> GiveUp | None:
    """What follows a launch that was refused: the end of the batch, or None for the same again after a while.

    Args:
        batch: the batch.
        message: the launcher's words.
        now: aware, UTC.
    """
    if batch.launch_refused_at is None or now < batch.launch_refused_at + LAUNCH_REFUSED_LIMIT:
        return None
    minutes = LAUNCH_REFUSED_LIMIT // timedelta(minutes=1)
    return _given_up(f"was refused for {minutes} minutes: {message}")


def backoff(failures: int) -> timedelta:
    """How long to wait after ``failures`` failures in a row: 2 s, 4 s, 8 s, … at most 60 s."""
    return timedelta(seconds=min(MAX_BACKOFF_S, FIRST_BACKOFF_S * 2 ** min(failures - 1, 10)))
