"""The processor engine: ``ray.data.llm``'s vLLM processor.

It leaves out Ray's chat-template and tokenize stages: each would be an actor that imports vLLM, and both add the
beginning-of-text token again when the chat template contains it. One stage of this module renders and tokenizes as
vLLM's server does. A row that cannot be rendered skips the engine and becomes an error row.
"""

import functools
import json
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from ray_job.contract.job_spec import ModelSpec
from ray_job.engines.engine_args import effective_engine_args
from ray_job.engines.llm_stages import engine_actor, response_row
from ray_job.engines.processor_rows import (
    CHAT,
    EMBEDDINGS,
    BodyError,
    error_response,
    finished_response,
    sampling_params,
)

if TYPE_CHECKING:
    import numpy as np
    from ray.data import Dataset

# The parameters that decide how a generation ends.
_ENDED_BY = ("stop", "stop_token_ids", "ignore_eos")
# The model's own defaults, by the names of its generation config.
_MODEL_DEFAULTS = ("repetition_penalty", "temperature", "top_k", "top_p", "min_p")


def processor_engine(model: ModelSpec, requests: "Dataset", *, embeds: bool) -> "Dataset":
    """Add the prompt stage, Ray's engine stage, and the stage that creates the bodies."""
    from ray.data import ActorPoolStrategy
    from ray.data.llm import build_processor, vLLMEngineProcessorConfig
    from transformers import AutoTokenizer, GenerationConfig

    from ray_job.engines.processor_stage import EngineStage

    arguments = effective_engine_args(model)
    del arguments["model"], arguments["served_model_name"]
    config = vLLMEngineProcessorConfig(
        model_source=model.source,
        engine_kwargs=arguments,
        task_type="embed" if embeds else "generate",
        batch_size=model.call_rows,
        max_concurrent_batches=model.max_concurrent_batches,
        concurrency=(model.concurrency, model.concurrency),
        should_continue_on_error=True,
        log_engine_metrics=False,
        chat_template_stage=False,
        tokenize_stage=False,
        detokenize_stage=False,
        **engine_actor(model),
    )
    try:
        # Only what differs from transformers' defaults.
        generation = GenerationConfig.from_pretrained(model.source).to_diff_dict()
    except OSError:  # the model has no generation config
        generation = {}
    defaults = {name: generation[name] for name in _MODEL_DEFAULTS if generation.get(name) is not None}
    if generation.get("max_new_tokens") is not None:
        defaults["max_tokens"] = generation["max_new_tokens"]
    eos = AutoTokenizer.from_pretrained(model.source).eos_token_id
    listed = generation.get("eos_token_id") or []
    ends = {token: token for token in (listed if isinstance(listed, list) else [listed])} | {eos: None}
    stage = {"num_cpus": model.stage_num_cpus}
    processor = build_processor(
        config,
        preprocess=to_engine_row,
        postprocess=functools.partial(finished_response, model=model.id, ends=ends),
        preprocess_map_kwargs=stage,
        postprocess_map_kwargs=stage,
    )
    # A copy, because the stage does not keep its resources when one of its fields is assigned.
    engine = processor.get_stage_by_name("vLLMEngineStage").model_copy(update={"fn": EngineStage})
    engine.fn_constructor_kwargs["request_timeout_s"] = model.request_timeout_s
    processor.stages["vLLMEngineStage"] = engine
    prompts = requests.map_batches(
        Prompts,
        fn_constructor_args=(model.source, defaults),
        compute=ActorPoolStrategy(size=1),
        batch_size=None,
        **stage,
    )
    return processor(prompts).map(to_response, **stage)


class Prompts:
    """A stage that renders and tokenizes bodies.

    It adds ``tokenized_prompt``, ``sampling_params`` and ``refusal`` to each row.

    Args:
        source: the directory of the model.
        defaults: the model's own sampling parameters.
    """

    def __init__(self, source: str, defaults: Mapping[str, Any]) -> None:
        from transformers import AutoTokenizer

        self._tokenizer = AutoTokenizer.from_pretrained(source)
        self._defaults = defaults

    def __call__(self, batch: "dict[str, np.ndarray]") -> dict[str, list[Any]]:
        """Return the columns of a batch and three more."""
        rows = [self._row(str(url), bytes(body)) for url, body in zip(batch["url"], batch["body"], strict=True)]
        added = {name: [row[name] for row in rows] for name in rows[0]} if rows else {}
        return {**{name: list(column) for name, column in batch.items()}, **added}

    def _row(self, url: str, raw: bytes) -> dict[str, Any]:
        body = json.loads(raw)
        try:
            params = sampling_params(url, body, self._defaults)
            return {"tokenized_prompt": self._tokens(url, body), "sampling_params": params, "refusal": ""}
        except BodyError as error:
            refusal = f"{BodyError.__name__}: {error}"
        except Exception as error:  # noqa: BLE001 - any error of a chat template concerns this row only
            refusal = f"{ValueError.__name__}: the prompt cannot be rendered: {error}"
        return {
            "tokenized_prompt": [0],
            "sampling_params": sampling_params(url, {}, self._defaults),
            "refusal": refusal,
        }

    def _tokens(self, url: str, body: Mapping[str, Any]) -> list[int]:
        if url == CHAT:
            messages = body.get("messages")
            if not isinstance(messages, list) or not messages:
                raise BodyError("messages must be a list that is not empty")
            text = self._tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
            encoding = self._tokenizer(text, add_special_tokens=False)
        else:
            prompt = body.get("input" if url == EMBEDDINGS else "prompt")
            if isinstance(prompt, list) and all(isinstance(token, int) for token in prompt) and prompt:
                return prompt
            if not isinstance(prompt, str) or not prompt:
                raise BodyError("the prompt must be a string or a list of token ids that is not empty")
            encoding = self._tokenizer(prompt)
        return [int(token) for token in encoding["input_ids"]]


def to_engine_row(row: dict[str, Any]) -> dict[str, Any]:
    """Return the input of the engine stage for a row. A refused row skips the engine."""
    params = row["sampling_params"]
    return {
        "ended_by": {name: params[name] for name in _ENDED_BY},
        "pooling_params": {"use_activation": None},
        "__inference_error__": row["refusal"],
    }


def to_response(row: dict[str, Any]) -> dict[str, Any]:
    """Convert a failed row, which the processor passes on without its postprocessing, to a response."""
    error = row.get("__inference_error__")
    if not error:
        return response_row(row, row["status_code"], row["response_body"])
    return response_row(row, *error_response(error))
