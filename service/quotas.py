"""Quotas: decide whether a project's limits leave room for another batch or file. Pure: current use is an argument."""

import math
from dataclasses import dataclass
from typing import Final

from service.errors import ApiError, QuotaError, RateLimitError

_BYTES_PER_TOKEN: Final = 4
_MIN_RETRY_AFTER_S: Final = 5
_MAX_RETRY_AFTER_S: Final = 300
# Used until a batch of the project has reported its rate.
_DEFAULT_RETRY_AFTER_S: Final = 30
_RAISE: Final = "an operator can raise the limit with `cloister projects set`"


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """The most that a project may have at a time. None means no limit."""

    max_batches_in_progress: int | None = None
    max_enqueued_requests: int | None = None
    max_enqueued_tokens: int | None = None
    max_stored_bytes: int | None = None

    @property
    def limits_batches(self) -> bool:
        """True if a limit applies to batches."""
        return (self.max_batches_in_progress, self.max_enqueued_requests, self.max_enqueued_tokens) != (None,) * 3


@dataclass(frozen=True, slots=True, kw_only=True)
class Use:
    """Current use of a project: its open batches and its files.

    ``soonest_end_s`` is the time until the first of its batches ends at its current rate; None if none runs.
    """

    batches: int = 0
    requests: int = 0
    tokens: int = 0
    stored_bytes: int = 0
    soonest_end_s: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class ProjectSettings(Limits):
    """Limits and retention of a project as stored. ``stored_bytes`` is None if nothing limits it."""

    retention_s: int | None = None
    stored_bytes: int | None = None


def estimated_tokens(size_bytes: int) -> int:
    """Estimate the tokens of an input: one for each four bytes."""
    return math.ceil(size_bytes / _BYTES_PER_TOKEN)


def batch_refusal(limits: Limits, use: Use, *, requests: int, tokens: int) -> ApiError | None:
    """Return the reason why a project cannot create another batch now, or None if it can.

    Args:
        limits: the project's limits.
        use: the use of its open batches, without the new one.
        requests: requests of the new batch.
        tokens: estimated tokens of the new batch.
    """
    for name, code, limit, used, asked in (
        ("batches in progress", "rate_limit_exceeded", limits.max_batches_in_progress, use.batches, 1),
        ("enqueued requests", "rate_limit_exceeded", limits.max_enqueued_requests, use.requests, requests),
        ("enqueued tokens", "token_limit_exceeded", limits.max_enqueued_tokens, use.tokens, tokens),
    ):
        if limit is None or used + asked <= limit:
            continue
        if asked > limit:
            advice = f"split its input file, or {_RAISE}" if asked > 1 else _RAISE
            return QuotaError(
                f"The project's limit of {name} is {limit:,}. This batch alone asks for {asked:,} and can never start: "
                f"{advice}.",
                code="insufficient_quota",
            )
        wait_s = _DEFAULT_RETRY_AFTER_S if use.soonest_end_s is None else math.ceil(use.soonest_end_s)
        wait_s = max(_MIN_RETRY_AFTER_S, min(wait_s, _MAX_RETRY_AFTER_S))
        return RateLimitError(
            f"The limit of {name} is reached. Limit: {limit:,}, in use: {used:,}, asked for: {asked:,}. Please try "
            f"again after some of the project's batches have ended, or cancel one; {_RAISE}.",
            code=code,
            headers={"retry-after": str(wait_s)},
        )
    return None


def upload_refusal(limits: Limits, stored_bytes: int, size_bytes: int) -> QuotaError | None:
    """Return why a project with ``stored_bytes`` cannot store another ``size_bytes``, or None if it can."""
    limit = limits.max_stored_bytes
    if limit is None or stored_bytes + size_bytes <= limit:
        return None
    return QuotaError(
        f"The limit of stored bytes is reached. Limit: {limit:,}, in use: {stored_bytes:,}, this file: "
        f"{size_bytes:,}. Delete files that are no longer needed, or {_RAISE}.",
        param="file",
        code="insufficient_quota",
    )
