"""The reference part of docs/cli.md, made from the commands themselves.

``python -m tests.integration.cli_reference`` writes it anew; a test tells when that is due.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

from typer.main import get_command

from service.cli import app
from service.cli.exits import MEANINGS

PAGE: Final = Path(__file__).parents[2] / "docs" / "cli.md"
START: Final = "<!-- reference: written by `python -m tests.integration.cli_reference` -->\n"


def commands(command: Any, name: str) -> Iterator[tuple[str, Any]]:
    """Every command that does something, by its full name."""
    if hasattr(command, "commands"):
        for below in command.commands.values():
            yield from commands(below, f"{name} {below.name}")
    else:
        yield name, command


def reference() -> str:
    """Exit codes, and a section for each command."""
    exits = "".join(f"| {code.value} | {meaning} |\n" for code, meaning in MEANINGS.items())
    sections = "".join(_section(name, command) for name, command in commands(get_command(app), "cloister"))
    return f"\n## Exit codes\n\n| code | meaning |\n|---|---|\n{exits}\n## Commands\n{sections}"


def _section(name: str, command: Any) -> str:
    arguments = [parameter for parameter in command.params if parameter.param_type_name == "argument"]
    usage = " ".join([name, *(_argument(argument) for argument in arguments)])
    rows = "".join(
        f"| `{_names(parameter)}` | {_cell(parameter.help or '')} |\n"
        for parameter in command.params
        if parameter.help and parameter.name != "help"
    )
    table = f"\n| | |\n|---|---|\n{rows}" if rows else ""
    return f"\n### `{usage}`\n\n{_cell(command.help or '')}\n{table}"


def _argument(argument: Any) -> str:
    return str(argument.name.upper()) if argument.required else f"[{argument.name.upper()}]"


def _names(parameter: Any) -> str:
    if parameter.param_type_name == "argument":
        return str(parameter.name.upper())
    return ", ".join([*parameter.opts, *parameter.secondary_opts])


def _cell(text: str) -> str:
    return " ".join(text.split()).replace("|", "\\|")


def written(page: str) -> str:
    """The page with its reference part as it should be."""
    return page.split(START, maxsplit=1)[0] + START + reference()


if __name__ == "__main__":
    PAGE.write_text(written(PAGE.read_text()))
