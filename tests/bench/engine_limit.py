"""The limit of the engine: vLLM's AsyncLLM with all lines at once, without HTTP and without a window.

Run as ``python -m tests.bench.engine_limit INPUT OUTPUT ENGINE_ARGS_JSON``.
"""

import asyncio
import json
import sys
from pathlib import Path
from typing import Any

from tests.bench.workloads import EMBEDDINGS


async def answer_all(lines: list[dict[str, Any]], target: Path, engine_args: dict[str, Any]) -> None:
    """Tokenize every line, then submit all at once and write each answer when it is complete."""
    from transformers import AutoTokenizer
    from vllm import PoolingParams, SamplingParams
    from vllm.engine.arg_utils import AsyncEngineArgs
    from vllm.sampling_params import RequestOutputKind
    from vllm.v1.engine.async_llm import AsyncLLM

    engine = AsyncLLM.from_engine_args(AsyncEngineArgs(**engine_args))
    tokenizer = AutoTokenizer.from_pretrained(engine_args["model"])

    def prompt(line: dict[str, Any]) -> dict[str, list[int]]:
        body = line["body"]
        if line["url"] == EMBEDDINGS:
            return {"prompt_token_ids": tokenizer(body["input"])["input_ids"]}
        text = tokenizer.apply_chat_template(body["messages"], tokenize=False, add_generation_prompt=True)
        return {"prompt_token_ids": tokenizer(text, add_special_tokens=False)["input_ids"]}

    async def answer(line: dict[str, Any], tokens: dict[str, list[int]]) -> None:
        body, request_id = line["body"], line["custom_id"]
        if line["url"] == EMBEDDINGS:
            async for output in engine.encode(tokens, PoolingParams(task="embed"), request_id):
                count = len(output.prompt_token_ids)
        else:
            parameters = SamplingParams(
                temperature=body["temperature"],
                max_tokens=body["max_tokens"],
                min_tokens=body["min_tokens"],
                extra_args=body.get("vllm_xargs"),
                output_kind=RequestOutputKind.FINAL_ONLY,
            )
            async for output in engine.generate(tokens, parameters, request_id):
                count = len(output.outputs[0].token_ids)
        file.write(json.dumps({"custom_id": request_id, "tokens": count}) + "\n")

    # Before the first step, so that the device never waits for the tokenizer.
    prompts = [prompt(line) for line in lines]
    with target.open("w", buffering=1) as file:
        await asyncio.gather(*(answer(line, tokens) for line, tokens in zip(lines, prompts, strict=True)))
    engine.shutdown()


if __name__ == "__main__":
    requests = [json.loads(line) for line in Path(sys.argv[1]).read_text().splitlines()]
    asyncio.run(answer_all(requests, Path(sys.argv[2]), json.loads(sys.argv[3])))
