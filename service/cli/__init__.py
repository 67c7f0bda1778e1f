"""The ``cloister`` command. Each module holds one command or one group of them."""

import sys
from importlib.metadata import version as package_version

import typer

from service.cli import keys
from service.cli.local import local
from service.errors import CloisterError

app = typer.Typer(help="A private, OpenAI-compatible LLM batch stack.", no_args_is_help=True, add_completion=False)
app.command()(local)
app.add_typer(keys.app, name="keys")


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
