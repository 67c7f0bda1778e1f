"""Which batches a pass takes further."""

from collections.abc import Collection
from typing import Final

from service.db import Pool, query

# More than the workers can begin in a second or two; by then the list is made anew.
_MOST: Final = 200


def batches_to_advance(pool: Pool, *, max_running_jobs: int, busy: Collection[str]) -> list[str]:
    """The ids of batches that a step may take further now, in a fair order; at most 200, none that is ``busy``."""
    values = {"max_running_jobs": max_running_jobs, "busy": list(busy), "limit": _MOST}
    with pool.connection() as connection:
        return [row["id"] for row in connection.execute(query("batches_to_advance"), values)]


def is_any_batch_open(pool: Pool) -> bool:
    """Whether there is a batch for which something is left to be done, now or later."""
    with pool.connection() as connection:
        row = connection.execute(query("is_any_batch_open")).fetchone()
    return row is not None and bool(row["is_so"])
