"""One engine server as a child process: start it, wait until it answers, talk to it, end it."""

import asyncio
import contextlib
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

import aiohttp

from ray_job.errors import EngineStartError

POLL_S = 0.1
STOP_TIMEOUT_S = 10.0
LOG_TAIL_BYTES = 60_000
# Ray keeps the last ten lines of a job's log.
LOG_TAIL_LINES = 6
# Time for a sibling's end to show after a connection broke, before the break is called something else.
EXIT_GRACE_S = 5.0


class EngineDiedError(Exception):
    """The engine ended while it worked on a request."""


class EngineProcess:
    """A running engine server. Its files lie in a directory of its own that ``stop`` removes."""

    def __init__(self, options: Sequence[str]) -> None:
        self._directory = Path(tempfile.mkdtemp(prefix="engine-"))
        self._socket = self._directory / "s"
        self._log = self._directory / "log"
        environment = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
        environment["TMPDIR"] = str(self._directory)  # vLLM leaves its sockets and rendezvous files there
        with self._log.open("wb") as log:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "ray_job.engines.engine_server", str(self._socket), *options],
                stdin=subprocess.PIPE,
                stdout=log,
                stderr=subprocess.STDOUT,
                env=environment,
                start_new_session=True,
            )
        self._session: aiohttp.ClientSession | None = None

    async def wait_ready(self) -> None:
        """Returns when the engine answers.

        Raises:
            EngineStartError: the process ended before that; the message holds the last lines of its log, and says
                at its end what the engine core died of.
        """
        while not self._socket.exists():
            if self._process.poll() is not None:
                log = self._log.read_bytes()[-LOG_TAIL_BYTES:].decode(errors="replace").splitlines()
                last = "\n".join(log[-LOG_TAIL_LINES:])
                raise EngineStartError(
                    f"the last lines of the engine's log:\n{last}\nThe engine ended with exit code "
                    f"{self._process.returncode} before it was ready; check the model's source and engine_args"
                    f"{core_error(log)}"
                )
            await asyncio.sleep(POLL_S)
        self._session = aiohttp.ClientSession(
            connector=aiohttp.UnixConnector(path=str(self._socket), limit=0),
            timeout=aiohttp.ClientTimeout(total=None),
        )

    def alive(self) -> bool:
        """Whether the process still runs."""
        return self._process.poll() is None

    async def post(self, url: str, body: bytes) -> tuple[int, bytes]:
        """Posts a JSON body to a path of vLLM's API; returns the HTTP status and the response body.

        Raises:
            EngineDiedError: the engine ended before it had answered.
        """
        if self._session is None:
            raise EngineDiedError("the engine is not ready")
        try:
            async with self._session.post(
                f"http://engine{url}", data=body, headers={"content-type": "application/json"}
            ) as response:
                return response.status, await response.read()
        except (aiohttp.ClientError, OSError) as error:
            await self._wait_for_exit()
            raise EngineDiedError(f"the engine ended while it worked on a request: {error!r}") from error

    async def _wait_for_exit(self) -> None:
        with contextlib.suppress(subprocess.TimeoutExpired):
            await asyncio.to_thread(self._process.wait, EXIT_GRACE_S)

    async def stop(self) -> None:
        """Ends the process and removes its files."""
        if self._session is not None:
            await self._session.close()
            self._session = None
        await asyncio.to_thread(self.stop_now)

    def stop_now(self) -> None:
        """Ends the process and removes its files, without an event loop."""
        if self._process.stdin is not None:
            with contextlib.suppress(OSError):
                self._process.stdin.close()
        try:
            self._process.wait(STOP_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        shutil.rmtree(self._directory, ignore_errors=True)


def core_error(log: Sequence[str]) -> str:
    """What the engine core died of, as ``: AttributeError: …``; empty where the log does not tell.

    The core is a process of its own. vLLM's last words are then only that it failed, and to look further up.
    """
    told = [line for line in log if line.startswith("(EngineCore") and " ERROR " in line]
    return f": {told[-1].rpartition('] ')[2].strip()}" if told else ""
