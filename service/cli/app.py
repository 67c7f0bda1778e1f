"""The ``cloister`` command, assembled from the commands of this package."""

import sys
from collections.abc import Sequence
from importlib.metadata import version as package_version
from pathlib import Path
from typing import Annotated

import stamina.instrumentation
import typer

from service.cli import audit
from service.cli.batches import cancel, pause, resume, status, watch
from service.cli.capacity import capacity
from service.cli.doctor import doctor
from service.cli.keys import keys
from service.cli.models import models as models_commands
from service.cli.options import DEFAULT_DATA_DIR, DataDir
from service.cli.projects import projects
from service.cli.receipts import receipts, verify_receipt
from service.cli.results import results
from service.cli.submit import submit, validate
from service.cli.top import top
from service.cli.usage import usage
from service.cli.webhooks import secrets, webhooks
from service.client.exit_codes import EPILOG, CommandError, ExitCode
from service.errors import CloisterError

app = typer.Typer(help="A private, OpenAI-compatible LLM batch stack.", no_args_is_help=True, add_completion=False)
for command in (validate, submit, status, watch, top, results, pause, resume, cancel, capacity):
    app.command(epilog=EPILOG)(command)


@app.command()
def local(
    *,
    port: Annotated[int, typer.Option(min=1, max=65535, help="The port of the API on 127.0.0.1.")] = 8000,
    data_dir: DataDir = DEFAULT_DATA_DIR,
    model: Annotated[str, typer.Option(help="A directory, or any model id that vLLM accepts.")] = "",
    model_id: Annotated[str, typer.Option(help="The name that requests use for the model.")] = "",
    engine_arg: Annotated[
        list[str] | None,
        typer.Option(help="An engine argument of vLLM as key=value, e.g. max_model_len=4096. May be repeated."),
    ] = None,
    keep_warm: Annotated[
        int | None,
        typer.Option(
            min=0, metavar="SECONDS", help="How long engines stay ready after their last work; 600 by default."
        ),
    ] = None,
    models: Annotated[Path | None, typer.Option(help="A model catalogue (models.yaml) instead of --model.")] = None,
) -> None:
    """Run API, reconciler, coordinator, Postgres and Ray on this machine, in the foreground.

    Without --model and --models, the command uses the catalogue in the data directory. The first
    time, it creates a small demo model with random weights.
    """
    from service.local.models import KEEP_WARM_S, ModelOptions
    from service.local.stack import run_local

    describes_model = bool(model_id or engine_arg or keep_warm is not None)
    if models is not None and (model or describes_model):
        raise typer.BadParameter("--models replaces --model, --model-id, --engine-arg and --keep-warm: leave these out")
    if not model and describes_model and (data_dir / "models.yaml").exists():
        raise typer.BadParameter("--model-id, --engine-arg and --keep-warm describe a model: give --model too")
    options = ModelOptions(
        source=model,
        model_id=model_id,
        engine_args=tuple(engine_arg or ()),
        keep_warm_s=KEEP_WARM_S if keep_warm is None else keep_warm,
        models_file=models,
    )
    run_local(port=port, data_dir=data_dir, options=options, report=lambda line: print(line, flush=True))


app.add_typer(keys, name="keys")
app.add_typer(projects, name="projects")
app.add_typer(webhooks, name="webhooks")
app.add_typer(secrets, name="secrets")
app.add_typer(models_commands, name="models")
app.add_typer(audit.audit, name="audit")
app.add_typer(receipts, name="receipts")
app.command()(verify_receipt)
app.command()(usage)
app.command()(doctor)


@app.command()
def version() -> None:
    """Print the version."""
    print(package_version("cloister"))


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command, and print the errors of cloister without a traceback.

    Args:
        arguments: the command line; None for the arguments of the process.
    """
    stamina.instrumentation.set_on_retry_hooks([])  # retries show in the progress, not in a log on stdout
    try:
        app(args=arguments)
    except CloisterError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(error.exit_code if isinstance(error, CommandError) else ExitCode.ERROR)
