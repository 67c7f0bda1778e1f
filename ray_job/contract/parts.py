"""Part objects: the results of some lines of a batch, in one object that is written once.

A part is one JSON header line and then one line per row, sorted by line number:

    {"version":1,"batch_id":"batch_…","lines":[3,17],"lengths":[812,790],"outcomes":"cf",
     "usage":[[120,32,0,0],[118,0,0,0]],"sha256":"…"}
    {"id":"batch_req_…", …}        a complete line of the output file (outcome c)
    {"id":"batch_req_…", …}        or of the error file (outcome f)

``lengths`` are bytes without the line break, ``sha256`` is the digest of everything after the header.
A part counts as committed when its object exists: object stores write an object whole or not at all.
"""

import hashlib
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Final

from ray_job.contract.lines import Outcome

VERSION: Final = 1
_LETTERS: Final[dict[Outcome, str]] = {"completed": "c", "failed": "f"}
_OUTCOMES: Final[dict[str, Outcome]] = {letter: outcome for outcome, letter in _LETTERS.items()}


class PartError(ValueError):
    """A part object that is damaged or was written by another version; the message names what is wrong."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Usage:
    """Tokens, in OpenAI's words for a batch's usage."""

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
    """What a part says of itself. ``size_bytes`` is the header's own length with its line break."""

    batch_id: str
    lines: tuple[int, ...]
    lengths: tuple[int, ...]
    outcomes: tuple[Outcome, ...]
    usage: tuple[Usage, ...]
    sha256: str
    size_bytes: int

    def offsets(self) -> Iterator[int]:
        """Where each row starts, in bytes from the start of the object."""
        offset = self.size_bytes
        for length in self.lengths:
            yield offset
            offset += length + 1


def encode_part(batch_id: str, rows: Sequence[PartRow]) -> bytes:
    """The bytes of a part object. The rows may come in any order; no line may occur twice."""
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


def part_id(lines: Sequence[int]) -> str:
    """The last segment of a part's key: made of the lines it holds, so that a retried write replaces itself."""
    ordered = sorted(lines)
    digest = hashlib.sha256(",".join(map(str, ordered)).encode()).hexdigest()
    return f"{ordered[0]:08d}-{len(ordered):05d}-{digest[:16]}.part"


def decode_header(line: bytes, key: str) -> PartHeader:
    """Reads a header line (with its line break). ``key`` names the object in error messages.

    Raises:
        PartError: not a header, or of another version.
    """
    try:
        raw = json.loads(line)
        version = raw["version"]
        header = _header(raw, len(line)) if version == VERSION else None
    except (ValueError, KeyError, TypeError) as error:
        raise PartError(f"part {key} has no readable header: {error!r}") from error
    if header is None:
        raise PartError(f"part {key} has version {version}, this program reads {VERSION}")
    if not len(header.lines) == len(header.lengths) == len(header.outcomes) == len(header.usage):
        raise PartError(f"part {key} has a header whose lists differ in length")
    return header


def _header(raw: dict[str, Any], size_bytes: int) -> PartHeader:
    return PartHeader(
        batch_id=raw["batch_id"],
        lines=tuple(raw["lines"]),
        lengths=tuple(raw["lengths"]),
        outcomes=tuple(_OUTCOMES[letter] for letter in raw["outcomes"]),
        usage=tuple(
            Usage(input_tokens=i, output_tokens=o, cached_tokens=c, reasoning_tokens=r) for i, o, c, r in raw["usage"]
        ),
        sha256=raw["sha256"],
        size_bytes=size_bytes,
    )
