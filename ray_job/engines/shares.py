"""The positions of a batch's plan that each engine still has to run."""

import heapq
import itertools
import math
from array import array
from collections import deque
from collections.abc import Iterable, Sequence


class Shares:
    """One share of the plan per engine. The rows of a group share a prefix, and meet in one engine's cache.

    Each group goes to the engine whose share costs least so far, so all engines begin with long rows and end with short
    ones. A group that costs more than an engine's part of the batch is cut.

    An engine whose share is empty takes rows from the end of the largest one: half of them if that share's engine does
    not work yet, else as many as make the rows that both have left equal.

    Args:
        costs: the cost of each row of the plan.
        group_starts: positions of the plan at which a group begins, ascending from 0.
        engines: the number of engines.
    """

    def __init__(self, costs: Sequence[int], group_starts: Sequence[int], engines: int) -> None:
        total = [0, *itertools.accumulate(cost + 1 for cost in costs)]
        part = total[-1] / engines
        self._shares = [array("Q") for _ in range(engines)]
        loads = [(0, engine) for engine in range(engines)]
        for start, end in itertools.pairwise([*group_starts, len(costs)]):
            pieces = math.ceil((total[end] - total[start]) / part)
            bounds = [start + (end - start) * piece // pieces for piece in range(pieces + 1)]
            for first, last in itertools.pairwise(bounds):
                load, engine = loads[0]
                heapq.heapreplace(loads, (load + total[last] - total[first], engine))
                self._shares[engine].extend(range(first, last))
        for share in self._shares:
            share.reverse()  # rows are taken from its end
        self._returned: deque[int] = deque()
        self._working: set[int] = set()

    @property
    def left(self) -> bool:
        """Whether any row is left to begin."""
        return bool(self._returned) or any(self._shares)

    def take(self, engine: int, in_flight: int) -> int | None:
        """Return the next position for an engine.

        Args:
            engine: its number.
            in_flight: the rows that it has begun and not finished.

        Returns:
            None if no row is left for it now.
        """
        self._working.add(engine)
        if self._returned:
            return self._returned.popleft()
        if not self._shares[engine]:
            other = max(range(len(self._shares)), key=lambda each: len(self._shares[each]))
            share = self._shares[other]
            moved = (len(share) - (in_flight if other in self._working else 0) + 1) // 2
            if moved < 1:
                return None
            self._shares[engine], self._shares[other] = share[:moved], share[moved:]
        return self._shares[engine].pop()

    def give_back(self, engine: int, positions: Iterable[int]) -> None:
        """Return the positions that an engine did not finish when it ended. The next engine that asks takes them."""
        self._working.discard(engine)
        self._returned.extend(positions)
