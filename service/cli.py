"""The ``cloister`` command."""

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.metadata import version as package_version
from pathlib import Path
from typing import Annotated

import psycopg
import typer

from service.api_keys import create_api_key, ensure_default_project, list_api_keys, revoke_api_key
from service.db import Pool, open_pool
from service.errors import CloisterError

app = typer.Typer(help="A private, OpenAI-compatible LLM batch stack.", no_args_is_help=True, add_completion=False)
keys = typer.Typer(help="API keys of a running stack.", no_args_is_help=True)
app.add_typer(keys, name="keys")

DataDir = Annotated[Path, typer.Option(help="Where everything that lasts is kept.")]
DEFAULT_DATA_DIR = Path("cloister-data")


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


@contextmanager
def _database(data_dir: Path) -> Iterator[Pool]:
    """The database of a running ``cloister local``, or any that CLOISTER_DATABASE_URL names."""
    from service.local.layout import layout_of

    url = os.environ.get("CLOISTER_DATABASE_URL") or layout_of(data_dir).database_url("cloister")
    try:
        with psycopg.connect(url, connect_timeout=5):
            pass
    except psycopg.OperationalError as error:
        raise CloisterError(
            f"no database answers for {data_dir}: start `cloister local --data-dir {data_dir}` first, "
            f"or set CLOISTER_DATABASE_URL ({error})"
        ) from error
    with open_pool(url, max_size=1) as pool:
        yield pool


@keys.command("create")
def create_key(
    name: Annotated[str, typer.Argument(help="Tells keys apart.")], data_dir: DataDir = DEFAULT_DATA_DIR
) -> None:
    """Make a key and show it, this once."""
    with _database(data_dir) as pool:
        print(create_api_key(pool, project_id=ensure_default_project(pool).id, name=name))


@keys.command("list")
def list_keys(data_dir: DataDir = DEFAULT_DATA_DIR) -> None:
    """Show every key's id, name and last four characters."""
    with _database(data_dir) as pool:
        for key in list_api_keys(pool):
            state = f"revoked {key.revoked_at:%Y-%m-%d}" if key.revoked_at else "valid"
            print(f"{key.id}  …{key.hint}  {key.created_at:%Y-%m-%d}  {state}  {key.name}")


@keys.command("revoke")
def revoke_key(key_id: str, data_dir: DataDir = DEFAULT_DATA_DIR) -> None:
    """Refuse a key from now on."""
    with _database(data_dir) as pool:
        if not revoke_api_key(pool, key_id):
            raise CloisterError(f"there is no key {key_id}; see `cloister keys list`")
    print(f"revoked {key_id}")


@app.command()
def version() -> None:
    """Show the version."""
    print(package_version("cloister"))


def main() -> None:
    """The entry point: errors that we raise on purpose are shown without a traceback."""
    try:
        app()
    except CloisterError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(1)


if __name__ == "__main__":
    main()
