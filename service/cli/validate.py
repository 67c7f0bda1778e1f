"""``cloister validate``: looks for errors in an input file, without a server."""

import dataclasses
import json
from pathlib import Path
from typing import Annotated

import typer

from ray_job.contract.lines import ENDPOINTS
from service.cli.exits import ExitCode
from service.cli.terminal import counted, print_errors, stdout, transfer
from service.cli.uploads import first_endpoint, open_input
from service.input_file import InputFacts, read_input_file
from service.model_catalogue import load_catalogue


def validate(
    file: Annotated[Path, typer.Argument(help="A JSONL file of requests; - for stdin.", show_default=False)],
    *,
    endpoint: Annotated[str, typer.Option(help="By default the url of the first request.", show_default=False)] = "",
    models: Annotated[
        Path | None, typer.Option(help="The server's models.yaml; without it, any model name is taken.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object and nothing else.")] = False,
) -> None:
    """Look for errors in an input file, as the server does. Nothing is sent anywhere."""
    if endpoint and endpoint not in ENDPOINTS:
        raise typer.BadParameter(f"there are: {', '.join(ENDPOINTS)}", param_hint="--endpoint")
    catalogue = load_catalogue(models).models if models else None
    with open_input(file) as source:
        endpoint = endpoint or first_endpoint(source.chunks()) or ENDPOINTS[0]
        with transfer(source.name, source.size_bytes, quiet=as_json) as tell:
            chunks = (tell(source.file.tell()) or chunk for chunk in source.chunks())
            facts = read_input_file(chunks, endpoint=endpoint, models=catalogue)
    if as_json:
        print(_facts_json(facts, str(file), endpoint))
    elif facts.error_count:
        print_errors(stdout(), facts.errors, facts.error_count)
        print(f"{file}: {counted(facts.error_count, 'error')} in {counted(facts.total, 'request')} for {endpoint}")
    else:
        print(f"{file}: {counted(facts.total, 'request')} for {endpoint}, model {facts.model}, no errors")
    raise typer.Exit(ExitCode.FILE_INVALID if facts.error_count else ExitCode.OK)


def _facts_json(facts: InputFacts, file: str, endpoint: str) -> str:
    return json.dumps(
        {
            "file": file,
            "endpoint": endpoint,
            "is_valid": facts.error_count == 0,
            "requests": facts.total,
            "model": facts.model,
            "error_count": facts.error_count,
            "errors": [dataclasses.asdict(error) for error in facts.errors],
        },
        ensure_ascii=False,
    )
