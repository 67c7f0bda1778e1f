"""Starts children and restarts those that died, with a backoff."""

import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from threading import Event

from service.local.errors import ChildFailedError

STEADY_AFTER_S = 30.0
FIRST_DELAY_S = 0.25
LONGEST_DELAY_S = 15.0
POLL_S = 0.2
LOG_LIMIT_BYTES = 20_000_000
LOG_TAIL_LINES = 15
REAP_TIMEOUT_S = 10.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Child:
    """One process to keep running.

    Attributes:
        name: what the user reads, and the name of the log.
        command: the program and its arguments.
        environment: the whole environment.
        log: where its output goes.
        before_restart: clears up what the dead child left behind.
        pass_fds: file descriptors that it keeps open.
        watches_us: its standard input is a pipe that ends when we do.
    """

    name: str
    command: Sequence[str]
    environment: Mapping[str, str]
    log: Path
    before_restart: Callable[[], None] | None = None
    pass_fds: tuple[int, ...] = ()
    watches_us: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class RestartPlan:
    """When to start a child again, and how many quick deaths it had in a row."""

    quick_deaths: int
    start_at_s: float


def plan_restart(*, quick_deaths: int, lived_s: float, now_s: float) -> RestartPlan:
    """Decides on a child that died: at once after a steady life, ever later after quick deaths."""
    deaths = 1 if lived_s >= STEADY_AFTER_S else quick_deaths + 1
    delay_s = min(FIRST_DELAY_S * 2 ** (deaths - 1), LONGEST_DELAY_S)
    return RestartPlan(quick_deaths=deaths, start_at_s=now_s + delay_s)


def describe_exit(returncode: int) -> str:
    """A return code in words."""
    return f"was killed by signal {-returncode}" if returncode < 0 else f"ended with exit code {returncode}"


def log_tail(log: Path) -> str:
    """The last lines of a log."""
    try:
        lines = log.read_text(errors="replace").splitlines()
    except FileNotFoundError:
        return ""
    return "\n".join(lines[-LOG_TAIL_LINES:])


def rotate(log: Path) -> None:
    """Keeps one older log beside the current one, once that has grown large."""
    if log.exists() and log.stat().st_size > LOG_LIMIT_BYTES:
        log.replace(log.with_suffix(".log.1"))


@dataclass(slots=True)
class _Running:
    child: Child
    process: subprocess.Popen[bytes]
    started_s: float
    plan: RestartPlan = field(default_factory=lambda: RestartPlan(quick_deaths=0, start_at_s=0))
    dead: bool = False


class Supervisor:
    """Keeps children running until it is told to stop. It starts them; ending them is ``processes``' work."""

    def __init__(self, tell: Callable[[str], None]) -> None:
        self._tell = tell
        self._running: dict[str, _Running] = {}

    def start(self, child: Child) -> None:
        """Starts a child for the first time."""
        rotate(child.log)
        self._running[child.name] = _Running(child=child, process=spawn(child), started_s=time.monotonic())

    def check(self) -> None:
        """Raises ChildFailedError when a child has ended; used while the stack starts."""
        for running in self._running.values():
            returncode = running.process.poll()
            if returncode is not None:
                raise ChildFailedError(
                    f"{running.child.name} {describe_exit(returncode)}. The end of {running.child.log}:\n"
                    f"{log_tail(running.child.log)}"
                )

    def wait_until(self, ready: Callable[[], bool], *, what: str, timeout_s: float, stopping: Event) -> bool:
        """Polls until ``ready``; false when the user stopped meanwhile.

        Raises:
            ChildFailedError: a child ended, or the time is over.
        """
        deadline_s = time.monotonic() + timeout_s
        while not stopping.wait(POLL_S):
            self.check()
            if ready():
                return True
            if time.monotonic() > deadline_s:
                logs = ", ".join(str(running.child.log) for running in self._running.values())
                raise ChildFailedError(f"{what} was not ready within {timeout_s:.0f} s; see the logs: {logs}")
        return False

    def run(self, stopping: Event) -> None:
        """Restarts what dies until ``stopping`` is set."""
        while not stopping.wait(POLL_S):
            for running in self._running.values():
                self._look_after(running, time.monotonic())

    def _look_after(self, running: _Running, now_s: float) -> None:
        if not running.dead:
            returncode = running.process.poll()
            if returncode is None:
                return
            running.dead = True
            running.plan = plan_restart(
                quick_deaths=running.plan.quick_deaths, lived_s=now_s - running.started_s, now_s=now_s
            )
            self._tell(
                f"{running.child.name} {describe_exit(returncode)}; starting it again (log: {running.child.log})"
            )
            if running.child.before_restart is not None:
                running.child.before_restart()
        elif now_s >= running.plan.start_at_s:
            rotate(running.child.log)
            running.process = spawn(running.child)
            running.started_s = now_s
            running.dead = False

    def reap(self) -> None:
        """Takes leave of the children that have been ended."""
        for running in self._running.values():
            if not running.child.watches_us:
                running.process.wait(timeout=REAP_TIMEOUT_S)

    def let_go(self, name: str, *, timeout_s: float) -> None:
        """Ends the pipe of a child that watches us, and waits until it has ended."""
        running = self._running.pop(name, None)
        if running is not None:
            running.process.communicate(timeout=timeout_s)


def spawn(child: Child) -> subprocess.Popen[bytes]:
    """Starts a child in its own session, so that a terminal's Ctrl-C reaches only the supervisor."""
    with child.log.open("ab") as log:
        return subprocess.Popen(
            list(child.command),
            env=dict(child.environment),
            stdin=subprocess.PIPE if child.watches_us else subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            pass_fds=child.pass_fds,
        )
