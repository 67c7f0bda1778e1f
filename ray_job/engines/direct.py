"""The direct engine: a Ray actor with vLLM's own OpenAI application, fed row by row by the driver.

driver: leased rows ▶ actor: window of rows ▶ vLLM ▶ parts by batch ▶ object store; driver: records of the parts

A part is written in two steps: the actor announces it, and the driver answers with its place. So the actor needs no
credential, and results never pass through the driver.
"""

import asyncio
import itertools
import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Final

import aiohttp

from ray_job.contract.job_spec import ModelSpec
from ray_job.contract.leases import CommittedRows, SegmentRef
from ray_job.contract.parts import encode_part
from ray_job.engines.deadlines import LineDeadlines, LineSize, LineTimeoutError, generated_tokens
from ray_job.engines.engine_args import engine_flags, server_args
from ray_job.engines.engine_process import EngineProcess
from ray_job.engines.part_buffer import PartBuffer
from ray_job.engines.row_window import Answer, RowWindow
from ray_job.errors import InputError, UrlRefusedError
from ray_job.object_urls import put_object
from ray_job.rows import (
    FinishedRow,
    LeasedRow,
    Request,
    committed_rows,
    finished_row,
    parse_request,
    refused,
    timed_out,
)
from ray_job.weights import require_model, verify_model

# Rows in flight per sequence that the engine runs at once: some wait inside the engine for a free place.
WINDOW_PER_SEQUENCE: Final = 1.1
SEND_ROWS: Final = 16
"""Rows that are sent to an actor at once, and that wait in it for a place in the window."""
# Parts that wait for the store. The engine goes on until the buffer is full too.
PARTS_AHEAD: Final = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class ReadyPart:
    """A part that an actor can write.

    Attributes:
        number: its number in the actor.
        batch_id: its batch.
        segments: its rows by segment.
        restarts: how often the engine died and was started again since the part before.
    """

    number: int
    batch_id: str
    segments: tuple[CommittedRows, ...]
    restarts: int


@dataclass(frozen=True, slots=True, kw_only=True)
class UnreadableSegment:
    """A segment with a row that is not a request. The reason names the line and quotes nothing."""

    segment: SegmentRef
    reason: str


class DirectEngine:
    """An actor with one engine, which is started again after it died.

    Args:
        model: the model.
        deadlines: the deadlines of its lines.
    """

    def __init__(self, model: ModelSpec, deadlines: LineDeadlines | None = None) -> None:
        self._model = model
        self._deadlines = deadlines or LineDeadlines()
        self._numbers = itertools.count()
        self._parts: dict[int, tuple[str, list[FinishedRow]]] = {}
        self._announced: asyncio.Queue[ReadyPart | Exception] = asyncio.Queue()
        self._places = asyncio.Semaphore(PARTS_AHEAD)
        self._restarts = 0  # since the last part that was announced

    async def start(self) -> None:
        """Start the engine and wait until it is ready.

        Raises:
            EngineUnavailableError: the engine ended first, or its model is missing or was changed.
        """
        require_model(self._model.source)
        await asyncio.to_thread(verify_model, self._model)
        self._process = EngineProcess(engine_flags(server_args(self._model)))
        await self._process.wait_ready()
        self._session = aiohttp.ClientSession()
        self._buffer = PartBuffer(self._model.part_rows)
        sequences = self._process.max_num_seqs
        rows = math.ceil(sequences * WINDOW_PER_SEQUENCE)
        self._window = RowWindow(self, self._finish, rows=rows, sequences=sequences, ahead=SEND_ROWS)
        self._work = asyncio.create_task(self._run())

    async def add(
        self, rows: Sequence[LeasedRow], *, settled: Collection[str], engines: int
    ) -> tuple[UnreadableSegment, ...]:
        """Take rows; return when there is room for more.

        Args:
            rows: the rows.
            settled: batches of which no further rows are announced after these.
            engines: how many engines the job has.

        Returns:
            Segments with rows that are not requests. Their other rows are dropped too.
        """
        requests, unreadable = [], {}
        for row in rows:
            try:
                requests.append(parse_request(row))
            except InputError as error:
                unreadable[row.segment] = UnreadableSegment(segment=row.segment, reason=str(error))
        requests = [request for request in requests if request.segment not in unreadable]
        self._buffer.writers = engines
        self._buffer.expect(request.segment for request in requests)
        if unreadable:
            await self.drop(unreadable)
        await self._buffer.settle(settled)
        for request in requests:
            if request.refusal:
                await self._finish(request, refused(request.refusal))
        await self._window.add([request for request in requests if not request.refusal])
        return tuple(unreadable.values())

    async def drop(self, segments: Collection[SegmentRef]) -> None:
        """Forget the rows of segments that the job does not hold any more."""
        await self._buffer.drop(segments)
        await self._window.drop(segments)

    async def next_part(self) -> ReadyPart:
        """Wait for the next part that is due.

        Raises:
            JobError: see ``ray_job.errors``.
        """
        part = await self._announced.get()
        if isinstance(part, Exception):
            raise part
        return part

    async def write(self, number: int, url: str) -> bool:
        """Write a part, and return whether the store accepts the URL.

        Raises:
            ObjectError: the store is away, or does not take the object.
        """
        batch_id, rows = self._parts[number]
        data = await asyncio.to_thread(encode_part, batch_id, [result for row in rows for result in row.results])
        try:
            await put_object(self._session, url, data)
        except UrlRefusedError:
            return False
        self.discard(number)
        return True

    def discard(self, number: int) -> None:
        """Forget a part."""
        del self._parts[number]
        self._places.release()

    async def write_prompt_rules(self, url: str) -> None:
        """Write the prompt rules of the model, with which the service counts the tokens of batches.

        Raises:
            ObjectError: the store does not take them.
        """
        if rules := await asyncio.to_thread(self._process.prompt_rules):
            await put_object(self._session, url, rules)

    async def ask(self, request: Request) -> Answer:
        """See ``row_window.Engine``. A request that takes too long is closed, which cancels it in the engine."""
        try:
            return await self._deadlines.answer(
                LineSize(tokens=request.tokens, prompt=len(request.body)),
                lambda: self._process.post(request.url, request.body),
                lambda answer: generated_tokens(*answer),
                ceiling_s=self._model.request_timeout_s,
            )
        except LineTimeoutError as error:
            return timed_out(str(error))

    async def restart(self) -> None:
        """See ``row_window.Engine``."""
        self._restarts += 1
        await self._process.restart()

    async def _run(self) -> None:
        try:
            async with asyncio.TaskGroup() as tasks:
                tasks.create_task(self._window.run())
                tasks.create_task(self._announce())
        except ExceptionGroup as group:
            self._announced.put_nowait(group.exceptions[0])  # next_part raises it

    async def _finish(self, request: Request, answer: Answer) -> None:
        await self._buffer.add(finished_row(request, *answer))

    async def _announce(self) -> None:
        """Announce the parts that are due."""
        while True:
            await self._places.acquire()
            batch_id, rows = await self._buffer.take()
            number = next(self._numbers)
            self._parts[number] = batch_id, rows
            restarts, self._restarts = self._restarts, 0
            segments = committed_rows(rows)
            self._announced.put_nowait(
                ReadyPart(number=number, batch_id=batch_id, segments=segments, restarts=restarts)
            )
