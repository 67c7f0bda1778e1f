"""Decides whether a project's limits leave room for one more batch or file. Pure: what is used is handed in."""

import dataclasses
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

from service.errors import ApiError, QuotaError, RateLimitError

_BYTES_PER_TOKEN: Final = 4
_MIN_RETRY_AFTER_S: Final = 5
_MAX_RETRY_AFTER_S: Final = 300
# When no batch of the project has told yet how fast it is.
_USUAL_RETRY_AFTER_S: Final = 30
_RAISE: Final = "an operator can raise the limit with `cloister projects set`"


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """How much a project may have at a time; None is no limit."""

    max_batches_in_progress: int | None = None
    max_enqueued_requests: int | None = None
    max_enqueued_tokens: int | None = None
    max_stored_bytes: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Use:
    """What a project has of it now: its batches that have not ended, and its files."""

    batches: int = 0
    requests: int = 0
    tokens: int = 0
    stored_bytes: int = 0


def limits_of(row: Mapping[str, Any]) -> Limits:
    """The limits in a row of ``projects``."""
    return Limits(**{field.name: row[field.name] for field in dataclasses.fields(Limits)})


def estimated_tokens(size_bytes: int) -> int:
    """The tokens that an input of this size is taken for: one for each four bytes."""
    return math.ceil(size_bytes / _BYTES_PER_TOKEN)


def retry_after_s(soonest_end_s: float | None) -> int:
    """How long to wait for room, from 5 to 300 s.

    Args:
        soonest_end_s: in how many seconds the first batch of the project will end at its present rate, None when no
            batch runs.
    """
    wait_s = _USUAL_RETRY_AFTER_S if soonest_end_s is None else math.ceil(soonest_end_s)
    return max(_MIN_RETRY_AFTER_S, min(wait_s, _MAX_RETRY_AFTER_S))


def batch_refusal(
    limits: Limits, use: Use, *, requests: int, tokens: int, soonest_end_s: float | None
) -> ApiError | None:
    """Why a project cannot have another batch of so many requests and tokens now, or None if it can.

    Args:
        limits: the project's limits.
        use: what its open batches use of them, without the new one.
        requests: of the new batch.
        tokens: of the new batch, estimated.
        soonest_end_s: see ``retry_after_s``.
    """
    for what, code, limit, used, asked in (
        ("batches in progress", "rate_limit_exceeded", limits.max_batches_in_progress, use.batches, 1),
        ("enqueued requests", "rate_limit_exceeded", limits.max_enqueued_requests, use.requests, requests),
        ("enqueued tokens", "token_limit_exceeded", limits.max_enqueued_tokens, use.tokens, tokens),
    ):
        if limit is None or used + asked <= limit:
            continue
        if asked > limit:
            advice = f"split its input file, or {_RAISE}" if asked > 1 else _RAISE
            return QuotaError(
                f"The project's limit of {what} is {limit:,}, and this batch alone asks for {asked:,}, so it can never "
                f"start: {advice}.",
                code="insufficient_quota",
            )
        return RateLimitError(
            f"The limit of {what} is reached. Limit: {limit:,}, in use: {used:,}, asked for: {asked:,}. Please try "
            f"again once some of the project's batches have ended, or cancel one; {_RAISE}.",
            code=code,
            headers={"retry-after": str(retry_after_s(soonest_end_s))},
        )
    return None


def upload_refusal(limits: Limits, stored_bytes: int, size_bytes: int) -> QuotaError | None:
    """Why a project that stores so many bytes cannot store another file of ``size_bytes``, or None if it can."""
    limit = limits.max_stored_bytes
    if limit is None or stored_bytes + size_bytes <= limit:
        return None
    return QuotaError(
        f"The limit of stored bytes is reached. Limit: {limit:,}, in use: {stored_bytes:,}, this file: "
        f"{size_bytes:,}. Delete files that are not needed any more, or {_RAISE}.",
        param="file",
        code="insufficient_quota",
    )
