"""One error of an input file, and the list of them that is kept."""

import dataclasses
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any, Final

MAX_LISTED_ERRORS: Final = 1_000
_MAX_SHOWN: Final = 100
_MAX_MESSAGE: Final = 1_000
# Control characters are shown escaped: Postgres takes no NUL, and a terminal obeys some of the others.
_ESCAPED: Final = {code: f"\\u{code:04x}" for code in (*range(0x20), *range(0x7F, 0xA0))}


@dataclass(frozen=True, slots=True, kw_only=True)
class InputError:
    """One thing that is wrong. ``line`` is None where it is the file as a whole."""

    code: str
    message: str
    param: str | None = None
    line: int | None = None


@dataclass(slots=True, kw_only=True)
class ErrorList:
    """All errors are counted, the first 1,000 kept: what is wrong with the file as a whole, then by line."""

    count: int = 0
    _of_file: list[InputError] = field(default_factory=list)
    _of_lines: list[InputError] = field(default_factory=list)

    def add(self, errors: Iterable[InputError]) -> None:
        """Counts errors, and keeps them while there is room."""
        for error in errors:
            self.count += 1
            kept = self._of_file if error.line is None else self._of_lines
            if len(kept) < MAX_LISTED_ERRORS:
                kept.append(_printable(error))

    def listed(self) -> tuple[InputError, ...]:
        """The errors that are told. Where some are left out, the last of them says so."""
        listed = [*self._of_file, *self._of_lines][:MAX_LISTED_ERRORS]
        if self.count > len(listed):
            note = f" (Of {self.count:,} errors in this file, the first {len(listed):,} are listed; this is the last.)"
            listed[-1] = dataclasses.replace(listed[-1], message=listed[-1].message + note)
        return tuple(listed)


def missing(param: str, number: int, hint: str = "") -> InputError:
    """A required field is not there, or null."""
    message = f"Missing required parameter: '{param}'.{hint and ' '}{hint}"
    return InputError(code="missing_required_parameter", message=message, param=param, line=number)


def invalid(param: str | None, message: str, number: int | None) -> InputError:
    """A field, or a line as a whole, cannot be used."""
    return InputError(code="invalid_request", message=message, param=param, line=number)


def wrong_type(param: str, expected: str, value: Any, number: int) -> InputError:
    """A field holds another type than it must."""
    return invalid(param, f"Invalid type for '{param}': it must be {expected}, not {shown(value)}.", number)


def shown(value: Any) -> str:
    """A value of a request as a message quotes it, cut where it is long."""
    match value:
        case None:
            return "null"
        case bool():
            return str(value).lower()
        case str():
            return f"'{value[:_MAX_SHOWN]}…'" if len(value) > _MAX_SHOWN else f"'{value}'"
        case int() | float():
            return str(value)
        case list():
            return "an array"
        case _:
            return "an object"


def _printable(error: InputError) -> InputError:
    message = _cut(error.message, _MAX_MESSAGE).translate(_ESCAPED)
    param = None if error.param is None else _cut(error.param, _MAX_SHOWN).translate(_ESCAPED)
    return dataclasses.replace(error, message=message, param=param)


def _cut(text: str, most: int) -> str:
    return text if len(text) <= most else f"{text[:most]}…"
