"""Hears what happens to batches, once for all clients that watch any.

One connection of the process listens to Postgres. What it hears of is read in one query for all batches, in one
thread, and kept per batch: a thousand watchers of a batch cost what one does, and hold neither a thread nor a
connection. Without the listening connection, and every now and then beside it, all watched batches are read.
"""

import asyncio
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any, Final
from weakref import WeakValueDictionary

import psycopg
import structlog

from service.api.extension import eta_s, fresh_rate
from service.db import CONNECTION_LIMITS, Pool, query
from service.transitions import FINAL

_log = structlog.get_logger(__name__)

_COALESCE_S: Final = 0.1
_MAX_BACKOFF_S: Final = 10.0
_NEVER: Final = datetime.min.replace(tzinfo=UTC)


@dataclass(frozen=True, slots=True, kw_only=True)
class StreamTimes:
    """Times of event streams, in seconds.

    Attributes:
        max_stream_s: after so long a stream ends and its client connects again, so that a revoked key sees no more.
        heartbeat_s: an idle stream sends a comment so often: proxies cut connections that are still for a minute.
        listening_poll_s: all watched batches are read so often even if nothing was heard of them.
        deaf_poll_s: the same while there is no listening connection.
    """

    max_stream_s: float = 3600
    heartbeat_s: float = 15
    listening_poll_s: float = 10
    deaf_poll_s: float = 2


async def _listening_connection(pool: Pool) -> psycopg.AsyncConnection:
    conninfo = pool.conninfo() if callable(pool.conninfo) else pool.conninfo
    return await psycopg.AsyncConnection.connect(
        conninfo, autocommit=True, application_name="cloister events", **CONNECTION_LIMITS
    )


@dataclass(eq=False)
class Feed:
    """What is known of one watched batch.

    Attributes:
        batch_id: the batch.
        events: its rows of ``batch_events``, oldest first; a batch has some ten of them.
        state: its status, counts and rate, as clients see them.
        progress: changes when the counts do.
        is_over: it is in a final state, or it was deleted; no event will follow.
        changed: set when any of these changed, and then replaced.
        as_of: the database's time at which this was so.
    """

    batch_id: str
    events: list[dict[str, Any]] = field(default_factory=list)
    state: dict[str, Any] = field(default_factory=dict)
    progress: tuple[int, ...] = ()
    is_over: bool = False
    changed: asyncio.Event = field(default_factory=asyncio.Event)
    as_of: datetime = _NEVER

    @property
    def last_id(self) -> int:
        """The id of its newest event, 0 before the first."""
        return int(self.events[-1]["id"]) if self.events else 0

    def after(self, event_id: int) -> Sequence[dict[str, Any]]:
        """The events behind one."""
        return [event for event in self.events if event["id"] > event_id]

    def is_told(self, event_id: int) -> bool:
        """Whether a client that has this event has all there will ever be."""
        return self.is_over and self.last_id <= event_id

    def wake(self) -> None:
        """Lets all who watch look again."""
        changed, self.changed = self.changed, asyncio.Event()
        changed.set()

    def update(self, row: Mapping[str, Any]) -> None:
        """Takes over a row of ``watched_batches``, unless a newer one came first."""
        if row["now"] < self.as_of:
            return
        self.as_of = row["now"]
        self.events += [event for event in row["events"] or () if event["id"] > self.last_id]
        counts = {name: row[name] for name in ("total", "completed", "failed")}
        rate, eta = fresh_rate(row, row["now"]), eta_s(row, row["now"])
        self.progress = tuple(counts.values())
        self.state = {
            "status": row["status"],
            "request_counts": counts,
            "rate_rows_per_second": None if rate is None else round(rate, 3),
            "eta_seconds": None if eta is None else round(eta),
        }
        self.is_over = row["status"] in FINAL
        self.wake()


class Watching:
    """The watched batches of this process. To be used in one event loop; ``stop`` ends all streams.

    Args:
        pool: where batches are read; the listening connection goes to the same database.
        times: of the streams.
    """

    def __init__(self, pool: Pool, times: StreamTimes) -> None:
        self.times = times
        self.is_stopping = False
        self.watchers = 0
        self._pool = pool
        # Kept by those who watch: a feed goes with the last of them.
        self._feeds: WeakValueDictionary[str, Feed] = WeakValueDictionary()
        self._dirty: set[str] = set()
        self._woken = asyncio.Event()
        self._is_listening = False
        self._tasks: list[asyncio.Task[None]] = []

    async def open(self, batch_id: str) -> Feed:
        """What is known of a batch, kept up to date for as long as somebody holds it.

        Raises:
            psycopg.OperationalError: the database cannot be reached.
        """
        if not self._tasks and not self.is_stopping:
            self._tasks = [asyncio.create_task(self._listen()), asyncio.create_task(self._refresh())]
        feed = self._feeds.get(batch_id)
        if feed is None:
            feed = self._feeds[batch_id] = Feed(batch_id)
        if not feed.state:
            await self._read([feed])
        return feed

    def stop(self) -> None:
        """Ends all streams and everything in the background."""
        self.is_stopping = True
        for feed in list(self._feeds.values()):
            feed.wake()
        for task in self._tasks:
            task.cancel()

    async def stopped(self) -> None:
        """Waits for what ``stop`` ended."""
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _read(self, feeds: Iterable[Feed]) -> None:
        feeds = list(feeds)
        values = {"ids": [feed.batch_id for feed in feeds], "last_ids": [feed.last_id for feed in feeds]}
        rows = {row["id"]: row for row in await asyncio.to_thread(self._rows, values)}
        for feed in feeds:
            if feed.batch_id in rows:
                feed.update(rows[feed.batch_id])
            else:
                feed.is_over = True
                feed.wake()

    def _rows(self, values: Mapping[str, Any]) -> list[dict[str, Any]]:
        with self._pool.connection() as connection:
            return connection.execute(query("watched_batches"), values).fetchall()

    def _is_dirty(self, batch_ids: Iterable[str]) -> None:
        self._dirty.update(batch_ids)
        if self._dirty:
            self._woken.set()

    async def _refresh(self) -> None:
        """Reads what is dirty, and all of it when nothing was heard for a while."""
        while True:
            poll_s = self.times.listening_poll_s if self._is_listening else self.times.deaf_poll_s
            try:
                await asyncio.wait_for(self._woken.wait(), poll_s)
            except TimeoutError:
                self._dirty.update(self._feeds)
            # Many notices come at once; they cost one query.
            await asyncio.sleep(_COALESCE_S)
            dirty, self._dirty = self._dirty, set()
            self._woken.clear()
            feeds = [feed for batch_id in dirty if (feed := self._feeds.get(batch_id)) is not None]
            try:
                if feeds:
                    await self._read(feeds)
            except Exception as error:  # noqa: BLE001 - the shell of the loop: all streams of the process hang on it
                _log.warning("events.not_read", error=type(error).__name__, watched=len(feeds))
                await asyncio.sleep(1)
                self._is_dirty(dirty)

    async def _listen(self) -> None:
        """Notes of which watched batches Postgres tells."""
        backoff_s = 0.5
        while True:
            try:
                async with await _listening_connection(self._pool) as connection:
                    await connection.execute("LISTEN batch_events")
                    self._is_listening, backoff_s = True, 0.5
                    # What happened before this was not heard.
                    self._is_dirty(list(self._feeds))
                    async for notice in connection.notifies():
                        if notice.payload in self._feeds:
                            self._is_dirty([notice.payload])
            except Exception as error:  # noqa: BLE001 - the shell of the loop
                _log.warning("events.listener_lost", error=type(error).__name__, retry_in_s=backoff_s)
            finally:
                self._is_listening = False
            await asyncio.sleep(backoff_s)
            backoff_s = min(backoff_s * 2, _MAX_BACKOFF_S)
