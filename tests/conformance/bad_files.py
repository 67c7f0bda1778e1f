"""Input files that fail a batch, and the errors that the server must report."""

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Final

from tests.conformance.workload import CHAT, chat, jsonl


@dataclass(frozen=True, slots=True, kw_only=True)
class Expected:
    """One error: its physical line from 1 (None: the whole file), its code (None: any), the last step of its param."""

    line: int | None
    code: str | None = None
    field: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class BadFile:
    """The content for a model, and all errors that the server must report, in order."""

    content: Callable[[str], bytes]
    errors: tuple[Expected, ...]


_Line = Mapping[str, Any] | bytes


def _between_good_lines(bad: Callable[[str], _Line], code: str | None, field: str | None = None) -> BadFile:
    return BadFile(
        content=lambda model: jsonl([chat("first", model), bad(model), chat("last", model)]),
        errors=(Expected(line=2, code=code, field=field),),
    )


def _changed(**changes: Any) -> Callable[[str], _Line]:
    def make(model: str) -> _Line:
        return {name: value for name, value in {**chat("bad", model), **changes}.items() if value is not ...}

    return make


def _changed_body(**changes: Any) -> Callable[[str], _Line]:
    def make(model: str) -> _Line:
        whole = chat("bad", model)
        body = {name: value for name, value in {**whole["body"], **changes}.items() if value is not ...}
        return {**whole, "body": body}

    return make


def _raw(text: bytes) -> Callable[[str], _Line]:
    return lambda _: text


def _replaced(old: bytes, new: bytes) -> Callable[[str], _Line]:
    return lambda model: json.dumps(chat("bad", model)).encode().replace(old, new)


# Each file has three lines; the second is bad.
BAD_LINES: Final = {
    "cut off": _between_good_lines(_raw(b'{"custom_id": "bad"'), "invalid_json_line"),
    "plain text": _between_good_lines(_raw(b"hello"), "invalid_json_line"),
    "an array": _between_good_lines(_raw(b'["custom_id", "bad"]'), "invalid_json_line"),
    "null": _between_good_lines(_raw(b"null"), "invalid_json_line"),
    "a trailing comma": _between_good_lines(_replaced(b'"POST"', b'"POST",'), "invalid_json_line"),
    "NaN": _between_good_lines(_replaced(b'"max_tokens": 4', b'"max_tokens": NaN'), "invalid_json_line"),
    "two objects": _between_good_lines(_raw(b"{} {}"), "invalid_json_line"),
    "not UTF-8": _between_good_lines(_replaced(b'"bad"', b'"b\xff\xfed"'), "invalid_json_line"),
    "a NUL byte": _between_good_lines(_replaced(b'"bad"', b'"b\0d"'), "invalid_json_line"),
    "5,000 levels deep": _between_good_lines(_raw(b'{"custom_id":' + b"[" * 5_000), "invalid_json_line"),
    "no custom_id": _between_good_lines(_changed(custom_id=...), "missing_required_parameter", "custom_id"),
    "no method": _between_good_lines(_changed(method=...), "missing_required_parameter", "method"),
    "no url": _between_good_lines(_changed(url=...), "missing_required_parameter", "url"),
    "no body": _between_good_lines(_changed(body=...), "missing_required_parameter", "body"),
    "no model": _between_good_lines(_changed_body(model=...), "missing_required_parameter", "model"),
    "a number as custom_id": _between_good_lines(_changed(custom_id=7), None, "custom_id"),
    "an array as body": _between_good_lines(_changed(body=[]), None, "body"),
    "a number as model": _between_good_lines(_changed_body(model=7), None, "model"),
    "another endpoint's url": _between_good_lines(_changed(url="/v1/embeddings"), "invalid_url"),
    "a whole url": _between_good_lines(_changed(url=f"https://api.openai.com{CHAT}"), "invalid_url"),
    "an unknown url": _between_good_lines(_changed(url="/v1/poems"), "invalid_url"),
    "an unknown model": _between_good_lines(_changed_body(model="no-such-model"), "model_not_found"),
    "a stream": _between_good_lines(_changed_body(stream=True), "streaming_unsupported"),
}
UNCONFIRMED_LINES: Final = {
    "the method GET": _between_good_lines(_changed(method="GET"), "invalid_method"),
    "a custom_id twice": _between_good_lines(_changed(custom_id="first"), "duplicate_custom_id"),
}
MANY: Final = 300


def _seven_kinds(model: str) -> bytes:
    bad = [
        _raw(b"{"), _changed(custom_id=...), _changed(url="/v1/poems"), _changed_body(model="no-such-model"),
        _changed(body=...), _changed_body(stream=True), _changed(custom_id="c0"),
    ]  # fmt: skip
    lines: list[_Line] = []
    for number, make in enumerate(bad):
        bad_line = make(model)
        if isinstance(bad_line, dict) and bad_line.get("custom_id") == "bad":
            bad_line["custom_id"] = f"bad-{number}"
        lines += [chat(f"c{number}", model), bad_line]
    return jsonl(lines)


def _after_blank_lines(model: str) -> bytes:
    good = json.dumps(chat("good", model)).encode()
    return b"\xef\xbb\xbf" + good + b"\r\n\r\n\n  \r\n{\r\n"


def _too_many(model: str) -> bytes:
    template = json.dumps(chat("NUMBER", model)).encode()
    return b"\n".join(template.replace(b"NUMBER", str(number).encode()) for number in range(50_001))


BAD_FILES: Final = {
    **BAD_LINES,
    **UNCONFIRMED_LINES,
    "seven kinds": BadFile(
        content=_seven_kinds,
        errors=(
            Expected(line=2, code="invalid_json_line"),
            Expected(line=4, code="missing_required_parameter", field="custom_id"),
            Expected(line=6, code="invalid_url"),
            Expected(line=8, code="model_not_found"),
            Expected(line=10, code="missing_required_parameter", field="body"),
            Expected(line=12, code="streaming_unsupported"),
            Expected(line=14, code="duplicate_custom_id"),
        ),
    ),
    "many": BadFile(
        content=lambda model: jsonl(chat(f"c{n}", model if n % 2 else "no-such-model") for n in range(2 * MANY)),
        errors=tuple(Expected(line=1 + 2 * n, code="model_not_found") for n in range(MANY)),
    ),
    "after blank lines": BadFile(content=_after_blank_lines, errors=(Expected(line=5, code="invalid_json_line"),)),
    "50,001 requests": BadFile(content=_too_many, errors=(Expected(line=None),)),
}
# Obviously not JSONL: a server may refuse these at upload.
NO_JSONL: Final[dict[str, bytes]] = {
    "gzip": b"\x1f\x8b\x08\x00\x00\x00\x00\x00\x00\x03\x03\x00\x00\x00\x00\x00\x00\x00\x00\x00",
    "a JSON array": b'[{"custom_id": "a", "method": "POST"}]',
    "UTF-16": '{"custom_id": "a"}\n'.encode("utf-16"),
    "CSV": b"custom_id,method,url\na,POST,/v1/chat/completions\n",
    "nothing": b"",
    "blank lines": b"\n\r\n   \n",
}
