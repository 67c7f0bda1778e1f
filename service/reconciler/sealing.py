"""Sealing of the audit log: refused logins become entries, and all entries get their place in the chain."""

import math
import time
from threading import Event
from typing import Final

from service.audit.chain import seal_entries
from service.db import Pool, query
from service.reconciler.backends import Backends
from service.reconciler.repeating import repeat

_INTERVAL_S: Final = 5.0
# How often the whole log is searched for entries that committed very late.
_SEARCH_INTERVAL_S: Final = 3_600.0
# Entries for the refused logins of one minute.
MAX_ENTRIES: Final = 1_000


def keep_sealing(backends: Backends, over: Event) -> None:
    """Seal new entries every few seconds until ``over`` is set."""
    searched_at = -math.inf

    def seal() -> None:
        nonlocal searched_at
        record_refused_logins(backends.pool)
        while seal_entries(backends.pool) and not over.is_set():
            pass
        if time.monotonic() - searched_at >= _SEARCH_INTERVAL_S and not over.is_set():
            while seal_entries(backends.pool, whole_log=True) and not over.is_set():
                pass
            searched_at = time.monotonic()

    repeat(seal, over, interval_s=_INTERVAL_S, failure="audit.not_sealed")


def record_refused_logins(pool: Pool) -> None:
    """Move the refused logins of past minutes to the audit log."""
    with pool.connection() as connection:
        connection.execute(query("record_refused_logins"), {"max_entries": MAX_ENTRIES})
