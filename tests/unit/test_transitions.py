import dataclasses
from datetime import UTC, datetime, timedelta
from itertools import product

import pytest

from service.transitions import ALLOWED, FINAL, Action, BatchStatus, BatchView, decide

NOW = datetime(2026, 1, 2, 12, tzinfo=UTC)
LATER = NOW + timedelta(hours=1)
EARLIER = NOW - timedelta(hours=1)

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


# status, deadline, segments that are left, next action
DECISIONS: list[tuple[str, datetime, int | None, Action]] = [
    ("validating", LATER, None, Action.VALIDATE),
    ("validating", EARLIER, None, Action.VALIDATE),
    ("in_progress", LATER, 3, Action.WAIT),
    ("in_progress", LATER, 0, Action.FINALIZE),
    ("in_progress", LATER, None, Action.PLAN_AGAIN),
    ("in_progress", NOW, 3, Action.FINALIZE),
    ("in_progress", EARLIER, 3, Action.FINALIZE),
    ("in_progress", EARLIER, 0, Action.FINALIZE),
    ("in_progress", EARLIER, None, Action.FINALIZE),
    ("cancelling", LATER, None, Action.ASSEMBLE),
    ("cancelling", EARLIER, 3, Action.ASSEMBLE),
    ("finalizing", LATER, 0, Action.ASSEMBLE),
    ("finalizing", EARLIER, 3, Action.ASSEMBLE),
    *((status.value, LATER, 0, Action.DELETE_PARTS) for status in sorted(FINAL)),
]


@pytest.mark.parametrize(("status", "expires_at", "segments_left", "expected"), DECISIONS)
def test_next_action(status: str, expires_at: datetime, segments_left: int | None, expected: Action) -> None:
    view = BatchView(status=BatchStatus(status), expires_at=expires_at, segments_left=segments_left)
    assert decide(view, NOW) == expected


@pytest.mark.parametrize("segments_left", [None, 0, 3])
def test_a_batch_that_was_given_up_ends(segments_left: int | None) -> None:
    view = BatchView(
        status=BatchStatus.IN_PROGRESS, expires_at=LATER, segments_left=segments_left, giving_up_at=EARLIER
    )
    assert decide(view, NOW) == Action.ASSEMBLE


def test_every_state_that_is_not_final_leads_to_another() -> None:
    # With any facts, a batch reaches a final state, or waits for its jobs until the deadline at the latest.
    after = {
        Action.VALIDATE: BatchStatus.IN_PROGRESS,
        Action.FINALIZE: BatchStatus.FINALIZING,
    }
    for status, segments_left in product(BatchStatus, (None, 0, 3)):
        view = BatchView(status=status, expires_at=NOW, segments_left=segments_left)
        for _ in range(4):
            action = decide(view, NOW)
            assert action not in {Action.WAIT, Action.PLAN_AGAIN}
            if action is Action.DELETE_PARTS:
                break
            ending = BatchStatus.CANCELLED if view.status is BatchStatus.CANCELLING else BatchStatus.COMPLETED
            following = after.get(action, ending)
            assert following in ALLOWED[view.status]
            view = dataclasses.replace(view, status=following)
        assert view.status in FINAL


@pytest.mark.parametrize(("finalizing_at", "missed"), [(None, False), (EARLIER, False), (NOW, True), (LATER, True)])
def test_deadline_is_missed_by_the_time_of_finalizing(finalizing_at: datetime | None, missed: bool) -> None:
    view = BatchView(status=BatchStatus.FINALIZING, expires_at=NOW, finalizing_at=finalizing_at)
    assert view.missed_deadline == missed
