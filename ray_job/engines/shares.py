"""The leased rows that were not sent to an engine yet, in one share per engine."""

from collections import Counter, deque
from collections.abc import Collection, Iterable, Sequence

from ray_job.contract.leases import SegmentRef
from ray_job.rows import LeasedRow


class _Share:
    """Rows for one engine, in the order in which they are sent."""

    def __init__(self) -> None:
        self.rows: deque[LeasedRow] = deque()
        self.tokens = 0.0
        self.batches: Counter[str] = Counter()

    def append(self, row: LeasedRow) -> None:
        self.rows.append(row)
        self.tokens += row.tokens
        self.batches[row.segment.batch_id] += 1

    def pop_first(self) -> LeasedRow:
        return self._removed(self.rows.popleft())

    def pop_last(self) -> LeasedRow:
        return self._removed(self.rows.pop())

    def _removed(self, row: LeasedRow) -> LeasedRow:
        self.tokens -= row.tokens
        self.batches[row.segment.batch_id] -= 1
        if not self.batches[row.segment.batch_id]:
            del self.batches[row.segment.batch_id]
        return row


class Shares:
    """One share of the leased rows per engine. A segment's rows share prefixes, and meet in one engine's cache.

    Each segment goes to the engine with the fewest tokens left to send, among those that work if there are any. An
    engine whose share is empty takes rows from the end of the largest one: half of them if that share's engine does not
    work yet, else as many as make the rows that both have left equal.
    """

    def __init__(self) -> None:
        self._shares: dict[int, _Share] = {}
        self._working: set[int] = set()
        self._returned: deque[LeasedRow] = deque()

    def add_engine(self, engine: int) -> None:
        """Add the share of an engine, which does not work yet."""
        self._shares[engine] = _Share()

    def remove_engine(self, engine: int) -> None:
        """Remove the share of an engine. The next engine that asks takes its rows."""
        self._returned.extend(self._shares.pop(engine).rows)
        self._working.discard(engine)

    @property
    def left(self) -> int:
        """The rows that were not sent."""
        return len(self._returned) + sum(len(share.rows) for share in self._shares.values())

    @property
    def tokens(self) -> float:
        """About how many tokens these rows take."""
        return sum(row.tokens for row in self._returned) + sum(share.tokens for share in self._shares.values())

    def has_batch(self, engine: int, batch_id: str) -> bool:
        """Return whether rows of a batch are left in the share of an engine."""
        return batch_id in self._shares[engine].batches

    def deal(self, rows: Sequence[LeasedRow]) -> None:
        """Add the rows of a segment."""
        share = min((self._shares[each] for each in self._working or self._shares), key=lambda each: each.tokens)
        for row in rows:
            share.append(row)

    def take(self, engine: int, in_flight: int, *, can_lease: bool) -> LeasedRow | None:
        """Return the next row for an engine, which works from now on.

        Args:
            engine: its number.
            in_flight: the rows that it has begun and not finished.
            can_lease: whether further segments can be leased. Only an engine with nothing in flight then takes rows
                from another share.

        Returns:
            None if no row is left for it now.
        """
        self._working.add(engine)
        if self._returned:
            return self._returned.popleft()
        share = self._shares[engine]
        if not share.rows and not (can_lease and in_flight):
            number = max(self._shares, key=lambda each: len(self._shares[each].rows))
            other = self._shares[number]
            moved = (len(other.rows) - (in_flight if number in self._working else 0) + 1) // 2
            for row in reversed([other.pop_last() for _ in range(moved)]):
                share.append(row)
        return share.pop_first() if share.rows else None

    def give_back(self, engine: int, rows: Iterable[LeasedRow]) -> None:
        """Return the rows that an engine did not finish when it ended. The next engine that asks takes them."""
        self._working.discard(engine)
        self._returned.extend(rows)

    def drop(self, segments: Collection[SegmentRef]) -> list[LeasedRow]:
        """Remove the rows of some segments, and return them."""
        dropped = [row for row in self._returned if row.segment in segments]
        self._returned = deque(row for row in self._returned if row.segment not in segments)
        for engine, share in self._shares.items():
            if not any(row.segment in segments for row in share.rows):
                continue
            kept = self._shares[engine] = _Share()
            for row in share.rows:
                if row.segment in segments:
                    dropped.append(row)
                else:
                    kept.append(row)
        return dropped
