"""The positions of a batch's plan that each engine still has to run."""

import bisect
import itertools
from collections import deque
from collections.abc import Iterable, Sequence


class Shares:
    """One contiguous share of the plan per engine, so that rows with one prefix meet in one engine's cache.

    An engine without rows takes the second half of the largest share that is left.

    Args:
        costs: the cost of each row of the plan. The shares cost about the same.
        engines: the number of engines.
    """

    def __init__(self, costs: Sequence[int], engines: int) -> None:
        total = list(itertools.accumulate(cost + 1 for cost in costs))
        inner = [bisect.bisect_left(total, total[-1] * each // engines) + 1 for each in range(1, engines) if total]
        bounds = [0, *inner, *[len(costs)] * (engines - len(inner))]
        self._shares = [range(start, end) for start, end in itertools.pairwise(bounds)]
        self._returned: deque[int] = deque()

    def take(self, engine: int) -> int | None:
        """Return the next position for an engine, or None if no row is left."""
        if self._returned:
            return self._returned.popleft()
        if not self._shares[engine]:
            largest = max(range(len(self._shares)), key=lambda each: len(self._shares[each]))
            share = self._shares[largest]
            kept = len(share) // 2
            self._shares[largest], self._shares[engine] = share[:kept], share[kept:]
        share = self._shares[engine]
        if not share:
            return None
        self._shares[engine] = share[1:]
        return share[0]

    def give_back(self, positions: Iterable[int]) -> None:
        """Return positions that an engine did not finish. The next engine that asks takes them."""
        self._returned.extend(positions)
