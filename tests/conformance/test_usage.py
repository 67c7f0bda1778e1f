"""Request counts and usage."""

from typing import Any

import pytest

from tests.conformance.workload import Workload

pytestmark = pytest.mark.point("N2")
late = pytest.mark.late

Lines = list[dict[str, Any]]


@late
@pytest.mark.point("N1")
def test_requests_are_counted_by_outcome(main: dict[str, Any], workload: Workload) -> None:
    answered, refused = len(workload.answered), len(workload.refused)
    assert main["request_counts"] == {"total": answered + refused, "completed": answered, "failed": refused}


@late
@pytest.mark.point("N1")
def test_failed_requests_are_counted_as_failed(all_refused: dict[str, Any]) -> None:
    assert all_refused["request_counts"] == {"total": 2, "completed": 0, "failed": 2}


@pytest.mark.point("N1")
def test_requests_that_never_ran_are_not_counted_as_failed(cancelled: dict[str, Any]) -> None:
    counts = cancelled.get("request_counts") or {"failed": 0}
    assert counts["failed"] == 0


@late
@pytest.mark.parametrize("field", ["input_tokens", "output_tokens", "total_tokens"])
def test_usage_has_a_positive(main: dict[str, Any], field: str) -> None:
    assert type(main["usage"][field]) is int
    assert main["usage"][field] > 0


@late
@pytest.mark.parametrize(
    ("details", "field"),
    [("input_tokens_details", "cached_tokens"), ("output_tokens_details", "reasoning_tokens")],
    ids=["cached_tokens", "reasoning_tokens"],
)
def test_usage_has_the_detail(main: dict[str, Any], details: str, field: str) -> None:
    assert type(main["usage"][details][field]) is int
    assert main["usage"][details][field] >= 0


@late
def test_total_tokens_are_the_sum_of_input_and_output(main: dict[str, Any]) -> None:
    usage = main["usage"]
    assert usage["total_tokens"] == usage["input_tokens"] + usage["output_tokens"]


@late
@pytest.mark.parametrize(
    ("whole", "of_a_row"),
    [("input_tokens", "prompt_tokens"), ("output_tokens", "completion_tokens")],
    ids=["input", "output"],
)
def test_tokens_are_the_sum_of_all_rows(main: dict[str, Any], output: Lines, whole: str, of_a_row: str) -> None:
    assert main["usage"][whole] == sum(row["response"]["body"]["usage"][of_a_row] for row in output)


def test_a_batch_that_failed_at_validation_has_no_usage(failed: dict[str, Any]) -> None:
    assert (failed.get("usage") or {"total_tokens": 0})["total_tokens"] == 0
