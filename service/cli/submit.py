"""``cloister submit``: from a file to a batch, and if asked to its results."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Final

import typer

from ray_job.contract.lines import ENDPOINTS
from service.cli.client import ClientDataDir, open_client
from service.cli.database import DEFAULT_DATA_DIR
from service.cli.downloads import save
from service.cli.exits import CommandError, ExitCode, outcome
from service.cli.following import update_of
from service.cli.terminal import counted, note, print_errors, stderr, transfer
from service.cli.uploads import InputFile, first_endpoint, open_input, upload
from service.cli.waiting import batch_json, tell_end, wait
from service.input_file import InputFacts, read_input_file

if TYPE_CHECKING:
    from openai import OpenAI
    from openai.types import Batch

_MAX_PAIRS: Final = 16


def submit(
    file: Annotated[Path, typer.Argument(help="A JSONL file of requests; - for stdin.", show_default=False)],
    *,
    endpoint: Annotated[str, typer.Option(help="By default the url of the first request.", show_default=False)] = "",
    metadata: Annotated[
        list[str] | None, typer.Option(metavar="KEY=VALUE", help="Metadata of the batch. May be repeated.")
    ] = None,
    validate: Annotated[
        bool, typer.Option(help="Look for errors before the upload. The server looks in any case.")
    ] = True,
    should_wait: Annotated[bool, typer.Option("--wait", help="Wait for the end, then write the results.")] = False,
    output: Annotated[
        Path | None, typer.Option(help="With --wait: answers go here; if not given, BATCH_output.jsonl.")
    ] = None,
    errors: Annotated[
        Path | None, typer.Option(help="With --wait: failed lines go here; if not given, BATCH_errors.jsonl.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the Batch object and nothing else.")] = False,
    data_dir: ClientDataDir = DEFAULT_DATA_DIR,
) -> None:
    """Upload a file and make a batch of it."""
    if not should_wait and (output or errors):
        raise typer.BadParameter("--output and --errors are written at the end of the batch: give --wait too")
    if endpoint and endpoint not in ENDPOINTS:
        raise typer.BadParameter(f"there are: {', '.join(ENDPOINTS)}", param_hint="--endpoint")
    pairs = parse_metadata(metadata or [])
    with open_client(data_dir) as client:
        batch = _created(client, file, endpoint, pairs, validate=validate, quiet=as_json)
        if should_wait:
            batch = wait(client, batch.id, quiet=as_json)
            _save_results(client, batch, output, errors, quiet=as_json)
    if as_json:
        print(batch_json(batch))
    elif should_wait:
        tell_end(batch)
    else:
        print(batch.id)
        note(f"`cloister watch {batch.id}` follows it, `cloister results {batch.id}` fetches the answers.")
    if should_wait:
        raise typer.Exit(outcome(batch.status, update_of(batch).failed))


def parse_metadata(pairs: list[str]) -> dict[str, str]:
    """The pairs of ``--metadata``.

    Raises:
        typer.BadParameter: one is no pair, or there are too many.
    """
    parsed = dict(pair.split("=", 1) for pair in pairs if "=" in pair)
    for pair in pairs:
        if "=" not in pair or pair.startswith("="):
            raise typer.BadParameter(f"{pair!r} must look like KEY=VALUE", param_hint="--metadata")
    if len(parsed) > _MAX_PAIRS:
        raise typer.BadParameter(f"a batch has at most {_MAX_PAIRS} pairs", param_hint="--metadata")
    return parsed


def _created(
    client: "OpenAI", path: Path, endpoint: str, metadata: dict[str, str], *, validate: bool, quiet: bool
) -> "Batch":
    with open_input(path) as source:
        found = endpoint or first_endpoint(source.chunks())
        if validate or found is None:
            facts = read_input_file(source.chunks(), endpoint=found or ENDPOINTS[0], models=None)
            if facts.error_count:
                raise _invalid(source, facts)
        try:
            with transfer(source.name, source.size_bytes, quiet=quiet) as tell:
                file_id = upload(client, source, tell)
        except KeyboardInterrupt:
            raise CommandError("interrupted during the upload: no batch was made", ExitCode.INTERRUPTED) from None
    options: Any = {"metadata": metadata} if metadata else {}
    return client.batches.create(
        input_file_id=file_id,
        endpoint=found or ENDPOINTS[0],  # type: ignore[arg-type]
        completion_window="24h",
        **options,
    )


def _invalid(source: InputFile, facts: InputFacts) -> CommandError:
    print_errors(stderr(), facts.errors, facts.error_count)
    return CommandError(
        f"{source.name} has {counted(facts.error_count, 'error')}, so nothing was uploaded. Correct it; "
        "`cloister validate` tells whether it will do.",
        ExitCode.FILE_INVALID,
    )


def _save_results(client: "OpenAI", batch: "Batch", output: Path | None, errors: Path | None, *, quiet: bool) -> None:
    for path, file_id, name in (
        (output, batch.output_file_id, f"{batch.id}_output.jsonl"),
        (errors, batch.error_file_id, f"{batch.id}_errors.jsonl"),
    ):
        if path is None and file_id is None:
            continue
        target = path or Path(name)
        with transfer(target.name, None, quiet=quiet) as tell:
            size = save(client, file_id, target, tell)
        if not quiet:
            note(f"wrote {target} ({size:,} bytes)")
