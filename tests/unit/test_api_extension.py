"""The pure computations behind ``x_cloister``."""

from dataclasses import fields
from datetime import UTC, datetime, timedelta
from decimal import Decimal
from typing import Any

import pytest

from service.api.extension import Extension, rate_and_eta
from service.db.rows import RetrievedBatchRow

NOW = datetime(2026, 1, 2, 12, 0, tzinfo=UTC)


def row(**changes: Any) -> RetrievedBatchRow:
    """A batch that runs at 10 rows/s with 9,000 of 10,000 left and 22 of 24 hours to go."""
    columns: dict[str, Any] = dict.fromkeys(field.name for field in fields(RetrievedBatchRow))
    columns |= {
        "status": "in_progress", "total": 10_000, "completed": 900, "failed": 100,
        "rows_per_s": 10.0, "progress_at": NOW - timedelta(seconds=5),
        "created_at": NOW - timedelta(hours=2), "expires_at": NOW + timedelta(hours=22),
        "gpu_seconds": 30.04, "cost": Decimal("1.25"), "currency": "USD", "output_tokens": 30,
        "is_queued": False, "input_tokens": 50, "cached_tokens": 20, "enqueued_tokens": 7,
        "priority": 5, "paused_at": NOW,
        "job_id": "job-1", "failed_jobs": 1,
        "last_job_message": "the node went away", "now": NOW,
    }  # fmt: skip
    return RetrievedBatchRow(**columns | changes)


def test_extension_of_a_running_batch_has_every_field() -> None:
    assert Extension.from_row(row(), queue_position=3).model_dump() == {
        "priority": 5, "paused_at": int(NOW.timestamp()),
        "queue_position": 3, "rate_rows_per_second": 10.0, "eta_seconds": 900,
        "estimated_completion_at": int(NOW.timestamp()) + 900, "deadline_risk": "low", "gpu_seconds": 30.0,
        "cost": {"value": 1.25, "currency": "usd"},
        "input_tokens": 50, "cached_tokens": 20, "output_tokens": 30, "enqueued_tokens": 7,
        "job_id": "job-1", "failed_jobs": 1,
        "last_job_message": "the node went away", "estimate": None,
    }  # fmt: skip


@pytest.mark.parametrize(
    ("changes", "rate"),
    [
        ({}, 10.0),
        ({"progress_at": NOW - timedelta(seconds=60)}, 10.0),
        ({"progress_at": NOW - timedelta(seconds=61)}, None),
        ({"progress_at": None}, None),
        ({"rows_per_s": None}, None),
        ({"status": "finalizing"}, None),
        ({"status": "completed"}, None),
    ],
)
def test_rate_is_reported_only_while_fresh(changes: dict[str, Any], rate: float | None) -> None:
    assert rate_and_eta(row(**changes), NOW)[0] == rate


@pytest.mark.parametrize(
    ("changes", "expected_s"),
    [({}, 900.0), ({"completed": 9_900}, 0.0), ({"rows_per_s": 0.0}, None), ({"rows_per_s": None}, None)],
)
def test_eta_is_the_remaining_rows_at_the_rate(changes: dict[str, Any], expected_s: float | None) -> None:
    assert rate_and_eta(row(**changes), NOW)[1] == expected_s


@pytest.mark.parametrize(
    ("status", "rate", "hours_left", "risk"),
    [
        ("in_progress", 10.0, 0.51, "low"),  # the ETA is 15 minutes
        ("in_progress", 10.0, 0.49, "medium"),
        ("in_progress", 10.0, 0.25, "medium"),
        ("in_progress", 10.0, 0.24, "high"),
        ("in_progress", 10.0, -1.0, "high"),
        ("in_progress", None, 12.1, "low"),
        ("in_progress", None, 12.0, "medium"),
        ("in_progress", None, 2.5, "medium"),
        ("in_progress", None, 2.4, "high"),
        ("in_progress", 0.0, 20.0, "low"),
        ("validating", None, 24.0, "low"),
        ("validating", None, 1.0, "high"),
        ("finalizing", None, 1.0, None),
        ("cancelling", None, 1.0, None),
        ("completed", None, 1.0, None),
        ("failed", None, 1.0, None),
        ("expired", None, -1.0, None),
        ("cancelled", None, 1.0, None),
    ],
)
def test_deadline_risk_follows_eta_or_remaining_time(
    status: str, rate: float | None, hours_left: float, risk: str | None
) -> None:
    expires_at = NOW + timedelta(hours=hours_left)
    batch = row(status=status, rows_per_s=rate, expires_at=expires_at, created_at=expires_at - timedelta(hours=24))
    assert Extension.from_row(batch, queue_position=None).deadline_risk == risk
