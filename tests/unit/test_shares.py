"""Shares of a plan."""

from collections.abc import Iterator
from random import Random

from hypothesis import given, settings
from hypothesis import strategies as st

from ray_job.engines.shares import Shares


def taken(shares: Shares, engine: int) -> Iterator[int]:
    while (position := shares.take(engine)) is not None:
        yield position


def test_engines_take_contiguous_shares() -> None:
    shares = Shares([1] * 10, 2)
    assert [shares.take(0), shares.take(1), shares.take(0), shares.take(1)] == [0, 5, 1, 6]


def test_engine_without_rows_takes_half_of_the_largest_share() -> None:
    shares = Shares([1] * 9, 3)
    assert [shares.take(0) for _ in range(4)] == [0, 1, 2, 4]
    assert [shares.take(1) for _ in range(2)] == [3, 7]


def test_returned_rows_run_first() -> None:
    shares = Shares([1] * 4, 1)
    assert [shares.take(0), shares.take(0)] == [0, 1]
    shares.give_back([1])
    assert list(taken(shares, 0)) == [1, 2, 3]


@settings(deadline=None)
@given(rows=st.integers(0, 200), engines=st.integers(1, 5), order=st.randoms(use_true_random=False))
def test_every_position_is_taken_once(rows: int, engines: int, order: Random) -> None:
    shares = Shares([order.randrange(9) for _ in range(rows)], engines)
    found = []
    while (position := shares.take(order.randrange(engines))) is not None:
        found.append(position)
    assert sorted(found) == list(range(rows))


def test_shares_cost_about_the_same() -> None:
    shares = Shares([9] * 5 + [1] * 25, 2)
    assert [shares.take(0), shares.take(1)] == [0, 5]
