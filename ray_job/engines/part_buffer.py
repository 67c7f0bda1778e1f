"""Collects finished rows, by batch, until they are worth a part object."""

import asyncio
import time
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass, field
from typing import Final

from ray_job.contract.leases import SegmentRef
from ray_job.rows import FinishedRow

PART_BYTES: Final = 8 << 20
# Rows beyond this wait for the store, and the engine with them.
FULL_BYTES: Final = 4 * PART_BYTES
FIRST_AGE_S: Final = 1.0
# A part waits for at most this share of the time that the engine has worked on its batch: long batches have few parts,
# and none loses more than this share of its work.
AGE_SHARE: Final = 0.02


@dataclass(slots=True, kw_only=True)
class _Pile:
    """Rows of one batch.

    Attributes:
        started_s: when the first of its rows was expected.
        expected: the rows of each segment that are still to be answered.
        rows: finished rows.
        size_bytes: their size.
        oldest_s: when the first of them was finished.
        settled: whether no further rows are announced.
    """

    started_s: float
    expected: dict[SegmentRef, int] = field(default_factory=dict)
    rows: list[FinishedRow] = field(default_factory=list)
    size_bytes: int = 0
    oldest_s: float = 0
    settled: bool = False


class PartBuffer:
    """Rows of an engine that no part holds yet.

    A part is due when it has enough rows or bytes, when its first row has a certain age, or when the engine has no
    further row of the batch.

    Args:
        part_rows: rows that are always worth a part.
        clock: the current time in seconds.

    Attributes:
        writers: how many engines share the batches. Each waits longer, so that the number of parts stays the same.
    """

    def __init__(self, part_rows: int, *, clock: Callable[[], float] = time.monotonic) -> None:
        self.writers = 1
        self._part_rows = part_rows
        self._clock = clock
        self._piles: dict[str, _Pile] = {}
        self._bytes = 0
        self._changed = asyncio.Condition()

    def expect(self, segments: Iterable[SegmentRef]) -> None:
        """Announce rows, by their segments. Rows that are not announced are dropped when they finish."""
        for segment in segments:
            pile = self._piles.setdefault(segment.batch_id, _Pile(started_s=self._clock()))
            pile.expected[segment] = pile.expected.get(segment, 0) + 1
            pile.settled = False

    async def settle(self, batch_ids: Iterable[str]) -> None:
        """Make the next part of some batches due with the last of the announced rows."""
        async with self._changed:
            for batch_id in batch_ids:
                if batch_id in self._piles:
                    self._piles[batch_id].settled = True
            self._changed.notify_all()

    async def add(self, row: FinishedRow) -> None:
        """Add a finished row; wait while the store is far behind."""
        async with self._changed:
            await self._changed.wait_for(lambda: self._bytes < FULL_BYTES)
            pile = self._piles.get(row.segment.batch_id)
            if pile is None or row.segment not in pile.expected:
                return  # its segment was dropped
            if not pile.rows:
                pile.oldest_s = self._clock()
            pile.rows.append(row)
            pile.size_bytes += row.size_bytes
            self._bytes += row.size_bytes
            pile.expected[row.segment] -= 1
            if not pile.expected[row.segment]:
                del pile.expected[row.segment]
            if len(pile.rows) == 1 or self._due_in_s(pile) <= 0:
                self._changed.notify_all()

    async def drop(self, segments: Collection[SegmentRef]) -> None:
        """Forget the rows of some segments, also those that are still to be answered."""
        async with self._changed:
            for batch_id in {segment.batch_id for segment in segments} & self._piles.keys():
                pile = self._piles[batch_id]
                pile.expected = {each: count for each, count in pile.expected.items() if each not in segments}
                pile.rows = [row for row in pile.rows if row.segment not in segments]
                size_bytes = sum(row.size_bytes for row in pile.rows)
                self._bytes += size_bytes - pile.size_bytes
                pile.size_bytes = size_bytes
                if not pile.expected and not pile.rows:
                    del self._piles[batch_id]
            self._changed.notify_all()

    async def take(self) -> tuple[str, list[FinishedRow]]:
        """Wait until the rows of a batch are due, and return the batch and all of its finished rows."""
        async with self._changed:
            while True:
                due = {batch_id: self._due_in_s(pile) for batch_id, pile in self._piles.items() if pile.rows}
                first = min(due, key=due.__getitem__, default=None)
                if first is not None and due[first] <= 0:
                    break
                try:
                    async with asyncio.timeout(None if first is None else due[first]):
                        await self._changed.wait()
                except TimeoutError:
                    continue
            pile = self._piles[first]
            rows = pile.rows
            self._bytes -= pile.size_bytes
            pile.rows, pile.size_bytes = [], 0
            if not pile.expected:
                del self._piles[first]
            self._changed.notify_all()
            return first, rows

    def _due_in_s(self, pile: _Pile) -> float:
        if len(pile.rows) >= self._part_rows or pile.size_bytes >= PART_BYTES:
            return 0
        if pile.settled and not pile.expected:
            return 0
        age_s = max(FIRST_AGE_S, AGE_SHARE * (pile.oldest_s - pile.started_s)) * self.writers
        return pile.oldest_s + age_s - self._clock()
