"""Holdings of a job."""

import asyncio
from dataclasses import replace
from pathlib import Path

from ray_job.contract.leases import Lease, PartUrls, PartUrlsRequest, SegmentTimes
from ray_job.holdings import FIRST_PLACES, PLACE_AGE_S, HeldLeases, PartPlaces
from tests.memory_coordinator import MemoryCoordinator


def lease(segment: int, rows: int = 3, done: str = "0", batch_id: str = "batch_1") -> Lease:
    return Lease(
        batch_id=batch_id,
        segment=segment,
        epoch=1,
        endpoint="/v1/completions",
        url="file:///plan",
        start=0,
        end=1,
        rows=rows,
        tokens=30,
        done=done,
        cache_salt="",
    )


def test_lease_is_held_until_its_last_row_is_committed() -> None:
    held = HeldLeases()
    held.add(lease(0, rows=3, done="1"))
    assert (held.rows_left, held.tokens_per_row) == (2, 10)
    held.commit(lease(0).ref, {1})
    assert held.refs == (lease(0).ref,)
    held.commit(lease(0).ref, {2})
    assert (len(held), held.rows_left, held.tokens_per_row) == (0, 0, 0)


def test_idle_time_begins_when_the_last_lease_is_gone() -> None:
    now_s = 5.0
    held = HeldLeases(clock=lambda: now_s)
    for segment in (0, 1):
        held.add(lease(segment))
    now_s = 7.0
    assert held.remove(lease(0).ref)
    assert not held.remove(lease(0).ref)
    assert (held.idle_since_s, held.has_batch("batch_1"), held.has_batch("batch_2")) == (5, True, False)
    held.remove(lease(1).ref)
    assert held.idle_since_s == 7


def test_times_of_a_traced_segment_and_of_its_next_part() -> None:
    now_s = 100.0
    held = HeldLeases(clock=lambda: now_s)
    traced = replace(lease(0), is_traced=True)
    held.add(traced)
    held.add(lease(1))
    refs = [traced.ref, lease(1).ref]
    now_s = 103.0
    for ref in refs:
        held.reach(ref, "read")
    now_s = 105.0
    for ref in refs:
        held.reach(ref, "sent")
    now_s = 110.0
    held.reach(traced.ref, "sent")
    first = SegmentTimes(segment=0, leased_s=10, read_s=7, sent_s=5, ready_s=2)
    assert held.times(refs, ready_at_s=108) == (first,)
    assert held.times(refs, ready_at_s=109) == (replace(first, leased_s=5, read_s=5, ready_s=1),)
    held.remove(traced.ref)
    assert held.times(refs, ready_at_s=109) == ()


class CountingCoordinator(MemoryCoordinator):
    """A coordinator that counts requests for places."""

    def __init__(self, root: Path) -> None:
        super().__init__(root)
        self.asked: list[int] = []
        self.has_places = True

    async def part_urls(self, request: PartUrlsRequest) -> PartUrls:
        self.asked.append(request.count)
        return await super().part_urls(request) if self.has_places else PartUrls(parts=())


def test_small_batch_asks_for_places_once(tmp_path: Path) -> None:
    async def work() -> None:
        coordinator = CountingCoordinator(tmp_path)
        places = PartPlaces(coordinator)
        places.prepare("batch_1")
        assert await places.take("batch_1")
        assert coordinator.asked == [FIRST_PLACES]

    asyncio.run(work())


def test_places_are_refilled_before_they_are_needed_and_each_is_taken_once(tmp_path: Path) -> None:
    async def work() -> None:
        coordinator = CountingCoordinator(tmp_path)
        places = PartPlaces(coordinator)
        keys = []
        for _ in range(30):
            place = await places.take("batch_1")
            assert place is not None
            keys.append(place.key)
            await asyncio.sleep(0)
        assert len(set(keys)) == 30
        assert len(coordinator.asked) == 4

    asyncio.run(work())


def test_old_places_are_not_used(tmp_path: Path) -> None:
    now_s = 0.0

    async def work() -> None:
        nonlocal now_s
        places = PartPlaces(CountingCoordinator(tmp_path), clock=lambda: now_s)
        places.prepare("batch_1")
        first = await places.take("batch_1")
        now_s = PLACE_AGE_S + 1
        second = await places.take("batch_1")
        assert (first and first.key[-10:], second and second.key[-10:]) == ("00000.part", "00002.part")

    asyncio.run(work())


def test_batch_that_has_ended_has_no_places(tmp_path: Path) -> None:
    async def work() -> None:
        coordinator = CountingCoordinator(tmp_path)
        coordinator.has_places = False
        assert await PartPlaces(coordinator).take("batch_1") is None

    asyncio.run(work())
