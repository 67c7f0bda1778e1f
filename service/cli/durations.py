"""Lengths of time as an operator writes them: ``30d``, ``12h``, ``90m``."""

import re
from datetime import timedelta

import typer

_UNITS = {"d": "days", "h": "hours", "m": "minutes"}


def parse_duration(text: str) -> timedelta:
    """Reads a whole number and one of d, h and m.

    Raises:
        typer.BadParameter: it is not of that form, or no time at all, or more than a hundred years.
    """
    match = re.fullmatch(r"([0-9]{1,9})([dhm])", text)
    length = timedelta(**{_UNITS[match[2]]: int(match[1])}) if match else timedelta()
    if not timedelta() < length <= timedelta(days=36_500):
        raise typer.BadParameter(f"{text!r} is no length of time: write a whole number and d, h or m, e.g. 30d")
    return length
