"""Shares of the rows that a job has leased."""

from collections.abc import Iterator
from random import Random

from hypothesis import given, settings
from hypothesis import strategies as st

from ray_job.contract.leases import SegmentRef
from ray_job.engines.shares import Shares
from ray_job.rows import LeasedRow


def ref(number: int, batch_id: str = "batch_1") -> SegmentRef:
    return SegmentRef(batch_id=batch_id, segment=number, epoch=1)


def segment(number: int, rows: int, tokens: float = 1, batch_id: str = "batch_1") -> list[LeasedRow]:
    return [
        LeasedRow(segment=ref(number, batch_id), row=row, line=100 * number + row, raw=b"{}", tokens=tokens)
        for row in range(rows)
    ]


def new_shares(engines: int, *segments: list[LeasedRow]) -> Shares:
    shares = Shares()
    for engine in range(engines):
        shares.add_engine(engine)
    for rows in segments:
        shares.deal(rows)
    return shares


def take(shares: Shares, engine: int, in_flight: int = 0, *, can_lease: bool = False) -> int | None:
    row = shares.take(engine, in_flight, can_lease=can_lease)
    return None if row is None else row.line


def taken(shares: Shares, engine: int, in_flight: int = 0) -> Iterator[int]:
    while (line := take(shares, engine, in_flight)) is not None:
        yield line


def test_rows_of_a_segment_go_to_one_engine() -> None:
    shares = new_shares(2, segment(1, 3), segment(2, 3))
    assert [take(shares, 0) for _ in range(3)] == [100, 101, 102]
    assert [take(shares, 1) for _ in range(3)] == [200, 201, 202]


def test_segment_goes_to_the_engine_with_the_fewest_tokens() -> None:
    shares = new_shares(2, segment(1, 2, tokens=9), segment(2, 3), segment(3, 3))
    assert [take(shares, 1) for _ in range(6)] == [200, 201, 202, 300, 301, 302]


def test_segment_goes_to_an_engine_that_works() -> None:
    shares = new_shares(2)
    assert take(shares, 1) is None
    shares.deal(segment(1, 2))
    shares.deal(segment(2, 2))
    assert [take(shares, 1, 4) for _ in range(4)] == [100, 101, 200, 201]


def test_engine_without_rows_takes_half_of_the_share_of_one_that_does_not_work_yet() -> None:
    shares = new_shares(2, segment(1, 1), segment(2, 4))
    assert [take(shares, 0, in_flight) for in_flight in range(3)] == [100, 202, 203]
    assert list(taken(shares, 1)) == [200, 201]


def test_engine_without_rows_leaves_a_working_one_as_many_as_it_has_itself() -> None:
    shares = new_shares(2, segment(1, 20))
    assert take(shares, 0) == 100
    assert take(shares, 1, 20) is None
    assert take(shares, 1, 19) is None
    assert take(shares, 1, 9) == 115  # five of 19
    assert [len(list(taken(shares, engine, 99))) for engine in (1, 0)] == [4, 14]
    assert not shares.left


def test_busy_engine_does_not_cut_a_segment_while_others_can_be_leased() -> None:
    shares = new_shares(2, segment(1, 20))
    assert take(shares, 0) == 100
    assert take(shares, 1, 1, can_lease=True) is None
    assert take(shares, 1, 0, can_lease=True) == 110


def test_returned_rows_run_first_and_others_need_not_wait_for_their_engine() -> None:
    rows = segment(1, 4)
    shares = new_shares(2, rows)
    assert [take(shares, 0), take(shares, 0)] == [100, 101]
    shares.give_back(0, rows[:2])
    assert [take(shares, 1, in_flight) for in_flight in range(2)] == [100, 101]


def test_rows_of_an_engine_that_ended_go_to_the_next_one_that_asks() -> None:
    shares = new_shares(2, segment(1, 2))
    shares.remove_engine(0)
    assert list(taken(shares, 1)) == [100, 101]


def test_lost_segments_are_dropped() -> None:
    shares = new_shares(2, segment(1, 3), segment(2, 2), segment(3, 1, batch_id="batch_2"))
    assert [row.line for row in shares.drop([ref(1)])] == [100, 101, 102]
    assert (shares.left, shares.tokens) == (3, 3)
    assert [shares.has_batch(1, batch_id) for batch_id in ("batch_1", "batch_2")] == [True, True]
    assert not shares.has_batch(0, "batch_1")


@settings(deadline=None)
@given(
    sizes=st.lists(st.integers(1, 8), max_size=4),
    engines=st.integers(1, 5),
    order=st.randoms(use_true_random=False),
)
def test_every_row_is_taken_once(sizes: list[int], engines: int, order: Random) -> None:
    shares = new_shares(engines)
    waiting = [segment(number, size, tokens=order.randrange(9)) for number, size in enumerate(sizes)]
    in_flight: list[list[LeasedRow]] = [[] for _ in range(engines)]
    finished: list[int] = []
    while waiting or shares.left or any(in_flight):
        engine, act = order.randrange(engines), order.random()
        if waiting and act < 0.1:
            shares.deal(waiting.pop())
        elif act < 0.2:
            shares.give_back(engine, in_flight[engine])
            in_flight[engine] = []
        elif act < 0.4 and in_flight[engine]:
            finished.append(in_flight[engine].pop().line)
        elif row := shares.take(engine, len(in_flight[engine]), can_lease=bool(waiting)):
            in_flight[engine].append(row)
    assert sorted(finished) == sorted(row.line for number, size in enumerate(sizes) for row in segment(number, size))
    assert shares.tokens == 0
