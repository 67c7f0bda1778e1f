"""Processes of the cluster: started with a log file, waited for until they are ready, and stopped by their own id."""

import contextlib
import os
import signal
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Final, Self

_LOG_LINES: Final = 15


class ProcessError(Exception):
    """A process of the cluster did not start; the message contains the end of its log."""


class Process:
    """One program. Use it as a context manager.

    Args:
        command: the program with its arguments.
        log: file for its output.
        is_ready: polled until it returns true.
        environment: the complete environment; nothing is inherited from this process.
        timeout_s: maximum time until it is ready.
        detached: start it in its own session, so that it can outlive this process and the terminal; stopping it also
            stops everything that it started in that session.
    """

    def __init__(
        self,
        command: Sequence[str],
        *,
        log: Path,
        is_ready: Callable[[], bool],
        environment: Mapping[str, str] | None = None,
        timeout_s: float = 180,
        detached: bool = False,
    ) -> None:
        self._command = list(command)
        self._log = log
        self._is_ready = is_ready
        self._environment = dict(environment or {})
        self._timeout_s = timeout_s
        self._detached = detached
        self._process: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> Self:
        self.start()
        return self

    @property
    def pid(self) -> int:
        """Process id while it runs."""
        if self._process is None:
            raise ProcessError(f"{self._command[0]} does not run")
        return self._process.pid

    def start(self) -> None:
        """Start the process, and return when it is ready.

        Raises:
            ProcessError: it ended, or was not ready in time.
        """
        with self._log.open("ab") as log:
            self._process = subprocess.Popen(
                self._command,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env=self._environment,
                start_new_session=self._detached,
            )
        try:
            self._wait_until_ready(self._process)
        except BaseException:
            self.stop()
            raise

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()

    def stop(self, *, timeout_s: float = 15) -> None:
        """Send SIGTERM, and SIGKILL after the timeout."""
        if self._process is None:
            return
        process, self._process = self._process, None
        self._signal(process, signal.SIGTERM)
        end = time.monotonic() + timeout_s
        while self._runs(process):
            if time.monotonic() > end:
                self._signal(process, signal.SIGKILL)
            time.sleep(0.05)

    def _signal(self, process: subprocess.Popen[bytes], number: signal.Signals) -> None:
        if self._detached:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, number)
        else:
            process.send_signal(number)

    def _runs(self, process: subprocess.Popen[bytes]) -> bool:
        if process.poll() is None:
            return True
        if not self._detached:
            return False
        try:
            os.killpg(process.pid, 0)
        except ProcessLookupError:
            return False
        return True

    def _wait_until_ready(self, process: subprocess.Popen[bytes]) -> None:
        name = self._log.stem
        end = time.monotonic() + self._timeout_s
        while not self._is_ready():
            if process.poll() is not None:
                raise ProcessError(f"{name} ended with {process.returncode}; {self._log} ends with:\n{self._tail()}")
            if time.monotonic() > end:
                raise ProcessError(f"{name} was not ready after {self._timeout_s} s; {self._log}:\n{self._tail()}")
            time.sleep(0.1)

    def _tail(self) -> str:
        return "\n".join(self._log.read_text(errors="replace").splitlines()[-_LOG_LINES:])
