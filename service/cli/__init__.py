"""The ``cloister`` command. Each module holds one command or one group of them."""

import sys
from collections.abc import Sequence
from importlib.metadata import version as package_version

import typer

from service.cli import keys, projects, webhooks
from service.cli.audit import audit
from service.cli.cancel import cancel
from service.cli.doctor import doctor
from service.cli.exits import EPILOG, CommandError, ExitCode
from service.cli.local import local
from service.cli.results import results
from service.cli.status import status
from service.cli.submit import submit
from service.cli.validate import validate
from service.cli.watch import watch
from service.errors import CloisterError

app = typer.Typer(help="A private, OpenAI-compatible LLM batch stack.", no_args_is_help=True, add_completion=False)
for command in (validate, submit, status, watch, results, cancel):
    app.command(epilog=EPILOG)(command)
app.command()(local)
app.add_typer(keys.app, name="keys")
app.add_typer(projects.app, name="projects")
app.add_typer(webhooks.app, name="webhooks")
app.command()(audit)
app.command()(doctor)


@app.command()
def version() -> None:
    """Show the version."""
    print(package_version("cloister"))


def main(arguments: Sequence[str] | None = None) -> None:
    """The entry point: errors that we raise on purpose are shown without a traceback.

    Args:
        arguments: instead of those of the process.
    """
    try:
        app(args=arguments)
    except CloisterError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(error.exit_code if isinstance(error, CommandError) else ExitCode.ERROR)
