"""Positions in the queue, with a pool that counts its queries."""

from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

from service.api.queue_positions import QueuePositions


class CountingPool:
    """A pool whose query takes so many seconds of its clock."""

    def __init__(self, *, reading_s: float) -> None:
        self.queues: list[list[str]] = [["job-a", "job-b"], ["job-c"]]
        self.reading_s = reading_s
        self.readings = 0
        self.time_s = 100.0

    @contextmanager
    def connection(self) -> Any:
        def execute(_query: str) -> Any:
            self.readings += 1
            self.time_s += self.reading_s
            return SimpleNamespace(fetchall=lambda: [{"ids": ids} for ids in self.queues])

        yield SimpleNamespace(execute=execute)


def positions_of(pool: Any) -> QueuePositions:
    return QueuePositions(pool, clock=lambda: pool.time_s)


def test_each_accelerator_has_a_queue_of_its_own() -> None:
    assert positions_of(CountingPool(reading_s=0)).now() == {"job-a": 1, "job-b": 2, "job-c": 1}


def test_short_queue_is_read_for_each_request() -> None:
    pool = CountingPool(reading_s=0)
    positions = positions_of(pool)
    positions.now()
    pool.queues = [["job-b"]]
    assert positions.now() == {"job-b": 1}


def test_long_queue_is_read_for_a_small_share_of_the_time() -> None:
    pool = CountingPool(reading_s=0.02)
    positions = positions_of(pool)
    for _ in range(1_000):
        positions.now()
        pool.time_s += 0.01
    assert 15 <= pool.readings <= 20
