"""``cloister watch``: follows a batch to its end."""

from typing import Annotated

import typer

from service.cli.client import ClientDataDir, open_client
from service.cli.database import DEFAULT_DATA_DIR
from service.cli.exits import outcome
from service.cli.following import Update, update_of
from service.cli.terminal import note
from service.cli.waiting import batch_json, tell_end, update_json, wait


def watch(
    batch: Annotated[str, typer.Argument(help="A batch id.", show_default=False)],
    *,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print one JSON object per change, the Batch object last.")
    ] = False,
    data_dir: ClientDataDir = DEFAULT_DATA_DIR,
) -> None:
    """Show the progress of a batch until it ends. The exit code says how."""
    told: list[Update] = []

    def tell(update: Update) -> None:
        if told != [update]:
            told[:] = [update]
            print(update_json("progress", update), flush=True)

    with open_client(data_dir) as client:
        ended = wait(client, batch, quiet=as_json, tell=tell if as_json else None)
    if as_json:
        print(batch_json(ended))
    else:
        tell_end(ended)
        if ended.output_file_id or ended.error_file_id:
            note(f"`cloister results {ended.id}` fetches what it has.")
    raise typer.Exit(outcome(ended.status, update_of(ended).failed))
