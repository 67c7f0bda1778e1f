"""The driver of the direct engine: leases segments, deals their rows to engines, and records their parts.

coordinator: leases ▶ rows of the plan ▶ one share per engine ▶ actors ▶ parts ▶ coordinator: records of the parts

The first engine starts before the first lease. Leases are taken ahead, so that no engine waits for rows. An engine
without work ends, which releases its GPUs; the last one stays for ``keep_warm_s``.
"""

import asyncio
import itertools
import logging
import time
from collections.abc import Callable, Collection, Coroutine
from dataclasses import dataclass, field
from typing import Any, Final

import aiohttp

from ray_job.contract.job_spec import JobSpec
from ray_job.contract.leases import Commit, EndRequest, Failure, Lease, SegmentRef, SyncRequest, SyncResponse
from ray_job.contract.plans import PlanError, bitmap_rows
from ray_job.coordinator import Coordinator
from ray_job.engines.direct import SEND_ROWS, DirectEngine, ReadyPart
from ray_job.engines.shares import Shares
from ray_job.errors import EngineUnavailableError, ObjectMissingError, UrlRefusedError
from ray_job.holdings import (
    EXTEND_EVERY_S,
    LONG_POLL_S,
    SEGMENT_TOKENS,
    HeldLeases,
    PartPlaces,
    extension_pause_s,
    record,
    segment_ref,
)
from ray_job.object_urls import read_range
from ray_job.rows import LeasedRow, RowKey, leased_rows
from ray_job.uploaded_files import UploadedFiles

logger = logging.getLogger(__name__)

UNSENT_BYTES: Final = 64 << 20
"""Rows in the driver's memory. A larger segment is read alone."""
READS: Final = 4
SEND_BYTES: Final = 4 << 20
SHORTEST_POLL_S: Final = 0.5
"""A job that holds leases waits at least so long for more of them."""
DEATHS_WITHOUT_PROGRESS: Final = 3
WRITES: Final = 3
"""Places that are tried for a part whose URL the store refuses."""


@dataclass(slots=True, kw_only=True, eq=False)
class _Engine:
    """An engine of the job.

    Attributes:
        number: its number.
        actor: its actor.
        started: the result of the actor's start.
        ready: whether the engine is ready.
        pending: rows that were sent and are in no part.
        announced: batches whose rows were sent, and of which more may follow.
    """

    number: int
    actor: Any = None
    started: Any = None
    ready: bool = False
    pending: dict[RowKey, LeasedRow] = field(default_factory=dict)
    announced: set[str] = field(default_factory=set)


class DirectJob:
    """A job with the direct engine.

    Args:
        spec: the job.
        coordinator: where it leases segments.
    """

    def __init__(self, spec: JobSpec, coordinator: Coordinator) -> None:
        self._model = spec.model
        self._coordinator = coordinator
        self._held = HeldLeases()
        self._places = PartPlaces(coordinator)
        self._files = UploadedFiles()
        self._shares = Shares()
        self._engines: dict[int, _Engine] = {}
        self._numbers = itertools.count()
        self._waiters: list[asyncio.Future[None]] = []
        self._unread: dict[SegmentRef, Lease] = {}
        self._reading_bytes = self._unsent_bytes = 0
        self._reads = asyncio.Semaphore(READS)
        self._backlog_tokens = 0
        self._draining = False
        self._prompt_rules_url = ""
        self._writing_rules: asyncio.Task[None] | None = None
        self._committed_parts = 0
        self._engine_restarts = 0  # that the coordinator does not know
        self._accounted_s = time.monotonic()
        self._engine_s = self._busy_s = 0.0

    async def run(self) -> None:
        """Answer rows until there has been no work for a while.

        Raises:
            JobError: see ``ray_job.errors``.
        """
        import ray

        try:
            async with aiohttp.ClientSession() as self._session, asyncio.TaskGroup() as self._tasks:
                self._work: set[asyncio.Task[None]] = set()
                self._start_engine()
                await self._lease()
                for task in self._work:
                    task.cancel()
        except ExceptionGroup as group:
            raise group.exceptions[0] from None
        finally:
            for engine in self._engines.values():
                ray.kill(engine.actor)

    async def _lease(self) -> None:
        """Extend leases and take new ones, until the job ends."""
        while True:
            if not self._held and await self._end():
                return
            wanted = self._wanted_tokens()
            if self._held and not wanted:
                await self._change(extension_pause_s(), until=self._wants_to_sync)
                if not self._held:
                    continue
                wanted = self._wanted_tokens()
            if not wanted:
                wait_s = 0.0
            elif self._held:
                wait_s = min(EXTEND_EVERY_S, max(SHORTEST_POLL_S, self._model.keep_warm_s))
            else:
                wait_s = min(LONG_POLL_S, max(0.0, self._idle_until_s() - time.monotonic()))
            ready = sum(engine.ready for engine in self._engines.values())
            request = SyncRequest(
                wanted_tokens=wanted,
                wait_s=wait_s,
                held=self._held.refs,
                engines=ready,
                engine_restarts=self._engine_restarts,
            )
            response = await self._coordinator.sync(request)
            self._engine_restarts -= request.engine_restarts
            self._take(response)

    def _wants_to_sync(self) -> bool:
        return not self._held or bool(self._wanted_tokens())

    def _idle_until_s(self) -> float:
        return self._held.idle_since_s + self._model.keep_warm_s

    async def _end(self) -> bool:
        """End the job if it has had no work for a while, and return whether it has ended."""
        if self._writing_rules is not None:
            await asyncio.wait({self._writing_rules})
        if not self._draining and time.monotonic() < self._idle_until_s():
            return False
        self._account()
        request = EndRequest(
            engine_s=round(self._engine_s, 3),
            busy_s=round(self._busy_s, 3),
            engine_restarts=self._engine_restarts,
        )
        response = await self._coordinator.end(request)
        self._engine_restarts -= request.engine_restarts
        if response.ended:
            return True
        await asyncio.sleep(SHORTEST_POLL_S)  # the coordinator has work, which it leases next
        return False

    def _wanted_tokens(self) -> int:
        """Return how many tokens to lease; 0 if there are enough rows to send, or too many bytes of them."""
        if self._draining:
            return 0
        unread_bytes = sum(lease.size_bytes for lease in self._unread.values())
        if unread_bytes + self._unsent_bytes >= UNSENT_BYTES:
            return 0
        enough = SEGMENT_TOKENS * len(self._engines)
        unsent = int(self._shares.tokens) + sum(lease.tokens for lease in self._unread.values())
        # Not for each row that is sent.
        return enough - unsent if unsent <= enough // 2 else 0

    def _take(self, response: SyncResponse) -> None:
        """Apply an answer of the coordinator."""
        self._account()
        if response.drain and not self._draining:
            logger.info("the coordinator lets the job end: it finishes the %s segments that it holds", len(self._held))
        self._draining = response.drain
        self._backlog_tokens = 0 if response.drain else response.backlog_tokens
        self._lose(response.lost)
        for lease in response.leases:
            self._held.add(lease)
            self._unread[lease.ref] = lease
            self._places.prepare(lease.batch_id)
            self._run(self._read(lease))
        per_row = self._held.tokens_per_row
        rows = self._held.rows_left + (self._backlog_tokens / per_row if per_row else 0)
        while len(self._engines) < self._model.engines_for(int(rows)):
            self._start_engine()
        self._prompt_rules_url = response.prompt_rules_url
        self._write_prompt_rules()
        self._note_change()

    def _lose(self, segments: Collection[SegmentRef]) -> None:
        """Drop the rows of segments that the job does not hold any more."""
        self._account()
        lost = {ref for ref in segments if self._held.remove(ref)}
        if not lost:
            return
        logger.info("%s segments were lost", len(lost))
        for ref in lost:
            self._unread.pop(ref, None)
        self._unsent_bytes -= sum(len(row.raw) for row in self._shares.drop(lost))
        for engine in self._engines.values():
            dropped = [key for key in engine.pending if key[0] in lost]
            for key in dropped:
                del engine.pending[key]
            if dropped:
                engine.actor.drop.remote(lost)
        self._forget_places({ref.batch_id for ref in lost})
        self._note_change()

    def _forget_places(self, batch_ids: Collection[str]) -> None:
        for batch_id in batch_ids:
            if not self._held.has_batch(batch_id):
                self._places.forget(batch_id)

    async def _read(self, lease: Lease) -> None:
        """Read the rows of a lease and deal them to an engine."""
        size = lease.size_bytes
        async with self._reads:
            while self._reading_bytes + self._unsent_bytes and (
                self._reading_bytes + self._unsent_bytes + size > UNSENT_BYTES
            ):
                await self._change()
            if lease.ref not in self._unread:
                return
            self._reading_bytes += size
            try:
                rows = leased_rows(lease, await read_range(self._session, lease.url, lease.start, lease.end))
                rows = await self._files.resolve(self._session, lease, rows)
            except (PlanError, ObjectMissingError, UrlRefusedError) as error:
                await self._fail(lease.ref, str(error))
                return
            finally:
                self._reading_bytes -= size
        if self._unread.pop(lease.ref, None) is None:
            return  # it was lost
        if not rows:
            await self._fail(lease.ref, "the segment has no rows left to run")
            return
        self._held.reach(lease.ref, "read")
        self._unsent_bytes += sum(len(row.raw) for row in rows)
        self._shares.deal(rows)
        self._note_change()

    async def _fail(self, ref: SegmentRef, reason: str) -> None:
        """Give a segment back that cannot be run, unless it was lost."""
        if ref not in self._held:
            return
        self._lose([ref])
        logger.warning("segment %s of %s cannot be run: %s", ref.segment, ref.batch_id, reason)
        await self._coordinator.fail(
            Failure(batch_id=ref.batch_id, segment=ref.segment, epoch=ref.epoch, reason=reason)
        )

    def _start_engine(self) -> None:
        engine = _Engine(number=next(self._numbers))
        self._engines[engine.number] = engine
        self._shares.add_engine(engine.number)
        self._start_actor(engine)
        self._work.add(self._tasks.create_task(self._use_engine(engine)))

    def _start_actor(self, engine: _Engine) -> None:
        import ray

        options: dict[str, Any] = {
            "num_cpus": self._model.engine_num_cpus,
            "num_gpus": self._model.num_gpus or None,
        }
        engine.actor = ray.remote(**options)(DirectEngine).remote(self._model)
        engine.started = engine.actor.start.remote()

    async def _use_engine(self, engine: _Engine) -> None:
        """Run rows on one engine until it ends. Replace its actor if that dies."""
        from ray.exceptions import RayError, RayTaskError

        deaths = 0
        while True:
            committed = self._committed_parts
            try:
                async with asyncio.TaskGroup() as tasks:
                    if await self._becomes_ready(engine):
                        collecting = tasks.create_task(self._collect(engine, tasks))
                        await self._feed(engine)
                        collecting.cancel()
            except ExceptionGroup as group:
                error = group.exceptions[0]
                if isinstance(error, RayTaskError) or not isinstance(error, RayError):
                    raise error from None
                deaths = deaths + 1 if self._committed_parts == committed else 1
                logger.warning("an engine worker ended (%s); its rows run again", type(error).__name__)
                if deaths == DEATHS_WITHOUT_PROGRESS:
                    raise EngineUnavailableError(
                        f"the worker of an engine ended {deaths} times before it committed a row "
                        f"({type(error).__name__}): check the memory of its node or pod"
                    ) from error
                self._engine_restarts += 1
                self._stop_engine(engine)
                self._start_actor(engine)
            else:
                self._stop_engine(engine)
                self._shares.remove_engine(engine.number)
                del self._engines[engine.number]
                logger.info("an engine without rows ended")
                return

    async def _becomes_ready(self, engine: _Engine) -> bool:
        """Wait until an engine is ready, or is not needed any more: it may wait for its node for long."""
        started = asyncio.ensure_future(engine.started)
        started.add_done_callback(lambda _: self._note_change())
        try:
            await self._change(until=lambda: started.done() or self._is_superfluous(engine))
            if not started.done():
                return False
            started.result()
        finally:
            started.cancel()
        self._account()
        engine.ready = True
        self._write_prompt_rules()
        return True

    def _stop_engine(self, engine: _Engine) -> None:
        """Kill the actor of an engine, and take its rows back."""
        import ray

        self._account()
        engine.ready = False
        ray.kill(engine.actor)
        self._shares.give_back(engine.number, engine.pending.values())
        self._unsent_bytes += sum(len(row.raw) for row in engine.pending.values())
        engine.pending.clear()
        engine.announced.clear()
        self._note_change()

    async def _feed(self, engine: _Engine) -> None:
        """Send rows to an engine as soon as it has room for them. Return when it is not needed any more."""
        while True:
            rows: list[LeasedRow] = []
            size = 0
            while len(rows) < SEND_ROWS and size < SEND_BYTES:
                row = self._shares.take(engine.number, len(engine.pending), can_lease=self._can_lease())
                if row is None:
                    break
                rows.append(row)
                size += len(row.raw)
                engine.pending[row.key] = row
                engine.announced.add(row.segment.batch_id)
            self._unsent_bytes -= size
            for ref in {row.segment for row in rows}:
                self._held.reach(ref, "sent")
            settled = {each for each in engine.announced if not self._shares.has_batch(engine.number, each)}
            if rows or settled:
                engine.announced -= settled
                self._note_change()  # there is room to read, and other engines may end
                unreadable = await engine.actor.add.remote(rows, settled=settled, engines=len(self._engines))
                for each in unreadable:
                    self._run(self._fail(each.segment, each.reason))
            elif self._is_superfluous(engine):
                return
            else:
                await self._change()

    def _can_lease(self) -> bool:
        return bool(self._backlog_tokens or self._unread)

    def _is_superfluous(self, engine: _Engine) -> bool:
        """Return whether an engine has no rows and gets none, and another one is ready and stays."""
        if engine.pending or self._shares.left or self._can_lease():
            return False
        return any(other.ready for other in self._engines.values() if other is not engine)

    async def _collect(self, engine: _Engine, tasks: asyncio.TaskGroup) -> None:
        """Let an engine write its parts."""
        while True:
            part = await engine.actor.next_part.remote()
            self._engine_restarts += part.restarts
            tasks.create_task(self._write(engine, part))

    async def _write(self, engine: _Engine, part: ReadyPart) -> None:
        """Let an engine write one part, and record it."""
        ready_at_s = time.monotonic()
        for _ in range(WRITES):
            place = await self._places.take(part.batch_id)
            if place is None:  # the batch has ended
                engine.actor.discard.remote(part.number)
                self._lose([segment_ref(part.batch_id, rows) for rows in part.segments])
                return
            if await engine.actor.write.remote(part.number, place.url):
                break
            self._places.forget(part.batch_id)
        else:
            raise UrlRefusedError(
                f"the object store refuses the URLs of parts of {part.batch_id}; see that the clocks of the service "
                "and the store agree"
            )
        for rows in part.segments:
            for row in bitmap_rows(rows.rows):
                engine.pending.pop((segment_ref(part.batch_id, rows), row), None)
        self._note_change()
        # Not in the tasks of the engine: the part counts even if its actor dies now.
        self._run(self._record(Commit(batch_id=part.batch_id, key=place.key, segments=part.segments), ready_at_s))

    async def _record(self, commit: Commit, ready_at_s: float) -> None:
        refused = await record(self._coordinator, commit, self._held, ready_at_s=ready_at_s)
        self._account()
        self._committed_parts += 1
        self._lose(refused)
        self._forget_places([commit.batch_id])
        self._note_change()

    def _write_prompt_rules(self) -> None:
        """Let an engine write the prompt rules, if the coordinator wants them."""
        ready = next((engine for engine in self._engines.values() if engine.ready), None)
        if not self._prompt_rules_url or ready is None or self._writing_rules is not None:
            return

        async def write(actor: Any, url: str) -> None:
            from ray.exceptions import RayError

            try:
                await actor.write_prompt_rules.remote(url)
            except RayError as error:
                logger.warning("the prompt rules were not written, a later job writes them: %s", type(error).__name__)

        self._writing_rules = self._tasks.create_task(write(ready.actor, self._prompt_rules_url))

    def _run(self, work: Coroutine[Any, Any, None]) -> None:
        """Run a task that ends with the job."""
        task = self._tasks.create_task(work)
        self._work.add(task)
        task.add_done_callback(self._work.discard)

    def _account(self) -> None:
        """Add up the times since the last change of what the job holds and of which engines are ready."""
        now_s = time.monotonic()
        elapsed_s, self._accounted_s = now_s - self._accounted_s, now_s
        ready = sum(engine.ready for engine in self._engines.values())
        self._engine_s += elapsed_s * ready
        if ready and self._held:
            self._busy_s += elapsed_s

    async def _change(self, timeout_s: float | None = None, until: Callable[[], bool] | None = None) -> None:
        """Wait for a change of rows, engines or leases, or for one that meets a condition."""
        deadline_s = None if timeout_s is None else time.monotonic() + timeout_s
        while until is None or not until():
            waiter = asyncio.get_running_loop().create_future()
            self._waiters.append(waiter)
            left_s = None if deadline_s is None else max(0.0, deadline_s - time.monotonic())
            await asyncio.wait({waiter}, timeout=left_s)
            if until is None or not waiter.done():
                return

    def _note_change(self) -> None:
        for waiter in self._waiters:
            if not waiter.done():
                waiter.set_result(None)
        self._waiters.clear()
