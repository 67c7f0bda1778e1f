"""Live state of watched batches, shared by all clients that watch one.

One connection of the process listens for Postgres notifications. A batch that changed is read once for all of its
watchers: one query, in one thread, for all changed batches. A thousand watchers of a batch cost as much as one, and
hold neither a thread nor a connection. All watched batches are also read periodically, more often while the listening
connection is lost.
"""

import asyncio
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from typing import Any, Final
from weakref import WeakValueDictionary

import psycopg
import structlog

from service.api.extension import rate_and_eta
from service.api_keys import PERSON_PREFIX, valid_readers
from service.db import CONNECTION_LIMITS, Pool
from service.db.rows import WatchedBatchRow, fetch_all
from service.transitions import FINAL

_log = structlog.get_logger(__name__)

_COALESCE_S: Final = 0.1
_FIRST_BACKOFF_S: Final = 0.5
_MAX_BACKOFF_S: Final = 10.0
_NEVER: Final = datetime.min.replace(tzinfo=UTC)


@dataclass(eq=False)
class Feed:
    """The known state of one watched batch.

    Attributes:
        batch_id: the batch.
        events: its rows of ``batch_events``, oldest first; a batch has about ten.
        state: its status, counts and rate, as clients see them.
        progress: its counts, for comparison.
        is_over: the batch is in a final state or deleted; no event will follow.
        changed: set when any of these changed, and then replaced.
        as_of: the database's time of this state.
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
        """The id of the newest event; 0 before the first."""
        return int(self.events[-1]["id"]) if self.events else 0

    def after(self, event_id: int) -> Sequence[dict[str, Any]]:
        """Return the events after one."""
        return [event for event in self.events if event["id"] > event_id]

    def is_finished(self, event_id: int) -> bool:
        """Return whether a client with this event has every event that the batch will ever have."""
        return self.is_over and self.last_id <= event_id

    def wake(self) -> None:
        """Wake all watchers."""
        changed, self.changed = self.changed, asyncio.Event()
        changed.set()

    def update(self, row: WatchedBatchRow) -> None:
        """Take over a newly read state, unless a newer one arrived first."""
        if row.now < self.as_of:
            return
        self.as_of = row.now
        self.events += [event for event in row.events or () if event["id"] > self.last_id]
        rate, eta = rate_and_eta(row, row.now)
        self.progress = (row.total, row.completed, row.failed)
        self.state = {
            "status": row.status,
            "request_counts": {"total": row.total, "completed": row.completed, "failed": row.failed},
            "rate_rows_per_second": None if rate is None else round(rate, 3),
            "eta_seconds": None if eta is None else round(eta),
        }
        self.is_over = row.status in FINAL
        self.wake()


class Watching:
    """The watched batches of this process. It belongs to one event loop; ``stop`` ends all streams.

    Args:
        pool: the database of the batches; the listening connection uses the same one.
        max_key_lifetime: see ``service.api_keys.authenticate``.
        max_stream_s: a stream ends after this time and its client reconnects, so that the replicas share the streams.
        key_check_s: the keys of all streams are checked this often; the streams of a revoked or expired key end.
        heartbeat_s: an idle stream sends a comment this often, because proxies cut connections that are idle for a
            minute.
        poll_s: all watched batches are read this often even without a notification.
        fallback_poll_s: the same while the listening connection is lost.
    """

    def __init__(
        self,
        pool: Pool,
        *,
        max_key_lifetime: timedelta | None = None,
        max_stream_s: float = 3600,
        key_check_s: float = 5,
        heartbeat_s: float = 15,
        poll_s: float = 10,
        fallback_poll_s: float = 2,
    ) -> None:
        self.max_stream_s = max_stream_s
        self.heartbeat_s = heartbeat_s
        self._key_check_s = key_check_s
        self._poll_s = poll_s
        self._fallback_poll_s = fallback_poll_s
        self.is_stopping = False
        self._pool = pool
        self._max_key_lifetime = max_key_lifetime
        # Watchers hold the references: a feed disappears with its last watcher.
        self._feeds: WeakValueDictionary[str, Feed] = WeakValueDictionary()
        self._changed_ids: set[str] = set()
        # Open streams by the id of their key.
        self._streams: Counter[str] = Counter()
        self._refused_keys: set[str] = set()
        self._woken = asyncio.Event()
        self._is_listening = False
        self._tasks: list[asyncio.Task[None]] = []

    async def open(self, batch_id: str) -> Feed:
        """Return the feed of a batch, which stays up to date as long as the caller holds it.

        Raises:
            psycopg.OperationalError: the database is unreachable.
        """
        if not self._tasks and not self.is_stopping:
            self._tasks = [asyncio.create_task(loop) for loop in (self._listen(), self._refresh(), self._check_keys())]
        feed = self._feeds.get(batch_id)
        if feed is None:
            feed = self._feeds[batch_id] = Feed(batch_id)
        if not feed.state:
            await self._read([feed])
        return feed

    @property
    def watchers(self) -> int:
        """The number of open streams."""
        return self._streams.total()

    @contextmanager
    def stream(self, key_id: str) -> Iterator[None]:
        """Count a stream of a key as long as the context lasts."""
        self._streams[key_id] += 1
        try:
            yield
        finally:
            self._streams[key_id] -= 1
            if not self._streams[key_id]:
                del self._streams[key_id]

    def must_end(self, key_id: str) -> bool:
        """Return whether the streams of a key must end, because this process stops or the key has been refused."""
        return self.is_stopping or key_id in self._refused_keys

    def stop(self) -> None:
        """End all streams and background tasks."""
        self.is_stopping = True
        for feed in list(self._feeds.values()):
            feed.wake()
        for task in self._tasks:
            task.cancel()

    async def stopped(self) -> None:
        """Wait for the background tasks to end."""
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _read(self, feeds: Iterable[Feed]) -> None:
        feeds = list(feeds)
        parameters = {"ids": [feed.batch_id for feed in feeds], "last_ids": [feed.last_id for feed in feeds]}
        rows = {row.id: row for row in await asyncio.to_thread(self._rows, parameters)}
        for feed in feeds:
            if feed.batch_id in rows:
                feed.update(rows[feed.batch_id])
            else:
                feed.is_over = True
                feed.wake()

    def _rows(self, parameters: Mapping[str, Any]) -> list[WatchedBatchRow]:
        with self._pool.connection() as connection:
            return fetch_all(connection, WatchedBatchRow, "watched_batches", parameters)

    def _mark_changed(self, batch_ids: Iterable[str]) -> None:
        self._changed_ids.update(batch_ids)
        if self._changed_ids:
            self._woken.set()

    async def _refresh(self) -> None:
        """Read the changed batches, and all of them if nothing was notified for a while."""
        while True:
            poll_s = self._poll_s if self._is_listening else self._fallback_poll_s
            try:
                await asyncio.wait_for(self._woken.wait(), poll_s)
            except TimeoutError:
                self._changed_ids.update(self._feeds)
            # Notifications arrive in bursts; one burst costs one query.
            await asyncio.sleep(_COALESCE_S)
            changed, self._changed_ids = self._changed_ids, set()
            self._woken.clear()
            feeds = [feed for batch_id in changed if (feed := self._feeds.get(batch_id)) is not None]
            try:
                if feeds:
                    await self._read(feeds)
            except Exception as error:  # noqa: BLE001 - loop shell: all streams of the process depend on it
                _log.warning("events.read_failed", error=type(error).__name__, watched=len(feeds))
                await asyncio.sleep(1)
                self._mark_changed(changed)

    async def _check_keys(self) -> None:
        """End the streams of keys that were revoked or have expired."""
        while True:
            await asyncio.sleep(self._key_check_s)
            # The streams of people end with their tokens.
            watching = {key_id for key_id in self._streams if not key_id.startswith(PERSON_PREFIX)}
            try:
                valid = set()
                if watching:
                    valid = await asyncio.to_thread(valid_readers, self._pool, watching, self._max_key_lifetime)
            except Exception as error:  # noqa: BLE001 - loop shell: without the database nothing new is sent either
                _log.warning("events.keys_not_checked", error=type(error).__name__, keys=len(watching))
                continue
            self._refused_keys = watching - valid
            if self._refused_keys:
                for feed in list(self._feeds.values()):
                    feed.wake()

    async def _listen(self) -> None:
        """Mark the watched batches that Postgres notifies about. Reconnect without end."""
        backoff_s = _FIRST_BACKOFF_S
        while True:
            try:
                conninfo = self._pool.conninfo() if callable(self._pool.conninfo) else self._pool.conninfo
                async with await psycopg.AsyncConnection.connect(
                    conninfo, autocommit=True, application_name="cloister events", **CONNECTION_LIMITS
                ) as connection:
                    await connection.execute("LISTEN batch_events")
                    self._is_listening, backoff_s = True, _FIRST_BACKOFF_S
                    # Changes before this point were not notified.
                    self._mark_changed(list(self._feeds))
                    async for notice in connection.notifies():
                        if notice.payload in self._feeds:
                            self._mark_changed([notice.payload])
            except Exception as error:  # noqa: BLE001 - loop shell
                _log.warning("events.listener_lost", error=type(error).__name__, retry_in_s=backoff_s)
            finally:
                self._is_listening = False
            await asyncio.sleep(backoff_s)
            backoff_s = min(backoff_s * 2, _MAX_BACKOFF_S)
