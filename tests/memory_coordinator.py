"""A coordinator in memory, over plans in a directory, and an HTTP server for it."""

import asyncio
import threading
import time
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from aiohttp import web

from ray_job.contract.leases import (
    COMMITS_PATH,
    END_PATH,
    FAILURES_PATH,
    PART_URLS_PATH,
    SYNC_PATH,
    Commit,
    CommitResponse,
    EndRequest,
    EndResponse,
    Failure,
    Lease,
    Message,
    PartUrl,
    PartUrls,
    PartUrlsRequest,
    SegmentRef,
    SyncRequest,
    SyncResponse,
)
from ray_job.contract.object_keys import parts_prefix
from ray_job.contract.plans import PlanRow, bitmap, bitmap_rows

TOKEN = "job-token"
LEASE_S = 30.0
TOKENS_PER_ROW = 100
PROMPT_RULES_KEY = "prompt_rules/demo.json"


@dataclass(slots=True, kw_only=True)
class Segment:
    """A segment, with its rows by number, and its lease."""

    batch_id: str
    number: int
    endpoint: str
    start: int
    end: int
    lines: tuple[tuple[int, ...], ...]
    cache_salt: str
    done: set[int] = field(default_factory=set)
    epoch: int = 0
    leased_until_s: float = 0.0
    failures: list[str] = field(default_factory=list)

    @property
    def is_done(self) -> bool:
        return len(self.done) == len(self.lines)


class MemoryCoordinator:
    """Leases, commits and fencing as in ADR 13, for one job.

    Args:
        root: the directory of the objects.
    """

    def __init__(self, root: Path) -> None:
        self.root = root
        self.segments: list[Segment] = []
        self.parts: list[str] = []  # keys, in the order of their records
        self.refused: dict[str, set[int]] = {}  # lines of a part that do not count
        self.syncs: list[SyncRequest] = []
        self.commits: list[tuple[float, Commit]] = []
        self.ended: EndRequest | None = None
        self.drain = False
        self._answers: dict[str, CommitResponse] = {}
        self._places = 0
        self._changed = asyncio.Condition()

    def add_batch(
        self,
        batch_id: str,
        rows: Sequence[PlanRow],
        *,
        endpoint: str,
        segment_rows: int = 64,
        cache_salt: str = "",
    ) -> None:
        """Write a plan and offer its segments."""
        plan = self.root / "batches" / batch_id / "plan"
        plan.parent.mkdir(parents=True)
        data, segments = b"", []
        for first in range(0, len(rows), segment_rows):
            some = rows[first : first + segment_rows]
            start = len(data)
            data += b"".join(row.encode() for row in some)
            segments.append(
                Segment(
                    batch_id=batch_id,
                    number=first // segment_rows,
                    endpoint=endpoint,
                    start=start,
                    end=len(data),
                    lines=tuple((row.line, *(line for line, _ in row.twins)) for row in some),
                    cache_salt=cache_salt,
                )
            )
        plan.write_bytes(data)
        self.segments += segments

    @property
    def left(self) -> int:
        """Rows that are not committed."""
        return sum(len(each.lines) - len(each.done) for each in self.segments)

    def lose(self, *, but: int = 0) -> list[SegmentRef]:
        """Take all leases away, except the first few, and return them."""
        lost = [each for each in self.segments if self._is_leased(each)][but:]
        refs = [_ref(each) for each in lost]
        for each in lost:
            each.leased_until_s = 0
        return refs

    async def notify(self) -> None:
        """Wake requests that wait for work."""
        async with self._changed:
            self._changed.notify_all()

    async def sync(self, request: SyncRequest) -> SyncResponse:
        self.syncs.append(request)
        lost = tuple(ref for ref in request.held if not self._extend(ref))
        deadline = time.monotonic() + request.wait_s
        while True:
            leases = () if self.drain else self._lease(request.wanted_tokens)
            left_s = deadline - time.monotonic()
            if leases or lost or self.drain or left_s <= 0:
                break
            try:
                async with asyncio.timeout(left_s), self._changed:
                    await self._changed.wait()
            except TimeoutError:
                continue
            lost = tuple(ref for ref in request.held if not self._extend(ref))
        backlog = sum(TOKENS_PER_ROW * len(each.lines) for each in self.segments if self._is_free(each))
        rules = "" if (self.root / PROMPT_RULES_KEY).exists() else (self.root / PROMPT_RULES_KEY).as_uri()
        return SyncResponse(leases=leases, lost=lost, backlog_tokens=backlog, drain=self.drain, prompt_rules_url=rules)

    async def part_urls(self, request: PartUrlsRequest) -> PartUrls:
        first = self._places
        self._places += request.count
        keys = [f"{parts_prefix(request.batch_id)}{number:08d}.part" for number in range(first, self._places)]
        return PartUrls(parts=tuple(PartUrl(key=key, url=(self.root / key).as_uri()) for key in keys))

    async def commit(self, commit: Commit) -> CommitResponse:
        if commit.key in self._answers:
            return self._answers[commit.key]
        assert (self.root / commit.key).exists()
        self.commits.append((time.monotonic(), commit))
        for each in commit.times:
            assert each.leased_s >= each.read_s >= each.sent_s >= each.ready_s >= 0
        self.parts.append(commit.key)
        accepted = []
        for rows in commit.segments:
            ref = SegmentRef(batch_id=commit.batch_id, segment=rows.segment, epoch=rows.epoch)
            segment = self._find(ref)
            counts = segment is not None and self._is_leased(segment)
            accepted.append(counts)
            if segment is not None and counts:
                numbers = bitmap_rows(rows.rows)
                assert not numbers & segment.done, "a row was committed twice under one lease"
                assert sorted(rows.lines) == sorted(line for number in numbers for line in segment.lines[number])
                segment.done |= numbers
            else:
                self.refused.setdefault(commit.key, set()).update(rows.lines)
        self._answers[commit.key] = CommitResponse(accepted=tuple(accepted))
        return self._answers[commit.key]

    async def fail(self, failure: Failure) -> None:
        ref = SegmentRef(batch_id=failure.batch_id, segment=failure.segment, epoch=failure.epoch)
        if segment := self._find(ref):
            segment.failures.append(failure.reason)
            segment.leased_until_s = 0

    async def end(self, request: EndRequest) -> EndResponse:
        if any(self._is_free(each) or self._is_leased(each) for each in self.segments) and not self.drain:
            return EndResponse(ended=False)
        self.ended = request
        return EndResponse(ended=True)

    def _find(self, ref: SegmentRef) -> Segment | None:
        return next((each for each in self.segments if _ref(each) == ref), None)

    def _is_leased(self, segment: Segment) -> bool:
        return not segment.is_done and segment.leased_until_s > time.monotonic()

    def _is_free(self, segment: Segment) -> bool:
        return not segment.is_done and not self._is_leased(segment) and len(segment.failures) < 4

    def _extend(self, ref: SegmentRef) -> bool:
        segment = self._find(ref)
        if segment is None or not self._is_leased(segment):
            return False
        segment.leased_until_s = time.monotonic() + LEASE_S
        return True

    def _lease(self, wanted_tokens: int) -> tuple[Lease, ...]:
        leases = []
        for segment in self.segments:
            if wanted_tokens <= 0:
                break
            if not self._is_free(segment):
                continue
            segment.epoch += 1
            segment.leased_until_s = time.monotonic() + LEASE_S
            tokens = TOKENS_PER_ROW * len(segment.lines)
            wanted_tokens -= tokens
            leases.append(
                Lease(
                    batch_id=segment.batch_id,
                    segment=segment.number,
                    epoch=segment.epoch,
                    endpoint=segment.endpoint,
                    url=(self.root / "batches" / segment.batch_id / "plan").as_uri(),
                    start=segment.start,
                    end=segment.end,
                    rows=len(segment.lines),
                    tokens=tokens,
                    done=bitmap(segment.done),
                    cache_salt=segment.cache_salt,
                    is_traced=True,
                )
            )
        return tuple(leases)


def _ref(segment: Segment) -> SegmentRef:
    return SegmentRef(batch_id=segment.batch_id, segment=segment.number, epoch=segment.epoch)


class CoordinatorServer:
    """A coordinator behind HTTP, in a thread."""

    def __init__(self, root: Path) -> None:
        self.coordinator = MemoryCoordinator(root)
        self.status = 0
        """The status of every answer, or 0 to answer."""
        self.url = ""
        self.requests = 0
        self._loop = asyncio.new_event_loop()

    def change(self, **attributes: Any) -> None:
        """Set attributes of the coordinator, and wake requests that wait."""
        for name, value in attributes.items():
            setattr(self.coordinator, name, value)
        asyncio.run_coroutine_threadsafe(self.coordinator.notify(), self._loop).result(10)

    @contextmanager
    def running(self) -> Iterator["CoordinatorServer"]:
        """Answer requests within the block."""
        started = threading.Event()
        thread = threading.Thread(target=self._run, args=(started,), daemon=True)
        thread.start()
        assert started.wait(10)
        try:
            yield self
        finally:
            self._loop.call_soon_threadsafe(self._loop.stop)
            thread.join(10)

    def _run(self, started: threading.Event) -> None:
        asyncio.set_event_loop(self._loop)
        runner = self._loop.run_until_complete(self._start())
        started.set()
        self._loop.run_forever()
        self._loop.run_until_complete(runner.cleanup())
        self._loop.close()

    async def _start(self) -> web.AppRunner:
        app = web.Application()
        app.router.add_post("/{path:.*}", self._answer)
        runner = web.AppRunner(app, shutdown_timeout=0.1)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        host, port = runner.addresses[0][:2]
        self.url = f"http://{host}:{port}"
        return runner

    async def _answer(self, request: web.Request) -> web.Response:
        self.requests += 1
        if self.status:
            return web.Response(status=self.status)
        if request.headers.get("authorization") != f"Bearer {TOKEN}":
            return web.Response(status=401)
        handlers: dict[str, tuple[type[Message], Callable[[Any], Awaitable[Message | None]]]] = {
            SYNC_PATH: (SyncRequest, self.coordinator.sync),
            PART_URLS_PATH: (PartUrlsRequest, self.coordinator.part_urls),
            COMMITS_PATH: (Commit, self.coordinator.commit),
            FAILURES_PATH: (Failure, self.coordinator.fail),
            END_PATH: (EndRequest, self.coordinator.end),
        }
        kind, handle = handlers[request.path]
        answer = await handle(kind.from_json(await request.read()))
        if self.status:  # it became unavailable while the request waited
            return web.Response(status=self.status)
        return web.Response(body=answer.to_json() if answer else b"{}")
