"""Child processes of ``cloister local``: their environment, which marks them, and how to find and end them."""

import contextlib
import os
import re
import shutil
import signal
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import psutil

from ray_job.contract.ray_environment import RAY_ENVIRONMENT
from service.local.layout import Layout, runtime_dir_problem

LOCAL_ID = "CLOISTER_LOCAL_ID"
CHILD = "CLOISTER_LOCAL_CHILD"

# Variables of the caller that would change the behaviour of a child.
DROPPED = (
    "RAY_ADDRESS",
    "RAY_AUTH_TOKEN",
    "RAY_TMPDIR",
    "PYTHONDONTWRITEBYTECODE",
    "PGHOST",
    "PGPORT",
    "PGUSER",
    "PGPASSWORD",
)
QUIET = {
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_DISABLE_IMPORT_WARNING": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "DO_NOT_TRACK": "1",
    "HF_HUB_DISABLE_TELEMETRY": "1",
    # Ray and vLLM rename their processes. Without this, the new name overwrites the environment that the kernel shows,
    # and with it the mark by which the guard finds them.
    "SPT_NOENV": "1",
    "PYTHONUNBUFFERED": "1",
}

GRACE_S = 4.0
POSTGRES_GRACE_S = 20.0
KILL_ROUNDS = 50
SHARED_MEMORY = "/dev/shm/"  # noqa: S108 - the kernel's directory
POSTGRES = "postgres"


def child_environment(
    layout: Layout, child: str, inherited: Mapping[str, str], *, offline: bool, gpu: bool
) -> dict[str, str]:
    """Return the environment of a child, without the settings of its program.

    Args:
        layout: the paths of the data directory.
        child: the child's name. Together with the layout's id it marks the child and all its descendants.
        inherited: the environment of the supervisor.
        offline: forbid downloads from Hugging Face, because the model is on this machine.
        gpu: whether this machine has a GPU.
    """
    environment = {name: value for name, value in inherited.items() if name not in DROPPED}
    environment |= QUIET | RAY_ENVIRONMENT
    if not gpu:
        # Ray gives a worker as many threads as it reserves CPUs, which is one for the engine. On two cores vLLM's own
        # LLM.chat answered 43 rows per second with one thread and 69 with two. The caller's values take precedence.
        cpu_engine = {"VLLM_CPU_KVCACHE_SPACE": "1", "OMP_NUM_THREADS": str(psutil.cpu_count() or 1)}
        environment = cpu_engine | environment
    if offline:
        environment["HF_HUB_OFFLINE"] = "1"
    return environment | {
        LOCAL_ID: layout.local_id,
        CHILD: child,
        "TMPDIR": str(layout.temporary_dir),
        # Some of Ray's ports listen on every interface. Without a token, the whole network could run code here.
        "RAY_AUTH_MODE": "token",
        "RAY_AUTH_TOKEN_PATH": str(layout.ray_token),
    }


def marked_processes(local_id: str, *, child: str | None = None) -> list[psutil.Process]:
    """Return the running processes of a data directory, or of one child and its descendants; never the caller."""
    found = []
    for process in psutil.process_iter():
        if process.pid == os.getpid():
            continue
        try:
            environment = process.environ()
        except psutil.Error:
            continue
        if environment.get(LOCAL_ID) == local_id and child in (None, environment.get(CHILD, "")):
            found.append(process)
    return found


def shared_memory(processes: Sequence[psutil.Process]) -> set[Path]:
    """Return the files of /dev/shm that these processes have mapped. A killed process leaves them behind."""
    found = set()
    for process in processes:
        try:
            maps = Path(f"/proc/{process.pid}/maps").read_text()
        except OSError:
            continue  # the process has ended, or this is not Linux
        found |= {Path(path) for path in re.findall(rf"{SHARED_MEMORY}\S+", maps)}
    return found


def _end(find: Callable[[], list[psutil.Process]], *, grace_s: float) -> None:
    """End the processes that ``find`` returns, until it returns none, so that newly started ones end too."""
    shared: set[Path] = set()
    attempts = [(signal.SIGTERM, grace_s)] if grace_s else []
    attempts += [(signal.SIGKILL, 0.2)] * KILL_ROUNDS
    for number, timeout_s in attempts:
        processes = find()
        if not processes:
            break
        shared |= shared_memory(processes)
        for process in processes:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.send_signal(number)
        psutil.wait_procs(processes, timeout=timeout_s)
    for path in shared:
        path.unlink(missing_ok=True)


def kill_child(local_id: str, child: str) -> None:
    """Kill a child and all its descendants."""
    _end(lambda: marked_processes(local_id, child=child), grace_s=0)


def end_everything(layout: Layout) -> int:
    """End every process of a data directory, Postgres last and gracefully, and remove the runtime directory.

    Returns:
        The number of processes that were running.
    """
    local_id = layout.local_id
    count = len(marked_processes(local_id))
    if count:

        def all_but_postgres() -> list[psutil.Process]:
            database = {process.pid for process in marked_processes(local_id, child=POSTGRES)}
            return [process for process in marked_processes(local_id) if process.pid not in database]

        _end(all_but_postgres, grace_s=GRACE_S)
        try:
            postmaster = int((layout.postgres_data / "postmaster.pid").read_text().split()[0])
        except (FileNotFoundError, IndexError, ValueError):
            postmaster = 0
        found = [process for process in marked_processes(local_id, child=POSTGRES) if process.pid == postmaster]
        for process in found:
            with contextlib.suppress(psutil.NoSuchProcess):
                # A fast shutdown: disconnect the clients, write a checkpoint, end.
                process.send_signal(signal.SIGINT)
        psutil.wait_procs(found, timeout=POSTGRES_GRACE_S)
        kill_child(local_id, POSTGRES)
    # A process that was just killed may still hold a directory entry, so this may take more than one try. What another
    # user placed there stays, for make_directories to report.
    for _ in range(10):
        try:
            if runtime_dir_problem(layout.runtime_dir):
                break
        except FileNotFoundError:
            break
        shutil.rmtree(layout.runtime_dir, ignore_errors=True)
        time.sleep(0 if not layout.runtime_dir.exists() else 0.1)
    if layout.temporary_dir.parent == layout.data_dir:
        shutil.rmtree(layout.temporary_dir, ignore_errors=True)
    layout.place.unlink(missing_ok=True)
    return count
