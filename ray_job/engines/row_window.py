"""Answers rows with one engine, keeps its window full, and finds the row that ends the engine.

Each answer makes room for the next row, so the engine never waits for the slowest row of a group.

Rows that were in flight when the engine died are suspects. Most rows that end an engine do so in their first step, so
each suspect runs that step alone, newest first; those that still waited inside the engine run last. One that ends the
engine waits until the engine has no other row, or for a minute. If none of them does, they run again beside other rows.
Suspects of a second death run in a few groups with nothing beside them. A group that ends the engine is split again,
until one row is alone. A row that ends the engine twice while it is alone gets an error. When something else ended the
engine, its rows run again and none of them is blamed.
"""

import asyncio
import json
import math
import time
from collections import deque
from collections.abc import Awaitable, Callable, Collection, Sequence
from dataclasses import replace
from typing import Final, Protocol

from ray_job.contract.leases import SegmentRef
from ray_job.contract.lines import error_body
from ray_job.engines.engine_process import EngineDiedError
from ray_job.rows import Request, RowKey

Answer = tuple[int, bytes]
Finish = Callable[[Request, Answer], Awaitable[None]]

# Time for the first steps of suspects. Each takes some hundredths of a second.
PROBE_TIME_S: Final = 10.0
# Suspects are split into this many groups: 512 rows are 3 deaths away from a row alone, at most 8 runs each.
GROUPS: Final = 8
DEATHS_ALONE: Final = 2
# The engine is then free of other rows when such a row ends it again, unless rows never stop coming.
ISOLATE_WITHIN_S: Final = 60.0
# Bodies in flight; a row larger than this is sent alone.
MAX_BYTES: Final = 64 << 20


class Engine(Protocol):
    """An engine that may die."""

    async def ask(self, request: Request) -> Answer:
        """Return the status and the body of one response.

        Raises:
            EngineDiedError: the engine died with this request.
        """

    async def restart(self) -> None:
        """Start a dead engine again and wait until it is ready."""


class RowWindow:
    """The rows that one engine works on, and those that wait for it.

    Args:
        engine: the engine, which is ready.
        finish: receives each row with its answer. While it blocks, the row counts as in flight.
        rows: the most rows in flight.
        sequences: the rows that the engine runs at once. The others in flight wait inside it.
        ahead: ``add`` blocks while this many rows wait.
    """

    def __init__(self, engine: Engine, finish: Finish, *, rows: int, sequences: int, ahead: int) -> None:
        self._engine = engine
        self._finish = finish
        self._rows = rows
        self._sequences = sequences
        self._ahead = ahead
        self._waiting: deque[Request] = deque()
        self._in_flight: dict[RowKey, Request] = {}
        self._asking: dict[RowKey, asyncio.Task[None]] = {}
        self._suspected: set[RowKey] = set()
        self._ended_engine: list[Request] = []
        self._isolate_at_s = math.inf
        self._bytes = 0
        self._died = False  # while rows were in flight
        self._dead = False
        self._changed = asyncio.Condition()

    async def add(self, requests: Sequence[Request]) -> None:
        """Add rows, and return when there is room for more."""
        async with self._changed:
            self._waiting.extend(requests)
            self._changed.notify_all()
            await self._changed.wait_for(lambda: len(self._waiting) < self._ahead)

    async def drop(self, segments: Collection[SegmentRef]) -> None:
        """Forget the rows of some segments. Those in flight are cancelled in the engine."""
        async with self._changed:
            self._waiting = deque(each for each in self._waiting if each.segment not in segments)
            self._ended_engine = [each for each in self._ended_engine if each.segment not in segments]
            for key, request in list(self._in_flight.items()):
                if request.segment in segments:
                    del self._in_flight[key]
                    self._asking[key].cancel()
            self._changed.notify_all()

    async def run(self) -> None:
        """Answer rows until the task is cancelled.

        Raises:
            EngineUnavailableError: the engine did not start again.
        """
        try:
            while True:
                if suspects := await self._answer_waiting():
                    await self._retry(suspects)
                    continue
                isolated, self._ended_engine, self._isolate_at_s = self._ended_engine, [], math.inf
                for request in isolated:
                    await self._isolate([request], deaths=1)
        except ExceptionGroup as group:
            raise group.exceptions[0] from None

    async def _answer_waiting(self) -> list[Request]:
        """Answer the rows that wait. Return the suspects when the engine has died, and none when a row is isolated."""
        async with asyncio.TaskGroup() as tasks:
            while True:
                async with self._changed:
                    await self._changed.wait_for(self._can_proceed)
                    if self._died or not self._waiting or time.monotonic() > self._isolate_at_s:
                        break
                    request = self._waiting.popleft()
                    self._changed.notify_all()
                await self._start_engine()
                self._send(request, self._finish, tasks)
        return self._take_unanswered()

    def _can_proceed(self) -> bool:
        if self._died or time.monotonic() > self._isolate_at_s:
            return True
        if not self._waiting:
            return bool(self._ended_engine) and not self._in_flight
        fits = self._bytes + len(self._waiting[0].body) <= MAX_BYTES
        return not self._in_flight or (fits and len(self._in_flight) < self._rows)

    async def _retry(self, suspects: Sequence[Request]) -> None:
        """Find the row that ended the engine, or let the suspects wait again."""
        new = [request for request in suspects if request.key not in self._suspected]
        self._suspected.update(request.key for request in new)
        await self._start_engine()
        deadline = time.monotonic() + PROBE_TIME_S
        waited = max(0, len(suspects) - self._sequences)
        for request in [*new[waited:], *new[:waited]]:
            if time.monotonic() > deadline:
                break
            if await self._run_alone([replace(request, body=first_step(request))], _discard):
                self._ended_engine.append(request)
                self._isolate_at_s = min(self._isolate_at_s, time.monotonic() + ISOLATE_WITHIN_S)
                suspects = [each for each in suspects if each is not request]
                break
        else:
            await self._isolate([request for request in suspects if request not in new])
            suspects = new
        self._waiting.extendleft(suspects)

    async def _isolate(self, suspects: Sequence[Request], *, deaths: int = 0) -> None:
        """Answer suspects in groups with nothing beside them.

        Args:
            suspects: rows, newest first.
            deaths: how often a single suspect has ended the engine while it was alone.
        """
        size = math.ceil(len(suspects) / GROUPS)
        for start in range(0, len(suspects), max(1, size)):
            group: Sequence[Request] = suspects[start : start + size]
            for _ in range(DEATHS_ALONE - deaths if len(group) == 1 else 1):
                unanswered = await self._run_alone(group, self._finish)
                if not unanswered:
                    break
            if unanswered and len(group) == 1:
                body = error_body(
                    f"The engine of model {json.loads(group[0].body).get('model')!r} ended each time it ran this "
                    "request, also with no other request beside it. Leave out unusual sampling parameters or shorten "
                    "the prompt, and send the line again.",
                    type="server_error",
                    param=None,
                    code="engine_died",
                )
                await self._finish(group[0], (500, body))
            elif unanswered:
                await self._isolate(unanswered)

    async def _run_alone(self, group: Sequence[Request], finish: Finish) -> list[Request]:
        """Answer rows with nothing beside them. Return those that the engine's death left unanswered, newest first."""
        await self._start_engine()
        async with asyncio.TaskGroup() as tasks:
            for request in group:
                self._send(request, finish, tasks)
        return self._take_unanswered()

    def _send(self, request: Request, finish: Finish, tasks: asyncio.TaskGroup) -> None:
        self._in_flight[request.key] = request
        self._bytes += len(request.body)
        self._asking[request.key] = tasks.create_task(self._ask(request, finish))

    async def _ask(self, request: Request, finish: Finish) -> None:
        try:
            await finish(request, await self._engine.ask(request))
            self._in_flight.pop(request.key, None)
        except EngineDiedError:
            self._died = True
        finally:
            del self._asking[request.key]
            async with self._changed:
                self._bytes -= len(request.body)
                self._changed.notify_all()

    async def _start_engine(self) -> None:
        """Start the engine again if it has died."""
        if self._dead:
            await self._engine.restart()
            self._dead = False

    def _take_unanswered(self) -> list[Request]:
        """Return the rows that the engine's death left unanswered, newest first."""
        unanswered = list(reversed(self._in_flight.values()))
        self._in_flight.clear()
        self._dead = self._dead or self._died
        self._died = False
        return unanswered


def first_step(request: Request) -> bytes:
    """Return the request's body with one generated token."""
    body = json.loads(request.body)
    if request.url.endswith("/completions"):
        body |= {"max_tokens": 1, "max_completion_tokens": 1}
        body.pop("min_tokens", None)
    return json.dumps(body).encode()


async def _discard(_: Request, __: Answer) -> None:
    pass
