"""Builds the plan of a batch from the lines of its input file, and cuts it into segments.

The lines are copied to a file of the workspace while the input file is read, and at most some 300 bytes per line stay
in memory. So the order of execution is free, and memory does not grow with the size of the lines.
"""

import dataclasses
import os
from array import array
from collections.abc import Container, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from types import MappingProxyType, TracebackType
from typing import Final, Self

import orjson

from ray_job.contract.media import MIN_TOKENS, data_url_bytes
from ray_job.contract.object_keys import plan_key
from ray_job.contract.plans import PlanRow
from service.input_file import LineFiles
from service.planning.order import BYTES_PER_TOKEN, Traits, execution_groups, line_traits
from service.ports import ObjectStore
from service.row_chunks import RowChunks
from service.workspace import Workspace

SEGMENT_TOKENS: Final = 1 << 16
SEGMENT_BYTES: Final = 8 << 20
# A part holds the results of whole rows, so their size needs a limit. Further equal lines are another row.
MOST_TWINS: Final = 1_000
_NO_FILES: Final[LineFiles] = MappingProxyType({})


@dataclass(frozen=True, slots=True, kw_only=True)
class Segment:
    """A range of rows of a plan, which a job leases as a whole.

    Attributes:
        number: its place in the plan, from 0.
        start_byte: its first byte in the plan.
        end_byte: the byte after its last one.
        rows: the number of its rows.
        tokens: about how many tokens its rows take.
        files: ids of the uploaded files that its rows name.
        media_bytes: by so many bytes the content of these files enlarges its rows.
    """

    number: int
    start_byte: int
    end_byte: int
    rows: int
    tokens: int
    files: tuple[str, ...] = ()
    media_bytes: int = 0


class PlanBuilder:
    """The lines of one input file, and the plan that is made of them. Use it as a context manager.

    Args:
        workspace: holds a copy of the lines.
        skipped: numbers of lines to leave out.
    """

    def __init__(self, workspace: Workspace, skipped: Container[int] = ()) -> None:
        self._skipped = skipped
        self._closing = ExitStack()
        self._file, self._claim = self._closing.enter_context(workspace.open())
        self._size_bytes = 0
        self._numbers, self._offsets, self._lengths = array("Q"), array("Q"), array("Q")
        self._traits: list[Traits] = []
        # Files of lines are numbers, so that a line that names many takes little memory.
        self._files: dict[str, int] = {}
        self._files_of_lines: dict[int, array[int]] = {}
        self._media_bytes: dict[int, int] = {}

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._closing.close()

    def add(self, first: int, lines: Sequence[bytes | None], files: LineFiles = _NO_FILES) -> None:
        """Add consecutive lines of the input file, without their line breaks. Blank lines are left out.

        Args:
            first: the number of the first of them.
            lines: the lines; None for one that is longer than allowed, which is left out.
            files: the images of lines that are uploaded files.

        Raises:
            OSError: the workspace has no room for them.
        """
        kept = [
            (number, raw)
            for number, raw in enumerate(lines, first)
            if raw is not None and raw.strip() and number not in self._skipped
        ]
        self._claim(sum(len(raw) for _, raw in kept))
        for number, raw in kept:
            self._file.write(raw)
            self._numbers.append(number)
            self._offsets.append(self._size_bytes)
            self._lengths.append(len(raw))
            traits = line_traits(raw)
            if named := files.get(number):
                index = len(self._traits)
                sizes = [data_url_bytes(size_bytes) for _, size_bytes in named]
                numbers = (self._files.setdefault(file_id, len(self._files)) for file_id, _ in named)
                self._files_of_lines[index] = array("L", numbers)
                self._media_bytes[index] = sum(sizes)
                # As if the line held the data: URLs, so that a job leases no more than it can read.
                tokens = sum(max(MIN_TOKENS, size // BYTES_PER_TOKEN) for size in sizes)
                traits = dataclasses.replace(traits, tokens=traits.tokens + tokens)
            self._traits.append(traits)
            self._size_bytes += len(raw)

    def write(self, store: ObjectStore, batch_id: str, *, merge_equal: bool) -> list[Segment]:
        """Write the plan of a batch to its object, and return its segments; without lines, write nothing.

        The same lines give the same plan. A segment ends where a group of lines with a common beginning ends, unless
        the group is larger than a segment. A row that is larger than a segment is one by itself.

        Args:
            store: the object store.
            batch_id: the batch.
            merge_equal: let lines with the same body, whose answer does not depend on chance, share one row.

        Raises:
            ObjectStoreError: the store cannot be reached.
            OSError: the workspace cannot be written.
        """
        self._file.flush()
        twins = self._twins() if merge_equal else {}
        merged = {twin for each in twins.values() for twin in each}
        own = [index for index in range(len(self._traits)) if index not in merged]
        # Indices of lines, in the order of execution.
        groups = [
            [own[position] for position in group] for group in execution_groups([self._traits[index] for index in own])
        ]
        segments: list[Segment] = []
        file_ids = list(self._files)

        def rows() -> Iterator[bytes]:
            segments.clear()
            start = end = tokens = 0
            held: list[int] = []
            for group in groups:
                group_tokens = sum(self._traits[index].tokens for index in group)
                group_bytes = sum(self._lengths[index] for index in group)
                must_cut = tokens + group_tokens > SEGMENT_TOKENS or end - start + group_bytes > SEGMENT_BYTES
                for index in group:
                    row = self._row(index, twins.get(index, ()))
                    row_tokens = self._traits[index].tokens
                    must_cut |= tokens + row_tokens > SEGMENT_TOKENS or end - start + len(row) > SEGMENT_BYTES
                    if must_cut and held:
                        segments.append(self._segment(len(segments), start, end, held, file_ids))
                        start, tokens, held = end, 0, []
                    must_cut = False
                    end, tokens = end + len(row), tokens + row_tokens
                    held.append(index)
                    yield row
            if held:
                segments.append(self._segment(len(segments), start, end, held, file_ids))

        if groups:
            store.put(plan_key(batch_id), RowChunks(rows))
        return segments

    def _twins(self) -> dict[int, list[int]]:
        """Return the indices of lines that share an answer with an earlier line, by the index of that line."""
        first: dict[bytes, int] = {}
        twins: dict[int, list[int]] = {}
        for index, traits in enumerate(self._traits):
            if traits.identity is None or (known := first.setdefault(traits.identity, index)) == index:
                continue
            others = twins.setdefault(known, [])
            if len(others) < MOST_TWINS:
                others.append(index)
            else:
                first[traits.identity] = index
        return twins

    def _row(self, index: int, twins: Sequence[int]) -> bytes:
        return PlanRow(
            line=self._numbers[index],
            raw=self._read(index),
            twins=tuple((self._numbers[twin], orjson.loads(self._read(twin))["custom_id"]) for twin in twins),
        ).encode()

    def _segment(self, number: int, start: int, end: int, lines: Sequence[int], file_ids: Sequence[str]) -> Segment:
        files = {file for index in lines for file in self._files_of_lines.get(index, ())}
        return Segment(
            number=number,
            start_byte=start,
            end_byte=end,
            rows=len(lines),
            tokens=sum(self._traits[index].tokens for index in lines),
            files=tuple(file_ids[file] for file in sorted(files)),
            media_bytes=sum(self._media_bytes.get(index, 0) for index in lines),
        )

    def _read(self, index: int) -> bytes:
        return os.pread(self._file.fileno(), self._lengths[index], self._offsets[index])
