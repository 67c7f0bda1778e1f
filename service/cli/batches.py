"""``cloister status``, ``watch``, ``pause``, ``resume`` and ``cancel``, and waiting for the end of a batch."""

import dataclasses
import json
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Final

import typer

from service.cli.options import DEFAULT_DATA_DIR, ClientDataDir
from service.client.connection import open_client
from service.client.exit_codes import CommandError, ExitCode
from service.client.following import Update, follow, listed_errors
from service.client.terminal import (
    BatchProgress,
    console,
    duration,
    note,
    print_errors,
    print_table,
    progress_text,
)
from service.transitions import FINAL

if TYPE_CHECKING:
    from openai import OpenAI
    from openai.types import Batch

_LATEST: Final = 20

BatchId = Annotated[str, typer.Argument(help="A batch id.", show_default=False)]


def status(
    batch: Annotated[str, typer.Argument(help="A batch id. Without it, the latest 20 batches are listed.")] = "",
    *,
    as_json: Annotated[bool, typer.Option("--json", help="Print the answer of the API.")] = False,
    data_dir: ClientDataDir = DEFAULT_DATA_DIR,
) -> None:
    """Show the state of a batch, or list the latest batches."""
    target, now_s = console(), datetime.now(UTC).timestamp()
    with open_client(data_dir) as client:
        if not batch:
            page = client.batches.list(limit=_LATEST)
            if as_json:
                print(page.to_json(indent=None))
            elif page.data:
                rows = []
                for each in page.data:
                    update, age_s = Update.of(each), now_s - each.created_at
                    counts = (f"{update.done:,}/{update.total:,}", f"{update.failed:,}")
                    rows.append((each.id, each.status, *counts, duration(age_s), each.model or ""))
                heads = ("batch", "status", "done", "failed", "age", "model")
                print_table(target, heads, rows, right=("done", "failed", "age"))
            else:
                print("No batches found. `cloister submit FILE` creates one.")
            return
        found = client.batches.retrieve(batch)
    if as_json:
        print(found.to_json(indent=None))
        return
    created, expires = (
        f"{datetime.fromtimestamp(unix_s, UTC):%Y-%m-%d %H:%M} UTC" if unix_s else ""
        for unix_s in (found.created_at, found.expires_at)
    )
    extension = (found.model_extra or {}).get("x_cloister") or {}
    paused_at = extension.get("paused_at")
    paused = f", paused {duration(now_s - paused_at)} ago" if paused_at else ""
    fields = {
        "status": f"{found.status}{paused}",
        "progress": progress_text(Update.of(found)),
        "model": found.model,
        "endpoint": found.endpoint,
        "priority": str(extension.get("priority") or ""),
        "created": f"{created}, {duration(now_s - found.created_at)} ago",
        "expires": "" if found.status in FINAL else expires,
        "input file": found.input_file_id,
        "output file": found.output_file_id,
        "error file": found.error_file_id,
        "metadata": ", ".join(f"{key}={value}" for key, value in (found.metadata or {}).items()),
    }
    target.print(found.id)
    for name, value in fields.items():
        if value:
            target.print(f"  {name:<12} {value}")
    if errors := listed_errors(found):
        print_errors(target, errors, len(errors))


def watch(
    batch: BatchId,
    *,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print one JSON object for each change, then the Batch object.")
    ] = False,
    data_dir: ClientDataDir = DEFAULT_DATA_DIR,
) -> None:
    """Show the progress of a batch until it ends. The exit code shows how it ended."""
    last: Update | None = None

    def print_change(update: Update) -> None:
        nonlocal last
        if as_json and update != last:
            last = update
            print(json.dumps({"type": "progress", **dataclasses.asdict(update)}), flush=True)

    with open_client(data_dir) as client:
        ended = wait(client, batch, quiet=as_json, on_update=print_change)
    if as_json:
        print(ended.to_json(indent=None))
    else:
        report_end(ended)
        if ended.output_file_id or ended.error_file_id:
            note(f"`cloister results {ended.id}` downloads its results.")
    raise typer.Exit(ExitCode.of_batch(ended.status, Update.of(ended).failed))


def pause(
    batch: BatchId,
    *,
    as_json: Annotated[bool, typer.Option("--json", help="Print the Batch object and nothing else.")] = False,
    data_dir: ClientDataDir = DEFAULT_DATA_DIR,
) -> None:
    """Take a batch from its job until it is resumed. Finished lines keep their results; the deadline stays."""
    _change_pause("pause", batch, as_json=as_json, data_dir=data_dir)


def resume(
    batch: BatchId,
    *,
    as_json: Annotated[bool, typer.Option("--json", help="Print the Batch object and nothing else.")] = False,
    data_dir: ClientDataDir = DEFAULT_DATA_DIR,
) -> None:
    """Let a paused batch go on with the lines that have no result."""
    _change_pause("resume", batch, as_json=as_json, data_dir=data_dir)


def _change_pause(change: str, batch_id: str, *, as_json: bool, data_dir: Path) -> None:
    from openai.types import Batch

    with open_client(data_dir) as client:
        found = client.post(f"/batches/{batch_id}/{change}", cast_to=Batch)
    if as_json:
        print(found.to_json(indent=None))
    elif change == "pause":
        print(f"{found.id} is paused")
        note(f"`cloister resume {found.id}` lets it go on.")
    else:
        print(f"{found.id} is {found.status}")


def cancel(
    batch: BatchId,
    *,
    should_wait: Annotated[bool, typer.Option("--wait", help="Wait until the batch has ended.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print the Batch object and nothing else.")] = False,
    data_dir: ClientDataDir = DEFAULT_DATA_DIR,
) -> None:
    """Cancel a batch. The results of its finished lines are kept."""
    with open_client(data_dir) as client:
        cancelled = client.batches.cancel(batch)
        if should_wait:
            cancelled = wait(client, batch, quiet=as_json)
    if as_json:
        print(cancelled.to_json(indent=None))
    elif should_wait:
        report_end(cancelled)
    else:
        print(f"{cancelled.id} is {cancelled.status}")
    if cancelled.output_file_id and not as_json:
        note(f"`cloister results {batch}` downloads the results of its finished lines.")
    if should_wait and cancelled.status != "cancelled":
        raise typer.Exit(ExitCode.of_batch(cancelled.status, Update.of(cancelled).failed))


def wait(client: "OpenAI", batch_id: str, *, quiet: bool, on_update: Callable[[Update], None] | None = None) -> "Batch":
    """Show the progress of a batch until it ends, and return it.

    Args:
        client: the client of the server.
        batch_id: the batch.
        quiet: whether to show nothing on stderr.
        on_update: a function that also receives every update.

    Raises:
        CommandError: interrupted by Ctrl-C; the message lists the commands to continue with.
    """
    try:
        with BatchProgress(quiet=quiet) as progress:

            def show(update: Update) -> None:
                progress.show(update)
                if on_update:
                    on_update(update)

            return follow(client, batch_id, show)
    except KeyboardInterrupt:
        raise CommandError(
            f"interrupted. The batch continues: `cloister watch {batch_id}` shows its progress, `cloister results "
            f"{batch_id}` downloads its results, `cloister cancel {batch_id}` ends it.",
            ExitCode.INTERRUPTED,
        ) from None


def report_end(batch: "Batch") -> None:
    """Print the final state of a batch to stderr, with the errors of its input file."""
    note(f"{batch.id}  {batch.status}  {progress_text(Update.of(batch))}".rstrip())
    if errors := listed_errors(batch):
        print_errors(console(is_stderr=True), errors, len(errors))
