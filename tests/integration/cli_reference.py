"""The generated part of docs/cli.md: the exit codes, and typer's own reference of the commands.

``python -m tests.integration.cli_reference`` writes it. A test fails if it is out of date.
"""

import html
import re
import subprocess
import sys
from pathlib import Path
from typing import Final

from service.client.exit_codes import EPILOG, MEANINGS

PAGE: Final = Path(__file__).parents[2] / "docs" / "cli.md"
START: Final = "<!-- reference: written by `python -m tests.integration.cli_reference` -->\n"
_TYPER: Final = (sys.executable, "-m", "typer", "service.cli.app", "utils", "docs", "--name", "cloister")


def reference() -> str:
    """Return the exit codes and the reference of the commands, as Markdown."""
    exits = "".join(f"| {code.value} | {meaning} |\n" for code, meaning in MEANINGS.items())
    commands = subprocess.run(_TYPER, capture_output=True, text=True, check=True).stdout
    commands = html.unescape(commands).replace(f"{EPILOG}\n\n", "")
    commands = re.sub(r"^\* `--help`: .*\n", "", commands, flags=re.MULTILINE)
    commands = re.sub(r"\*\*Options\*\*:\n\n(?=\n|\Z)", "", commands)
    # The headings below list the commands too, without cutting their descriptions.
    commands = re.sub(r"\*\*Commands\*\*:\n\n(\* .*\n)+\n", "", commands)
    commands = re.sub(r"\n{3,}", "\n\n", commands)
    # The page has its own title, so every heading moves down by one level.
    commands = re.sub(r"^#", "##", commands, flags=re.MULTILINE)
    return f"\n## Exit codes\n\n| code | meaning |\n|---|---|\n{exits}\n{commands.rstrip()}\n"


def updated(page: str) -> str:
    """Return the page with a current reference."""
    return page.split(START, maxsplit=1)[0] + START + reference()


if __name__ == "__main__":
    PAGE.write_text(updated(PAGE.read_text()))
