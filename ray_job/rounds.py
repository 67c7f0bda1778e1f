"""The driver of the engines that are a stage of Ray Data: processor, serve and http.

coordinator: leases ▶ requests ▶ Ray Data: engine ▶ tasks: parts of a block, by batch ▶ coordinator: their records

A dataset has an end, so the job works in rounds: it leases all work that there is, up to a limit, and answers it. Tasks
outside of the dataset write its blocks, because the coordinator gives places for the parts of a batch only when it is
known which batches a block holds. Results never pass through the driver.
"""

import asyncio
import contextlib
import json
import logging
import threading
import time
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final

import aiohttp

from ray_job.contract.job_spec import JobSpec, ModelSpec
from ray_job.contract.leases import (
    Commit,
    EndRequest,
    Failure,
    Lease,
    PartUrl,
    SegmentRef,
    SyncRequest,
    SyncResponse,
)
from ray_job.contract.parts import encode_part
from ray_job.contract.plans import PlanError
from ray_job.coordinator import Coordinator
from ray_job.errors import InputError, ObjectMissingError, UrlRefusedError
from ray_job.holdings import LONG_POLL_S, SEGMENT_TOKENS, HeldLeases, PartPlaces, extension_pause_s, record
from ray_job.object_urls import put_object, read_range
from ray_job.rows import FinishedRow, Request, committed_rows, finished_row, leased_rows, parse_request, refused
from ray_job.uploaded_files import UploadedFiles

if TYPE_CHECKING:
    from collections.abc import Callable

    import pyarrow as pa
    from ray.data import Dataset

logger = logging.getLogger(__name__)

ROUND_ROWS: Final = 2_000
ROUND_BYTES: Final = 64 << 20
EMBEDDINGS: Final = "/v1/embeddings"
PROCESSOR_KEEP_WARM_S: Final = 2.0
"""Each dataset of the processor starts its own engine, so waiting for work keeps nothing warm."""
PAUSE_S: Final = 0.5


class RoundsJob:
    """A job with the processor, serve or http engine.

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
        self._busy_s = 0.0
        self._keep_warm_s: float = spec.model.keep_warm_s
        if spec.model.engine == "processor":
            self._keep_warm_s = min(self._keep_warm_s, PROCESSOR_KEEP_WARM_S)

    async def run(self) -> None:
        """Answer rows until there has been no work for a while.

        Raises:
            JobError: see ``ray_job.errors``.
        """
        import ray

        task = ray.remote(num_cpus=self._model.stage_num_cpus)
        self._batches_of, self._write_parts = task(batches_of), task(write_parts)
        async with aiohttp.ClientSession() as session:
            while True:
                idle_s = self._held.idle_since_s + self._keep_warm_s - time.monotonic()
                response = await self._sync(SEGMENT_TOKENS, wait_s=min(LONG_POLL_S, max(0.0, idle_s)))
                if leases := await self._more(response.leases):
                    await self._answer(session, leases)
                elif response.drain or idle_s <= 0:
                    # The engines of a dataset are busy from its start to its end.
                    engine_s = self._busy_s * self._model.concurrency
                    request = EndRequest(engine_s=round(engine_s, 3), busy_s=round(self._busy_s, 3))
                    if (await self._coordinator.end(request)).ended:
                        return
                    await asyncio.sleep(PAUSE_S)

    async def _sync(self, wanted_tokens: int, *, wait_s: float = 0) -> SyncResponse:
        """Extend the leases and take new ones."""
        response = await self._coordinator.sync(
            SyncRequest(
                wanted_tokens=wanted_tokens,
                wait_s=wait_s,
                held=self._held.refs,
                engines=self._model.concurrency if self._held else 0,
            )
        )
        for ref in response.lost:
            self._held.remove(ref)
        for lease in response.leases:
            self._held.add(lease)
            self._places.prepare(lease.batch_id)
        return response

    async def _more(self, leases: Sequence[Lease]) -> list[Lease]:
        """Return the leases and all others that the coordinator has now, up to the limits of a round."""
        taken = list(leases)
        while leases and (
            sum(lease.rows for lease in taken) < ROUND_ROWS and sum(lease.size_bytes for lease in taken) < ROUND_BYTES
        ):
            leases = (await self._sync(SEGMENT_TOKENS)).leases
            taken += leases
        return taken

    async def _read(self, session: aiohttp.ClientSession, lease: Lease) -> list[Request]:
        """Return the requests of a lease. One that cannot be run is given back."""
        try:
            rows = leased_rows(lease, await read_range(session, lease.url, lease.start, lease.end))
            rows = await self._files.resolve(session, lease, rows)
            requests = await asyncio.to_thread(lambda: [parse_request(row) for row in rows])
        except (PlanError, InputError, ObjectMissingError, UrlRefusedError) as error:
            await self._fail(lease.ref, str(error))
            return []
        self._held.reach(lease.ref, "read")
        return requests

    async def _fail(self, ref: SegmentRef, reason: str) -> None:
        self._held.remove(ref)
        logger.warning("segment %s of %s cannot be run: %s", ref.segment, ref.batch_id, reason)
        await self._coordinator.fail(
            Failure(batch_id=ref.batch_id, segment=ref.segment, epoch=ref.epoch, reason=reason)
        )

    async def _answer(self, session: aiohttp.ClientSession, leases: Sequence[Lease]) -> None:
        """Answer the requests of some leases, and commit them."""
        import ray

        started_s = time.monotonic()
        extending = asyncio.create_task(self._extend())
        try:
            segments = [await self._read(session, lease) for lease in leases]
            if refusals := [each for some in segments for each in some if each.refusal]:
                await self._commit(ray.put(refusal_table(refusals)))
            # The engine of a processor either generates or embeds.
            for embeds in (False, True):
                requests = [
                    each
                    for some in segments
                    for each in some
                    if (each.url == EMBEDDINGS) == embeds and not each.refusal
                ]
                if requests:
                    work = asyncio.create_task(self._run_dataset(requests, embeds=embeds))
                    await asyncio.wait({work, extending}, return_when=asyncio.FIRST_COMPLETED)
                    if extending.done():
                        work.cancel()
                        extending.result()  # raises the error that ended it
                    await work
        finally:
            extending.cancel()
            await asyncio.wait({extending})
        for ref in self._held.refs:
            await self._fail(ref, "the engine returned no answer for some of its rows")
        for batch_id in {lease.batch_id for lease in leases}:
            self._places.forget(batch_id)
        self._busy_s += time.monotonic() - started_s

    async def _extend(self) -> None:
        while True:
            await asyncio.sleep(extension_pause_s())
            await self._sync(0)

    async def _run_dataset(self, requests: Sequence[Request], *, embeds: bool) -> None:
        """Run requests through the engine, and commit each block of responses."""
        import ray

        loop = asyncio.get_running_loop()
        blocks: asyncio.Queue[Any] = asyncio.Queue()
        for ref in {request.segment for request in requests}:
            self._held.reach(ref, "sent")

        def run() -> None:
            end: Exception | None = None
            try:
                for bundle in build_dataset(self._model, requests, embeds=embeds).iter_internal_ref_bundles():
                    for block in bundle.block_refs:
                        loop.call_soon_threadsafe(blocks.put_nowait, block)
            except Exception as error:  # noqa: BLE001 - raised below
                end = error
            with contextlib.suppress(RuntimeError):  # the job has ended
                loop.call_soon_threadsafe(blocks.put_nowait, end)

        # A job whose token is void does not wait for the dataset, so its thread must not keep the process.
        threading.Thread(target=run, name="dataset", daemon=True).start()
        try:
            async with asyncio.TaskGroup() as commits:
                while isinstance(block := await blocks.get(), ray.ObjectRef):
                    commits.create_task(self._commit(block))
        except ExceptionGroup as group:
            raise group.exceptions[0] from None
        if block is not None:
            raise block

    async def _commit(self, block: Any) -> None:
        """Let a worker write the parts of a block, and record them."""
        places, ready_at_s = {}, time.monotonic()
        for batch_id in await self._batches_of.remote(block):
            place = await self._places.take(batch_id)
            if place is not None:
                places[batch_id] = place
            else:  # the batch has ended
                for ref in self._held.refs:
                    if ref.batch_id == batch_id:
                        self._held.remove(ref)
        for commit in await self._write_parts.remote(block, places):
            for ref in await record(self._coordinator, commit, self._held, ready_at_s=ready_at_s):
                self._held.remove(ref)


def build_dataset(model: ModelSpec, requests: Sequence[Request], *, embeds: bool) -> "Dataset":
    """Build a dataset without running it: blocks of requests in, blocks of responses out.

    Args:
        model: the model.
        requests: the requests.
        embeds: whether they are for embeddings, and not for generated text.
    """
    import ray

    logging.getLogger("ray.data").setLevel(logging.WARNING)
    context = ray.data.DataContext.get_current()
    context.enable_progress_bars = False
    context.print_on_execution_start = False
    # Only the libraries of the engine that runs are imported.
    add_engine: Callable[[ModelSpec, Dataset], Dataset]
    match model.engine:
        case "processor":
            import functools

            from ray_job.engines.processor import processor_engine

            add_engine = functools.partial(processor_engine, embeds=embeds)
        case "serve":
            from ray_job.engines.serve import serve_engine as add_engine
        case _:
            from ray_job.engines.http import http_engine as add_engine
    size = model.call_rows
    blocks = [request_table(requests[start : start + size]) for start in range(0, len(requests), size)]
    return add_engine(model, ray.data.from_arrow_refs([ray.put(block) for block in blocks]))


def request_table(requests: Sequence[Request]) -> "pa.Table":
    """Return requests as a block; see ``ray_job.engines`` for the columns."""
    import pyarrow as pa

    return pa.table(
        {
            "batch_id": pa.array([each.segment.batch_id for each in requests], pa.string()),
            "segment": pa.array([each.segment.segment for each in requests], pa.int64()),
            "epoch": pa.array([each.segment.epoch for each in requests], pa.int64()),
            "row": pa.array([each.row for each in requests], pa.int64()),
            "line": pa.array([each.line for each in requests], pa.int64()),
            "custom_id": pa.array([each.custom_id for each in requests], pa.string()),
            "twins": pa.array([json.dumps(each.twins) for each in requests], pa.string()),
            "url": pa.array([each.url for each in requests], pa.string()),
            "body": pa.array([each.body for each in requests], pa.binary()),
            "tokens": pa.array([each.tokens for each in requests], pa.float64()),
        }
    )


def refusal_table(requests: Sequence[Request]) -> "pa.Table":
    """Return requests that fail without the engine as a block of responses."""
    import pyarrow as pa

    answers = [refused(each.refusal) for each in requests]
    table = request_table(requests).drop_columns(["url", "body", "tokens"])
    table = table.append_column("status_code", pa.array([status for status, _ in answers], pa.int64()))
    return table.append_column("response_body", pa.array([body for _, body in answers], pa.binary()))


def batches_of(block: Any) -> list[str]:
    """Return the batches of a block of responses."""
    from ray.data.block import BlockAccessor

    return sorted(set(BlockAccessor.for_block(block).to_arrow()["batch_id"].to_pylist())) if len(block) else []


def write_parts(block: Any, places: Mapping[str, PartUrl]) -> list[Commit]:
    """Write a block of responses as one part per batch.

    Args:
        block: the responses; see ``ray_job.engines`` for the columns.
        places: the place of the part of each batch; rows of others are left out.

    Returns:
        The records of the parts.

    Raises:
        ObjectError: the store does not take a part.
    """
    from ray.data.block import BlockAccessor

    rows: dict[str, list[FinishedRow]] = {}
    for row in BlockAccessor.for_block(block).to_arrow().to_pylist():
        segment = SegmentRef(batch_id=row["batch_id"], segment=row["segment"], epoch=row["epoch"])
        request = Request(
            segment=segment,
            row=row["row"],
            line=row["line"],
            custom_id=row["custom_id"],
            url="",
            body=b"",
            twins=tuple((line, custom_id) for line, custom_id in json.loads(row["twins"])),
        )
        finished = finished_row(request, row["status_code"], row["response_body"])
        rows.setdefault(segment.batch_id, []).append(finished)

    async def write() -> None:
        async with aiohttp.ClientSession() as session:
            for batch_id, place in places.items():
                results = [result for row in rows[batch_id] for result in row.results]
                await put_object(session, place.url, encode_part(batch_id, results))

    asyncio.run(write())
    return [
        Commit(batch_id=batch_id, key=place.key, segments=committed_rows(rows[batch_id]))
        for batch_id, place in places.items()
    ]
