"""Lines of the input, output and error files, as OpenAI's Batch API writes them.

An input line is ``{"custom_id", "method": "POST", "url", "body"}``. An output or error line is
``{"id": "batch_req_…", "custom_id", "response": {"status_code", "request_id", "body"}, "error"}``.
Source: https://platform.openai.com/docs/api-reference/batch/request-input and …/request-output.

Ids are derived from the batch id and the line number. If a worker dies after it wrote a line and before it reported
it, the line is written again with the same ids.
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


def line_id(prefix: Literal["batch_req_", "req_"], batch_id: str, line: int) -> str:
    """Return an id of one line, which counts from 1.

    An output or error line has two: its own ``id`` with the prefix ``batch_req_``, and the ``response.request_id``
    with the prefix ``req_``.
    """
    digest = hashlib.sha256(f"{prefix}{batch_id}:{line}".encode()).hexdigest()
    return f"{prefix}{digest[:32]}"


def response_line(batch_id: str, line: int, custom_id: str, status_code: int, body: bytes) -> bytes:
    """Return an output line (status 2xx) or an error line (status 4xx or 5xx) around a response body.

    Args:
        batch_id: the batch of the line.
        line: the line number in the input file, from 1.
        custom_id: the client's id of the request.
        status_code: the HTTP status of the engine's response.
        body: the response body, a JSON value without line breaks. It is copied byte for byte.

    Returns:
        The JSON line without its line break.
    """
    head = json.dumps(
        {
            "id": line_id("batch_req_", batch_id, line),
            "custom_id": custom_id,
            "response": {"status_code": status_code, "request_id": line_id("req_", batch_id, line)},
        },
        ensure_ascii=False,
        separators=(",", ":"),
    ).encode()
    return head[:-2] + b',"body":' + body + b'},"error":null}'


def error_line(batch_id: str, line: int, custom_id: str, error: dict[str, Any]) -> bytes:
    """Return the error line of a request without a response, e.g. one that expired.

    Args:
        batch_id: the batch of the line.
        line: the line number in the input file, from 1.
        custom_id: the client's id of the request.
        error: the reason, with ``code`` and ``message``.

    Returns:
        The JSON line without its line break.
    """
    return json.dumps(
        {
            "id": line_id("batch_req_", batch_id, line),
            "custom_id": custom_id,
            "response": None,
            "error": error,
        },
        ensure_ascii=False,
        separators=(",", ":"),
    ).encode()


def error_body(message: str, *, type: str, param: str | None, code: str | int | None) -> bytes:
    """Return OpenAI's error object as a response body.

    Args:
        message: what is wrong and what to do.
        type: the class of the error, e.g. ``invalid_request_error``.
        param: the field that is wrong.
        code: a fixed name or number of the error.
    """
    return json.dumps(
        {"error": {"message": message, "type": type, "param": param, "code": code}},
        ensure_ascii=False,
        separators=(",", ":"),
    ).encode()
