"""``cloister cancel``: ends a batch early."""

from typing import Annotated

import typer

from service.cli.client import ClientDataDir, open_client
from service.cli.database import DEFAULT_DATA_DIR
from service.cli.exits import ExitCode, outcome
from service.cli.following import update_of
from service.cli.terminal import note
from service.cli.waiting import batch_json, tell_end, wait


def cancel(
    batch: Annotated[str, typer.Argument(help="A batch id.", show_default=False)],
    *,
    should_wait: Annotated[bool, typer.Option("--wait", help="Wait until it has ended.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print the Batch object and nothing else.")] = False,
    data_dir: ClientDataDir = DEFAULT_DATA_DIR,
) -> None:
    """Cancel a batch. What it has answered so far is kept."""
    with open_client(data_dir) as client:
        ended = client.batches.cancel(batch)
        if should_wait:
            ended = wait(client, batch, quiet=as_json)
    if as_json:
        print(batch_json(ended))
    elif should_wait:
        tell_end(ended)
    else:
        print(f"{ended.id} is {ended.status}")
    if ended.output_file_id and not as_json:
        note(f"`cloister results {batch}` fetches the answers that there are.")
    if should_wait and ended.status != "cancelled":
        raise typer.Exit(outcome(ended.status, update_of(ended).failed))
    raise typer.Exit(ExitCode.OK)
