"""Reports the totals of a job to Postgres, through the one function that the job's role may execute."""

import logging
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Final

import psycopg

from ray_job.contract.job_spec import JobSpec
from ray_job.contract.parts import Usage
from ray_job.errors import SupersededError

logger = logging.getLogger(__name__)

# A report costs one round trip. A person who watches a batch sees no difference below this interval.
INTERVAL_S: Final = 0.5
# The job's rows wait for a report: one that cannot connect takes a seventh of the time at most.
PAUSE_AFTER_FAILURE_S: Final = 30.0
CONNECT_TIMEOUT_S: Final = 5


@dataclass(frozen=True, slots=True, kw_only=True)
class Totals:
    """Rows of a batch by outcome, and their tokens."""

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
    """Sends totals at most every half second, and pauses for half a minute after a failed report.

    It sends totals instead of increments, so that the next report makes up for a lost one. An unreachable database
    does not end the job: the service counts the parts when it assembles the files.

    Args:
        spec: the job, with the URL of the database.
        clock: the current time in seconds.
    """

    def __init__(self, spec: JobSpec, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._spec = spec
        self._clock = clock
        self._next_report = clock()
        self._connection: psycopg.Connection | None = None
        self._accepted: Totals | None = None

    def report(self, totals: Totals, *, final: bool = False) -> None:
        """Send the totals if a report is due, or at once if it is the final one and they have changed.

        Raises:
            SupersededError: the database refuses the progress of this attempt.
        """
        is_due = self._accepted != totals if final else self._clock() >= self._next_report
        if not self._spec.database_url or not is_due:
            return
        self._next_report = self._clock() + INTERVAL_S
        try:
            accepted = self._send(totals)
        except psycopg.OperationalError as error:
            logger.warning("progress was not reported, the next report makes up for it: %s", error)
            self.close()
            self._next_report = self._clock() + PAUSE_AFTER_FAILURE_S
            return
        if not accepted:
            raise SupersededError(
                f"attempt {self._spec.attempt} of {self._spec.batch_id} is not the current one any more"
            )
        self._accepted = totals

    def _send(self, totals: Totals) -> bool:
        if self._connection is None:
            self._connection = psycopg.connect(
                self._spec.database_url,
                autocommit=True,
                connect_timeout=CONNECT_TIMEOUT_S,
                # The job's rows wait for the report, so a server that stops responding is given up after 25 s.
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
        """Close the connection. A later report opens a new one."""
        if self._connection is not None:
            self._connection.close()
            self._connection = None
