"""Finds and ends the processes of one data directory, by the mark in their environment."""

import os
import re
import shutil
import signal
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import psutil

from service.local.environment import CHILD, LOCAL_ID
from service.local.layout import Layout

GRACE_S = 4.0
POSTGRES_GRACE_S = 20.0
KILL_ROUNDS = 50
SHARED_MEMORY = "/dev/shm/"  # noqa: S108 - the kernel's place for it
POSTGRES = "postgres"


def _mark(process: psutil.Process) -> tuple[str, str] | None:
    try:
        environment = process.environ()
    except psutil.Error:
        return None
    if LOCAL_ID not in environment:
        return None
    return environment[LOCAL_ID], environment.get(CHILD, "")


def marked_processes(local_id: str, *, child: str | None = None) -> list[psutil.Process]:
    """Every running process of a data directory, or of one child and its descendants; never the caller."""
    found = []
    for process in psutil.process_iter():
        if process.pid == os.getpid():
            continue
        mark = _mark(process)
        if mark is not None and mark[0] == local_id and child in (None, mark[1]):
            found.append(process)
    return found


def _signal(processes: Sequence[psutil.Process], number: signal.Signals) -> None:
    for process in processes:
        try:
            process.send_signal(number)
        except psutil.NoSuchProcess:
            continue


def shared_memory(processes: Sequence[psutil.Process]) -> set[Path]:
    """The files of /dev/shm that these processes have mapped; a killed process cannot remove its own."""
    found = set()
    for process in processes:
        try:
            maps = Path(f"/proc/{process.pid}/maps").read_text()
        except OSError:
            continue  # it has ended, or this is no Linux
        found |= {Path(path) for path in re.findall(rf"{SHARED_MEMORY}\S+", maps)}
    return found


def _end(find: Callable[[], list[psutil.Process]], *, grace_s: float) -> None:
    """Ends what ``find`` gives until it gives nothing, so that what starts meanwhile is found too."""
    processes = find()
    shared = shared_memory(processes)
    if grace_s:
        _signal(processes, signal.SIGTERM)
        psutil.wait_procs(processes, timeout=grace_s)
    for _ in range(KILL_ROUNDS):
        processes = find()
        if not processes:
            break
        shared |= shared_memory(processes)
        _signal(processes, signal.SIGKILL)
        psutil.wait_procs(processes, timeout=0.2)
    for path in shared:
        path.unlink(missing_ok=True)


def kill_child(local_id: str, child: str) -> None:
    """Ends a child and all its descendants at once."""
    _end(lambda: marked_processes(local_id, child=child), grace_s=0)


def _end_all_but_postgres(local_id: str) -> None:
    def others() -> list[psutil.Process]:
        database = {process.pid for process in marked_processes(local_id, child=POSTGRES)}
        return [process for process in marked_processes(local_id) if process.pid not in database]

    _end(others, grace_s=GRACE_S)


def _end_postgres(layout: Layout) -> None:
    try:
        postmaster = int((layout.postgres_data / "postmaster.pid").read_text().split()[0])
    except (FileNotFoundError, IndexError, ValueError):
        postmaster = 0
    processes = [process for process in marked_processes(layout.local_id, child=POSTGRES) if process.pid == postmaster]
    _signal(processes, signal.SIGINT)  # a fast shutdown: disconnect the clients, write a checkpoint, end
    psutil.wait_procs(processes, timeout=POSTGRES_GRACE_S)
    kill_child(layout.local_id, POSTGRES)


def end_everything(layout: Layout) -> int:
    """Ends every process of a data directory, Postgres last and politely, and removes the runtime directory.

    Returns:
        How many processes there were.
    """
    count = len(marked_processes(layout.local_id))
    if count:
        _end_all_but_postgres(layout.local_id)
        _end_postgres(layout)
    _remove(layout)
    return count


def _remove(layout: Layout) -> None:
    # A process that was killed a moment ago may still hold a directory entry: try more than once.
    for _ in range(10):
        shutil.rmtree(layout.runtime_dir, ignore_errors=True)
        if not layout.runtime_dir.exists():
            return
        time.sleep(0.1)
