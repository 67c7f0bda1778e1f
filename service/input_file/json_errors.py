"""Why a line is not the JSON that a batch can take, and what to do about it."""

import re
from collections.abc import Mapping
from typing import Any, Final

import orjson

from ray_job.contract.input_lines import BYTE_ORDER_MARK
from service.input_file.errors import InputError, invalid

# Python's own parser, with which the job reads the line again, gives up at 1,000 less the frames above it.
MAX_DEPTH: Final = 500
MIN_DEEP_BYTES: Final = 2 * MAX_DEPTH
_STRING: Final = re.compile(rb'"[^"\\]*+(?:\\.[^"\\]*+)*+"', re.DOTALL)
_NOT_A_BRACKET: Final = re.compile(rb"[^\[\]{}]+")
_OPENING: Final = frozenset(b"[{")
_FIELDS: Final = ("custom_id", "method", "url", "body")
_PLAIN: Final = frozenset({str, int, float, bool, type(None)})


def is_too_deep(content: bytes) -> bool:
    """Whether a line nests arrays and objects more than 500 levels deep."""
    # Nearly every line has fewer brackets than that altogether, and counting them costs next to nothing.
    if content.count(b"[") + content.count(b"{") <= MAX_DEPTH:
        return False
    depth = 0
    for bracket in _NOT_A_BRACKET.sub(b"", _STRING.sub(b"", content)):
        depth += 1 if bracket in _OPENING else -1
        if depth > MAX_DEPTH:
            return True
    return False


def is_flat(request: Mapping[str, Any]) -> bool:
    """Whether a request with a body holds no more than plain values, lists of them and lists of objects of them.

    Most do, and once a line is parsed that is told several times faster than brackets are counted in its bytes.
    """
    if len(request) != len(_FIELDS):
        return False
    for value in request["body"].values():
        if type(value) in _PLAIN:
            continue
        if type(value) is not list:
            return False
        for item in value:
            if type(item) not in _PLAIN and (type(item) is not dict or not _PLAIN.issuperset(map(type, item.values()))):
                return False
    return True


def too_deep(number: int) -> InputError:
    """A line nests deeper than the job can read."""
    message = f"This line nests arrays or objects more than {MAX_DEPTH} levels deep. Make it flatter."
    return invalid(None, message, number)


def json_error(content: bytes, error: orjson.JSONDecodeError, number: int) -> InputError:
    """A line that ``orjson`` cannot read."""
    return InputError(code="invalid_json_line", message=_message(content, error), line=number)


def _message(content: bytes, error: orjson.JSONDecodeError) -> str:
    try:
        content.decode()
    except UnicodeDecodeError as decode_error:
        return (
            f"This line is not UTF-8: byte {decode_error.start + 1} of the line cannot be read. Save the file as UTF-8."
        )
    if content.startswith(BYTE_ORDER_MARK):
        return (
            "This line begins with a byte order mark, which may stand at the start of the file only. Leave it out; it "
            "comes from joining files."
        )
    if (position := content.find(b"\0")) >= 0:
        return (
            f"This line holds a NUL byte, at byte {position + 1}. Save the file as UTF-8 text; inside a string write "
            "\\u0000."
        )
    hint = _hint(content, error)
    return f"This line is not parseable as valid JSON: {error.msg}, at character {error.pos + 1}. {hint}"


def _hint(content: bytes, error: orjson.JSONDecodeError) -> str:
    for sign, hint in _HINTS.items():
        if sign in error.msg:
            return hint
    if b"\r" in content.strip():
        return "Lines must end with LF or CRLF, not with CR alone."
    if error.msg == "trailing comma is not allowed" or content.rstrip().endswith(b"},"):
        return "Leave out the comma at the end: lines stand for themselves, without an array around them."
    return "NaN and Infinity are no JSON, and a request must stand on one line, as one object."


_HINTS: Final = {
    "unexpected end": "It stops too early: a request must stand on one line, as one whole object.",
    "depth limit": f"Nest arrays and objects at most {MAX_DEPTH} levels deep.",
    "infinity": "No number may be larger than about 1.8e308. Write it as a string, or leave it out.",
    "surrogate": "A \\u escape of half a character stands alone. Write the whole character, or both halves.",
    "control character": "Inside a string write tabs, line breaks and the like as \\t, \\n or \\u00XX.",
}
