"""Reads the input object once, and returns its uncommitted lines in the order of execution.

The object is copied to an unlinked temporary file while it is read, and at most some 300 bytes per line stay in memory.
So the order of execution is free, and memory does not grow with the size of the lines. See ``ray_job.plan``.
"""

import os
import tempfile
from array import array
from collections.abc import Container, Iterable, Iterator
from types import TracebackType
from typing import Self

from ray_job.contract.input_lines import split_lines
from ray_job.plan import Traits, execution_groups, line_traits
from ray_job.rows import parse_request

# The number and the custom_id of a line that shares the answer of an equal line.
Twin = tuple[int, str]


class InputLines:
    """The uncommitted lines of one input object. Use it as a context manager.

    Args:
        chunks: the content of the object.
        committed: line numbers to leave out.
        merge_equal: let lines with the same body, whose answer does not depend on chance, share one answer.

    Attributes:
        costs: about how many engine steps each line takes, in the order of execution.
        group_starts: positions in this order at which a group of lines with a common beginning begins.
    """

    def __init__(self, chunks: Iterable[bytes], committed: Container[int], *, merge_equal: bool = False) -> None:
        self._file = tempfile.TemporaryFile()  # noqa: SIM115 - closed by __exit__
        self._lines = array("Q")
        self._offsets = array("Q")
        self._lengths = array("Q")
        self._twins: dict[int, list[Twin]] = {}
        traits: list[Traits] = []
        known: dict[bytes, int] = {}
        offset = 0
        for line in split_lines(chunks):
            raw = line.content or b""
            if line.is_blank or line.number in committed:
                continue
            found = line_traits(raw)
            if merge_equal and found.identity is not None:
                first = known.setdefault(found.identity, len(traits))
                if first < len(traits):
                    self._twins.setdefault(first, []).append((line.number, parse_request(line.number, raw).custom_id))
                    continue
            self._file.write(raw)
            self._lines.append(line.number)
            self._offsets.append(offset)
            self._lengths.append(len(raw))
            traits.append(found)
            offset += len(raw)
        self._file.flush()
        self._order, self.group_starts = array("Q"), array("Q")
        for group in execution_groups(traits):
            self.group_starts.append(len(self._order))
            self._order.extend(group)
        self.costs = array("Q", (traits[index].cost for index in self._order))

    def __len__(self) -> int:
        return len(self._lines)

    @property
    def total(self) -> int:
        """The number of lines, with those that share the answer of another line."""
        return len(self._lines) + sum(map(len, self._twins.values()))

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._file.close()

    def blocks(self, rows: int) -> Iterator[list[tuple[int, bytes]]]:
        """Yield blocks of at most ``rows`` pairs of line number and line, in the order of execution."""
        for start in range(0, len(self), rows):
            yield [self.read(position) for position in range(start, min(start + rows, len(self)))]

    def read(self, position: int) -> tuple[int, bytes]:
        """Return the number and the content of the line at a position of the order of execution, from 0."""
        index = self._order[position]
        return self._lines[index], os.pread(self._file.fileno(), self._lengths[index], self._offsets[index])

    def twins(self, position: int) -> list[Twin]:
        """Return the lines that share the answer of the line at a position of the order of execution."""
        return self._twins.get(self._order[position], [])
