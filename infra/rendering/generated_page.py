"""Pages of docs/ that are generated from the code, and the check that they are up to date."""

import sys
from collections.abc import Sequence
from pathlib import Path


def write_or_check(path: Path, text: str, arguments: Sequence[str], *, module: str) -> int:
    """Write a page; with ``--check``, compare it with the existing one instead.

    Args:
        path: the page.
        text: its content.
        arguments: arguments of the command line.
        module: the module that generates the page, for the message.

    Returns:
        The exit status: 1 if the existing page differs.
    """
    if "--check" not in arguments:
        path.write_text(text, encoding="utf-8")
        return 0
    if path.exists() and path.read_text(encoding="utf-8") == text:
        return 0
    sys.stderr.write(f"{path.parent.name}/{path.name} is out of date: run `python -m {module}`\n")
    return 1
