"""The direct engine: Ray actors, each with vLLM's own OpenAI application, fed row by row by the driver.

driver: lines in execution order ▶ one share per engine ▶ actor: window of rows ▶ vLLM ▶ part ▶ driver: totals

The first engine starts while the driver still reads the input. A large share is split among engines that have no rows
left. An engine without work ends at once, which releases its GPUs.
"""

import asyncio
import logging
import math
import time
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Final, Self

from ray_job.contract.job_spec import JobSpec
from ray_job.contract.measurement import Measurement
from ray_job.contract.object_keys import batch_prompt_rules_key, measurement_key
from ray_job.contract.parts import Usage
from ray_job.engines.engine_args import engine_flags, server_args
from ray_job.engines.engine_process import EngineProcess
from ray_job.engines.part_buffer import PartBuffer
from ray_job.engines.row_window import Answer, RowWindow
from ray_job.engines.shares import Shares
from ray_job.errors import EngineUnavailableError
from ray_job.input_lines import InputLines, Twin
from ray_job.object_store import write_object, write_part
from ray_job.progress import Totals
from ray_job.rows import Request, parse_request, part_row, timed_out
from ray_job.weights import require_model

logger = logging.getLogger(__name__)

# Rows in flight per sequence that the engine runs at once: some wait inside the engine for a free place.
WINDOW_PER_SEQUENCE: Final = 1.1
SEGMENT_ROWS: Final = 16
SEGMENT_BYTES: Final = 4 << 20
DEATHS_WITHOUT_PROGRESS: Final = 3
MOSTLY_DISTINCT: Final = 0.5


@dataclass(frozen=True, slots=True, kw_only=True)
class Commit:
    """Lines of one part object, and their totals."""

    lines: tuple[int, ...]
    totals: Totals


class DirectEngine:
    """An actor with one engine, which is started again after it died.

    Args:
        spec: the job.
    """

    def __init__(self, spec: JobSpec) -> None:
        self._spec = spec
        self._twins: dict[int, list[Twin]] = {}
        self._commits: asyncio.Queue[Commit | Exception | None] = asyncio.Queue()

    async def start(self) -> None:
        """Start the engine and wait until it is ready.

        Raises:
            EngineUnavailableError: the engine ended first, or its model is missing.
        """
        require_model(self._spec.model.source)
        self._process = EngineProcess(engine_flags(server_args(self._spec.model)))
        await self._process.wait_ready()

    async def open(self, engines: int, *, writes_prompt_rules: bool) -> None:
        """Begin to take rows, as one of so many engines of the job. One of them writes their prompt rules."""
        write = self._write_prompt_rules if writes_prompt_rules else (lambda: None)
        self._writing = asyncio.create_task(asyncio.to_thread(write))
        self._buffer = PartBuffer(self._spec.model.part_rows, writers=engines)
        sequences = self._process.max_num_seqs
        rows = math.ceil(sequences * WINDOW_PER_SEQUENCE)
        self._window = RowWindow(self, self._add_row, rows=rows, sequences=sequences, ahead=SEGMENT_ROWS)
        self._work = asyncio.create_task(self._run())

    async def add(self, rows: Sequence[tuple[int, bytes, list[Twin]]]) -> None:
        """Take line numbers, lines and the lines that share their answers; return when there is room for more."""
        self._twins |= {line: twins for line, _, twins in rows if twins}
        await self._window.add([parse_request(line, raw) for line, raw, _ in rows])

    async def close(self) -> None:
        """Commit what is left when all rows are answered."""
        await self._window.close()

    async def next_commit(self) -> Commit | None:
        """Wait for the next part; return None after the last one.

        Raises:
            JobError: see ``ray_job.errors``.
        """
        commit = await self._commits.get()
        if isinstance(commit, Exception):
            raise commit
        return commit

    async def ask(self, request: Request) -> Answer:
        """See ``row_window.Engine``. A request that takes too long is closed, which cancels it in the engine."""
        timeout_s = self._spec.model.request_timeout_s
        try:
            async with asyncio.timeout(timeout_s):
                return await self._process.post(request.url, request.body)
        except TimeoutError:
            return timed_out(timeout_s)

    async def restart(self) -> None:
        """See ``row_window.Engine``."""
        await self._process.restart()

    def _write_prompt_rules(self) -> None:
        """Write the prompt rules, with which the service counts the tokens of later batches."""
        try:
            if rules := self._process.prompt_rules():
                write_object(self._spec.object_store, batch_prompt_rules_key(self._spec.batch_id), rules)
        except OSError as error:
            logger.warning("the prompt rules were not written, a later job writes them: %s", error)

    async def _run(self) -> None:
        try:
            await run_together(self._answer(), self._commit())
        except Exception as error:  # noqa: BLE001 - next_commit raises it
            self._commits.put_nowait(error)
        else:
            self._commits.put_nowait(None)

    async def _answer(self) -> None:
        await self._window.run()
        await self._buffer.close()

    async def _add_row(self, request: Request, answer: Answer) -> None:
        lines = [(request.line, request.custom_id), *self._twins.pop(request.line, [])]
        await self._buffer.add([part_row(self._spec.batch_id, line, custom_id, *answer) for line, custom_id in lines])

    async def _commit(self) -> None:
        while rows := await self._buffer.take():
            await asyncio.to_thread(write_part, self._spec.object_store, self._spec.batch_id, rows)
            completed = sum(row.outcome == "completed" for row in rows)
            totals = Totals(
                completed=completed, failed=len(rows) - completed, usage=sum((row.usage for row in rows), Usage())
            )
            await self._writing  # the last commit may end the batch
            self._commits.put_nowait(Commit(lines=tuple(row.line for row in rows), totals=totals))


class DirectRun:
    """The engines of a job and the rows that they still have to answer. Use it as a context manager, in the driver.

    Args:
        spec: the job.
        report: receives the totals of each part that was committed.
    """

    def __init__(self, spec: JobSpec, report: Callable[[Totals], None]) -> None:
        self._spec = spec
        self._report = report
        self._reporting = asyncio.Lock()
        self._done = asyncio.Event()
        self._waiting_feeds: list[asyncio.Future[None]] = []
        self._started: list[tuple[Any, Any]] = []
        self._first_ready_at = math.inf
        self._ready_at: dict[int, float] = {}  # of each engine that works
        self._engines = 0
        self._engine_s = 0.0  # of those that ended

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        import ray

        for actor, _ in self._started:
            ray.kill(actor)

    def start_engine(self) -> None:
        """Start one engine before the lines are known."""
        import ray

        model = self._spec.model
        options: dict[str, Any] = {"num_cpus": model.engine_num_cpus, "num_gpus": model.num_gpus or None}
        actor = ray.remote(**options)(DirectEngine).remote(self._spec)
        self._started.append((actor, actor.start.remote()))

    def answer(self, lines: InputLines) -> None:
        """Answer all lines, in about the order in which they are given.

        Raises:
            JobError: see ``ray_job.errors``.
        """
        asyncio.run(self._answer(lines))

    def write_measurement(self, lines: InputLines, usage: Usage) -> None:
        """Write what the engines measured, for estimates of later batches, when they have answered all lines.

        Args:
            lines: the lines.
            usage: the tokens of all lines, with those that share the answer of another.
        """
        now = time.monotonic()
        # Batches of a model have about the same share of equal lines, unless most are equal.
        answered = len(lines) / lines.total
        counted = 1.0 if answered > MOSTLY_DISTINCT else answered
        measurement = Measurement(
            engines=self._engines,
            engine_s=round(self._engine_s + sum(now - at for at in self._ready_at.values()), 3),
            busy_s=round(max(0.0, now - self._first_ready_at), 3),
            rows=round(lines.total * counted),
            input_tokens=round(usage.input_tokens * counted),
            output_tokens=round(usage.output_tokens * counted),
        )
        try:
            write_object(self._spec.object_store, measurement_key(self._spec.batch_id), measurement.to_json())
        except OSError as error:
            logger.warning("the measurement was not written, estimates use those of other jobs: %s", error)

    async def _answer(self, lines: InputLines) -> None:
        engines = self._spec.model.engines_for(len(lines))
        self._lines, self._left = lines, lines.total
        self._shares = Shares(lines.costs, lines.group_starts, engines)
        loops = asyncio.ensure_future(run_together(*(self._use_engine(each, engines) for each in range(engines))))
        done = asyncio.ensure_future(self._done.wait())
        # An engine may still wait for its node when the others have answered all rows.
        await asyncio.wait({loops, done}, return_when=asyncio.FIRST_COMPLETED)
        for task in (loops, done):
            task.cancel()
        await asyncio.wait({loops, done})
        if not self._done.is_set():
            loops.result()

    async def _use_engine(self, number: int, engines: int) -> None:
        """Run rows on one engine until none is left. Replace its actor if that dies."""
        import ray
        from ray.exceptions import RayError, RayTaskError

        deaths = 0
        while True:
            if not self._started:
                self.start_engine()
            actor, started = self._started.pop()
            pending: dict[int, int] = {}
            left = self._left
            try:
                await started
                self._ready_at[number] = time.monotonic()
                self._first_ready_at = min(self._first_ready_at, self._ready_at[number])
                self._engines = max(self._engines, number + 1)
                await actor.open.remote(engines, writes_prompt_rules=number == 0)
                await run_together(self._feed(actor, number, pending), self._collect(actor, pending))
            except RayTaskError:
                raise
            except RayError as error:
                deaths = deaths + 1 if self._left == left else 1
                logger.warning("an engine worker ended (%s); its rows run again", type(error).__name__)
                if deaths == DEATHS_WITHOUT_PROGRESS:
                    raise EngineUnavailableError(
                        f"the worker of an engine ended {deaths} times before it committed a row "
                        f"({type(error).__name__}): check the memory of its node or pod"
                    ) from error
                self._shares.give_back(number, pending.values())
                self._note_progress()
            else:
                return
            finally:
                if number in self._ready_at:
                    self._engine_s += time.monotonic() - self._ready_at.pop(number)
                ray.kill(actor)

    async def _feed(self, actor: Any, number: int, pending: dict[int, int]) -> None:
        """Send rows to an engine, as soon as it has room for them."""
        while self._shares.left:
            segment: list[tuple[int, bytes, list[Twin]]] = []
            size = 0
            while len(segment) < SEGMENT_ROWS and size < SEGMENT_BYTES:
                position = self._shares.take(number, len(pending))
                if position is None:
                    break
                line, raw = self._lines.read(position)
                pending[line] = position
                segment.append((line, raw, self._lines.twins(position)))
                size += len(raw)
            if not self._shares.left:
                self._note_progress()  # engines without rows end now
            if segment:
                await actor.add.remote(segment)
            else:
                await self._wait_for_progress()
        await actor.close.remote()

    async def _wait_for_progress(self) -> None:
        """Wait until an engine has committed rows, has begun its last ones, or has died."""
        waiter = asyncio.get_running_loop().create_future()
        self._waiting_feeds.append(waiter)
        await waiter

    def _note_progress(self) -> None:
        for waiter in self._waiting_feeds:
            if not waiter.done():
                waiter.set_result(None)
        self._waiting_feeds.clear()

    async def _collect(self, actor: Any, pending: dict[int, int]) -> None:
        """Report the parts of an engine until its last one."""
        while (commit := await actor.next_commit.remote()) is not None:
            for line in commit.lines:
                pending.pop(line, None)
            self._note_progress()
            async with self._reporting:
                await asyncio.to_thread(self._report, commit.totals)
            self._left -= len(commit.lines)
            if not self._left:
                self._done.set()


async def run_together(*coroutines: Coroutine[Any, Any, None]) -> None:
    """Run coroutines concurrently. The first error of one cancels the others and is raised."""
    tasks = [asyncio.ensure_future(each) for each in coroutines]
    try:
        await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.wait(tasks)
