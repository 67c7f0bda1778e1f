"""What happens to one row before and after the engine. Pure functions."""

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ray_job.contract.lines import error_body, response_line
from ray_job.contract.parts import PartRow, Usage
from ray_job.errors import InputError

# Characters of a prompt that decide which lines run side by side. Long enough to tell system prompts
# apart, short enough that lines with one system prompt and different questions still share it.
PREFIX_CHARACTERS = 1_024


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """One request line, as the engine stage needs it; ``body`` is JSON."""

    line: int
    custom_id: str
    url: str
    body: bytes


def parse_request(line: int, raw: bytes) -> Request:
    """Reads a validated input line.

    Raises:
        InputError: the line is not what the service validated.
    """
    try:
        parsed = json.loads(raw)
        return Request(
            line=line, custom_id=parsed["custom_id"], url=parsed["url"], body=json.dumps(parsed["body"]).encode()
        )
    except (ValueError, KeyError, TypeError) as error:
        raise InputError(
            f"line {line} of the input is not a request ({error!r}); it has changed since it was validated"
        ) from error


def prefix_key(raw: bytes) -> bytes:
    """A digest of what a line shares with others in the engine's prefix cache: its leading system messages.

    A line without any gives the digest of the beginning of its prompt, one that cannot be read gives an
    empty key. Lines of one key are run side by side, so that the cache still holds their prefix.
    """
    try:
        body = json.loads(raw)["body"]
    except (ValueError, KeyError, TypeError):
        return b""
    return hashlib.blake2b(_shared_text(body).encode(errors="surrogatepass"), digest_size=8).digest()


def _shared_text(body: Any) -> str:
    if not isinstance(body, dict):
        return ""
    messages = body.get("messages")
    if not isinstance(messages, list):
        return str(body.get("prompt", body.get("input", "")))[:PREFIX_CHARACTERS]
    leading = []
    for message in messages:
        if not isinstance(message, dict) or message.get("role") not in ("system", "developer"):
            break
        leading.append(str(message.get("content")))
    return "\0".join(leading) if leading else str(messages[:1])[:PREFIX_CHARACTERS]


def execution_order(keys: Sequence[bytes]) -> list[int]:
    """Indices in the order of execution: equal keys together, each group where its first member stands.

    Lines that share nothing keep the order of the input.
    """
    first: dict[bytes, int] = {}
    for index, key in enumerate(keys):
        first.setdefault(key, index)
    return sorted(range(len(keys)), key=lambda index: (first[keys[index]], index))


def part_row(batch_id: str, line: int, custom_id: str, status_code: int, body: bytes) -> PartRow:
    """The finished row of a response: a line of the output file (2xx) or of the error file (all else)."""
    completed = 200 <= status_code < 300  # noqa: PLR2004 - HTTP's success range
    parsed = _parse_object(body)
    if parsed is None:
        status_code = status_code if not completed else 500
        completed, parsed, body = False, {}, _not_json(body)
    elif not completed and not isinstance(parsed.get("error"), dict):
        body = error_body(_message_of(parsed), type=_error_type(status_code), param=None, code=None)
    elif b"\n" in body or b"\r" in body:
        body = json.dumps(parsed, ensure_ascii=False, separators=(",", ":")).encode()
    return PartRow(
        line=line,
        outcome="completed" if completed else "failed",
        data=response_line(batch_id, line, custom_id, status_code, body),
        usage=usage_of(parsed) if completed else Usage(),
    )


def usage_of(body: Mapping[str, Any]) -> Usage:
    """The tokens of a response body, by the names of a batch's usage."""
    usage = body.get("usage") or {}
    prompt_details = usage.get("prompt_tokens_details") or {}
    completion_details = usage.get("completion_tokens_details") or {}
    return Usage(
        input_tokens=usage.get("prompt_tokens") or 0,
        output_tokens=usage.get("completion_tokens") or 0,
        cached_tokens=prompt_details.get("cached_tokens") or 0,
        reasoning_tokens=completion_details.get("reasoning_tokens") or 0,
    )


def _parse_object(body: bytes) -> dict[str, Any] | None:
    try:
        parsed = json.loads(body)
    except ValueError:
        return None
    return parsed if isinstance(parsed, dict) else None


def _message_of(parsed: Mapping[str, Any]) -> str:
    return str(parsed.get("message") or parsed.get("detail") or "The engine refused the request without a reason.")


def _error_type(status_code: int) -> str:
    return "invalid_request_error" if status_code < 500 else "server_error"  # noqa: PLR2004 - HTTP's server errors


def _not_json(body: bytes) -> bytes:
    return error_body(
        f"The engine answered {len(body)} bytes that are not a JSON object.",
        type="server_error",
        param=None,
        code="invalid_engine_response",
    )
