"""Collects finished rows until they are worth a part object."""

import asyncio
import time
from collections.abc import Callable, Sequence
from typing import Final

from ray_job.contract.parts import PartRow

PART_BYTES: Final = 8 << 20
# Rows beyond this wait for the store, and the engine with them.
FULL_BYTES: Final = 4 * PART_BYTES
FIRST_AGE_S: Final = 1.0
# A part waits for at most this share of the time that the job has run: long jobs write few parts, and no job loses
# more than this share of its work.
AGE_SHARE: Final = 0.02


class PartBuffer:
    """Finished rows that no part holds yet.

    Args:
        part_rows: rows that are always worth a part.
        writers: how many buffers share the job. Each waits longer, so that the number of parts stays the same.
        clock: the current time in seconds.
    """

    def __init__(self, part_rows: int, *, writers: int = 1, clock: Callable[[], float] = time.monotonic) -> None:
        self._part_rows = part_rows
        self._writers = writers
        self._clock = clock
        self._started_s = clock()
        self._oldest_s = 0.0
        self._rows: list[PartRow] = []
        self._bytes = 0
        self._closed = False
        self._changed = asyncio.Condition()

    async def add(self, rows: Sequence[PartRow]) -> None:
        """Add finished rows, which stay in one part; wait while the store is far behind."""
        async with self._changed:
            await self._changed.wait_for(lambda: self._bytes < FULL_BYTES)
            was_empty = not self._rows
            if was_empty:
                self._oldest_s = self._clock()
            self._rows += rows
            self._bytes += sum(len(row.data) for row in rows)
            if was_empty or self.is_due():
                self._changed.notify_all()

    async def close(self) -> None:
        """Let ``take`` return what is left at once."""
        async with self._changed:
            self._closed = True
            self._changed.notify_all()

    def is_due(self) -> bool:
        """Return whether the rows are to be written now."""
        return self._closed or len(self._rows) >= self._part_rows or self._bytes >= PART_BYTES or self._due_in_s() <= 0

    def _due_in_s(self) -> float:
        age_s = max(FIRST_AGE_S, AGE_SHARE * (self._oldest_s - self._started_s)) * self._writers
        return self._oldest_s + age_s - self._clock()

    async def take(self) -> list[PartRow]:
        """Wait until rows are due and return all of them; return none after ``close``."""
        async with self._changed:
            await self._changed.wait_for(lambda: self._rows or self._closed)
            while not self.is_due():
                try:
                    async with asyncio.timeout(self._due_in_s()):
                        await self._changed.wait_for(self.is_due)
                except TimeoutError:
                    continue
            taken, self._rows, self._bytes = self._rows, [], 0
            self._changed.notify_all()
            return taken
