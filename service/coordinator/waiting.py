"""Jobs that wait for work. One connection of the process listens for all of them; a waiting job holds none."""

import asyncio
import contextlib
from typing import Final

import psycopg
import structlog

from service.db import CONNECTION_LIMITS, Pool

_log = structlog.get_logger(__name__)

CHANNEL: Final = "work"
# Waiting jobs look for work this often without a notification, because a lease may have expired.
_POLL_S: Final = 10.0
_POLL_WITHOUT_LISTENER_S: Final = 2.0
_FIRST_BACKOFF_S: Final = 0.5
_MAX_BACKOFF_S: Final = 10.0


class Waiting:
    """The jobs of this process that wait for work of their sharing domain. It belongs to one event loop.

    Args:
        pool: the database; the listening connection uses the same one.
    """

    def __init__(self, pool: Pool) -> None:
        self._pool = pool
        self._changed: dict[str, asyncio.Event] = {}
        self.is_listening = False
        self._is_stopping = False
        self._task: asyncio.Task[None] | None = None

    def start(self) -> None:
        """Listen until ``stop``."""
        self._task = asyncio.create_task(self._listen())

    def stop(self) -> None:
        """Wake all jobs. From now on nothing waits."""
        self._is_stopping = True
        self._wake_all()

    async def stopped(self) -> None:
        """Stop listening."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)

    def change_of(self, model: str, domain: str) -> asyncio.Event:
        """Return an event that is set at the next change of a domain. Take it before looking for work."""
        return self._changed.setdefault(_key(model, domain), asyncio.Event())

    async def wait(self, changed: asyncio.Event, timeout_s: float) -> bool:
        """Wait for a change, or for some seconds at most. Return whether to look for work again.

        At the end of its time a job asks again by itself.
        """
        if self._is_stopping or timeout_s <= 0:
            return False
        poll_s = _POLL_S if self.is_listening else _POLL_WITHOUT_LISTENER_S
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(changed.wait(), min(timeout_s, poll_s))
        return not self._is_stopping and (changed.is_set() or timeout_s > poll_s)

    def _wake_all(self) -> None:
        changed, self._changed = self._changed, {}
        for event in changed.values():
            event.set()

    async def _listen(self) -> None:
        """Wake the jobs whose domain Postgres notifies of. Reconnect without end."""
        backoff_s = _FIRST_BACKOFF_S
        while True:
            try:
                conninfo = self._pool.conninfo() if callable(self._pool.conninfo) else self._pool.conninfo
                async with await psycopg.AsyncConnection.connect(
                    conninfo, autocommit=True, application_name="cloister coordinator", **CONNECTION_LIMITS
                ) as connection:
                    await connection.execute(f"LISTEN {CHANNEL}")
                    self.is_listening, backoff_s = True, _FIRST_BACKOFF_S
                    # Changes before this point were not notified.
                    self._wake_all()
                    async for notice in connection.notifies():
                        if (changed := self._changed.pop(notice.payload, None)) is not None:
                            changed.set()
            except Exception as error:  # noqa: BLE001 - loop shell
                _log.warning("coordinator.listener_lost", error=type(error).__name__, retry_in_s=backoff_s)
            finally:
                self.is_listening = False
            await asyncio.sleep(backoff_s)
            backoff_s = min(backoff_s * 2, _MAX_BACKOFF_S)


def _key(model: str, domain: str) -> str:
    """Return the payload with which Postgres notifies of a domain."""
    return f"{model}\n{domain}"
