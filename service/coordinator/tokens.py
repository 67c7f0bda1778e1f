"""Tokens of jobs, so that most requests of a job need no query to find out whose they are."""

import time
from typing import Final

from service.coordinator.leasing import ActiveJob, authenticate
from service.db import Pool

_KNOWN_FOR_S: Final = 5.0
_MAX_KNOWN: Final = 10_000


class Tokens:
    """The jobs of the tokens that were sent lately.

    They only tell whose request it is. Each request checks in its own transaction whether the job has ended.

    Args:
        pool: the database of the jobs.
    """

    def __init__(self, pool: Pool) -> None:
        self._pool = pool
        self._known: dict[str, tuple[float, ActiveJob]] = {}

    def known(self, token: str) -> ActiveJob | None:
        """Return the job with this token if it is known. Does not block."""
        until, job = self._known.get(token, (0.0, None))
        return job if time.monotonic() < until else None

    def forget(self, token: str) -> None:
        """Look the job of a token up again at its next request."""
        self._known.pop(token, None)

    def authenticate(self, token: str) -> ActiveJob:
        """Return the job with this token.

        Raises:
            JobEndedError: no running job has it.
            psycopg.OperationalError: the database is unreachable.
        """
        job = authenticate(self._pool, token)
        if len(self._known) >= _MAX_KNOWN:
            self._known = {}
        self._known[token] = (time.monotonic() + _KNOWN_FOR_S, job)
        return job
