"""Holdings of a job: leases with rows to commit, and places for parts."""

import asyncio
import random
import time
from collections import deque
from collections.abc import Callable, Collection
from dataclasses import replace
from typing import Final, Literal

from ray_job.contract.leases import (
    Commit,
    CommittedRows,
    Lease,
    PartUrl,
    PartUrlsRequest,
    SegmentRef,
    SegmentTimes,
)
from ray_job.contract.plans import bitmap_rows
from ray_job.coordinator import Coordinator

SEGMENT_TOKENS: Final = 1 << 16
"""About the tokens of a segment."""
LONG_POLL_S: Final = 20.0
"""How long an idle job waits for a lease in one request."""
EXTEND_EVERY_S: Final = 15.0
"""The longest pause between two extensions of the leases."""
FIRST_PLACES: Final = 2
"""Enough for a small batch: one for its only part, and one so that no more are asked for."""
MORE_PLACES: Final = 8
# Presigned URLs are good for several times as long.
PLACE_AGE_S: Final = 300.0


def extension_pause_s() -> float:
    """Return the time to the next extension. Jobs that began together do not stay in step."""
    return random.uniform(0.7, 1.0) * EXTEND_EVERY_S  # noqa: S311 - no secret


class HeldLeases:
    """The leases of a job, and how many of their rows are left to commit.

    Args:
        clock: the current time in seconds.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._leases: dict[SegmentRef, Lease] = {}
        self._left: dict[SegmentRef, set[int]] = {}
        self._reached_s: dict[SegmentRef, dict[str, float]] = {}  # of traced segments
        self.idle_since_s = clock()
        """When the last lease was gone."""

    def __len__(self) -> int:
        return len(self._leases)

    def __contains__(self, ref: object) -> bool:
        return ref in self._leases

    @property
    def refs(self) -> tuple[SegmentRef, ...]:
        """The leases to extend."""
        return tuple(self._leases)

    @property
    def rows_left(self) -> int:
        """Rows that are not committed."""
        return sum(map(len, self._left.values()))

    @property
    def tokens_per_row(self) -> float:
        """The mean of the held segments, or 0 if none is held."""
        rows = sum(lease.rows for lease in self._leases.values())
        return sum(lease.tokens for lease in self._leases.values()) / rows if rows else 0

    def has_batch(self, batch_id: str) -> bool:
        """Return whether a segment of a batch is held."""
        return any(ref.batch_id == batch_id for ref in self._leases)

    def add(self, lease: Lease) -> None:
        """Hold a lease until its rows are committed."""
        self._leases[lease.ref] = lease
        self._left[lease.ref] = set(range(lease.rows)) - bitmap_rows(lease.done)
        if lease.is_traced:
            self._reached_s[lease.ref] = {"leased": self._clock()}

    def remove(self, ref: SegmentRef) -> bool:
        """Forget a lease, and return whether it was held."""
        if self._leases.pop(ref, None) is None:
            return False
        del self._left[ref]
        self._reached_s.pop(ref, None)
        if not self._leases:
            self.idle_since_s = self._clock()
        return True

    def commit(self, ref: SegmentRef, rows: Collection[int]) -> None:
        """Count rows as committed. A lease without rows left is forgotten."""
        if ref in self._left:
            self._left[ref].difference_update(rows)
            if not self._left[ref]:
                self.remove(ref)

    def reach(self, ref: SegmentRef, step: Literal["read", "sent"]) -> None:
        """Note that the rows of a segment were read, or that the first of them went to an engine, if it is traced."""
        if (reached_s := self._reached_s.get(ref)) is not None:
            reached_s.setdefault(step, self._clock())

    def times(self, refs: Collection[SegmentRef], ready_at_s: float) -> tuple[SegmentTimes, ...]:
        """Return the times of the traced ones of some segments, of which a part was just written.

        The next part of a segment begins with the engine.

        Args:
            refs: the segments.
            ready_at_s: when the rows of the part were answered, by the clock.
        """
        now_s, found = self._clock(), []
        for ref in refs:
            if (reached_s := self._reached_s.get(ref)) is None:
                continue
            leased_s = reached_s["leased"]
            read_s = reached_s.get("read", leased_s)
            sent_s = reached_s.get("sent", read_s)
            found.append(
                SegmentTimes(
                    segment=ref.segment,
                    leased_s=now_s - leased_s,
                    read_s=now_s - read_s,
                    sent_s=now_s - sent_s,
                    ready_s=now_s - ready_at_s,
                )
            )
            reached_s |= {"leased": sent_s, "read": sent_s}
        return tuple(found)


class PartPlaces:
    """Places for parts, a few ahead for each batch, so that parts seldom wait for the coordinator.

    Args:
        coordinator: the coordinator.
        clock: the current time in seconds.
    """

    def __init__(self, coordinator: Coordinator, clock: Callable[[], float] = time.monotonic) -> None:
        self._coordinator = coordinator
        self._clock = clock
        self._stock: dict[str, deque[tuple[float, PartUrl]]] = {}
        self._refills: dict[str, asyncio.Task[None]] = {}

    def prepare(self, batch_id: str) -> None:
        """Ask for the first places of a batch."""
        if batch_id not in self._stock:
            self._stock[batch_id] = deque()
            self._refill(batch_id, FIRST_PLACES)

    def forget(self, batch_id: str) -> None:
        """Forget the places of a batch, because no parts will follow or because the store refuses them."""
        self._stock.pop(batch_id, None)

    async def take(self, batch_id: str) -> PartUrl | None:
        """Return a place for a part, or None if the coordinator has none for this batch.

        Raises:
            JobError: see ``Coordinator``.
        """
        stock = self._stock.setdefault(batch_id, deque())
        while stock and self._clock() > stock[0][0] + PLACE_AGE_S:
            stock.popleft()
        if not stock:
            refill = self._refill(batch_id, MORE_PLACES)
            await asyncio.wait({refill})  # others wait for it too, so it outlives this caller
            refill.result()
            stock = self._stock.get(batch_id, deque())
            if not stock:
                return None
        _, place = stock.popleft()
        if not stock:
            self._refill(batch_id, MORE_PLACES)
        return place

    def _refill(self, batch_id: str, count: int) -> "asyncio.Task[None]":
        running = self._refills.get(batch_id)
        if running is None or running.done():
            running = self._refills[batch_id] = asyncio.create_task(self._ask(batch_id, count))
            # Its error ends the job when a part needs it, or earlier with the error of another request.
            running.add_done_callback(lambda task: task.cancelled() or task.exception())
        return running

    async def _ask(self, batch_id: str, count: int) -> None:
        try:
            answer = await self._coordinator.part_urls(PartUrlsRequest(batch_id=batch_id, count=count))
            if batch_id in self._stock:
                self._stock[batch_id].extend((self._clock(), place) for place in answer.parts)
        finally:
            del self._refills[batch_id]


async def record(
    coordinator: Coordinator, commit: Commit, held: HeldLeases, *, ready_at_s: float
) -> tuple[SegmentRef, ...]:
    """Commit a part that was just written, and count its rows.

    Args:
        coordinator: the coordinator.
        commit: the part.
        held: the leases.
        ready_at_s: when its rows were answered, in monotonic seconds.

    Returns:
        Segments whose rows were refused: the job does not hold them any more.

    Raises:
        JobError: see ``Coordinator``.
    """
    refs = [segment_ref(commit.batch_id, rows) for rows in commit.segments]
    commit = replace(commit, times=held.times(refs, ready_at_s))
    answer = await coordinator.commit(commit)
    refused = []
    for ref, rows, accepted in zip(refs, commit.segments, answer.accepted, strict=True):
        if accepted:
            held.commit(ref, bitmap_rows(rows.rows))
        else:
            refused.append(ref)
    return tuple(refused)


def segment_ref(batch_id: str, rows: CommittedRows) -> SegmentRef:
    """Return the segment, under its lease, of some rows of a part."""
    return SegmentRef(batch_id=batch_id, segment=rows.segment, epoch=rows.epoch)
