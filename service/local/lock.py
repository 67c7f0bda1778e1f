"""One ``cloister local`` per data directory.

The supervisor and its guard hold one lock together: while the guard still clears up after a
supervisor that was killed, the next one waits for it instead of racing with it.
"""

import fcntl
import os
import time
from pathlib import Path

import psutil

from service.local.errors import LocalError

GUARD_WAIT_S = 60.0


def _try_lock(descriptor: int) -> bool:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _holder(path: Path) -> int | None:
    text = path.read_text().strip()
    pid = int(text) if text.isdecimal() else None
    return pid if pid is not None and psutil.pid_exists(pid) else None


def take_lock(path: Path) -> int:
    """Takes the lock and writes this process's id into it.

    Returns:
        The open file descriptor; the lock lasts as long as a process keeps it open.

    Raises:
        LocalError: another ``cloister local`` runs on this data directory.
    """
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    deadline = time.monotonic() + GUARD_WAIT_S
    while not _try_lock(descriptor):
        holder = _holder(path)
        if holder is not None or time.monotonic() > deadline:
            os.close(descriptor)
            who = f"process {holder}" if holder else "an earlier run that still clears up"
            raise LocalError(
                f"the data directory {path.parent} is in use by {who}: stop that one, or choose another --data-dir"
            )
        time.sleep(0.2)
    os.ftruncate(descriptor, 0)
    os.pwrite(descriptor, f"{os.getpid()}\n".encode(), 0)
    return descriptor
