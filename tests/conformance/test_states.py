"""States of a batch, and their times."""

from typing import Any

import pytest

from tests.conformance.prepared import Prepared

pytestmark = [pytest.mark.point("S1")]
late = pytest.mark.late

STEPS = ("validating", "in_progress", "finalizing", "completed")


@late
def test_a_batch_with_failed_rows_completes(main: dict[str, Any]) -> None:
    assert main["status"] == "completed"


@late
@pytest.mark.usefixtures("main")
def test_states_follow_the_order_of_the_contract(prepared: Prepared) -> None:
    seen = prepared.batch("main").statuses
    assert seen == [status for status in STEPS if status in seen]


@late
@pytest.mark.parametrize(
    ("before", "after"),
    [("created_at", "in_progress_at"), ("in_progress_at", "finalizing_at"), ("finalizing_at", "completed_at"),
     ("completed_at", "expires_at")],
    ids=["created, in_progress", "in_progress, finalizing", "finalizing, completed", "completed, expires"],
)  # fmt: skip
def test_times_are_ordered_whole_seconds(main: dict[str, Any], before: str, after: str) -> None:
    assert (type(main[before]), type(main[after])) == (int, int)
    assert main[before] <= main[after]


@late
@pytest.mark.parametrize("field", ["failed_at", "expired_at", "cancelling_at", "cancelled_at", "errors"])
def test_a_completed_batch_has_no(main: dict[str, Any], field: str) -> None:
    assert main.get(field) is None


@late
@pytest.mark.parametrize("field", ["output_file_id", "error_file_id"])
def test_a_completed_batch_has(main: dict[str, Any], field: str) -> None:
    assert main[field][:5] == "file-"


@late
@pytest.mark.point("B2")
def test_a_batch_names_its_model(main: dict[str, Any], prepared: Prepared) -> None:
    assert main["model"] == prepared.target.model


@late
@pytest.mark.point("S2")
@pytest.mark.parametrize(
    ("field", "expected"), [("status", "completed"), ("output_file_id", None)], ids=["status", "no output file"]
)
def test_a_batch_completes_if_all_rows_fail(all_refused: dict[str, Any], field: str, expected: str) -> None:
    assert all_refused.get(field) == expected


@late
@pytest.mark.point("S2")
def test_a_batch_has_an_error_file_if_all_rows_fail(all_refused: dict[str, Any]) -> None:
    assert all_refused["error_file_id"][:5] == "file-"


@pytest.mark.point("S3")
def test_a_batch_with_a_bad_line_fails(prepared: Prepared) -> None:
    assert prepared.batch("cut off").ended()["status"] == "failed"


@pytest.mark.point("S3")
def test_failed_at_is_between_creation_and_expiry(failed: dict[str, Any]) -> None:
    assert failed["created_at"] <= failed["failed_at"] <= failed["expires_at"]


@pytest.mark.point("S3")
@pytest.mark.parametrize(
    "field",
    ["output_file_id", "error_file_id", "in_progress_at", "finalizing_at", "completed_at", "expired_at",
     "cancelling_at", "cancelled_at"],
)  # fmt: skip
def test_a_batch_that_failed_at_validation_has_no(failed: dict[str, Any], field: str) -> None:
    assert failed.get(field) is None


@pytest.mark.point("S4")
def test_a_missing_input_file_fails_the_batch_and_not_its_creation(prepared: Prepared) -> None:
    assert prepared.created["no file"]["status"] == "validating"
    assert prepared.batch("no file").ended()["status"] == "failed"


@pytest.mark.point("S4")
def test_a_missing_input_file_is_reported_as_an_error(prepared: Prepared) -> None:
    errors = prepared.batch("no file").ended()["errors"]["data"]
    assert [(error["code"], error["param"], error.get("line")) for error in errors] == [
        ("invalid_request", "file_id", None)
    ]


@pytest.mark.point("S5")
def test_a_cancelled_batch_ends_as_cancelled(prepared: Prepared) -> None:
    assert prepared.batch("cancelled at once").ended()["status"] == "cancelled"


@pytest.mark.point("S5")
def test_cancelled_at_follows_cancelling_at(cancelled: dict[str, Any]) -> None:
    assert cancelled["created_at"] <= cancelled["cancelling_at"] <= cancelled["cancelled_at"]


@pytest.mark.point("S5")
@pytest.mark.parametrize("field", ["completed_at", "failed_at", "expired_at", "errors"])
def test_a_cancelled_batch_has_no(cancelled: dict[str, Any], field: str) -> None:
    assert cancelled.get(field) is None
