"""The direct lane: each Ray Data actor runs vLLM's own OpenAI API application beside it and posts lines to it."""

import asyncio
from collections.abc import AsyncIterator
from typing import TYPE_CHECKING, Any

from ray_job.contract.job_spec import JobSpec, ModelSpec
from ray_job.engines.engine_args import effective_engine_args, engine_flags
from ray_job.engines.engine_process import EngineProcess
from ray_job.engines.isolation import Answer, Isolation
from ray_job.rows import Request
from ray_job.weights import require_model

if TYPE_CHECKING:
    import numpy as np
    from ray.data import Dataset

Columns = dict[str, Any]


class DirectEngine:
    """The actor: one engine, many batches of requests in flight on it.

    The engine starts with the actor and starts again when it died.
    """

    def __init__(self, model: ModelSpec) -> None:
        self._source = model.source
        self._options = engine_flags(effective_engine_args(model))
        self._process = EngineProcess(self._options)
        self._ready = False
        self._starting = asyncio.Lock()
        self._isolation = Isolation(self._ask)

    async def __call__(self, batch: "dict[str, np.ndarray]") -> AsyncIterator[Columns]:
        """Answers one batch of requests; see ``ray_job.engines`` for the columns."""
        requests = [
            Request(line=int(line), custom_id=custom_id, url=url, body=bytes(body))
            for line, custom_id, url, body in zip(
                batch["line"], batch["custom_id"], batch["url"], batch["body"], strict=True
            )
        ]
        answers = await self._isolation.answers(requests)
        yield response_columns(requests, answers)

    async def _ask(self, request: Request) -> Answer:
        process = await self._running()
        return await process.post(request.url, request.body)

    async def _running(self) -> EngineProcess:
        async with self._starting:
            if self._ready and not self._process.alive():
                await self._process.stop()
                self._process, self._ready = EngineProcess(self._options), False
            if not self._ready:
                require_model(self._source)
                await self._process.wait_ready()
                self._ready = True
            return self._process


def response_columns(requests: list[Request], answers: list[Answer]) -> Columns:
    """Requests and their answers as the columns of a response batch."""
    return {
        "line": [request.line for request in requests],
        "custom_id": [request.custom_id for request in requests],
        "status_code": [status for status, _ in answers],
        "response_body": [body for _, body in answers],
    }


def direct_lane(spec: JobSpec, requests: "Dataset") -> "Dataset":
    """Adds the engine stage of the direct lane: ``concurrency`` actors, each with its GPUs and one engine."""
    from ray.data import ActorPoolStrategy

    model = spec.model
    return requests.map_batches(
        DirectEngine,
        fn_constructor_args=(model,),
        batch_size=None,
        zero_copy_batch=True,
        compute=ActorPoolStrategy(
            size=model.concurrency,
            max_tasks_in_flight_per_actor=model.max_concurrent_batches + 1,
        ),
        num_cpus=model.engine_num_cpus,
        num_gpus=model.num_gpus or None,
        max_concurrency=model.max_concurrent_batches,
    )
