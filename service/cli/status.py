"""``cloister status``: one batch, or the latest ones."""

import json
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Annotated, Final

import typer

from service.cli.client import ClientDataDir, open_client
from service.cli.database import DEFAULT_DATA_DIR
from service.cli.following import update_of
from service.cli.terminal import duration, print_errors, print_table, progress_text, stdout
from service.cli.waiting import batch_json, listed_errors
from service.transitions import FINAL

if TYPE_CHECKING:
    from openai.types import Batch

_LATEST: Final = 20


def status(
    batch: Annotated[str, typer.Argument(help="A batch id; without it, the latest 20 are listed.")] = "",
    *,
    as_json: Annotated[bool, typer.Option("--json", help="Print what the API answers.")] = False,
    data_dir: ClientDataDir = DEFAULT_DATA_DIR,
) -> None:
    """Show where a batch is, or the latest batches."""
    with open_client(data_dir) as client:
        if batch:
            found = client.batches.retrieve(batch)
            print(batch_json(found)) if as_json else _print_one(found, datetime.now(UTC))
            return
        page = client.batches.list(limit=_LATEST)
    if as_json:
        print(json.dumps(page.to_dict(mode="json"), ensure_ascii=False))
    elif page.data:
        _print_list(page.data, datetime.now(UTC))
    else:
        print("There are no batches. `cloister submit FILE` makes one.")


def _print_list(batches: list["Batch"], now: datetime) -> None:
    rows = []
    for batch in batches:
        update = update_of(batch)
        rows.append(
            (
                batch.id,
                batch.status,
                f"{update.done:,}/{update.total:,}",
                f"{update.failed:,}",
                duration(now.timestamp() - batch.created_at),
                batch.model or "",
            )
        )
    heads = ("batch", "status", "done", "failed", "age", "model")
    print_table(stdout(), heads, rows, right=("done", "failed", "age"))


def _print_one(batch: "Batch", now: datetime) -> None:
    update = update_of(batch)
    rows = [
        ("status", batch.status),
        ("progress", progress_text(update)),
        ("model", batch.model or ""),
        ("endpoint", batch.endpoint),
        ("created", f"{_time(batch.created_at)}, {duration(now.timestamp() - batch.created_at)} ago"),
        ("expires", _time(batch.expires_at) if batch.status not in FINAL and batch.expires_at else ""),
        ("input file", batch.input_file_id),
        ("output file", batch.output_file_id or ""),
        ("error file", batch.error_file_id or ""),
        ("metadata", ", ".join(f"{key}={value}" for key, value in (batch.metadata or {}).items())),
    ]
    console = stdout()
    console.print(batch.id)
    for name, value in rows:
        if value:
            console.print(f"  {name:<12} {value}")
    if errors := listed_errors(batch):
        print_errors(console, errors, len(errors))


def _time(unix_s: int) -> str:
    return f"{datetime.fromtimestamp(unix_s, UTC):%Y-%m-%d %H:%M} UTC"
