"""Lines that are not JSON, or nest too deep for the job that reads them again."""

import re
from collections.abc import Mapping
from typing import Any, Final

import orjson

from ray_job.contract.input_lines import BYTE_ORDER_MARK
from service.input_file.errors import InputError

# The job reads the line again with Python's own parser, which stops at 1,000 levels minus the frames above it.
MAX_DEPTH: Final = 500
MIN_DEEP_BYTES: Final = 2 * MAX_DEPTH
_STRING: Final = re.compile(rb'"[^"\\]*+(?:\\.[^"\\]*+)*+"', re.DOTALL)
_NOT_A_BRACKET: Final = re.compile(rb"[^\[\]{}]+")
_OPENING: Final = frozenset(b"[{")
_FIELDS: Final = ("custom_id", "method", "url", "body")
_SCALARS: Final = frozenset({str, int, float, bool, type(None)})
# Hints by a phrase of orjson's message.
_HINTS: Final = {
    "unexpected end": "It ends too early: a request must be one whole object on one line.",
    "depth limit": f"Nest arrays and objects at most {MAX_DEPTH} levels deep.",
    "infinity": "No number may be larger than about 1.8e308. Write it as a string, or remove it.",
    "surrogate": "A \\u escape holds half a character. Write the whole character, or both halves.",
    "control character": "Inside a string write tabs, line breaks and other control characters as \\t, \\n or \\u00XX.",
}


def is_too_deep(content: bytes) -> bool:
    """Return whether a line nests arrays and objects more than 500 levels deep."""
    # Nearly every line has fewer brackets in total, and counting them costs next to nothing.
    return content.count(b"[") + content.count(b"{") > MAX_DEPTH and nesting(content) > MAX_DEPTH


def nesting(content: bytes) -> int:
    """Return how many levels deep a JSON text nests arrays and objects."""
    depth = deepest = 0
    for bracket in _NOT_A_BRACKET.sub(b"", _STRING.sub(b"", content)):
        depth += 1 if bracket in _OPENING else -1
        deepest = max(deepest, depth)
    return deepest


def is_flat(request: Mapping[str, Any]) -> bool:
    """Return whether a request's body holds only scalars, lists of scalars, and lists of objects of scalars.

    Most bodies do. On a parsed line this check is several times faster than counting brackets in its bytes.
    """
    if len(request) != len(_FIELDS):
        return False
    for value in request["body"].values():
        if type(value) in _SCALARS:
            continue
        if type(value) is not list:
            return False
        for item in value:
            is_object_of_scalars = type(item) is dict and _SCALARS.issuperset(map(type, item.values()))
            if type(item) not in _SCALARS and not is_object_of_scalars:
                return False
    return True


def json_error(content: bytes, error: orjson.JSONDecodeError, number: int) -> InputError:
    """Return the error for a line that ``orjson`` cannot parse, with its likely cause and remedy."""
    try:
        content.decode()
    except UnicodeDecodeError as decode_error:
        message = (
            f"This line is not UTF-8: byte {decode_error.start + 1} of the line is invalid. Save the file as UTF-8."
        )
        return InputError(code="invalid_json_line", message=message, line=number)
    nul_position = content.find(b"\0")
    if content.startswith(BYTE_ORDER_MARK):
        message = (
            "This line begins with a byte order mark, which is allowed only at the start of the file. Remove it; it "
            "comes from concatenating files."
        )
    elif nul_position >= 0:
        message = (
            f"This line holds a NUL byte, at byte {nul_position + 1}. Save the file as UTF-8 text; inside a string "
            "write \\u0000."
        )
    else:
        hint = next((hint for phrase, hint in _HINTS.items() if phrase in error.msg), None)
        if hint is None and b"\r" in content.strip():
            hint = "Lines must end with LF or CRLF, not with CR alone."
        elif hint is None and (error.msg == "trailing comma is not allowed" or content.rstrip().endswith(b"},")):
            hint = "Remove the comma at the end: each line is a separate object, not an element of an array."
        elif hint is None:
            hint = "JSON has no NaN and no Infinity, and a request must be one object on one line."
        message = f"This line is not parseable as valid JSON: {error.msg}, at character {error.pos + 1}. {hint}"
    return InputError(code="invalid_json_line", message=message, line=number)
