"""The threads in which batches are taken further, and what they do with a step that fails."""

import time
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from dataclasses import dataclass
from types import TracebackType
from typing import Final, Self

import psycopg
import structlog

from service.errors import LauncherError, ObjectStoreError
from service.reconciler.context import Context
from service.reconciler.steps import advance

logger = structlog.get_logger(__name__)

# Steps are waiting for the store or Postgres most of the time; two large assemblies leave two threads for the rest.
_WORKERS: Final = 4
_MAX_PAUSE_S: Final = 30.0

_TRANSIENT = (ObjectStoreError, LauncherError, psycopg.OperationalError)


@dataclass(slots=True)
class _Trouble:
    """A batch that could not be advanced: how often in a row, and when to try again (monotonic seconds)."""

    failures: int = 0
    not_before: float = 0.0


class Workers:
    """A few threads, each with one batch at a time. To be used by one thread, as a context."""

    def __init__(self, context: Context) -> None:
        self._context = context
        self._executor = ThreadPoolExecutor(max_workers=_WORKERS, thread_name_prefix="batch")
        self._running: dict[str, Future[bool]] = {}
        self._troubles: dict[str, _Trouble] = {}

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        """Waits for the steps that have begun."""
        self._executor.shutdown()

    def not_to_be_given(self) -> set[str]:
        """The batches that a thread works on, and those that failed just now."""
        self._collect()
        now = time.monotonic()
        return set(self._running) | {
            batch_id for batch_id, trouble in self._troubles.items() if now < trouble.not_before
        }

    def has_room(self) -> bool:
        """Whether a thread is free."""
        self._collect()
        return len(self._running) < _WORKERS

    def begin(self, batch_id: str) -> None:
        """Takes a batch further, in a free thread."""
        self._running[batch_id] = self._executor.submit(self._advance_safely, batch_id)

    def wait_for_room(self, timeout_s: float) -> None:
        """Until a thread is free, but no longer than that."""
        wait(self._running.values(), timeout=timeout_s, return_when=FIRST_COMPLETED)

    def _collect(self) -> None:
        for batch_id in [batch_id for batch_id, future in self._running.items() if future.done()]:
            if self._running.pop(batch_id).result():
                self._troubles.pop(batch_id, None)
            else:
                trouble = self._troubles.setdefault(batch_id, _Trouble())
                trouble.failures += 1
                trouble.not_before = time.monotonic() + self._pause_s(trouble.failures)

    def _advance_safely(self, batch_id: str) -> bool:
        """Advances one batch; whatever goes wrong with it is logged and tried again later."""
        try:
            advance(self._context, batch_id)
        except Exception as error:  # noqa: BLE001 - the shell of the loop: one batch never stops the others
            self._context.metrics.step_failures.labels(kind=type(error).__name__).inc()
            failures = self._troubles.get(batch_id, _Trouble()).failures + 1
            event = logger.warning if isinstance(error, _TRANSIENT) else logger.exception
            event(
                "batch.step_failed",
                batch_id=batch_id,
                error=str(error),
                failures=failures,
                retry_in_s=self._pause_s(failures),
            )
            return False
        return True

    def _pause_s(self, failures: int) -> float:
        return min(_MAX_PAUSE_S, self._context.first_pause_s * 2.0 ** min(failures - 1, 10))
