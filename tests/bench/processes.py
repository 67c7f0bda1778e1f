"""Processes of a run: their environment, which marks them, their start and end, and the lines that they write."""

import os
import secrets
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any

from tests.bench.measure import MARK

ROOT = Path(__file__).parents[2]
STOP_TIMEOUT_S = 60


def run_environment() -> tuple[dict[str, str], str]:
    """Return the environment of a run's processes, and the token that marks them."""
    token = secrets.token_hex(8)
    quiet = {
        "RAY_USAGE_STATS_ENABLED": "0",
        "VLLM_NO_USAGE_STATS": "1",
        "DO_NOT_TRACK": "1",
        "HF_HUB_OFFLINE": "1",
        # Ray and vLLM rename their processes, which would otherwise overwrite the environment with the mark.
        "SPT_NOENV": "1",
        "VLLM_CPU_KVCACHE_SPACE": os.environ.get("VLLM_CPU_KVCACHE_SPACE", "1"),
        # Where vLLM finds the worker of the simulated GPU, also in the processes that Ray starts.
        "PYTHONPATH": str(ROOT),
    }
    # Without compiled bytecode imports take twice as long, in all runners.
    inherited = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
    return {**inherited, **quiet, MARK: token}, token


@contextmanager
def running(
    arguments: list[str], environment: Mapping[str, str], log: Path, *, stderr: int | None = None
) -> "Iterator[subprocess.Popen[bytes]]":
    """Run Python with these arguments until the end of the block.

    Args:
        arguments: the arguments of Python.
        environment: the whole environment.
        log: the file for its output.
        stderr: where its errors go, if not to the log.
    """
    with log.open("wb") as file:
        process = subprocess.Popen(
            [sys.executable, *arguments],
            env=dict(environment),
            stdout=file,
            stderr=file if stderr is None else stderr,
            start_new_session=True,
        )
        try:
            yield process
        finally:
            if process.poll() is None:
                process.send_signal(signal.SIGTERM)
                process.wait(STOP_TIMEOUT_S)


def finish(process: "subprocess.Popen[bytes]", log: Path) -> None:
    """Wait for the end of a process.

    Raises:
        RuntimeError: it failed.
    """
    if process.wait() != 0:
        raise RuntimeError(f"a runner ended with {process.returncode}; see {log}")


def free_port() -> int:
    """Return a port of 127.0.0.1 on which nothing listens now."""
    with socket.socket() as opened:
        opened.bind(("127.0.0.1", 0))
        return int(opened.getsockname()[1])


class LineCounter:
    """Counts the lines of a growing file and reads each part of it once.

    Args:
        path: the file, which need not exist yet.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._file: IO[Any] | None = None
        self._lines = 0

    def count(self) -> int:
        """Return the lines that the file has now."""
        if self._file is None:
            if not self._path.exists():
                return 0
            self._file = self._path.open("rb")
        while chunk := self._file.read(1 << 20):
            self._lines += chunk.count(b"\n")
        return self._lines

    def close(self) -> None:
        """Close the file."""
        if self._file is not None:
            self._file.close()
