"""A process of the cluster: started with a log, waited for until it is ready, and stopped by its own id."""

import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Final, Self

_LOG_LINES: Final = 15


class ProcessError(Exception):
    """A part of the cluster did not start; the message has the end of its log."""


class Process:
    """One running program. Use it as a context manager.

    Args:
        command: the program with its arguments.
        log: where its output goes.
        is_ready: asked until it says yes.
        environment: all of it; the program sees nothing of this process's own.
        timeout_s: how long it may take to be ready.
    """

    def __init__(
        self,
        command: Sequence[str],
        *,
        log: Path,
        is_ready: Callable[[], bool],
        environment: Mapping[str, str] | None = None,
        timeout_s: float = 60,
    ) -> None:
        self._command = list(command)
        self._log = log
        self._is_ready = is_ready
        self._environment = dict(environment or {})
        self._timeout_s = timeout_s
        self._process: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> Self:
        with self._log.open("ab") as log:
            self._process = subprocess.Popen(
                self._command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, env=self._environment
            )
        try:
            self._wait_until_ready(self._process)
        except BaseException:
            self.stop()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()

    def stop(self, *, timeout_s: float = 15) -> None:
        """Ends it: first politely, then at once."""
        if self._process is None:
            return
        self._process.terminate()
        try:
            self._process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._process = None

    def _wait_until_ready(self, process: subprocess.Popen[bytes]) -> None:
        name = Path(self._command[0]).name
        end = time.monotonic() + self._timeout_s
        while not self._is_ready():
            if process.poll() is not None:
                raise ProcessError(f"{name} ended with {process.returncode}; {self._log} ends with:\n{self._tail()}")
            if time.monotonic() > end:
                raise ProcessError(f"{name} was not ready after {self._timeout_s} s; {self._log}:\n{self._tail()}")
            time.sleep(0.1)

    def _tail(self) -> str:
        return "\n".join(self._log.read_text(errors="replace").splitlines()[-_LOG_LINES:])
