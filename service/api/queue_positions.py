"""Positions of jobs in the queue, read for all of them at once: a client's poll need not count a long queue."""

import time
from collections.abc import Callable, Mapping
from threading import Lock
from typing import Final

from service.db import Pool, query

# Reading a queue takes longer the longer it is, and is repeated after this many times as long. A short queue is read
# anew for almost each request; one of 10,000 jobs, which takes about 20 ms, every half a second.
_AGE_PER_READING: Final = 25.0


class QueuePositions:
    """The positions of the jobs that wait for their launch. It is safe to use from several threads.

    Args:
        pool: the database of the jobs.
        clock: returns monotonic seconds.
    """

    def __init__(self, pool: Pool, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._pool = pool
        self._clock = clock
        self._positions: Mapping[str, int] | None = None
        self._due = 0.0  # when they are read again
        self._reading = Lock()

    def now(self) -> Mapping[str, int]:
        """Return the position of each job in the queue of its accelerator, by job id; 1 is launched next.

        Raises:
            psycopg.OperationalError: the database is unreachable.
        """
        known = self._positions
        # While one thread reads them, the others go on with those that are known.
        if (known is None or self._clock() >= self._due) and self._reading.acquire(blocking=known is None):
            try:
                if self._positions is known:
                    self._read()
            finally:
                self._reading.release()
        return self._positions or {}

    def _read(self) -> None:
        began = self._clock()
        with self._pool.connection() as connection:
            queues = connection.execute(query("job_queues")).fetchall()
        self._positions = {id_: place for row in queues for place, id_ in enumerate(row["ids"], start=1)}
        self._due = self._clock() + _AGE_PER_READING * (self._clock() - began)
