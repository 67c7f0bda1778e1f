"""Histories in this process, one after the other, or in several processes."""

import contextlib
import gc
import importlib
import logging
import multiprocessing
import os
import tempfile
import traceback
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Executor, Future, ProcessPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Self
from unittest import mock

import structlog

from tests.simulation.database import Database, database, postgres_server
from tests.simulation.history import History

if TYPE_CHECKING:
    from multiprocessing.queues import Queue

# Small enough that batches of a few lines have several segments, and projects several turns.
_SEGMENT_TOKENS: Final = 270
_TURN_TOKENS: Final = 300
_COLLECT_EVERY: Final = 20
_CLOCKS: Final = ("jobs", "steps", "planning", "finishing", "records")


@dataclass(frozen=True, slots=True, kw_only=True)
class Failure:
    """A seed whose history broke a rule, or raised an error.

    Attributes:
        seed: the seed.
        problem: the rule, or the error.
        trace: what happened.
    """

    seed: int
    problem: str
    trace: tuple[str, ...] = ()

    @property
    def command(self) -> str:
        """The command that replays the history."""
        return f"python -m tests.simulation --seed {self.seed}"


class _Inline(Executor):
    """Runs each call at once, in the same thread."""

    def __init__(self, *_: Any, **__: Any) -> None:
        pass

    def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        future: Future[Any] = Future()
        try:
            future.set_result(fn(*args, **kwargs))
        except Exception as error:  # noqa: BLE001 - the caller of result() gets it
            future.set_exception(error)
        return future


class Simulator:
    """Runs histories in this process. Use it as a context manager; meanwhile time and chance are simulated.

    Args:
        database_url: a database that nothing else uses.
        workspace: a directory for plans and assemblies.
    """

    def __init__(self, database_url: str, workspace: Path) -> None:
        self._database_url = database_url
        self._workspace = workspace
        self._history: History | None = None
        self._closing = ExitStack()

    def __enter__(self) -> Self:
        """Replace clocks, chance and threads."""
        simulator = self

        class Clock(datetime):
            """The clock of the process that acts."""

            @classmethod
            def now(cls, tz: Any = None) -> datetime:  # type: ignore[override] # the code compares and stores it only
                assert simulator._history is not None
                assert tz is not None
                return simulator._history.scheduler.now + simulator._history.scheduler.skew

        class Chance:
            """The module ``secrets``."""

            def __getattr__(self, name: str) -> Any:
                assert simulator._history is not None
                return getattr(simulator._history.scheduler, name)

        patches: list[tuple[str, str, Any]] = [
            *((f"service.reconciler.{name}", "datetime", Clock) for name in _CLOCKS),
            ("service.reconciler.jobs", "secrets", Chance()),
            ("ray_job.contract.object_keys", "secrets", Chance()),
            # The settings of a model never change, and their digest is computed in each pass.
            ("service.reconciler.jobs", "model_key", lambda model: f"{model.id} {model.engine_args}"),
            ("service.reconciler.steps", "ThreadPoolExecutor", _Inline),
            ("service.assembly", "ThreadPoolExecutor", _Inline),
            ("service.planning.plan", "SEGMENT_TOKENS", _SEGMENT_TOKENS),
            ("service.coordinator.leasing", "TURN_TOKENS", _TURN_TOKENS),
        ]
        for module, name, replacement in patches:
            self._closing.enter_context(mock.patch.object(importlib.import_module(module), name, replacement))
        configuration = structlog.get_config()
        self._closing.callback(lambda: structlog.configure(**configuration))
        # Logs of a million steps take longer than the steps.
        structlog.configure(
            wrapper_class=structlog.make_filtering_bound_logger(logging.CRITICAL), cache_logger_on_first_use=False
        )
        gc.collect()
        gc.freeze()
        gc.disable()
        self._closing.callback(gc.unfreeze)
        self._closing.callback(gc.enable)
        self._database = self._closing.enter_context(contextlib.closing(Database(self._database_url)))
        return self

    def __exit__(self, *_: object) -> None:
        """Restore clocks, chance and threads."""
        self._closing.close()

    def stay_on(self, number: int) -> None:
        """Keep this process and its connections on one processor, where the system can do that.

        They take turns and never run at the same time. To wake a process on another processor takes as long as half
        of the work.
        """
        if hasattr(os, "sched_setaffinity"):
            available = sorted(os.sched_getaffinity(0))
            self._closing.callback(os.sched_setaffinity, 0, available)
            for pid in (os.getpid(), *self._database.server_pids()):
                os.sched_setaffinity(pid, {available[number % len(available)]})

    def look(self, text: str) -> list[dict[str, Any]]:
        """Run a query on the tables of the last history."""
        return self._database.look(text)

    def run(self, seed: int) -> tuple[Failure | None, Counter[str], tuple[str, ...]]:
        """Run a history; return its failure if it has one, its batches by final state, and what happened."""
        # Reference cycles are few, and looking for them takes a tenth of the time.
        if seed % _COLLECT_EVERY == 0:
            gc.collect()
        self._history = history = History(seed, self._database, self._workspace)
        try:
            states = Counter(history.run())
        except Exception as error:  # noqa: BLE001 - each of them is a finding
            where = "" if isinstance(error, AssertionError) else "".join(traceback.format_tb(error.__traceback__)[-3:])
            problem = f"{type(error).__name__}: {error}\n{where}".strip()
            trace = tuple(history.scheduler.trace)
            return Failure(seed=seed, problem=problem, trace=trace), Counter(), trace
        return None, states, tuple(history.scheduler.trace)


@contextmanager
def simulator(server_url: str, name: str) -> Iterator[Simulator]:
    """Open a simulator on a new database of a server."""
    with (
        database(server_url, name) as url,
        tempfile.TemporaryDirectory(dir="/dev/shm" if Path("/dev/shm").is_dir() else None) as workspace,  # noqa: S108
        Simulator(url, Path(workspace)) as opened,
    ):
        yield opened


@dataclass(slots=True)
class _Worker:
    """The simulator of a worker process."""

    simulator: Simulator | None = None
    closing: ExitStack = field(default_factory=ExitStack)


_worker: Final = _Worker()


def _open_worker(places: "Queue[tuple[int, str]]") -> None:
    processor, server_url = places.get()
    _worker.simulator = _worker.closing.enter_context(simulator(server_url, f"simulation_{os.getpid()}"))
    _worker.simulator.stay_on(processor)


def _run_seeds(seeds: Sequence[int]) -> tuple[list[Failure], Counter[str]]:
    assert _worker.simulator is not None
    return run_seeds(_worker.simulator, seeds)


def run_seeds(simulator: Simulator, seeds: Iterable[int]) -> tuple[list[Failure], Counter[str]]:
    """Run histories in this process; return the failures, and the batches by final state."""
    failures, states = list[Failure](), Counter[str]()
    for seed in seeds:
        failure, ended, _ = simulator.run(seed)
        states += ended
        if failure is not None:
            failures.append(failure)
    return failures, states


@contextmanager
def worker_processes(processes: int) -> Iterator[Executor]:
    """Open processes that run histories with ``run_chunks``, each with a Postgres of its own.

    Transactions that notify have a lock that all databases of a server share. Its time would be a part of a history.
    """
    context = multiprocessing.get_context("spawn")
    places: Queue[tuple[int, str]] = context.Queue()
    with ExitStack() as servers:
        for processor in range(processes):
            places.put((processor, servers.enter_context(postgres_server())))
        with ProcessPoolExecutor(processes, context, initializer=_open_worker, initargs=(places,)) as executor:
            yield executor


def run_chunks(executor: Executor, seeds: range, chunk: int = 50) -> Iterator[tuple[list[Failure], Counter[str]]]:
    """Run histories in the processes; yield failures and final states of each chunk of seeds."""
    yield from executor.map(_run_seeds, [seeds[start : start + chunk] for start in range(0, len(seeds), chunk)])
