"""``cloister local``: the whole stack on one machine, in the foreground."""

from pathlib import Path
from typing import Annotated

import typer

from service.cli.database import DEFAULT_DATA_DIR, DataDir


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
    models: Annotated[
        Path | None, typer.Option(help="A whole model catalogue (models.yaml) instead of --model.")
    ] = None,
) -> None:
    """Run service, reconciler, Postgres and Ray on this machine, in the foreground.

    Without --model and --models, the catalogue in the data directory is used; the first time, a
    small demo model with random weights is made.
    """
    from service.local.models import ModelOptions
    from service.local.stack import run_local

    if models is not None and (model or model_id or engine_arg):
        raise typer.BadParameter("--models is a whole catalogue: leave out --model, --model-id and --engine-arg")
    if not model and (model_id or engine_arg) and (data_dir / "models.yaml").exists():
        raise typer.BadParameter("--model-id and --engine-arg describe a model: give --model too")
    options = ModelOptions(source=model, model_id=model_id, engine_args=tuple(engine_arg or ()), models_file=models)
    run_local(port=port, data_dir=data_dir, options=options, tell=lambda line: print(line, flush=True))
