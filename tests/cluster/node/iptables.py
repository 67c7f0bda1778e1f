"""iptables chains by prefix of their names, and their removal with the rules that jump to them."""

import shutil
import subprocess
from typing import Final

_COMMANDS: Final = ("iptables", "ip6tables")


def chains(beginnings: tuple[str, ...]) -> list[str]:
    """Return the names of the existing chains with these prefixes."""
    return [name for command in _COMMANDS for line in _saved(command) if (name := _declared(line, beginnings))]


def remove_chains(beginnings: tuple[str, ...]) -> None:
    """Remove the chains, each table in one transaction."""
    for command in _COMMANDS:
        if wanted := removal(_saved(command), beginnings):
            text = "\n".join(wanted) + "\n"
            subprocess.run([f"{command}-restore", "--wait", "--noflush"], input=text, text=True, check=True)


def removal(saved: list[str], beginnings: tuple[str, ...]) -> list[str]:
    """Return the input of ``iptables-restore`` that removes the chains.

    Args:
        saved: lines of ``iptables-save``.
        beginnings: prefixes of the chains' names.
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
    """Return the name of the chain that a line declares, if it has one of the prefixes; otherwise an empty text."""
    name = line[1:].partition(" ")[0] if line.startswith(":") else ""
    return name if name.startswith(beginnings) else ""


def _saved(command: str) -> list[str]:
    if shutil.which(f"{command}-save") is None:
        return []  # without the command nobody created chains
    done = subprocess.run([f"{command}-save"], check=True, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
    return done.stdout.splitlines()
