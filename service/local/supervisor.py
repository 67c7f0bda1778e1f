"""Starts child processes and restarts those that die, with a backoff."""

import os
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from threading import Event
from typing import Final, Self

from service.local.errors import LocalError

STEADY_AFTER_S = 30.0
FIRST_DELAY_S = 0.25
LONGEST_DELAY_S = 15.0
POLL_S = 0.2
LOG_LIMIT_BYTES = 20_000_000
LOG_TAIL_LINES = 15
REAP_TIMEOUT_S = 10.0
# Children write prompts: uploads, plans, parts, spilled objects.
_UMASK: Final = 0o077


@dataclass(frozen=True, slots=True, kw_only=True)
class Child:
    """A process to keep running.

    Attributes:
        name: its name in messages, and the name of its log.
        command: the program and its arguments.
        environment: its whole environment.
        log: the file for its output.
        before_restart: removes what the dead process left behind.
        pass_fds: file descriptors that it inherits.
        watches_us: whether its standard input is a pipe that ends when this process ends.
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
    """When to start a child again, in monotonic seconds, and how many quick deaths it had in a row."""

    quick_deaths: int = 0
    start_at_s: float = 0

    def after_death(self, *, lived_s: float, now_s: float) -> Self:
        """Return the plan for a child that died: soon after a long life, later after each quick death."""
        deaths = 1 if lived_s >= STEADY_AFTER_S else self.quick_deaths + 1
        delay_s = min(FIRST_DELAY_S * 2 ** (deaths - 1), LONGEST_DELAY_S)
        return type(self)(quick_deaths=deaths, start_at_s=now_s + delay_s)


def describe_exit(returncode: int) -> str:
    """Return a return code in words."""
    return f"was killed by signal {-returncode}" if returncode < 0 else f"ended with exit code {returncode}"


@dataclass(slots=True)
class _Running:
    child: Child
    process: subprocess.Popen[bytes]
    started_s: float
    plan: RestartPlan
    is_dead: bool = False


class Supervisor:
    """Starts children and keeps them running; ``processes`` ends them.

    Args:
        report: prints a message for the user.
    """

    def __init__(self, report: Callable[[str], None]) -> None:
        self._report = report
        self._running: dict[str, _Running] = {}

    def start(self, child: Child) -> None:
        """Start a child for the first time."""
        self._running[child.name] = _Running(
            child=child,
            process=_spawn(child),
            started_s=time.monotonic(),
            plan=RestartPlan(),
        )

    def wait_until(self, ready: Callable[[], bool], *, what: str, timeout_s: float, stopping: Event) -> bool:
        """Poll until ``ready``; return False if the user stopped it first. A child that ends is started once more.

        Raises:
            LocalError: a child ended twice, or ``what`` was not ready in time.
        """
        deadline_s = time.monotonic() + timeout_s
        while not stopping.wait(POLL_S):
            for running in self._running.values():
                self._check(running, time.monotonic())
                if running.is_dead and running.plan.quick_deaths > 1:
                    log, returncode = running.child.log, running.process.returncode
                    tail = "\n".join(log.read_text(errors="replace").splitlines()[-LOG_TAIL_LINES:])
                    raise LocalError(f"{running.child.name} {describe_exit(returncode)}. The end of {log}:\n{tail}")
            if ready():
                return True
            if time.monotonic() > deadline_s:
                logs = ", ".join(str(running.child.log) for running in self._running.values())
                raise LocalError(f"{what} was not ready within {timeout_s:.0f} s; see the logs: {logs}")
        return False

    def run(self, stopping: Event) -> None:
        """Restart children that die until ``stopping`` is set."""
        while not stopping.wait(POLL_S):
            for running in self._running.values():
                self._check(running, time.monotonic())

    def _check(self, running: _Running, now_s: float) -> None:
        """Plan the restart of a child that just died, or restart it when its time has come."""
        child = running.child
        if not running.is_dead:
            returncode = running.process.poll()
            if returncode is None:
                return
            running.is_dead = True
            if running.process.stdin is not None:
                running.process.stdin.close()
            running.plan = running.plan.after_death(lived_s=now_s - running.started_s, now_s=now_s)
            self._report(f"{child.name} {describe_exit(returncode)}; restarting it (log: {child.log})")
            if child.before_restart is not None:
                child.before_restart()
        elif now_s >= running.plan.start_at_s:
            running.process = _spawn(child)
            running.started_s = now_s
            running.is_dead = False

    def reap(self) -> None:
        """Collect the exit codes of the children that have been ended."""
        for running in self._running.values():
            if not running.child.watches_us:
                running.process.wait(timeout=REAP_TIMEOUT_S)

    def close_pipe(self, name: str, *, timeout_s: float) -> None:
        """Close the pipe of a child that watches this process, and wait until the child has ended."""
        running = self._running.pop(name, None)
        if running is not None:
            if running.process.stdin is not None:
                running.process.stdin.close()
            running.process.wait(timeout=timeout_s)


def _spawn(child: Child) -> subprocess.Popen[bytes]:
    """Start a child in its own session, so that Ctrl-C in the terminal reaches only the supervisor.

    A log that has grown large is renamed first; one older log is kept.
    """
    if child.log.exists() and child.log.stat().st_size > LOG_LIMIT_BYTES:
        child.log.replace(child.log.with_suffix(".log.1"))
    descriptor = os.open(child.log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    with os.fdopen(descriptor, "ab") as log:
        return subprocess.Popen(
            list(child.command),
            env=dict(child.environment),
            stdin=subprocess.PIPE if child.watches_us else subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            pass_fds=child.pass_fds,
            umask=_UMASK,
        )
