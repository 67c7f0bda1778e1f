"""The lines of an input file: one definition of line numbers for validation, execution and assembly."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Final

BYTE_ORDER_MARK: Final = b"\xef\xbb\xbf"


@dataclass(frozen=True, slots=True, kw_only=True)
class Line:
    """A physical line without its line break; ``content`` is None when it is longer than allowed."""

    number: int
    content: bytes | None

    @property
    def is_blank(self) -> bool:
        """Whether the line is no request."""
        return self.content is not None and not self.content.strip()


def split_lines(chunks: Iterable[bytes], *, max_line_bytes: int | None = None) -> Iterator[Line]:
    """The lines of a byte stream, without LF or CRLF and without a byte order mark at the start.

    No more than ``max_line_bytes`` and one chunk is held in memory: the rest of a longer line is skipped.
    """
    number, held, too_long = 1, bytearray(), False
    for chunk in chunks:
        start = 0
        while (end := chunk.find(b"\n", start)) >= 0:
            held += b"" if too_long else memoryview(chunk)[start:end]
            yield _line(number, held, too_long=too_long, max_line_bytes=max_line_bytes)
            number, held, too_long, start = number + 1, bytearray(), False, end + 1
        if not too_long:
            held += memoryview(chunk)[start:]
            # One byte more for a carriage return, three for a byte order mark.
            if max_line_bytes is not None and len(held) > max_line_bytes + len(BYTE_ORDER_MARK) + 1:
                held, too_long = bytearray(), True
    if held or too_long:
        yield _line(number, held, too_long=too_long, max_line_bytes=max_line_bytes)


def _line(number: int, held: bytearray, *, too_long: bool, max_line_bytes: int | None) -> Line:
    content = bytes(held)
    if number == 1:
        content = content.removeprefix(BYTE_ORDER_MARK)
    content = content.removesuffix(b"\r")
    if too_long or (max_line_bytes is not None and len(content) > max_line_bytes):
        return Line(number=number, content=None)
    return Line(number=number, content=content)
