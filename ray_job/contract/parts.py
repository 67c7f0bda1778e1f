"""Part objects: the results of some lines of a batch, in one object that is written once.

A part is one JSON header line followed by one line per row, sorted by line number:

    {"version":1,"batch_id":"batch_…","lines":[3,17],"lengths":[812,790],"outcomes":"cf",
     "usage":[[120,32,0,0],[118,0,0,0]],"sha256":"…"}
    {"id":"batch_req_…", …}        a complete line of the output file (outcome c)
    {"id":"batch_req_…", …}        or of the error file (outcome f)

``lengths`` are bytes without the line break. ``sha256`` is the digest of everything after the header.
A part is committed when its object exists: object stores write an object whole or not at all.
"""

import hashlib
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Final

from ray_job.contract.lines import Outcome

VERSION: Final = 1
_LETTERS: Final[dict[Outcome, str]] = {"completed": "c", "failed": "f"}
_OUTCOMES: Final[dict[str, Outcome]] = {letter: outcome for outcome, letter in _LETTERS.items()}


class PartError(ValueError):
    """A part object is damaged or has another version. The message names the object and quotes none of it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Usage:
    """Token counts, by the names of a batch's ``usage`` in OpenAI's API."""

    input_tokens: int = 0
    output_tokens: int = 0
    cached_tokens: int = 0
    reasoning_tokens: int = 0

    def __add__(self, other: "Usage") -> "Usage":
        return Usage(
            input_tokens=self.input_tokens + other.input_tokens,
            output_tokens=self.output_tokens + other.output_tokens,
            cached_tokens=self.cached_tokens + other.cached_tokens,
            reasoning_tokens=self.reasoning_tokens + other.reasoning_tokens,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class PartRow:
    """The result of one line. ``data`` is the finished output or error line, without its line break."""

    line: int
    outcome: Outcome
    data: bytes
    usage: Usage = Usage()


@dataclass(frozen=True, slots=True, kw_only=True)
class PartHeader:
    """The header of a part. Lists have one item per row, in the order of the rows.

    Attributes:
        batch_id: the batch of the rows.
        lines: line numbers in the input file, ascending.
        lengths: bytes of each row without its line break.
        outcomes: the outcome of each row.
        usage: the tokens of each row.
        sha256: the digest of everything after the header, in hexadecimal.
        size_bytes: the length of the header with its line break.
    """

    batch_id: str
    lines: tuple[int, ...]
    lengths: tuple[int, ...]
    outcomes: tuple[Outcome, ...]
    usage: tuple[Usage, ...]
    sha256: str
    size_bytes: int

    def offsets(self) -> Iterator[int]:
        """Yield the start of each row, in bytes from the start of the object."""
        offset = self.size_bytes
        for length in self.lengths:
            yield offset
            offset += length + 1


def encode_part(batch_id: str, rows: Sequence[PartRow]) -> bytes:
    """Return the bytes of a part object.

    Args:
        batch_id: the batch of the rows.
        rows: the rows, in any order.

    Raises:
        PartError: two rows have the same line number.
    """
    ordered = sorted(rows, key=lambda row: row.line)
    if len({row.line for row in ordered}) != len(ordered):
        raise PartError(f"a part of {batch_id} holds a line twice: {[row.line for row in ordered]}")
    body = b"".join(row.data + b"\n" for row in ordered)
    header = {
        "version": VERSION,
        "batch_id": batch_id,
        "lines": [row.line for row in ordered],
        "lengths": [len(row.data) for row in ordered],
        "outcomes": "".join(_LETTERS[row.outcome] for row in ordered),
        "usage": [
            [
                row.usage.input_tokens,
                row.usage.output_tokens,
                row.usage.cached_tokens,
                row.usage.reasoning_tokens,
            ]
            for row in ordered
        ],
        "sha256": hashlib.sha256(body).hexdigest(),
    }
    return json.dumps(header, separators=(",", ":")).encode() + b"\n" + body


def decode_header(line: bytes, key: str) -> PartHeader:
    """Read the header of a part.

    Args:
        line: the first line of the object, with its line break.
        key: the key of the object, for error messages.

    Raises:
        PartError: the line is not a header, or has another version.
    """
    try:
        raw = json.loads(line)
        version = raw["version"]
        header = None
        if version == VERSION:
            header = PartHeader(
                batch_id=raw["batch_id"],
                lines=tuple(raw["lines"]),
                lengths=tuple(raw["lengths"]),
                outcomes=tuple(_OUTCOMES[letter] for letter in raw["outcomes"]),
                usage=tuple(
                    Usage(input_tokens=i, output_tokens=o, cached_tokens=c, reasoning_tokens=r)
                    for i, o, c, r in raw["usage"]
                ),
                sha256=raw["sha256"],
                size_bytes=len(line),
            )
    except (ValueError, KeyError, TypeError) as error:
        # Neither the error nor its message: they may quote a row.
        raise PartError(f"part {key} has no readable header: {type(error).__name__}") from None
    if header is None:
        raise PartError(f"part {key} has version {version}, this program reads {VERSION}")
    if not len(header.lines) == len(header.lengths) == len(header.outcomes) == len(header.usage):
        raise PartError(f"part {key} has a header whose lists differ in length")
    return header
