"""The engine stage of the processor engine. Importing it imports ``ray.data.llm``, which takes some seconds."""

import asyncio
from typing import Any

from ray.llm._internal.batch.stages.vllm_engine_stage import vLLMEngineStageUDF

from ray_job.engines.processor_rows import RowTimeoutError


class EngineStage(vLLMEngineStageUDF):  # type: ignore[misc]
    """Ray's engine stage with a timeout of each row. Ray passes ``RowTimeoutError`` on as the error of the row.

    The time counts from when the row has its place in the engine: rows of a call that wait for one are not late. The
    cancelled generation is aborted in the engine.

    Args:
        stage: the arguments of Ray's stage.
        request_timeout_s: how long the engine may take for a row.
    """

    def __init__(self, *, request_timeout_s: float, **stage: Any) -> None:
        super().__init__(**stage)
        generate = self.llm._generate_async  # noqa: SLF001 - the public method waits for the place too

        async def generate_in_time(request: Any) -> Any:
            try:
                async with asyncio.timeout(request_timeout_s):
                    return await generate(request)
            except TimeoutError:
                raise RowTimeoutError(request_timeout_s) from None

        self.llm._generate_async = generate_in_time  # noqa: SLF001
