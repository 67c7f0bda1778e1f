"""The lines of an input file: one definition of line numbers for validation, execution and assembly."""

from collections.abc import Iterable, Iterator
from typing import Final, NamedTuple

BYTE_ORDER_MARK: Final = b"\xef\xbb\xbf"


class Line(NamedTuple):
    """A physical line without its line break; ``content`` is None when it is longer than allowed.

    A tuple, because a file has up to millions of them and a tuple is made several times faster than a dataclass.
    """

    number: int
    content: bytes | None

    @property
    def is_blank(self) -> bool:
        """Whether the line is no request."""
        return self.content is not None and not self.content.strip()


def split_lines(chunks: Iterable[bytes], *, max_line_bytes: int | None = None) -> Iterator[Line]:
    """The lines of a byte stream, without LF or CRLF and without a byte order mark at the start.

    No more than ``max_line_bytes`` and two chunks are held in memory: the rest of a longer line is skipped.
    """
    for first, block in line_blocks(chunks, max_line_bytes=max_line_bytes):
        yield from map(Line, range(first, first + len(block)), block)


def line_blocks(
    chunks: Iterable[bytes], *, max_line_bytes: int | None = None
) -> Iterator[tuple[int, list[bytes | None]]]:
    """The same lines as blocks, about one for each chunk: the first one's number, and their contents."""
    number, held, too_long = 1, bytearray(), False
    # One byte more for a carriage return, three for a byte order mark.
    most_held = None if max_line_bytes is None else max_line_bytes + len(BYTE_ORDER_MARK) + 1
    for chunk in chunks:
        pieces: list[bytes] = chunk.split(b"\n")
        last = pieces.pop()
        if pieces:
            block = _lines(number, pieces, held, too_long=too_long, max_line_bytes=max_line_bytes)
            yield number, block
            number, held, too_long = number + len(block), bytearray(), False
        if not too_long:
            held += last
            if most_held is not None and len(held) > most_held:
                held, too_long = bytearray(), True
    if held or too_long:
        yield number, _lines(number, [b""], held, too_long=too_long, max_line_bytes=max_line_bytes)


def _lines(
    number: int, pieces: list[bytes], held: bytearray, *, too_long: bool, max_line_bytes: int | None
) -> list[bytes | None]:
    """Whole lines: ``held`` is the beginning of the first, or that line was too long already."""
    if held:
        pieces[0] = bytes(held + pieces[0])
    if number == 1:
        pieces[0] = pieces[0].removeprefix(BYTE_ORDER_MARK)
    contents = [piece.removesuffix(b"\r") for piece in pieces]
    lines: list[bytes | None] = [*contents]
    if max_line_bytes is not None and max(map(len, contents)) > max_line_bytes:
        lines = [content if len(content) <= max_line_bytes else None for content in contents]
    if too_long:
        lines[0] = None
    return lines
