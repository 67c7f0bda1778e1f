"""Rows in larger pieces, for the object store."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Final

_CHUNK_BYTES: Final = 1 << 18


@dataclass(frozen=True, slots=True)
class RowChunks:
    """Chunks of whole rows. A chunk ends with the row that completes 256 KiB.

    Each iteration begins with the first row, because a store may have to retry.

    Args:
        rows: returns an iterator over all rows.
    """

    rows: Callable[[], Iterator[bytes]]

    def __iter__(self) -> Iterator[bytes]:
        chunk = bytearray()
        for row in self.rows():
            if len(chunk) >= _CHUNK_BYTES:
                yield bytes(chunk)
                chunk.clear()
            chunk += row
        if chunk:
            yield bytes(chunk)
