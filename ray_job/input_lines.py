"""Reads the input object once, and gives its open lines in the order of execution.

The object is copied to an unlinked temporary file as it is read; in memory stay some dozen bytes per line.
So the order of execution is free (lines with one system prompt side by side, which about doubles
the rows per second where the prefix cache is small) and memory does not grow with the file.
"""

import os
import tempfile
from array import array
from collections.abc import Container, Iterable, Iterator
from types import TracebackType
from typing import Self

from ray_job.contract.input_lines import split_lines
from ray_job.rows import execution_order, prefix_key


class InputLines:
    """The lines of one input object that are not committed yet. Use it as a context manager."""

    def __init__(self, chunks: Iterable[bytes], committed: Container[int]) -> None:
        self._file = tempfile.TemporaryFile()  # noqa: SIM115 - closed by __exit__
        self._lines = array("Q")
        self._offsets = array("Q")
        self._lengths = array("Q")
        keys: list[bytes] = []
        offset = 0
        for line in split_lines(chunks):
            raw = line.content or b""
            if line.is_blank or line.number in committed:
                continue
            self._file.write(raw)
            self._lines.append(line.number)
            self._offsets.append(offset)
            self._lengths.append(len(raw))
            keys.append(prefix_key(raw))
            offset += len(raw)
        self._file.flush()
        self._order = array("Q", execution_order(keys))

    def __len__(self) -> int:
        return len(self._lines)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._file.close()

    def blocks(self, rows: int) -> Iterator[list[tuple[int, bytes]]]:
        """Blocks of at most ``rows`` (line number, line) pairs in the order of execution."""
        for start in range(0, len(self._order), rows):
            yield [
                (
                    self._lines[index],
                    os.pread(self._file.fileno(), self._lengths[index], self._offsets[index]),
                )
                for index in self._order[start : start + rows]
            ]
