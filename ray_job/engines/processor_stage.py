"""The engine stage of the processor engine. Importing it imports ``ray.data.llm``, which takes some seconds."""

from typing import Any

from ray.llm._internal.batch.stages.vllm_engine_stage import vLLMEngineStageUDF

from ray_job.engines.deadlines import LineDeadlines, LineSize


class EngineStage(vLLMEngineStageUDF):  # type: ignore[misc]
    """Ray's engine stage with deadlines of rows. Ray passes ``LineTimeoutError`` on as the error of the row.

    The time counts from when the row has its place in the engine: rows of a call that wait for one are not late. The
    cancelled generation is aborted in the engine.

    Args:
        stage: the arguments of Ray's stage.
        request_timeout_s: how long the engine may take for a row at most.
    """

    def __init__(self, *, request_timeout_s: float, **stage: Any) -> None:
        super().__init__(**stage)
        deadlines = LineDeadlines()
        generate = self.llm._generate_async  # noqa: SLF001 - the public method waits for the place too

        async def generate_in_time(request: Any) -> Any:
            # The parameters of embeddings have no such field.
            size = LineSize(tokens=getattr(request.params, "max_tokens", 1), prompt=len(request.prompt_token_ids))
            return await deadlines.answer(
                size, lambda: generate(request), _generated_tokens, ceiling_s=request_timeout_s
            )

        self.llm._generate_async = generate_in_time  # noqa: SLF001


def _generated_tokens(output: Any) -> float:
    return max(1.0, len(output.outputs[0].token_ids)) if isinstance(output.outputs, list) else 1.0
