"""Rows before and after the engine: from an input line to a request, and from a response to a row of a part."""

import json
from dataclasses import dataclass
from http import HTTPStatus
from typing import Final

from ray_job.contract.lines import error_body, error_line, response_line
from ray_job.contract.parts import PartRow, Usage
from ray_job.errors import InputError

# Stands for a status where a request got no response. The body is then the ``error`` of the line.
NO_RESPONSE: Final = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """One request line, as the engine stage needs it; ``body`` is JSON."""

    line: int
    custom_id: str
    url: str
    body: bytes


def parse_request(line: int, raw: bytes) -> Request:
    """Read a validated input line.

    Args:
        line: the line number, from 1.
        raw: the line without its line break.

    Raises:
        InputError: the line differs from what the service validated.
    """
    try:
        parsed = json.loads(raw)
        return Request(
            line=line, custom_id=parsed["custom_id"], url=parsed["url"], body=json.dumps(parsed["body"]).encode()
        )
    except (ValueError, KeyError, TypeError) as error:
        # Neither the error nor its message: they may quote the line.
        raise InputError(
            f"line {line} of the input is not a request ({type(error).__name__}); it has changed since it was validated"
        ) from None


def timed_out(timeout_s: float) -> tuple[int, bytes]:
    """Return the status and the body of a request that the engine did not answer in time.

    The code is OpenAI's, for a line without a response.
    Source: https://platform.openai.com/docs/api-reference/batch/request-output.
    """
    message = (
        f"The engine did not answer this request within {timeout_s:,g} s. Lower max_tokens, or have request_timeout_s "
        "of the model raised, and send the line again."
    )
    return NO_RESPONSE, json.dumps({"code": "request_timeout", "message": message}).encode()


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
