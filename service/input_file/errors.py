"""Errors of an input file, and the list of them that a batch keeps.

Messages are stored in Postgres and shown to clients, so they never quote a value of a request, not even a custom_id:
they give its place, type and length.
"""

import dataclasses
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any, Final

MAX_LISTED_ERRORS: Final = 1_000
_MAX_PARAM_CHARACTERS: Final = 100
_MAX_MESSAGE_CHARACTERS: Final = 1_000
# Postgres rejects NUL in text, and terminals interpret some of the other control characters.
_ESCAPED: Final = {code: f"\\u{code:04x}" for code in (*range(0x20), *range(0x7F, 0xA0))}


@dataclass(frozen=True, slots=True, kw_only=True)
class InputError:
    """One error of an input file. ``line`` is None when it concerns the whole file."""

    code: str = "invalid_request"
    message: str
    param: str | None = None
    line: int | None = None


@dataclass(slots=True, kw_only=True)
class ErrorList:
    """All errors counted, the first 1,000 kept: those of the whole file first, then those of its lines."""

    count: int = 0
    _of_file: list[InputError] = field(default_factory=list)
    _of_lines: list[InputError] = field(default_factory=list)

    def add(self, errors: Iterable[InputError]) -> None:
        """Count errors and keep them while there is room, cut to length and with control characters escaped."""
        for error in errors:
            self.count += 1
            kept = self._of_file if error.line is None else self._of_lines
            if len(kept) < MAX_LISTED_ERRORS:
                message = cut(error.message, _MAX_MESSAGE_CHARACTERS).translate(_ESCAPED)
                param = error.param and cut(error.param, _MAX_PARAM_CHARACTERS).translate(_ESCAPED)
                kept.append(dataclasses.replace(error, message=message, param=param))

    def listed(self) -> tuple[InputError, ...]:
        """Return the kept errors in the order of lines. If some are omitted, the last message states the total."""
        # Some errors of a line are found after those of the next lines.
        of_lines = sorted(self._of_lines, key=lambda error: error.line or 0)
        listed = [*self._of_file, *of_lines][:MAX_LISTED_ERRORS]
        if self.count > len(listed):
            note = f" (Of {self.count:,} errors in this file, the first {len(listed):,} are listed; this is the last.)"
            listed[-1] = dataclasses.replace(listed[-1], message=listed[-1].message + note)
        return tuple(listed)


def cut(text: str, max_characters: int) -> str:
    """Return the text, cut to a length, with an ellipsis if something was cut."""
    return text if len(text) <= max_characters else f"{text[:max_characters]}…"


def missing(param: str, line: int, hint: str = "") -> InputError:
    """Return the error for a required field that is absent or null."""
    message = f"Missing required parameter: '{param}'.{hint and ' '}{hint}"
    return InputError(code="missing_required_parameter", message=message, param=param, line=line)


def wrong_type(param: str, expected: str, value: Any, line: int) -> InputError:
    """Return the error for a field whose value has the wrong type."""
    message = f"Invalid type for '{param}': expected {expected}, but got {described(value)} instead."
    return InputError(message=message, param=param, line=line)


def described(value: Any) -> str:
    """Describe a value by its JSON type and length, without quoting it."""
    match value:
        case None:
            return "null"
        case bool():
            return "a boolean"
        case str():
            return f"a string of {len(value):,} characters" if value else "an empty string"
        case int() | float():
            return "a number"
        case list():
            return "an array"
        case _:
            return "an object"
