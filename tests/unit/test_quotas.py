"""Quota decisions."""

import dataclasses

import pytest

from service.errors import QuotaError, RateLimitError
from service.quotas import Limits, Use, batch_refusal, estimated_tokens, upload_refusal

USE = Use(batches=2, requests=100, tokens=5_000)


@pytest.mark.parametrize(
    ("limits", "refused"),
    [
        (Limits(), None),
        (Limits(max_batches_in_progress=3), None),
        (Limits(max_batches_in_progress=2), RateLimitError),
        (Limits(max_batches_in_progress=0), QuotaError),
        (Limits(max_enqueued_requests=110), None),
        (Limits(max_enqueued_requests=109), RateLimitError),
        (Limits(max_enqueued_requests=10), RateLimitError),
        (Limits(max_enqueued_requests=9), QuotaError),
        (Limits(max_enqueued_tokens=5_400), None),
        (Limits(max_enqueued_tokens=5_399), RateLimitError),
        (Limits(max_enqueued_tokens=399), QuotaError),
        (Limits(max_stored_bytes=0), None),
    ],
)
def test_batch_must_fit_beside_the_open_ones(limits: Limits, refused: type[Exception] | None) -> None:
    refusal = batch_refusal(limits, USE, requests=10, tokens=400)
    assert (type(refusal) if refusal else None) is refused


def test_refusal_names_limit_use_and_remedy() -> None:
    limits = Limits(max_enqueued_tokens=5_100)
    refusal = batch_refusal(limits, dataclasses.replace(USE, soonest_end_s=42.3), requests=10, tokens=400)
    assert refusal is not None
    for part in ("enqueued tokens", "Limit: 5,100", "in use: 5,000", "asked for: 400", "try again", "projects set"):
        assert part in refusal.message
    assert (refusal.code, refusal.headers["retry-after"]) == ("token_limit_exceeded", "43")


def test_batch_that_can_never_fit_must_not_be_retried() -> None:
    refusal = batch_refusal(Limits(max_enqueued_requests=9), Use(), requests=10, tokens=1)
    assert refusal is not None
    assert (refusal.code, refusal.headers["x-should-retry"]) == ("insufficient_quota", "false")
    assert "split its input file" in refusal.message


def test_refusal_of_every_batch_does_not_suggest_splitting() -> None:
    refusal = batch_refusal(Limits(max_batches_in_progress=0), Use(), requests=10, tokens=1)
    assert refusal is not None
    assert "split" not in refusal.message


@pytest.mark.parametrize(("soonest_end_s", "wait_s"), [(None, 30), (0.0, 5), (42.3, 43), (9_999.0, 300)])
def test_wait_lasts_until_the_first_batch_ends_within_bounds(soonest_end_s: float | None, wait_s: int) -> None:
    use = Use(batches=1, soonest_end_s=soonest_end_s)
    refusal = batch_refusal(Limits(max_batches_in_progress=1), use, requests=1, tokens=1)
    assert refusal is not None
    assert refusal.headers["retry-after"] == str(wait_s)


def test_file_must_fit_beside_the_stored_ones() -> None:
    limits = Limits(max_stored_bytes=100)
    assert upload_refusal(limits, 60, 40) is None
    assert upload_refusal(Limits(), 60, 40) is None
    refusal = upload_refusal(limits, 60, 41)
    assert refusal is not None
    assert refusal.code == "insufficient_quota"


@pytest.mark.parametrize(("size_bytes", "tokens"), [(0, 0), (1, 1), (4, 1), (5, 2)])
def test_tokens_are_estimated_from_bytes(size_bytes: int, tokens: int) -> None:
    assert estimated_tokens(size_bytes) == tokens
