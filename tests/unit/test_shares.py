"""Shares of a plan."""

import itertools
from collections.abc import Iterator
from random import Random

from hypothesis import given, settings
from hypothesis import strategies as st

from ray_job.engines.shares import Shares


def single_rows(costs: list[int], engines: int) -> Shares:
    return Shares(costs, range(len(costs)), engines)


def taken(shares: Shares, engine: int, in_flight: int = 0) -> Iterator[int]:
    while (position := shares.take(engine, in_flight)) is not None:
        yield position


def test_every_engine_begins_with_long_rows() -> None:
    shares = single_rows([9, 8, 7, 3, 2, 1], 2)
    assert [[shares.take(engine, 0) for _ in range(3)] for engine in (0, 1)] == [[0, 3, 4], [1, 2, 5]]


def test_rows_of_a_group_go_to_one_engine() -> None:
    shares = Shares([1] * 12, [0, 3, 6, 9], 2)
    assert [shares.take(0, 0) for _ in range(6)] == [0, 1, 2, 6, 7, 8]
    assert [shares.take(1, 0) for _ in range(6)] == [3, 4, 5, 9, 10, 11]


def test_group_that_is_larger_than_a_share_is_cut() -> None:
    shares = Shares([1] * 12, [0, 10, 11], 3)
    assert [shares.take(engine, 0) for engine in range(3)] == [0, 3, 6]


def test_shares_cost_about_the_same() -> None:
    shares = single_rows([9] * 5 + [1] * 25, 2)
    assert [len(list(itertools.islice(taken(shares, engine), 15))) for engine in (0, 1)] == [15, 15]


def test_engine_without_rows_takes_half_of_the_share_of_one_that_does_not_work_yet() -> None:
    shares = single_rows([1] * 8, 2)
    # Its own four, then the last two of the other one.
    assert [shares.take(0, in_flight) for in_flight in range(6)] == [0, 2, 4, 6, 5, 7]
    assert list(taken(shares, 1)) == [1, 3]


def test_engine_without_rows_leaves_a_working_one_as_many_as_it_has_itself() -> None:
    shares = single_rows([1] * 40, 2)
    assert shares.take(1, 0) == 1
    assert len([shares.take(0, in_flight) for in_flight in range(20)]) == 20
    assert shares.take(0, 20) is None
    assert shares.take(0, 19) is None
    assert shares.take(0, 9) == 31  # five of 19
    assert [len(list(taken(shares, engine, 99))) for engine in (0, 1)] == [4, 14]
    assert not shares.left


def test_returned_rows_run_first_and_others_need_not_wait_for_their_engine() -> None:
    shares = single_rows([1] * 8, 2)
    assert [shares.take(1, 0), shares.take(1, 1)] == [1, 3]
    shares.give_back(1, [3, 1])
    assert [shares.take(0, in_flight) for in_flight in range(8)] == [3, 1, 0, 2, 4, 6, 7, 5]


def test_nothing_is_left_of_no_rows() -> None:
    shares = Shares([], [], 2)
    assert not shares.left
    assert shares.take(0, 0) is None


@settings(deadline=None)
@given(
    rows=st.integers(0, 200),
    engines=st.integers(1, 5),
    group=st.integers(1, 50),
    order=st.randoms(use_true_random=False),
)
def test_every_position_is_taken_once(rows: int, engines: int, group: int, order: Random) -> None:
    shares = Shares([order.randrange(9) for _ in range(rows)], range(0, rows, group), engines)
    found: list[int] = []
    while shares.left:
        position = shares.take(order.randrange(engines), order.randrange(9))
        found += [] if position is None else [position]
    assert sorted(found) == list(range(rows))
