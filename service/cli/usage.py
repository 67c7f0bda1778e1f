"""``cloister usage``: GPU time, tokens and costs of a stack, as a table or as CSV for chargeback."""

import csv
import sys
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from datetime import UTC, date, datetime, timedelta
from decimal import Decimal
from enum import StrEnum
from types import MappingProxyType
from typing import Annotated, Any, Final

import typer

from service.cli.database import stack_database
from service.cli.options import DEFAULT_DATA_DIR, DataDir, parse_duration
from service.client.terminal import console, print_table
from service.db import Pool, query
from service.db.rows import BatchUsageRow, UsageRow, fetch_all
from service.usage import read_usage

_HOUR_S: Final = 3_600
_COUNTS: Final = ("batches", "completed", "failed", "input_tokens", "cached_tokens", "output_tokens")


class By(StrEnum):
    """The groups of a listing."""

    PROJECT = "project"
    MODEL = "model"
    BATCH = "batch"
    DAY = "day"


# The columns that name a group.
_GROUPS: Final[Mapping[By, tuple[str, ...]]] = MappingProxyType(
    {
        By.PROJECT: ("project", "project_id"),
        By.MODEL: ("model",),
        By.BATCH: ("batch", "project", "project_id", "model"),
        By.DAY: ("day",),
    }
)


def usage(
    *,
    since: Annotated[
        str, typer.Option(metavar="DATE", help="The first day, in UTC (2026-11-01), or the last days only (30d).")
    ] = "30d",
    until: Annotated[
        str | None, typer.Option(metavar="DATE", help="The day after the last one, in UTC; tomorrow by default.")
    ] = None,
    by: Annotated[By, typer.Option(help="Show a line for each of these.")] = By.PROJECT,
    as_csv: Annotated[bool, typer.Option("--csv", help="Print CSV, with GPU seconds.")] = False,
    data_dir: DataDir = DEFAULT_DATA_DIR,
) -> None:
    """Show GPU time, tokens and costs of all projects.

    A batch counts on the day on which it ended. Overhead is the GPU time in which jobs worked for no
    batch. Costs need prices in the stack file or the model catalogue.
    """
    today = datetime.now(UTC).date()
    first = _day(since, today, "--since")
    end = _day(until, today, "--until") if until else today + timedelta(days=1)
    if end <= first:
        raise typer.BadParameter(f"{end} is not after the first day, {first}", param_hint="--until")
    with stack_database(data_dir) as pool:
        rows = _rows(pool, first, end, by)
        with pool.connection() as connection:
            names = {row["id"]: row["name"] for row in connection.execute(query("project_names"))}
    columns = [_columns(row, names) for row in rows]
    (_print_csv if as_csv else _print_table)(rows, columns, _GROUPS[by])


def _day(text: str, today: date, option: str) -> date:
    try:
        return date.fromisoformat(text)
    except ValueError:
        try:
            return today - parse_duration(text)
        except (typer.BadParameter, OverflowError):
            message = f"{text!r} is neither a date, e.g. 2026-11-01, nor a number of days, e.g. 30d"
            raise typer.BadParameter(message, param_hint=option) from None


def _rows(pool: Pool, first: date, end: date, by: By) -> Sequence[UsageRow]:
    if by is By.BATCH:
        with pool.connection() as connection:
            return fetch_all(connection, BatchUsageRow, "usage_by_batch", {"first": first, "end": end})
    return read_usage(
        pool,
        first,
        end,
        by_day=by is By.DAY,
        by_project=by is By.PROJECT,
        by_model=by is By.MODEL,
        by_currency=True,
    )


def _columns(row: UsageRow, names: Mapping[str, str]) -> dict[str, str]:
    """Return the columns that can name the group of a row."""
    project_id = row.project_id or ""
    return {
        "project": names.get(project_id, project_id) or "(stack)",
        "project_id": project_id,
        "model": row.model or "",
        "day": str(row.day or ""),
        "batch": row.id if isinstance(row, BatchUsageRow) else "",
    }


def _print_csv(rows: Sequence[UsageRow], columns: Sequence[Mapping[str, str]], group: Sequence[str]) -> None:
    """Print a line for each group and currency. Costs have six decimals."""
    writer = csv.writer(sys.stdout, lineterminator="\n")
    writer.writerow([*group, *_COUNTS, "gpu_seconds", "overhead_gpu_seconds", "cost", "currency"])
    for row, named in zip(rows, columns, strict=True):
        counts = [getattr(row, name) for name in _COUNTS]
        seconds = [f"{row.gpu_seconds:.1f}", f"{row.overhead_gpu_seconds:.1f}"]
        cost = f"{row.cost + row.overhead_cost:.6f}"
        writer.writerow([*(named[name] for name in group), *counts, *seconds, cost, row.currency])


def _print_table(rows: Sequence[UsageRow], columns: Sequence[Mapping[str, str]], group: Sequence[str]) -> None:
    """Print a line for each group and currency, and the total of each currency."""
    shown = [name for name in group if name != "project_id"]
    right = [name.replace("_", " ") for name in _COUNTS] + ["GPU h", "overhead GPU h", "cost"]
    totals: dict[str, Counter[str]] = defaultdict(Counter)
    costs: dict[str, Decimal] = defaultdict(Decimal)
    table = []
    for row, named in zip(rows, columns, strict=True):
        currency = row.currency or ""
        values: dict[str, Any] = {name: getattr(row, name) for name in _COUNTS}
        values |= {"gpu": row.gpu_seconds / _HOUR_S, "overhead": row.overhead_gpu_seconds / _HOUR_S}
        totals[currency].update(values)
        costs[currency] += row.cost + row.overhead_cost
        table.append([*(named[name] for name in shown), *_cells(values, row.cost + row.overhead_cost, currency)])
    for currency, total in sorted(totals.items()):
        table.append(["total", *[""] * (len(shown) - 1), *_cells(total, costs[currency], currency)])
    print_table(console(), [*shown, *right], table, right=right)


def _cells(values: Mapping[str, Any], cost: Decimal, currency: str) -> list[str]:
    hours = [f"{values[name]:,.2f}" for name in ("gpu", "overhead")]
    return [*(f"{values[name]:,}" for name in _COUNTS), *hours, f"{cost:,.2f} {currency}" if currency else "-"]
