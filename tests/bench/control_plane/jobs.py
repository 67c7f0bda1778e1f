"""Simulated jobs behind a simulated Ray dashboard: ``python -m tests.bench.control_plane.jobs``.

The launcher of the Ray Jobs API submits to it. Each job is a task that does to the real coordinator what the driver of
the direct engine does: it leases segments, reads their rows, writes parts and commits them. Only the engine is
missing: every row gets the same answer, at a constant rate.

Besides the routes of Ray it has two of its own:

    POST /bench/reset    begin to measure
    GET  /bench/figures  ``Timings`` since then, as JSON
"""

import argparse
import asyncio
import dataclasses
import json
import random
import time
from collections import deque
from dataclasses import dataclass, field
from typing import Final

import aiohttp
from aiohttp import web

from ray_job.contract.job_spec import ENVIRONMENT_VARIABLE, JobSpec
from ray_job.contract.leases import (
    TOKEN_VARIABLE,
    Commit,
    CommitResponse,
    EndRequest,
    SegmentRef,
    SyncRequest,
    SyncResponse,
)
from ray_job.contract.parts import encode_part
from ray_job.coordinator import HttpCoordinator
from ray_job.errors import JobEndedError
from ray_job.holdings import (
    EXTEND_EVERY_S,
    LONG_POLL_S,
    SEGMENT_TOKENS,
    HeldLeases,
    PartPlaces,
    extension_pause_s,
    record,
)
from ray_job.object_urls import put_object, read_range
from ray_job.rows import LeasedRow, committed_rows, finished_row, leased_rows, parse_request

ANSWER: Final = json.dumps(
    {
        "id": "chatcmpl-0",
        "object": "chat.completion",
        "choices": [{"index": 0, "message": {"role": "assistant", "content": "word " * 20}, "finish_reason": "stop"}],
        "usage": {"prompt_tokens": 20, "completion_tokens": 20, "total_tokens": 40},
    }
).encode()
# The times that jobs take have an exponential distribution, within these multiples of the mean. So as many jobs end in
# each second from the start.
LEAST_TIME: Final = 0.1
MOST_TIME: Final = 5.0
# Real rows do not end at the same moments in all jobs: the pause between two commits varies within these multiples of
# the mean, and drivers take up to this long to start.
COMMIT_SPREAD: Final = (0.7, 1.3)
LONGEST_START_S: Final = 10.0
LOOP_CHECK_S: Final = 0.1
RETRY_S: Final = 0.5


@dataclass(slots=True)
class Timings:
    """Measurements of the simulated jobs, in seconds.

    Attributes:
        syncs: answers to syncs that do not wait for work.
        commits: answers to commits.
        loop_lags: by how much a timer of this process was late: the other times include it.
        running: jobs that run now.
        broken: jobs that ended with an error.
    """

    syncs: list[float] = field(default_factory=list)
    commits: list[float] = field(default_factory=list)
    loop_lags: list[float] = field(default_factory=list)
    running: int = 0
    broken: int = 0


class TimedCoordinator(HttpCoordinator):
    """The coordinator, with the times of its answers."""

    def __init__(self, url: str, token: str, timings: Timings) -> None:
        super().__init__(url, token)
        self._timings = timings

    async def sync(self, request: SyncRequest) -> SyncResponse:
        """See ``Coordinator``."""
        began = time.monotonic()
        answer = await super().sync(request)
        if not request.wait_s:
            self._timings.syncs.append(time.monotonic() - began)
        return answer

    async def commit(self, commit: Commit) -> CommitResponse:
        """See ``Coordinator``."""
        began = time.monotonic()
        answer = await super().commit(commit)
        self._timings.commits.append(time.monotonic() - began)
        return answer


class SimulatedJob:
    """A job with an engine that answers rows at a constant rate.

    Args:
        spec: the job.
        coordinator: where it leases segments.
        session: reads plans and writes parts.
        rows_per_s: rows that the engine answers in a second.
        commit_every_s: how long finished rows wait for a commit, on average.
        chance: the times of commits.
    """

    def __init__(
        self,
        spec: JobSpec,
        coordinator: HttpCoordinator,
        session: aiohttp.ClientSession,
        *,
        rows_per_s: float,
        commit_every_s: float,
        chance: random.Random,
    ) -> None:
        self._chance = chance
        self._keep_warm_s = spec.model.keep_warm_s
        self._coordinator = coordinator
        self._session = session
        self._rows_per_s = rows_per_s
        self._commit_every_s = commit_every_s
        self._held = HeldLeases()
        self._places = PartPlaces(coordinator)
        self._rows: deque[LeasedRow] = deque()
        self._most_rows = 0
        self._has_rows = asyncio.Event()
        self._draining = False

    async def run(self) -> None:
        """Answer rows until there has been no work for a while.

        Raises:
            JobError: see ``ray_job.errors``.
        """
        try:
            async with asyncio.TaskGroup() as tasks:
                answering = tasks.create_task(self._answer())
                await self._lease()
                answering.cancel()
        except ExceptionGroup as group:
            raise group.exceptions[0] from None

    async def _lease(self) -> None:
        """Extend leases and take new ones, as ``ray_job.serving`` does."""
        while True:
            idle_left_s = self._held.idle_since_s + self._keep_warm_s - time.monotonic()
            if not self._held and (self._draining or idle_left_s <= 0):
                if (await self._coordinator.end(EndRequest(engine_s=1, busy_s=1))).ended:
                    return
                await asyncio.sleep(RETRY_S)
            wanted, wait_s = SEGMENT_TOKENS, EXTEND_EVERY_S
            # A job asks for more when its engine has taken half of the rows.
            if self._draining or (self._held and 2 * len(self._rows) > self._most_rows):
                await asyncio.sleep(extension_pause_s() if self._held else 0)
                wanted, wait_s = 0, 0.0
            elif not self._held:
                wait_s = min(LONG_POLL_S, max(0.0, idle_left_s))
            request = SyncRequest(wanted_tokens=wanted, wait_s=wait_s, held=self._held.refs, engines=1)
            await self._take(await self._coordinator.sync(request))

    async def _take(self, response: SyncResponse) -> None:
        self._draining = response.drain
        self._drop(response.lost)
        for lease in response.leases:
            self._held.add(lease)
            self._places.prepare(lease.batch_id)
            self._rows += leased_rows(lease, await read_range(self._session, lease.url, lease.start, lease.end))
            self._most_rows = len(self._rows)
            self._has_rows.set()

    def _drop(self, segments: tuple[SegmentRef, ...]) -> None:
        for ref in segments:
            self._held.remove(ref)
        self._rows = deque(row for row in self._rows if row.segment in self._held)

    async def _answer(self) -> None:
        """Commit the rows that the engine has answered, until the job ends."""
        while True:
            await self._has_rows.wait()
            rest_s = len(self._rows) / self._rows_per_s
            pause_s = self._commit_every_s * self._chance.uniform(*COMMIT_SPREAD)
            await asyncio.sleep(min(pause_s, rest_s))
            count = min(len(self._rows), max(1, round(self._rows_per_s * self._commit_every_s)))
            rows = [self._rows.popleft() for _ in range(count)]
            by_batch: dict[str, list[LeasedRow]] = {}
            for row in rows:
                by_batch.setdefault(row.segment.batch_id, []).append(row)
            for batch_id, some in by_batch.items():
                await self._commit(batch_id, some)
            if not self._rows:
                self._has_rows.clear()

    async def _commit(self, batch_id: str, rows: list[LeasedRow]) -> None:
        place = await self._places.take(batch_id)
        if place is None:
            return  # the batch has ended
        finished = [finished_row(parse_request(row), 200, ANSWER) for row in rows]
        part = encode_part(batch_id, [result for row in finished for result in row.results])
        await put_object(self._session, place.url, part)
        commit = Commit(batch_id=batch_id, key=place.key, segments=committed_rows(finished))
        self._drop(await record(self._coordinator, commit, self._held, ready_at_s=time.monotonic()))
        if not self._held.has_batch(batch_id):
            self._places.forget(batch_id)


class Dashboard:
    """The part of Ray's dashboard that launches and reports jobs.

    Args:
        rows_per_s: the rate of a job of mean length.
        commit_every_s: see ``SimulatedJob``.
    """

    def __init__(self, *, rows_per_s: float, commit_every_s: float) -> None:
        self._rows_per_s = rows_per_s
        self._commit_every_s = commit_every_s
        self._chance = random.Random(1)  # noqa: S311 - the same rates in each run
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self._broken: dict[str, str] = {}  # why a job ended, by its id
        self._timings = Timings()

    async def serve(self, port: int) -> None:
        """Answer requests until the process ends."""
        app = web.Application()
        app.add_routes(
            [
                web.post("/api/jobs/", self._submit),
                web.get("/api/jobs/{job_id}", self._status),
                web.get("/api/jobs/{job_id}/logs", self._logs),
                web.post("/api/jobs/{job_id}/stop", self._stop),
                web.post("/bench/reset", self._reset),
                web.get("/bench/figures", self._figures),
            ]
        )
        async with aiohttp.ClientSession() as self._session:
            runner = web.AppRunner(app, access_log=None)
            await runner.setup()
            await web.TCPSite(runner, "127.0.0.1", port).start()
            while True:
                began = time.monotonic()
                await asyncio.sleep(LOOP_CHECK_S)
                self._timings.loop_lags.append(time.monotonic() - began - LOOP_CHECK_S)

    async def _submit(self, request: web.Request) -> web.Response:
        submitted = await request.json()
        job_id = submitted["submission_id"]
        if job_id in self._tasks:
            return web.Response(status=500, text=f"Job with submission_id {job_id} already exists.")
        variables = submitted["runtime_env"]["env_vars"]
        spec = JobSpec.from_json(variables[ENVIRONMENT_VARIABLE])
        self._tasks[job_id] = asyncio.create_task(self._run(spec, variables[TOKEN_VARIABLE]))
        return web.json_response({"job_id": job_id, "submission_id": job_id})

    async def _run(self, spec: JobSpec, token: str) -> None:
        await asyncio.sleep(self._chance.uniform(0, LONGEST_START_S))
        self._timings.running += 1
        rate = self._rows_per_s / min(MOST_TIME, max(LEAST_TIME, self._chance.expovariate(1)))
        try:
            async with TimedCoordinator(spec.coordinator_url, token, self._timings) as coordinator:
                job = SimulatedJob(
                    spec,
                    coordinator,
                    self._session,
                    rows_per_s=rate,
                    commit_every_s=self._commit_every_s,
                    chance=self._chance,
                )
                await job.run()
        except JobEndedError:
            pass  # the driver stops
        except Exception as error:  # noqa: BLE001 - the job fails, and the run reports it
            self._broken[spec.job_id] = f"{type(error).__name__}: {error}"
            print(f"{spec.job_id} ended: {self._broken[spec.job_id]}", flush=True)
            self._timings.broken += 1
        finally:
            self._timings.running -= 1

    async def _status(self, request: web.Request) -> web.Response:
        job_id = request.match_info["job_id"]
        task = self._tasks.get(job_id)
        if task is None:
            return web.Response(status=404)
        if not task.done():
            return web.json_response({"status": "RUNNING"})
        status = "STOPPED" if task.cancelled() else "FAILED" if job_id in self._broken else "SUCCEEDED"
        return web.json_response({"status": status, "driver_exit_code": 0})

    async def _logs(self, request: web.Request) -> web.Response:
        return web.json_response({"logs": self._broken.get(request.match_info["job_id"], "")})

    async def _stop(self, request: web.Request) -> web.Response:
        task = self._tasks.get(request.match_info["job_id"])
        if task is None:
            return web.Response(status=404)
        return web.json_response({"stopped": task.cancel()})

    async def _reset(self, _request: web.Request) -> web.Response:
        for times in (self._timings.syncs, self._timings.commits, self._timings.loop_lags):
            times.clear()
        return web.json_response({})

    async def _figures(self, _request: web.Request) -> web.Response:
        return web.json_response(dataclasses.asdict(self._timings))


def main() -> None:
    """Serve until the process is ended."""
    parser = argparse.ArgumentParser(description="Simulated jobs behind a simulated Ray dashboard.")
    parser.add_argument("--port", type=int, required=True, help="where the dashboard listens, on 127.0.0.1")
    parser.add_argument("--rows-per-s", type=float, required=True, help="the rate of a job of mean length")
    parser.add_argument("--commit-every-s", type=float, required=True, help="how long finished rows wait for a commit")
    given = parser.parse_args()
    dashboard = Dashboard(rows_per_s=given.rows_per_s, commit_every_s=given.commit_every_s)
    asyncio.run(dashboard.serve(given.port))


if __name__ == "__main__":
    main()
