"""Chains of iptables by how their names begin: found, and removed with what leads to them."""

import shutil
import subprocess
from typing import Final

_COMMANDS: Final = ("iptables", "ip6tables")


def chains(beginnings: tuple[str, ...]) -> list[str]:
    """The names of those that are there."""
    return [name for command in _COMMANDS for line in _saved(command) if (name := _declared(line, beginnings))]


def remove_chains(beginnings: tuple[str, ...]) -> None:
    """Removes them, each table in one step."""
    for command in _COMMANDS:
        if wanted := removal(_saved(command), beginnings):
            text = "\n".join(wanted) + "\n"
            subprocess.run([f"{command}-restore", "--wait", "--noflush"], input=text, text=True, check=True)


def removal(saved: list[str], beginnings: tuple[str, ...]) -> list[str]:
    """What ``iptables-restore`` has to be told.

    Args:
        saved: the lines of ``iptables-save``.
        beginnings: of the chains' names.
    """
    wanted: list[str] = []
    ours: list[str] = []
    for line in saved:
        if line.startswith("*"):
            wanted.append(line)
            ours = []
        elif name := _declared(line, beginnings):
            ours.append(name)
        elif (
            line.startswith("-A ")
            and line.split()[1] not in ours
            and line.endswith(tuple(f" -j {name}" for name in ours))
        ):
            wanted.append(line.replace("-A", "-D", 1))
        elif line == "COMMIT":
            wanted += [*(f"-F {name}" for name in ours), *(f"-X {name}" for name in ours), line]
    return wanted if any(line.startswith("-X ") for line in wanted) else []


def _declared(line: str, beginnings: tuple[str, ...]) -> str:
    """The name of a chain that begins so, of the line that declares it."""
    name = line[1:].partition(" ")[0] if line.startswith(":") else ""
    return name if name.startswith(beginnings) else ""


def _saved(command: str) -> list[str]:
    if shutil.which(f"{command}-save") is None:
        return []  # who made chains had it
    done = subprocess.run([f"{command}-save"], check=True, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
    return done.stdout.splitlines()
