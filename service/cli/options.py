"""Options that several commands share."""

import re
from datetime import timedelta
from pathlib import Path
from typing import Annotated, Final

import typer

DEFAULT_DATA_DIR: Final = Path("cloister-data")
DataDir = Annotated[Path, typer.Option(help="The directory that holds all data of `cloister local`.")]
ClientDataDir = Annotated[
    Path,
    typer.Option(
        help="The data directory of the `cloister local` to connect to. CLOISTER_BASE_URL and CLOISTER_API_KEY, or "
        "OPENAI_BASE_URL and OPENAI_API_KEY, name another server."
    ),
]

_UNITS: Final = {"d": "days", "h": "hours", "m": "minutes"}
_MAX_DURATION: Final = timedelta(days=36_500)


def parse_duration(text: str) -> timedelta:
    """Parse a duration of whole days, hours or minutes: ``30d``, ``12h``, ``90m``.

    Raises:
        typer.BadParameter: the text has another form, or is zero or more than a hundred years.
    """
    match = re.fullmatch(r"([0-9]{1,9})([dhm])", text)
    length = timedelta(**{_UNITS[match[2]]: int(match[1])}) if match else timedelta()
    if not timedelta() < length <= _MAX_DURATION:
        raise typer.BadParameter(f"{text!r} is not a duration: write a whole number and d, h or m, e.g. 30d")
    return length
