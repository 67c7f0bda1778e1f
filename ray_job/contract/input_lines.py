"""Lines of an input file: one definition of line numbers for validation, execution and assembly."""

from collections.abc import Iterable, Iterator
from itertools import chain
from typing import Final, NamedTuple

BYTE_ORDER_MARK: Final = b"\xef\xbb\xbf"


class Line(NamedTuple):
    """A physical line without its line break.

    A tuple, because a file has up to millions of lines and a tuple is created several times faster than a dataclass.

    Attributes:
        number: the line number, from 1.
        content: the bytes of the line, or None if it is longer than allowed.
    """

    number: int
    content: bytes | None

    @property
    def is_blank(self) -> bool:
        """True for a line of white space, which is not a request."""
        return self.content is not None and not self.content.strip()


def split_lines(chunks: Iterable[bytes], *, max_line_bytes: int | None = None) -> Iterator[Line]:
    """Split a byte stream into lines, without LF or CRLF and without a byte order mark at the start.

    At most ``max_line_bytes`` and two chunks are held in memory: the rest of a longer line is skipped.

    Args:
        chunks: the byte stream.
        max_line_bytes: the longest line to return. Without it lines have no limit.
    """
    for first, block in line_blocks(chunks, max_line_bytes=max_line_bytes):
        yield from map(Line, range(first, first + len(block)), block)


def line_blocks(
    chunks: Iterable[bytes], *, max_line_bytes: int | None = None
) -> Iterator[tuple[int, list[bytes | None]]]:
    """Split a byte stream as ``split_lines`` does, into about one block of lines for each chunk.

    Yields:
        The number of the first line of a block, and the contents of its lines.
    """
    number, held, too_long = 1, bytearray(), False
    # One byte more for a carriage return, three for a byte order mark.
    max_held_bytes = None if max_line_bytes is None else max_line_bytes + len(BYTE_ORDER_MARK) + 1
    for chunk in chain(chunks, (None,)):
        if chunk is None and not held and not too_long:
            return
        # The end of the stream ends the last line.
        pieces = [b"", b""] if chunk is None else chunk.split(b"\n")
        last = pieces.pop()
        if pieces:
            pieces[0] = bytes(held + pieces[0])
            if number == 1:
                pieces[0] = pieces[0].removeprefix(BYTE_ORDER_MARK)
            contents = [piece.removesuffix(b"\r") for piece in pieces]
            block: list[bytes | None] = [*contents]
            if max_line_bytes is not None and max(map(len, contents)) > max_line_bytes:
                block = [content if len(content) <= max_line_bytes else None for content in contents]
            if too_long:
                block[0] = None
            yield number, block
            number, held, too_long = number + len(block), bytearray(), False
        if not too_long:
            held += last
            if max_held_bytes is not None and len(held) > max_held_bytes:
                held, too_long = bytearray(), True
