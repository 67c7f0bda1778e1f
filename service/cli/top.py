"""``cloister top``: jobs, engines, queue and rates, live in the terminal."""

import time
from collections.abc import Sequence
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Annotated, Any, Final

import typer
from rich.console import Group, RenderableType
from rich.live import Live
from rich.table import Table
from rich.text import Text

from service.cli.options import DEFAULT_DATA_DIR, ClientDataDir
from service.client.connection import open_client
from service.client.following import Update
from service.client.terminal import console, duration, progress_text
from service.transitions import FINAL

if TYPE_CHECKING:
    from openai import OpenAI
    from openai.types import Batch

_MOST_BATCHES: Final = 20


def top(
    *,
    interval: Annotated[float, typer.Option(min=0.5, metavar="SECONDS", help="The time between two looks.")] = 2.0,
    once: Annotated[bool, typer.Option("--once", help="Print the state once and end.")] = False,
    data_dir: ClientDataDir = DEFAULT_DATA_DIR,
) -> None:
    """Show jobs, engines, queue and rates until Ctrl-C."""
    target = console()
    with open_client(data_dir) as client:
        if once or not target.is_terminal:
            target.print(picture(*look(client)))
            return
        with Live(picture(*look(client)), console=target, screen=True, auto_refresh=False) as live:
            while True:
                time.sleep(interval)
                live.update(picture(*look(client)), refresh=True)


def look(client: "OpenAI") -> tuple[list[dict[str, Any]], list["Batch"]]:
    """Return the jobs, and the newest batches that are not at their end."""
    jobs: dict[str, Any] = client.get("/jobs", cast_to=dict[str, Any])
    latest = client.batches.list(limit=100).data
    return jobs["data"], [batch for batch in latest if batch.status not in FINAL][:_MOST_BATCHES]


def picture(jobs: list[dict[str, Any]], batches: list["Batch"]) -> RenderableType:
    """Return the tables of jobs and batches."""
    now_s = datetime.now(UTC).timestamp()
    engines = sum(job["engines"] for job in jobs)
    rate = sum(job["rate_rows_per_second"] for job in jobs)
    queued = sum(job["status"] == "queued" for job in jobs)
    head = f"{len(jobs) - queued} jobs, {queued} queued, {engines} engines, {rate:,.1f} lines/s, {len(batches)} batches"
    job_rows = [
        (
            job["id"],
            job["model"],
            f"queued ({job['queue_position']})" if job["queue_position"] else job["status"],
            str(job["engines"]),
            f"{job['leased_segments']}/{job['segments_left']}",
            "" if job["oldest_lease_seconds"] is None else duration(job["oldest_lease_seconds"]),
            f"{job['rate_rows_per_second']:,.1f}",
            "" if job["idle_since"] is None else duration(max(0.0, now_s - job["idle_since"])),
        )
        for job in jobs
    ]
    batch_rows = [
        (batch.id, batch.model or "", batch.status, progress_text(Update.of(batch)), duration(now_s - batch.created_at))
        for batch in batches
    ]
    return Group(
        Text(head),
        Text(),
        _table(("job", "model", "status", "engines", "segments", "oldest lease", "lines/s", "idle"), job_rows),
        Text(),
        _table(("batch", "model", "status", "progress", "age"), batch_rows),
    )


def _table(heads: tuple[str, ...], rows: Sequence[Sequence[str]]) -> Table:
    table = Table(box=None, pad_edge=False, header_style="bold")
    for head in heads:
        table.add_column(head, no_wrap=True)
    for row in rows:
        table.add_row(*map(Text, row))
    return table
