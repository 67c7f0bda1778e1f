"""States of a batch and the next action for it. Pure: ``now`` is an argument. For jobs, see ``job_transitions``.

    validating → failed | in_progress → finalizing → completed
                             │              ├──────→ expired      (the deadline passed and lines are missing)
                             │              └──────→ failed       (parts are missing or damaged)
                             └→ failed                            (the batch was given up)
    validating | in_progress | finalizing → cancelling → cancelled

A batch that is still validating at its deadline is validated first, because its owner needs to know of invalid lines
more than of the deadline. A batch whose lines were done before its deadline, or that is being cancelled, does not
expire.

Jobs lease the segments of a batch that is in progress and not paused. It goes to ``finalizing`` when all rows of all
segments are committed, or at its deadline. From then on no commit counts, so nothing waits for a job.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime
from enum import Enum, StrEnum, auto
from typing import Final


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


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchView:
    """The facts that decide a batch's next action.

    Attributes:
        status: its state.
        expires_at: its deadline.
        finalizing_at: when it went to ``finalizing``.
        segments_left: its segments with rows that are not committed; None before it has a plan.
        giving_up_at: when it was given up; None if it was not.
        giving_up_code: the error code of the reason that was recorded then.
        giving_up_message: the message of that reason.
    """

    status: BatchStatus
    expires_at: datetime
    finalizing_at: datetime | None = None
    segments_left: int | None = None
    giving_up_at: datetime | None = None
    giving_up_code: str | None = None
    giving_up_message: str | None = None

    @property
    def missed_deadline(self) -> bool:
        """True if it went to ``finalizing`` because its deadline passed."""
        return self.finalizing_at is not None and self.finalizing_at >= self.expires_at


class Action(Enum):
    """Next action for a batch.

    Attributes:
        VALIDATE: read the input file, and write its plan.
        WAIT: do nothing now.
        PLAN_AGAIN: it was accepted by an earlier version; stop its job and plan the lines that are left.
        FINALIZE: go to ``finalizing``.
        ASSEMBLE: write the output and error file from the parts, and end the batch.
        DELETE_PARTS: delete the plan and the parts; the work on the batch is over.
    """

    VALIDATE = auto()
    WAIT = auto()
    PLAN_AGAIN = auto()
    FINALIZE = auto()
    ASSEMBLE = auto()
    DELETE_PARTS = auto()


def decide(batch: BatchView, now: datetime) -> Action:
    """Return the next action for a batch.

    Args:
        batch: the batch.
        now: aware, UTC.
    """
    match batch.status:
        case BatchStatus.VALIDATING:
            return Action.VALIDATE
        case BatchStatus.IN_PROGRESS if batch.giving_up_at is not None:
            return Action.ASSEMBLE
        case BatchStatus.IN_PROGRESS if now >= batch.expires_at or batch.segments_left == 0:
            return Action.FINALIZE
        case BatchStatus.IN_PROGRESS if batch.segments_left is None:
            return Action.PLAN_AGAIN
        case BatchStatus.IN_PROGRESS:
            return Action.WAIT
        case BatchStatus.CANCELLING | BatchStatus.FINALIZING:
            return Action.ASSEMBLE
        case _:
            return Action.DELETE_PARTS
