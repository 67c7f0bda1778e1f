"""The loop of a background thread of the reconciler."""

from collections.abc import Callable
from threading import Event

import psycopg
import structlog

from service.errors import ObjectStoreError
from service.logging import error_text

logger = structlog.get_logger(__name__)


def repeat(work: Callable[[], None], over: Event, *, interval_s: float, failure: str) -> None:
    """Do some work at once and again after each pause, until ``over`` is set.

    An error is logged, and the next round continues. Only errors of the database and the object store are expected.

    Args:
        work: the work of one round.
        over: ends the loop.
        interval_s: the pause, in seconds.
        failure: the event that is logged for an error.
    """
    while not over.is_set():
        try:
            work()
        except Exception as error:  # noqa: BLE001 - the shell of a thread: the next round continues
            is_transient = isinstance(error, psycopg.OperationalError | ObjectStoreError)
            (logger.warning if is_transient else logger.exception)(failure, error=error_text(error))
        over.wait(interval_s)
