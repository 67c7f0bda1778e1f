"""Rows before and after the engine: from a leased segment to requests, and from responses to rows of a part."""

import json
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from http import HTTPStatus
from typing import Any, Final

from ray_job.contract.leases import CommittedRows, Lease, SegmentRef
from ray_job.contract.lines import error_body, error_line, response_line
from ray_job.contract.parts import PartRow, Usage
from ray_job.contract.plans import PlanError, Twin, bitmap, bitmap_rows, decode_rows
from ray_job.errors import InputError

# Stands for a status where a request got no response. The body is then the ``error`` of the line.
NO_RESPONSE: Final = 0

GENERATING: Final = ("/completions", "/responses")
"""Ends of the paths that generate text."""
# vLLM's default for completions, which is OpenAI's. Source:
# https://platform.openai.com/docs/api-reference/completions/create.
COMPLETION_TOKENS: Final = 16

RowKey = tuple[SegmentRef, int]
"""A row under one lease of its segment, and its number in the segment."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LeasedRow:
    """A row that is still to be run.

    Attributes:
        segment: its segment.
        row: its number in the segment, from 0.
        line: its line in the input file, from 1.
        raw: the line, without its line break.
        twins: lines that share its answer.
        tokens: about how many tokens it takes.
        cache_salt: vLLM's ``cache_salt`` for it; empty for none.
        refusal: why it fails without the engine; empty if it does not.
    """

    segment: SegmentRef
    row: int
    line: int
    raw: bytes
    twins: tuple[Twin, ...] = ()
    tokens: float = 0
    cache_salt: str = ""
    refusal: str = ""

    @property
    def key(self) -> RowKey:
        """Its identity within the job."""
        return self.segment, self.row


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """A row as an engine needs it.

    Attributes:
        segment: its segment.
        row: its number in the segment, from 0.
        line: its line in the input file, from 1.
        custom_id: the client's id of it.
        url: the path of the API.
        body: its body, as JSON.
        tokens: the most tokens that it generates; infinite if it has no limit.
        twins: lines that share its answer.
        refusal: why it fails without the engine; empty if it does not.
    """

    segment: SegmentRef
    row: int
    line: int
    custom_id: str
    url: str
    body: bytes
    tokens: float = math.inf
    twins: tuple[Twin, ...] = ()
    refusal: str = ""

    @property
    def key(self) -> RowKey:
        """Its identity within the job."""
        return self.segment, self.row


@dataclass(frozen=True, slots=True, kw_only=True)
class FinishedRow:
    """A row with its results: those of its line and of the lines that share its answer."""

    segment: SegmentRef
    row: int
    results: tuple[PartRow, ...]

    @property
    def size_bytes(self) -> int:
        """Bytes of its results."""
        return sum(len(result.data) for result in self.results)


def leased_rows(lease: Lease, data: bytes) -> list[LeasedRow]:
    """Return the rows of a leased segment that no earlier lease has committed.

    Args:
        lease: the lease.
        data: the bytes of the segment.

    Raises:
        PlanError: the data is not a segment with the lease's number of rows.
    """
    segment, done, tokens = lease.ref, bitmap_rows(lease.done), lease.tokens / max(1, lease.rows)
    rows = list(decode_rows(data))
    if len(rows) != lease.rows:
        raise PlanError(f"segment {lease.segment} of the plan has {len(rows)} rows instead of {lease.rows}")
    return [
        LeasedRow(
            segment=segment,
            row=number,
            line=row.line,
            raw=row.raw,
            twins=row.twins,
            tokens=tokens,
            cache_salt=lease.cache_salt,
        )
        for number, row in enumerate(rows)
        if number not in done
    ]


def parse_line(line: int, raw: bytes, cache_salt: str = "") -> tuple[str, str, bytes, float]:
    """Read a validated input line.

    Args:
        line: the line number, from 1.
        raw: the line without its line break.
        cache_salt: prepended to the ``cache_salt`` of the body; empty for none.

    Returns:
        Its ``custom_id``, its URL, its body and the most tokens that it generates.

    Raises:
        InputError: the line differs from what the service validated.
    """
    try:
        parsed = json.loads(raw)
        body = parsed["body"]
        # An engine refuses a salt that is empty or no string. It still does.
        if cache_salt and ((own := body.get("cache_salt")) is None or (isinstance(own, str) and own)):
            body["cache_salt"] = cache_salt + (own or "")
        custom_id, url = parsed["custom_id"], parsed["url"]
        if not (isinstance(custom_id, str) and isinstance(url, str)):
            raise TypeError  # noqa: TRY301 - reported as all other defects are
        return custom_id, url, json.dumps(body).encode(), most_tokens(url, body)
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        # Neither the error nor its message: they may quote the line.
        raise InputError(
            f"line {line} of the input is not a request ({type(error).__name__}); it has changed since it was validated"
        ) from None


def most_tokens(url: str, body: Mapping[str, Any]) -> float:
    """Return the most tokens that a request generates, of all its choices; infinite if it has no limit.

    A request that generates no text, such as one for embeddings, counts as one token. A beam search has no limit here,
    because a token takes it many steps.
    """
    if not url.endswith(GENERATING):
        return 1
    is_text = url.endswith("/completions") and not url.endswith("/chat/completions")
    limits = [body.get(name) for name in ("max_tokens", "max_completion_tokens", "max_output_tokens")]
    prompts = body.get("prompt") if is_text else None
    several = isinstance(prompts, list) and not all(isinstance(token, int) for token in prompts)
    factors = [*(body.get(name) or 1 for name in ("n", "best_of")), len(prompts or ()) if several else 1]
    tokens = max((limit for limit in limits if isinstance(limit, int)), default=COMPLETION_TOKENS if is_text else None)
    if tokens is None or body.get("use_beam_search") or not all(isinstance(factor, int) for factor in factors):
        return math.inf
    return float(tokens * math.prod(factors))


def parse_request(row: LeasedRow) -> Request:
    """Return the request of a row.

    Raises:
        InputError: see ``parse_line``.
    """
    custom_id, url, body, tokens = parse_line(row.line, row.raw, row.cache_salt)
    return Request(
        segment=row.segment,
        row=row.row,
        line=row.line,
        custom_id=custom_id,
        url=url,
        body=body,
        tokens=tokens,
        twins=row.twins,
        refusal=row.refusal,
    )


def finished_row(request: Request, status_code: int, body: bytes) -> FinishedRow:
    """Return a request with its results; see ``part_row``."""
    lines = ((request.line, request.custom_id), *request.twins)
    return FinishedRow(
        segment=request.segment,
        row=request.row,
        results=tuple(
            part_row(request.segment.batch_id, line, custom_id, status_code, body) for line, custom_id in lines
        ),
    )


def committed_rows(rows: Iterable[FinishedRow]) -> tuple[CommittedRows, ...]:
    """Return the record of a part with these rows of one batch, by segment."""
    by_segment: dict[SegmentRef, list[FinishedRow]] = {}
    for row in rows:
        by_segment.setdefault(row.segment, []).append(row)
    return tuple(_committed(segment, some) for segment, some in by_segment.items())


def _committed(segment: SegmentRef, rows: Sequence[FinishedRow]) -> CommittedRows:
    results = [result for row in rows for result in row.results]
    completed = sum(result.outcome == "completed" for result in results)
    return CommittedRows(
        segment=segment.segment,
        epoch=segment.epoch,
        rows=bitmap(row.row for row in rows),
        lines=tuple(result.line for result in results),
        completed=completed,
        failed=len(results) - completed,
        usage=sum((result.usage for result in results), Usage()),
    )


def timed_out(message: str) -> tuple[int, bytes]:
    """Return the status and the body of a request that the engine did not answer in time.

    The code is OpenAI's, for a line without a response.
    Source: https://platform.openai.com/docs/api-reference/batch/request-output.

    Args:
        message: see ``ray_job.engines.deadlines.LineTimeoutError``.
    """
    return NO_RESPONSE, json.dumps({"code": "request_timeout", "message": message}).encode()


def refused(refusal: str) -> tuple[int, bytes]:
    """Return the status and the body of a request that fails without the engine."""
    return NO_RESPONSE, json.dumps({"code": "media_file_unavailable", "message": refusal}).encode()


def part_row(batch_id: str, line: int, custom_id: str, status_code: int, body: bytes) -> PartRow:
    """Return the finished row of a response: a line of the output file (status 2xx) or of the error file.

    An error without OpenAI's error object gets one. A response that is not a JSON object becomes an error that does
    not quote it.

    Args:
        batch_id: the batch of the line.
        line: the line number in the input file, from 1.
        custom_id: the client's id of the request.
        status_code: the HTTP status of the response, or ``NO_RESPONSE``.
        body: the response body.
    """
    if status_code == NO_RESPONSE:
        return PartRow(line=line, outcome="failed", data=error_line(batch_id, line, custom_id, json.loads(body)))
    completed = HTTPStatus.OK <= status_code < HTTPStatus.MULTIPLE_CHOICES
    try:
        parsed = json.loads(body)
    except ValueError:
        parsed = None
    if not isinstance(parsed, dict):
        body = error_body(
            f"The engine answered {len(body)} bytes that are not a JSON object.",
            type="server_error",
            param=None,
            code="invalid_engine_response",
        )
        status_code = HTTPStatus.INTERNAL_SERVER_ERROR.value if completed else status_code
        completed, parsed = False, {}
    elif not completed and not isinstance(parsed.get("error"), dict):
        body = error_body(
            str(parsed.get("message") or parsed.get("detail") or "The engine refused the request without a reason."),
            type="invalid_request_error" if status_code < HTTPStatus.INTERNAL_SERVER_ERROR else "server_error",
            param=None,
            code=None,
        )
    elif b"\n" in body or b"\r" in body:
        body = json.dumps(parsed, ensure_ascii=False, separators=(",", ":")).encode()
    # A failed row has no usage.
    usage = (completed and parsed.get("usage")) or {}
    return PartRow(
        line=line,
        outcome="completed" if completed else "failed",
        data=response_line(batch_id, line, custom_id, status_code, body),
        usage=Usage(
            input_tokens=usage.get("prompt_tokens") or 0,
            output_tokens=usage.get("completion_tokens") or 0,
            cached_tokens=(usage.get("prompt_tokens_details") or {}).get("cached_tokens") or 0,
            reasoning_tokens=(usage.get("completion_tokens_details") or {}).get("reasoning_tokens") or 0,
        ),
    )
