"""When finished rows become a part."""

import asyncio
from collections.abc import Awaitable, Callable

from ray_job.contract.leases import SegmentRef
from ray_job.contract.parts import PartRow
from ray_job.engines import part_buffer
from ray_job.engines.part_buffer import PartBuffer
from ray_job.rows import FinishedRow


class Clock:
    """A clock that tests set."""

    def __init__(self) -> None:
        self.now_s = 1_000.0

    def __call__(self) -> float:
        return self.now_s


def segment(number: int = 0, batch_id: str = "batch_1") -> SegmentRef:
    return SegmentRef(batch_id=batch_id, segment=number, epoch=1)


ONE, OTHER = segment(), segment(batch_id="batch_2")


def row(line: int, size: int = 10, ref: SegmentRef = ONE) -> FinishedRow:
    return FinishedRow(segment=ref, row=line, results=(PartRow(line=line, outcome="completed", data=b"x" * size),))


def new_buffer(part_rows: int, *, rows: int = 9, clock: Callable[[], float] | None = None) -> PartBuffer:
    buffer = PartBuffer(part_rows, clock=clock or Clock())
    buffer.expect([ONE] * rows)
    return buffer


async def is_due(buffer: PartBuffer) -> bool:
    taking = asyncio.create_task(buffer.take())
    for _ in range(5):
        await asyncio.sleep(0)
    taking.cancel()
    return taking.done()


async def taken(buffer: PartBuffer) -> tuple[str, list[int]]:
    batch_id, rows = await buffer.take()
    return batch_id, [each.row for each in rows]


def run(work: Callable[[], Awaitable[object]]) -> None:
    async def within() -> None:
        async with asyncio.timeout(30):
            await work()

    asyncio.run(within())


def test_full_part_is_taken_at_once() -> None:
    async def work() -> None:
        buffer = new_buffer(3)
        for line in (1, 2):
            await buffer.add(row(line))
        assert not await is_due(buffer)
        await buffer.add(row(3))
        assert await taken(buffer) == ("batch_1", [1, 2, 3])

    run(work)


def test_bytes_are_worth_a_part_too() -> None:
    async def work() -> None:
        buffer = new_buffer(1_000)
        await buffer.add(row(1, part_buffer.PART_BYTES))
        assert await taken(buffer) == ("batch_1", [1])

    run(work)


def test_first_row_is_committed_after_a_second() -> None:
    async def work() -> None:
        clock = Clock()
        buffer = new_buffer(1_000, clock=clock)
        await buffer.add(row(1))
        clock.now_s += 0.9
        assert not await is_due(buffer)
        clock.now_s += 0.2
        assert await taken(buffer) == ("batch_1", [1])

    run(work)


def test_parts_of_a_long_batch_wait_longer() -> None:
    async def work() -> None:
        clock = Clock()
        buffer = new_buffer(1_000, clock=clock)
        buffer.writers = 2
        clock.now_s += 500
        await buffer.add(row(1))
        clock.now_s += 19
        assert not await is_due(buffer)
        clock.now_s += 2
        assert await is_due(buffer)

    run(work)


def test_take_waits_for_the_age_of_the_rows() -> None:
    async def work() -> None:
        buffer = PartBuffer(1_000)
        buffer.expect([ONE, ONE])
        taking = asyncio.create_task(taken(buffer))
        await asyncio.sleep(0)
        await buffer.add(row(1))
        assert await taking == ("batch_1", [1])

    run(work)


def test_last_announced_row_of_a_settled_batch_is_taken_at_once() -> None:
    async def work() -> None:
        buffer = new_buffer(1_000, rows=2)
        await buffer.settle(["batch_1"])
        await buffer.add(row(1))
        assert not await is_due(buffer)
        await buffer.add(row(2))
        assert await taken(buffer) == ("batch_1", [1, 2])

    run(work)


def test_batch_is_not_settled_any_more_when_further_rows_are_announced() -> None:
    async def work() -> None:
        buffer = new_buffer(1_000, rows=1)
        await buffer.settle(["batch_1"])
        buffer.expect([segment(1)])
        await buffer.add(row(1))
        assert not await is_due(buffer)
        await buffer.settle(["batch_1"])
        await buffer.add(row(2, ref=segment(1)))
        assert await taken(buffer) == ("batch_1", [1, 2])

    run(work)


def test_rows_of_two_batches_are_in_two_parts() -> None:
    async def work() -> None:
        buffer = new_buffer(2)
        buffer.expect([OTHER] * 2)
        for line in (1, 2):
            await buffer.add(row(line))
            await buffer.add(row(line, ref=OTHER))
        assert [await taken(buffer) for _ in range(2)] == [("batch_1", [1, 2]), ("batch_2", [1, 2])]

    run(work)


def test_rows_of_a_lost_segment_are_in_no_part() -> None:
    async def work() -> None:
        buffer = new_buffer(2)
        buffer.expect([segment(1)] * 3)
        await buffer.add(row(1))
        await buffer.drop([ONE])
        await buffer.add(row(2))
        for line in (3, 4):
            await buffer.add(row(line, ref=segment(1)))
        assert await taken(buffer) == ("batch_1", [3, 4])

    run(work)


def test_rows_wait_while_the_store_is_far_behind() -> None:
    async def work() -> None:
        buffer = new_buffer(1)
        await buffer.add(row(1, part_buffer.FULL_BYTES))
        adding = asyncio.create_task(buffer.add(row(2)))
        await asyncio.sleep(0)
        assert not adding.done()
        await buffer.take()
        await adding

    run(work)
