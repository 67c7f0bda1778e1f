"""The plan of a batch: its lines in the order of execution, in one object.

Each row of a plan is a header line in JSON, and the line of the input file:

    {"line":17,"length":812,"twins":[[19,"id-19"]]}
    {"custom_id":"id-17","method":"POST","url":"/v1/chat/completions","body":{…}}

``length`` is that of the second line in bytes, without its line break. ``twins`` are lines with an equal body, which
share the answer: the number and the custom_id of each. A segment is a range of bytes of the plan that begins and ends
at a row. Its rows count from 0.
"""

import json
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Final

Twin = tuple[int, str]

_BITMAP: Final = re.compile("[0-9a-f]*")


class PlanError(ValueError):
    """A part of a plan that cannot be read. The message quotes none of it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanRow:
    """One row: a line of the input file, and the lines that share its answer.

    Attributes:
        line: its number in the input file, from 1.
        raw: the line, without its line break.
        twins: numbers and custom_ids of the lines that share its answer.
    """

    line: int
    raw: bytes
    twins: tuple[Twin, ...] = ()

    def encode(self) -> bytes:
        """Return the bytes of the row in a plan."""
        header = {"line": self.line, "length": len(self.raw), "twins": self.twins}
        return json.dumps(header, separators=(",", ":")).encode() + b"\n" + self.raw + b"\n"


def decode_rows(data: bytes) -> Iterator[PlanRow]:
    """Yield the rows of a segment.

    Args:
        data: its bytes.

    Raises:
        PlanError: the data is not a whole number of rows.
    """
    start = 0
    while start < len(data):
        end = data.find(b"\n", start)
        try:
            header = json.loads(data[start:end])
            line, length = int(header["line"]), int(header["length"])
            twins = tuple((int(number), str(custom_id)) for number, custom_id in header["twins"])
        except (ValueError, KeyError, TypeError, OverflowError, RecursionError) as error:
            # Neither the error nor its message: they may quote a line.
            raise PlanError(f"a plan has no readable row at byte {start} ({type(error).__name__})") from None
        start = end + 1 + length + 1
        # A negative length would lead back to an earlier row.
        if length < 0 or start > len(data) or data[start - 1] != ord("\n"):
            raise PlanError(f"the row of line {line} in a plan has another length than its header names")
        yield PlanRow(line=line, raw=data[end + 1 : start - 1], twins=twins)


def bitmap(rows: Iterable[int]) -> str:
    """Return row numbers of a segment as a hexadecimal number, in which row 0 is the lowest bit."""
    value = 0
    for row in rows:
        value |= 1 << row
    return f"{value:x}"


def bitmap_value(text: str) -> int:
    """Return a bitmap as a number; an empty one is 0.

    Raises:
        ValueError: the text has other characters than the digits of ``bitmap``.
    """
    # int() would also accept a sign, spaces and underscores.
    if not _BITMAP.fullmatch(text):
        raise ValueError("a bitmap must be a hexadecimal number in lower case")
    return int(text or "0", 16)


def bitmap_rows(text: str) -> set[int]:
    """Return the row numbers of a bitmap.

    Raises:
        ValueError: see ``bitmap_value``.
    """
    value = bitmap_value(text)
    return {row for row in range(value.bit_length()) if value >> row & 1}
