"""Lines of the input, output and error files, as OpenAI's Batch API writes them.

An input line is ``{"custom_id", "method": "POST", "url", "body"}``. An output or error line is
``{"id": "batch_req_…", "custom_id", "response": {"status_code", "request_id", "body"}, "error"}``.
Source: https://platform.openai.com/docs/api-reference/batch/request-input and …/request-output.

Ids are derived from the batch id and the line number, so that a line which is written twice (a
worker that died between writing and reporting) is the same line both times.
"""

import hashlib
import json
from typing import Any, Final, Literal

Outcome = Literal["completed", "failed"]

ENDPOINTS: Final = ("/v1/chat/completions", "/v1/completions", "/v1/embeddings")

BATCH_EXPIRED: Final = {
    "code": "batch_expired",
    "message": "This request could not be executed before the completion window expired.",
}


def _derived_id(prefix: str, batch_id: str, line: int) -> str:
    digest = hashlib.sha256(f"{prefix}{batch_id}:{line}".encode()).hexdigest()
    return f"{prefix}{digest[:32]}"


def request_line_id(batch_id: str, line: int) -> str:
    """The ``id`` of an output or error line; ``line`` counts from 1."""
    return _derived_id("batch_req_", batch_id, line)


def request_id(batch_id: str, line: int) -> str:
    """The ``response.request_id`` of an output or error line; ``line`` counts from 1."""
    return _derived_id("req_", batch_id, line)


def response_line(batch_id: str, line: int, custom_id: str, status_code: int, body: bytes) -> bytes:
    """An output line (status 2xx) or error-file line (status 4xx or 5xx) around a response body.

    Args:
        batch_id: the batch the line belongs to.
        line: the line number in the input file, from 1.
        custom_id: the client's id of the request.
        status_code: the HTTP status that the engine answered.
        body: the JSON response body, taken over byte for byte. It must hold no line break.

    Returns:
        The JSON line without its line break.
    """
    head = json.dumps(
        {
            "id": request_line_id(batch_id, line),
            "custom_id": custom_id,
            "response": {"status_code": status_code, "request_id": request_id(batch_id, line)},
        },
        ensure_ascii=False,
        separators=(",", ":"),
    ).encode()
    return head[:-2] + b',"body":' + body + b'},"error":null}'


def error_line(batch_id: str, line: int, custom_id: str, error: dict[str, Any]) -> bytes:
    """An error-file line of a request that got no response at all, e.g. one that expired."""
    return json.dumps(
        {
            "id": request_line_id(batch_id, line),
            "custom_id": custom_id,
            "response": None,
            "error": error,
        },
        ensure_ascii=False,
        separators=(",", ":"),
    ).encode()


def error_body(message: str, *, type: str, param: str | None, code: str | int | None) -> bytes:
    """OpenAI's error envelope as a response body."""
    return json.dumps(
        {"error": {"message": message, "type": type, "param": param, "code": code}},
        ensure_ascii=False,
        separators=(",", ":"),
    ).encode()
