"""Pages of docs/ that are made of the code, and the check that they are what the code says now."""

import sys
from collections.abc import Sequence
from pathlib import Path


def write_or_check(path: Path, text: str, arguments: Sequence[str], *, module: str) -> int:
    """Writes a page; with ``--check`` tells whether it is the one that is there.

    Args:
        path: the page.
        text: what it has to be.
        arguments: of the command line.
        module: which module makes the page, for the message.

    Returns:
        The exit status: 1 where the page that is there is another one.
    """
    if "--check" not in arguments:
        path.write_text(text, encoding="utf-8")
        return 0
    if path.exists() and path.read_text(encoding="utf-8") == text:
        return 0
    sys.stderr.write(f"docs/{path.name} is not what the code says: run `python -m {module}`\n")
    return 1
