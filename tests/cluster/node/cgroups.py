"""Control groups of nodes: one below the root of each hierarchy, of version 1 or 2."""

import os
import signal
import time
from contextlib import suppress
from pathlib import Path
from typing import Final

_MOUNTS: Final = Path("/proc/self/mounts")
# Controllers that a kubelet requires.
_CONTROLLERS: Final = ("cpuset", "cpu", "io", "memory", "hugetlb", "pids")
_BEFORE_ALL_ELSE: Final = ("cpuset.cpus", "cpuset.mems")


def make_cgroup(name: str) -> None:
    """Create the cgroup in each hierarchy; a kubelet creates those of its pods below it."""
    for root, version in _hierarchies():
        directory = root / name
        directory.mkdir(exist_ok=True)  # a hierarchy can be mounted at two places
        for setting in _BEFORE_ALL_ELSE:
            # In version 1 they are initially empty, and an empty one accepts no process.
            if version == 1 and (root / setting).exists():
                (directory / setting).write_text((root / setting).read_text())
        controllers = root / "cgroup.controllers"
        if version == 2 and controllers.exists():
            enabled = " ".join(f"+{each}" for each in controllers.read_text().split() if each in _CONTROLLERS)
            (root / "cgroup.subtree_control").write_text(enabled)


def remove_cgroup(name: str, *, within_s: float = 20) -> None:
    """Kill the processes in the cgroup, and remove it with everything below it.

    Raises:
        OSError: something could not be removed.
    """
    end = time.monotonic() + within_s
    while True:
        try:
            for directory in cgroup_directories(name):
                _remove(directory)
        except OSError:
            if time.monotonic() > end:
                raise
            time.sleep(0.1)
        else:
            return


def cgroup_directories(name: str) -> list[Path]:
    """Return the directories of the cgroup that exist."""
    return [root / name for root, _ in _hierarchies() if (root / name).exists()]


def _remove(directory: Path) -> None:
    for folder, _, files in os.walk(directory, topdown=False):
        if "cgroup.procs" in files:
            for line in (Path(folder) / "cgroup.procs").read_text().split():
                with suppress(ProcessLookupError):
                    os.kill(int(line), signal.SIGKILL)
        Path(folder).rmdir()


def _hierarchies() -> list[tuple[Path, int]]:
    versions = {"cgroup": 1, "cgroup2": 2}
    mounts = [line.split() for line in _MOUNTS.read_text().splitlines()]
    return [(Path(path), versions[kind]) for _, path, kind, *_ in mounts if kind in versions]
