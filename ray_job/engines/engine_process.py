"""An engine server that runs as a child process: start it, wait until it is ready, post to it, stop it."""

import asyncio
import contextlib
import json
import os
import resource
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import IO, Final, cast

import aiohttp

from ray_job.core_dumps import disable_core_dumps
from ray_job.engines.engine_args import ENGINE_ENVIRONMENT
from ray_job.errors import EngineUnavailableError

ENGINE_SERVER: Final = ("-m", "ray_job.engines.engine_server")
# Files in the directory of a server. The exit code is there when the server ended. Limits are there before the socket,
# and so are the rules, if the server knows them.
SOCKET: Final = "s"
LIMITS_FILE: Final = "limits.json"
PROMPT_RULES_FILE: Final = "prompt_rules.json"
EXIT_FILE: Final = "exit"
POLL_INTERVAL_S: Final = 0.1
STOP_TIMEOUT_S: Final = 10.0
LOG_TAIL_BYTES: Final = 60_000
# Ray keeps the last ten lines of a job's log.
LOG_TAIL_LINES: Final = 6
# A process that dies closes its connections a moment before its parent can see its exit.
EXIT_GRACE_S: Final = 5.0


class EngineDiedError(Exception):
    """The engine exited, or broke off its response, while it worked on a request."""


class EngineProcess:
    """A running engine server. ``stop`` removes the directory that holds its socket, log and temporary files.

    Args:
        options: vLLM's command-line options.
        program: arguments of Python that name the server to run.
        exit_grace_s: how long to wait for the process to exit after a connection broke.
    """

    def __init__(
        self,
        options: Sequence[str],
        *,
        program: Sequence[str] = ENGINE_SERVER,
        exit_grace_s: float = EXIT_GRACE_S,
    ) -> None:
        self.directory = Path(tempfile.mkdtemp(prefix="engine-"))
        self._program = (*program, str(self.directory), *options)
        self._exit_grace_s = exit_grace_s
        self._sessions: list[aiohttp.ClientSession] = []
        # Each request in flight is a connection, on both sides; many systems allow 1,024 files by default.
        _, most_files = resource.getrlimit(resource.RLIMIT_NOFILE)
        resource.setrlimit(resource.RLIMIT_NOFILE, (most_files, most_files))
        disable_core_dumps()
        self._start()

    def _start(self) -> None:
        self._server = 1
        self._log_start = 0
        environment = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
        environment |= ENGINE_ENVIRONMENT
        environment["TMPDIR"] = str(self.directory)  # vLLM leaves its sockets and rendezvous files there
        self.directory.mkdir(mode=0o700, exist_ok=True)
        with (self.directory / "log").open("wb") as log:
            self._process = subprocess.Popen(
                [sys.executable, *self._program],
                stdin=subprocess.PIPE,
                stdout=log,
                stderr=subprocess.STDOUT,
                env=environment,
                start_new_session=True,
                bufsize=0,
            )
        self._input = cast("IO[bytes]", self._process.stdin)

    def _file(self, name: str) -> Path:
        return self.directory / str(self._server) / name

    @property
    def max_num_seqs(self) -> int:
        """Sequences that the ready engine runs at once."""
        return int(json.loads(self._file(LIMITS_FILE).read_text())["max_num_seqs"])

    def prompt_rules(self) -> bytes | None:
        """Return the prompt rules of the ready engine as JSON, or None if only the engine can count its prompts."""
        path = self._file(PROMPT_RULES_FILE)
        return path.read_bytes() if path.exists() else None

    @property
    def pid(self) -> int:
        """The process id of the parent of the server."""
        return self._process.pid

    def alive(self) -> bool:
        """Return whether the server is running."""
        return self._process.poll() is None and not self._file(EXIT_FILE).exists()

    async def wait_ready(self) -> None:
        """Wait until the engine answers.

        Raises:
            EngineUnavailableError: the process exited first. The message holds the last lines of its log since this
                start, and ends with the error of the engine core.
        """
        while not await self._is_listening():
            if not self.alive():
                exit_file = self._file(EXIT_FILE)
                code = exit_file.read_text() if exit_file.exists() else self._process.returncode
                # Lines of an earlier server may quote the requests that it ran.
                lines = (self.directory / "log").read_bytes()[self._log_start :][-LOG_TAIL_BYTES:]
                log = lines.decode(errors="replace").splitlines()
                last_lines = "\n".join(log[-LOG_TAIL_LINES:])
                # The core is a separate process. The last lines of vLLM's log report only that it failed.
                core_errors = [line for line in log if line.startswith("(EngineCore") and " ERROR " in line]
                core_error = f": {core_errors[-1].rpartition('] ')[2].strip()}" if core_errors else ""
                raise EngineUnavailableError(
                    f"the last lines of the engine's log:\n{last_lines}\nThe engine ended with exit "
                    f"code {code} before it was ready; check the model's source and engine_args"
                    f"{core_error}"
                )
            await asyncio.sleep(POLL_INTERVAL_S)
        # The first session keeps its connections, the second opens a new one for each request.
        self._sessions = [
            aiohttp.ClientSession(
                connector=aiohttp.UnixConnector(path=str(self._file(SOCKET)), limit=0, force_close=force_close),
                timeout=aiohttp.ClientTimeout(total=None),
            )
            for force_close in (False, True)
        ]

    async def _is_listening(self) -> bool:
        """Return whether the server accepts connections. Its socket exists a moment before it does."""
        try:
            _, writer = await asyncio.open_unix_connection(self._file(SOCKET))
        except OSError:
            return False
        writer.close()
        return True

    async def post(self, url: str, body: bytes) -> tuple[int, bytes]:
        """Post a JSON body to a path of vLLM's API.

        A server may close an idle connection while this event loop is busy, and the loop learns of it only when it
        uses the connection. So a request that fails on a kept connection of a live engine, before any part of the
        response arrived, is sent once more on a new connection.

        Returns:
            The HTTP status and the response body.

        Raises:
            EngineDiedError: the engine exited or broke off its response.
        """
        failure: Exception | None = None
        for session in self._sessions:
            responding = False
            try:
                async with session.post(
                    f"http://engine{url}", data=body, headers={"content-type": "application/json"}
                ) as response:
                    responding = True
                    return response.status, await response.read()
            except (aiohttp.ClientError, OSError) as error:
                failure = error
                if responding or not self.alive():
                    break
        if failure is None:
            raise EngineDiedError("the engine is not ready")
        deadline = time.monotonic() + self._exit_grace_s
        while self.alive() and time.monotonic() < deadline:  # noqa: ASYNC110 - a process sets no asyncio.Event
            await asyncio.sleep(POLL_INTERVAL_S)
        raise EngineDiedError(f"the engine ended while it worked on a request: {type(failure).__name__}") from failure

    async def restart(self) -> None:
        """Start the engine again and wait until it is ready.

        Raises:
            EngineUnavailableError: see ``wait_ready``.
        """
        await self._close_sessions()
        self._server += 1
        with contextlib.suppress(FileNotFoundError):  # the parent of the server removes it at its end
            self._log_start = (self.directory / "log").stat().st_size
        try:
            self._input.write(b"r")
        except BrokenPipeError:  # the parent of the server has died too
            await asyncio.to_thread(self._stop_process)
            self._start()
        await self.wait_ready()

    async def stop(self) -> None:
        """Stop the process and remove its files."""
        await self._close_sessions()
        await asyncio.to_thread(self._stop_process)

    async def _close_sessions(self) -> None:
        sessions, self._sessions = self._sessions, []
        for session in sessions:
            await session.close()

    def _stop_process(self) -> None:
        with contextlib.suppress(OSError):
            self._input.close()
        try:
            self._process.wait(STOP_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        shutil.rmtree(self.directory, ignore_errors=True)
