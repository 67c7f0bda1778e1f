"""States of a batch and the next action for it. Pure: ``now`` and the job's state are arguments.

    validating → failed | in_progress → finalizing → completed
                             │              ├──────→ expired      (the deadline passed and lines are missing)
                             │              └──────→ failed       (parts are missing or damaged)
                             └→ failed                            (the batch was given up)
    validating | in_progress | finalizing → cancelling → cancelled

A batch that is still validating at its deadline is validated first, because its owner needs to know of invalid lines
more than of the deadline. A batch whose lines were done before its deadline, or that is being cancelled, does not
expire.

An attempt of a batch is one job. It is recorded before its job is launched: ``launch_after`` is set until the launcher
accepts the job. If the reconciler dies in between, it launches the same job id again, which has no effect. A job that
the launcher no longer knows counts as failed: Ray may have been restarted, but a Ray that dies each time must not keep
a batch forever.

A batch goes to ``finalizing`` when its job has reported a result for each line and the parts confirm it. The job may
then still be ending: it keeps its slot, and the parts stay until its end was observed. If a line is missing although
it was reported, the batch waits for its job's end. A job whose end leaves lines without a result counts as failed.

The job of a paused batch is stopped, and its next attempt waits until the batch is resumed. That the job ended is no
failure. A batch whose lines are all reported goes on in spite of a pause.

A batch is given up in two steps: first the reason is recorded, then, once its job has stopped, the batch fails. The
reason survives a crash in between, and what the job commits before it stops is delivered.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime, timedelta
from enum import Enum, StrEnum, auto
from typing import Final

from service.ports import JobState, JobStatus


class BatchStatus(StrEnum):
    """State of a batch, by OpenAI's names."""

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
# The pause after the first failure; it doubles with each further failure in a row.
FIRST_BACKOFF_S: Final = 2
JOB_FAILED: Final = "job_failed"
# How long a refused launch is retried: a change of the stack may fix it in the meantime.
LAUNCH_REFUSED_LIMIT: Final = timedelta(minutes=30)
# How long an ending batch waits for its job to stop. What a job writes later is left out of the results, and deleted
# once the job has stopped. The job also receives the order to stop with its next progress report.
STOP_GRACE: Final = timedelta(minutes=5)
# How long a job has to end by itself once its batch has ended; it has nothing left to do, but holds its GPUs.
EXIT_LIMIT: Final = timedelta(minutes=1)
# States of a job that may still write parts.
ALIVE: Final = frozenset({JobState.PENDING, JobState.RUNNING})


@dataclass(frozen=True, slots=True)
class GiveUp:
    """Record why the batch will fail, in words that its owner can act on; its job is stopped after that."""

    code: str
    message: str


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchView:
    """The facts that decide a batch's next action.

    Attributes:
        status: its state.
        expires_at: its deadline.
        cancelling_at: when its owner cancelled it.
        finalizing_at: when it went to ``finalizing``.
        attempt: the number of its newest job; 0 before the first.
        launch_after: when the newest job is due to be launched; None once the launcher accepted it.
        failed_attempts: failed jobs in a row without a new part between them.
        committed_parts: how many parts were committed when the last of them failed.
        has_results: whether any of its lines has a result.
        launch_refused_at: when the launch of the newest job was first refused; None if it was not.
        all_reported: whether its newest job has reported a result for each line, and no check disproved it.
        job_ending_since: when it went to ``finalizing`` while its job was still ending; None once the job has ended.
        is_paused: whether its owner paused it.
        was_paused: whether a pause ended its newest job.
        giving_up_at: when it was given up; None if it was not.
        giving_up_code: the error code of the reason that was recorded then.
        giving_up_message: the message of that reason.
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
    all_reported: bool = False
    job_ending_since: datetime | None = None
    is_paused: bool = False
    was_paused: bool = False
    giving_up_at: datetime | None = None
    giving_up_code: str | None = None
    giving_up_message: str | None = None

    @property
    def missed_deadline(self) -> bool:
        """Whether it went to ``finalizing`` because its deadline passed."""
        return self.finalizing_at is not None and self.finalizing_at >= self.expires_at

    def stop_grace_is_over(self, now: datetime) -> bool:
        """Return whether it has waited long enough for its job to stop and goes on regardless of the job."""
        match self.status:
            case BatchStatus.IN_PROGRESS:
                return now >= (self.giving_up_at or self.expires_at) + STOP_GRACE
            case BatchStatus.CANCELLING:
                return self.cancelling_at is not None and now >= self.cancelling_at + STOP_GRACE
            case _:
                return self.job_ending_since is not None and now >= self.job_ending_since + STOP_GRACE


class Action(Enum):
    """Next action for a batch.

    Attributes:
        VALIDATE: read the input file.
        WAIT: do nothing now.
        LAUNCH: launch the job of the newest attempt.
        STOP_JOB: ask the job to stop; the next action waits until it has.
        CHECK_LINES: go to ``finalizing`` if each line has a result. Otherwise wait for the job's end, or, if it has
            ended, the attempt has failed.
        FINALIZE: go to ``finalizing``.
        ASSEMBLE: write the output and error file from the parts, and end the batch.
        DELETE_PARTS: delete the parts; the work on the batch is over.
    """

    VALIDATE = auto()
    WAIT = auto()
    LAUNCH = auto()
    STOP_JOB = auto()
    CHECK_LINES = auto()
    FINALIZE = auto()
    ASSEMBLE = auto()
    DELETE_PARTS = auto()


@dataclass(frozen=True, slots=True)
class AttemptFailed:
    """The job ended without success, for the reason in ``message``."""

    message: str


@dataclass(frozen=True, slots=True)
class NextAttempt:
    """Record a new attempt, due at ``launch_after``."""

    launch_after: datetime
    failed_attempts: int
    committed_parts: int


Decision = Action | AttemptFailed | GiveUp


def needs_job_status(batch: BatchView, now: datetime) -> bool:
    """Return whether ``decide`` needs the state of the batch's job."""
    if batch.attempt == 0:
        return False
    match batch.status:
        case BatchStatus.IN_PROGRESS:
            # Before its deadline, a due launch happens in any case, because launching twice has no effect.
            is_decided = batch.launch_after is not None or batch.all_reported
            return not is_decided or batch.giving_up_at is not None or now >= batch.expires_at
        case BatchStatus.FINALIZING:
            return batch.job_ending_since is not None
        case status:
            return status is not BatchStatus.VALIDATING


def decide(batch: BatchView, job: JobStatus | None, now: datetime) -> Decision:
    """Return the next action for a batch.

    Args:
        batch: the batch.
        job: the state of its newest job; None if it has no job or ``needs_job_status`` is False.
        now: aware, UTC.
    """
    job = job or JobStatus(state=JobState.MISSING)
    must_stop = job.state in ALIVE and not batch.stop_grace_is_over(now)
    match batch.status:
        case BatchStatus.VALIDATING:
            return Action.VALIDATE
        case BatchStatus.IN_PROGRESS if batch.giving_up_at is not None:
            return Action.STOP_JOB if must_stop else Action.ASSEMBLE
        case BatchStatus.IN_PROGRESS if now >= batch.expires_at:
            return Action.STOP_JOB if must_stop else Action.FINALIZE
        case BatchStatus.IN_PROGRESS if batch.launch_after is not None:
            return Action.LAUNCH if now >= batch.launch_after and not batch.is_paused else Action.WAIT
        case BatchStatus.IN_PROGRESS if batch.all_reported:
            return Action.CHECK_LINES
        case BatchStatus.IN_PROGRESS:
            return _decide_by_job(batch, job)
        case BatchStatus.CANCELLING:
            return Action.STOP_JOB if must_stop else Action.ASSEMBLE
        case BatchStatus.FINALIZING:
            return Action.ASSEMBLE
        case _ if job.state not in ALIVE:
            return Action.DELETE_PARTS
        case _:
            may_end_itself = batch.job_ending_since is not None and now < batch.job_ending_since + EXIT_LIMIT
            return Action.WAIT if may_end_itself else Action.STOP_JOB


def _decide_by_job(batch: BatchView, job: JobStatus) -> Decision:
    """Return the next action for a batch whose job was launched."""
    match job.state:
        case JobState.PENDING | JobState.RUNNING if batch.is_paused:
            return Action.STOP_JOB
        # If the batch has results, its jobs once had everything they need: what is missing now comes back.
        case JobState.PENDING | JobState.RUNNING if job.is_stuck and not batch.has_results:
            return _give_up_job(f"cannot run: {job.message}")
        case JobState.PENDING | JobState.RUNNING:
            return Action.WAIT
        case JobState.SUCCEEDED:
            return Action.CHECK_LINES
        case _ if batch.was_paused:
            return AttemptFailed("the batch was paused" if batch.is_paused else job.message or "the batch was paused")
        case JobState.FAILED if job.is_final:
            return _give_up_job(f"failed, and a retry would fail too: {job.message}")
        case JobState.FAILED:
            return AttemptFailed(job.message or "the job failed and left no message")
        case JobState.STOPPED:
            return AttemptFailed(job.message or "the job was stopped by something other than cloister")
        case _:
            return AttemptFailed("the launcher no longer knows the job; Ray was restarted or lost it")


def _give_up_job(problem: str) -> GiveUp:
    return GiveUp(code=JOB_FAILED, message=f"The batch's job {problem}. Fix the cause, then create the batch again.")


def after_failed_attempt(batch: BatchView, *, message: str, parts: int, now: datetime) -> NextAttempt | GiveUp:
    """Return what follows a failed job: another attempt after a pause, or the end of the batch.

    Args:
        batch: the batch.
        message: why the job failed.
        parts: how many parts are committed now. More than at the last failure means that the jobs make progress.
        now: aware, UTC.
    """
    if batch.was_paused:
        return NextAttempt(
            launch_after=now, failed_attempts=batch.failed_attempts, committed_parts=batch.committed_parts
        )
    failed = 1 if parts > batch.committed_parts else batch.failed_attempts + 1
    if failed >= MAX_FAILED_ATTEMPTS:
        return GiveUp(
            code=JOB_FAILED,
            message=f"The batch was given up after {failed} failed attempts in a row without progress "
            f"({batch.attempt} attempts in total). Error of the last attempt: {message}",
        )
    launch_after = now + timedelta(seconds=FIRST_BACKOFF_S * 2 ** (failed - 1))
    return NextAttempt(launch_after=launch_after, failed_attempts=failed, committed_parts=parts)


def after_refused_launch(batch: BatchView, *, message: str, now: datetime) -> GiveUp | None:
    """Return why to give up after a refused launch, or None to retry the launch after a pause.

    Args:
        batch: the batch.
        message: the launcher's error.
        now: aware, UTC.
    """
    if batch.launch_refused_at is None or now < batch.launch_refused_at + LAUNCH_REFUSED_LIMIT:
        return None
    minutes = LAUNCH_REFUSED_LIMIT // timedelta(minutes=1)
    return _give_up_job(f"was refused for {minutes} minutes: {message}")
