"""Usage and costs of finished days, projects and models, from totals that outlive batches and files.

A batch counts on the day, in UTC, on which it ended. Overhead counts on the day on which jobs held GPUs for no batch.
"""

from collections.abc import Sequence
from datetime import date

from service.db import Pool
from service.db.rows import UsageRow, fetch_all


def read_usage(
    pool: Pool,
    first: date,
    end: date,
    *,
    by_day: bool = False,
    by_project: bool = False,
    by_model: bool = False,
    by_currency: bool = False,
    project_ids: Sequence[str] | None = None,
    models: Sequence[str] | None = None,
) -> list[UsageRow]:
    """Return the usage from a day to the one before ``end``, one row for each group that has any.

    Args:
        pool: the database.
        first: the first day, in UTC.
        end: the day after the last one.
        by_day: a row for each day.
        by_project: a row for each project.
        by_model: a row for each model.
        by_currency: a row for each currency; without it, costs of several currencies are added up.
        project_ids: only these projects; None for all, and for the stack itself.
        models: only these models; None for all.
    """
    values = {
        "first": first,
        "end": end,
        "by_day": by_day,
        "by_project": by_project,
        "by_model": by_model,
        "by_currency": by_currency,
        "project_ids": None if project_ids is None else list(project_ids),
        "models": None if models is None else list(models),
    }
    with pool.connection() as connection:
        return fetch_all(connection, UsageRow, "usage", values)
