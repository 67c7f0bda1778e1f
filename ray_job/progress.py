"""Reports a job's totals to Postgres, through the one function that its role may execute."""

import logging
import time
from collections.abc import Callable
from dataclasses import dataclass, field

import psycopg

from ray_job.contract.job_spec import JobSpec
from ray_job.contract.parts import Usage
from ray_job.errors import SupersededError

logger = logging.getLogger(__name__)

# A report costs one round trip; a person who watches a batch sees no difference below this.
INTERVAL_S = 0.5
# The job's rows wait while a report does: one that cannot connect takes a seventh of the time at most.
PAUSE_S = 30.0
CONNECT_TIMEOUT_S = 5


@dataclass(frozen=True, slots=True, kw_only=True)
class Totals:
    """What a batch has so far: rows by outcome, and tokens."""

    completed: int = 0
    failed: int = 0
    usage: Usage = field(default_factory=Usage)

    def __add__(self, other: "Totals") -> "Totals":
        return Totals(
            completed=self.completed + other.completed,
            failed=self.failed + other.failed,
            usage=self.usage + other.usage,
        )


class ProgressReporter:
    """Sends totals at most every half second, and half a minute after a report that failed.

    Totals, not increments: a lost report is made good by the next.
    A database that cannot be reached does not end the job: the parts are what counts, and the service
    counts them again when it assembles the files.
    """

    def __init__(self, spec: JobSpec, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._spec = spec
        self._clock = clock
        self._next = clock()
        self._connection: psycopg.Connection | None = None

    def report(self, totals: Totals, *, final: bool = False) -> None:
        """Sends ``totals`` when it is time, or at once when ``final``.

        Raises:
            SupersededError: the database no longer takes this attempt's progress.
        """
        if not self._spec.database_url or (self._clock() < self._next and not final):
            return
        self._next = self._clock() + INTERVAL_S
        try:
            current = self._send(totals)
        except psycopg.OperationalError as error:
            logger.warning("progress was not reported, the next report makes up for it: %s", error)
            self.close()
            self._next = self._clock() + PAUSE_S
            return
        if not current:
            raise SupersededError(
                f"attempt {self._spec.attempt} of {self._spec.batch_id} is not the current one any more"
            )

    def _send(self, totals: Totals) -> bool:
        if self._connection is None:
            self._connection = psycopg.connect(
                self._spec.database_url,
                autocommit=True,
                connect_timeout=CONNECT_TIMEOUT_S,
                # A server that is lost without a word is given up after 25 s: the job's rows wait for the report.
                keepalives_idle=10,
                keepalives_interval=5,
                keepalives_count=3,
                tcp_user_timeout=25_000,
            )
        usage = totals.usage
        row = self._connection.execute(
            "SELECT report_progress(%s, %s, %s, %s, %s, %s, %s, %s)",
            [
                self._spec.batch_id,
                self._spec.attempt,
                totals.completed,
                totals.failed,
                usage.input_tokens,
                usage.cached_tokens,
                usage.output_tokens,
                usage.reasoning_tokens,
            ],
        ).fetchone()
        return bool(row and row[0])

    def close(self) -> None:
        """Closes the connection; a later report opens a new one."""
        if self._connection is not None:
            self._connection.close()
            self._connection = None
