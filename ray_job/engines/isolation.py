"""Finds the request that ends the engine, without losing the others.

Requests run freely until the engine dies. Those that were in flight then are suspects: they run again in
small groups with nothing beside them, and in smaller ones after each further death, until one request
stands alone. A request that ends the engine twice while it is alone gets an error for an answer.
An engine that was ended from outside costs its requests a second run and blames none of them.
"""

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Final

from ray_job.contract.lines import error_body
from ray_job.engines.engine_process import EngineDiedError
from ray_job.rows import Request

Answer = tuple[int, bytes]
Ask = Callable[[Request], Awaitable[Answer]]

# Requests of one exclusive group, by how often the engine has died with them: 8, then 1.
GROUP_SIZES: Final = (8, 1)
DEATHS_ALONE: Final = 2


class SharedExclusive:
    """A lock that many may share or one may have alone; who waits to have it alone goes first."""

    def __init__(self) -> None:
        self._changed = asyncio.Condition()
        self._sharing = 0
        self._alone = False
        self._waiting = 0

    @asynccontextmanager
    async def shared(self) -> AsyncIterator[None]:
        """Holds the lock together with others."""
        async with self._changed:
            await self._changed.wait_for(lambda: not self._alone and not self._waiting)
            self._sharing += 1
        try:
            yield
        finally:
            async with self._changed:
                self._sharing -= 1
                self._changed.notify_all()

    @asynccontextmanager
    async def alone(self) -> AsyncIterator[None]:
        """Holds the lock alone."""
        async with self._changed:
            self._waiting += 1
            try:
                await self._changed.wait_for(lambda: not self._alone and not self._sharing)
            finally:
                self._waiting -= 1
            self._alone = True
        try:
            yield
        finally:
            async with self._changed:
                self._alone = False
                self._changed.notify_all()


@dataclass(slots=True)
class Isolation:
    """Answers requests with ``ask``, which raises EngineDiedError when the engine died under a request."""

    ask: Ask
    lock: SharedExclusive = field(default_factory=SharedExclusive)

    async def answers(self, requests: Sequence[Request]) -> list[Answer]:
        """One answer per request, in the order of the requests."""
        async with self.lock.shared():
            first = await self._group(requests)
        answered = dict(first)
        suspects = [request for request in requests if request.line not in answered]
        for size in GROUP_SIZES:
            suspects = await self._run_alone(suspects, size, answered)
        for request in suspects:
            answered[request.line] = await self._last_chance(request)
        return [answered[request.line] for request in requests]

    async def _group(self, requests: Sequence[Request]) -> list[tuple[int, Answer]]:
        results = await asyncio.gather(*(self.ask(request) for request in requests), return_exceptions=True)
        answered = []
        for request, result in zip(requests, results, strict=True):
            if isinstance(result, BaseException):
                if not isinstance(result, EngineDiedError):
                    raise result
            else:
                answered.append((request.line, result))
        return answered

    async def _run_alone(self, suspects: Sequence[Request], size: int, answered: dict[int, Answer]) -> list[Request]:
        still: list[Request] = []
        for start in range(0, len(suspects), size):
            group = suspects[start : start + size]
            async with self.lock.alone():
                answered.update(await self._group(group))
            still += [request for request in group if request.line not in answered]
        return still

    async def _last_chance(self, request: Request) -> Answer:
        for _ in range(DEATHS_ALONE - 1):
            async with self.lock.alone():
                result = await self._group([request])
            if result:
                return result[0][1]
        return 500, engine_died_body(request)


def engine_died_body(request: Request) -> bytes:
    """The response body of a request that ended the engine each time it ran."""
    model = json.loads(request.body).get("model")
    return error_body(
        f"The engine of model {model!r} ended each time it ran this request, also with no other request beside "
        "it. Leave out unusual sampling parameters or shorten the prompt, and send the line again.",
        type="server_error",
        param=None,
        code="engine_died",
    )
