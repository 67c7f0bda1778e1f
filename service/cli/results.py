"""``cloister results``: fetches what a batch has answered."""

import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from service.cli.client import ClientDataDir, open_client
from service.cli.database import DEFAULT_DATA_DIR
from service.cli.downloads import replacing, save, save_partial, send_to_stdout
from service.cli.exits import CommandError, ExitCode, outcome
from service.cli.following import update_of
from service.cli.terminal import note, transfer
from service.transitions import FINAL

if TYPE_CHECKING:
    from openai import OpenAI
    from openai.types import Batch

_STDOUT = Path("-")


def results(
    batch: Annotated[str, typer.Argument(help="A batch id.", show_default=False)],
    *,
    output: Annotated[Path, typer.Option("--output", "-o", help="Answers go here; - for stdout.")] = _STDOUT,
    errors: Annotated[Path | None, typer.Option(help="Failed lines go here.")] = None,
    partial: Annotated[bool, typer.Option("--partial", help="What there is, while the batch still runs.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print what was written and nothing else.")] = False,
    data_dir: ClientDataDir = DEFAULT_DATA_DIR,
) -> None:
    """Fetch the answers of a batch. A file is written whole or not at all."""
    if as_json and output == _STDOUT:
        raise typer.BadParameter("the answers would stand beside the JSON: give --output PATH", param_hint="--json")
    with open_client(data_dir) as client:
        found = client.batches.retrieve(batch)
        is_over = found.status in FINAL
        if not is_over and not partial:
            raise CommandError(
                f"{batch} is {found.status}: `cloister watch {batch}` waits for it, --partial fetches what there is"
            )
        if is_over:
            written = _fetch(client, found, output, errors, quiet=as_json)
        else:
            written = _fetch_partial(client, found, output, errors)
    if as_json:
        print(json.dumps({"batch_id": batch, "status": found.status, "is_complete": is_over, "files": written}))
    else:
        _tell(found, written, errors)
    raise typer.Exit(outcome(found.status, update_of(found).failed) if is_over else ExitCode.OK)


def _fetch(client: "OpenAI", batch: "Batch", output: Path, errors: Path | None, *, quiet: bool) -> list[dict[str, Any]]:
    written = []
    for kind, path, file_id in (("output", output, batch.output_file_id), ("errors", errors, batch.error_file_id)):
        if path == _STDOUT:
            size = send_to_stdout(client, file_id)
        elif path is not None:
            with transfer(path.name, None, quiet=quiet) as tell:
                size = save(client, file_id, path, tell)
        else:
            continue
        written.append({"kind": kind, "path": str(path), "size_bytes": size})
    return written


def _fetch_partial(client: "OpenAI", batch: "Batch", output: Path, errors: Path | None) -> list[dict[str, Any]]:
    written = []
    if output == _STDOUT:
        save_partial(client, batch.id, "output", sys.stdout.buffer)
        sys.stdout.buffer.flush()
    else:
        with replacing(output) as target:
            save_partial(client, batch.id, "output", target)
        written.append({"kind": "output", "path": str(output), "size_bytes": output.stat().st_size})
    if errors is not None:
        with replacing(errors) as target:
            save_partial(client, batch.id, "error", target)
        written.append({"kind": "errors", "path": str(errors), "size_bytes": errors.stat().st_size})
    return written


def _tell(batch: "Batch", written: list[dict[str, Any]], errors: Path | None) -> None:
    for file in written:
        if file["path"] != "-":
            note(f"wrote {file['path']} ({file['size_bytes']:,} bytes)")
    update = update_of(batch)
    if batch.status not in FINAL:
        note(f"{batch.id} is {batch.status}: these are {update.done:,} of {update.total:,} lines")
    elif batch.error_file_id and errors is None:
        note(f"{update.failed:,} of {update.total:,} lines failed: --errors PATH fetches them")
    elif batch.status == "failed":
        note(f"{batch.id} failed: `cloister status {batch.id}` says why")
