"""When finished rows become a part."""

import asyncio
from collections.abc import Awaitable, Callable

from ray_job.contract.parts import PartRow
from ray_job.engines import part_buffer
from ray_job.engines.part_buffer import PartBuffer


class Clock:
    """A clock that tests set."""

    def __init__(self) -> None:
        self.now_s = 1_000.0

    def __call__(self) -> float:
        return self.now_s


def row(line: int, size: int = 10) -> PartRow:
    return PartRow(line=line, outcome="completed", data=b"x" * size)


def run(work: Callable[[], Awaitable[object]]) -> None:
    async def within() -> None:
        async with asyncio.timeout(30):
            await work()

    asyncio.run(within())


def test_full_part_is_taken_at_once() -> None:
    async def work() -> None:
        buffer = PartBuffer(3, clock=Clock())
        for line in (1, 2):
            await buffer.add([row(line)])
        assert not buffer.is_due()
        await buffer.add([row(3), row(4)])
        assert [each.line for each in await buffer.take()] == [1, 2, 3, 4]
        assert not buffer.is_due()

    run(work)


def test_bytes_are_worth_a_part_too() -> None:
    async def work() -> None:
        buffer = PartBuffer(1_000, clock=Clock())
        await buffer.add([row(1, part_buffer.PART_BYTES)])
        assert len(await buffer.take()) == 1

    run(work)


def test_first_row_is_committed_after_a_second() -> None:
    async def work() -> None:
        clock = Clock()
        buffer = PartBuffer(1_000, clock=clock)
        await buffer.add([row(1)])
        clock.now_s += 0.9
        assert not buffer.is_due()
        clock.now_s += 0.2
        assert len(await buffer.take()) == 1

    run(work)


def test_parts_of_a_long_job_wait_longer() -> None:
    async def work() -> None:
        clock = Clock()
        buffer = PartBuffer(1_000, clock=clock, writers=2)
        clock.now_s += 500
        await buffer.add([row(1)])
        clock.now_s += 19
        assert not buffer.is_due()
        clock.now_s += 2
        assert buffer.is_due()

    run(work)


def test_take_waits_for_the_age_of_the_rows() -> None:
    async def work() -> None:
        buffer = PartBuffer(1_000)
        taking = asyncio.create_task(buffer.take())
        await asyncio.sleep(0)
        await buffer.add([row(1)])
        assert [each.line for each in await taking] == [1]

    run(work)


def test_closed_buffer_returns_the_rest_and_then_nothing() -> None:
    async def work() -> None:
        buffer = PartBuffer(1_000, clock=Clock())
        await buffer.add([row(1)])
        await buffer.close()
        assert len(await buffer.take()) == 1
        assert await buffer.take() == []

    run(work)


def test_rows_wait_while_the_store_is_far_behind() -> None:
    async def work() -> None:
        buffer = PartBuffer(1, clock=Clock())
        await buffer.add([row(1, part_buffer.FULL_BYTES)])
        adding = asyncio.create_task(buffer.add([row(2)]))
        await asyncio.sleep(0)
        assert not adding.done()
        await buffer.take()
        await adding

    run(work)
