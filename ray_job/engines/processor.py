"""The processor lane: ``ray.data.llm``'s vLLM processor.

Ray's own chat-template and tokenize stages are left out: each would be an actor that imports vLLM, and both
add the beginning-of-text token twice where the chat template has it. One stage here renders and tokenizes
as vLLM's server does. A row that cannot be rendered passes the engine by and becomes an error row.
"""

import json
import time
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from ray_job.contract.job_spec import JobSpec, ModelSpec
from ray_job.engines.engine_args import effective_engine_args
from ray_job.engines.processor_rows import (
    CHAT,
    EMBEDDINGS,
    BodyError,
    EndTokens,
    error_response,
    response_body,
    sampling_params,
)

if TYPE_CHECKING:
    import numpy as np
    from ray.data import Dataset

# What of the parameters is needed to tell how a generation ended.
_ENDED_BY = ("stop", "stop_token_ids", "ignore_eos")
# The model's own defaults, by the names of its generation config.
_MODEL_DEFAULTS = ("repetition_penalty", "temperature", "top_k", "top_p", "min_p")


class Prompts:
    """Renders and tokenizes bodies: adds ``tokenized_prompt``, ``sampling_params`` and ``refusal`` to each row."""

    def __init__(self, source: str) -> None:
        from transformers import AutoTokenizer

        self._tokenizer = AutoTokenizer.from_pretrained(source)
        self._defaults = model_defaults(source)

    def __call__(self, batch: "dict[str, np.ndarray]") -> dict[str, list[Any]]:
        """Columns in, the same columns and three more out."""
        rows = [self._row(str(url), bytes(body)) for url, body in zip(batch["url"], batch["body"], strict=True)]
        added = {name: [row[name] for row in rows] for name in rows[0]} if rows else {}
        return {**{name: list(column) for name, column in batch.items()}, **added}

    def _row(self, url: str, raw: bytes) -> dict[str, Any]:
        body = json.loads(raw)
        try:
            params = sampling_params(url, body, self._defaults)
            return {"tokenized_prompt": self._tokens(url, body), "sampling_params": params, "refusal": ""}
        except BodyError as error:
            return self._refused(url, f"{BodyError.__name__}: {error}")
        except Exception as error:  # noqa: BLE001 - whatever a template raises is about this row alone
            return self._refused(url, f"{ValueError.__name__}: the prompt cannot be rendered: {error}")

    def _refused(self, url: str, why: str) -> dict[str, Any]:
        return {
            "tokenized_prompt": [0],
            "sampling_params": sampling_params(url, {}, self._defaults),
            "refusal": why,
        }

    def _tokens(self, url: str, body: Mapping[str, Any]) -> list[int]:
        if url == CHAT:
            messages = body.get("messages")
            if not isinstance(messages, list) or not messages:
                raise BodyError("messages must be a list that is not empty")
            text = self._tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
            return _ids(self._tokenizer(text, add_special_tokens=False))
        prompt = body.get("input" if url == EMBEDDINGS else "prompt")
        if isinstance(prompt, list) and all(isinstance(token, int) for token in prompt) and prompt:
            return prompt
        if not isinstance(prompt, str) or not prompt:
            raise BodyError("the prompt must be a string or a list of token ids that is not empty")
        return _ids(self._tokenizer(prompt))


def _ids(encoding: Any) -> list[int]:
    return [int(token) for token in encoding["input_ids"]]


def model_defaults(source: str) -> dict[str, Any]:
    """The sampling defaults that a model brings in its generation config."""
    config = _generation_config(source)
    defaults = {name: config[name] for name in _MODEL_DEFAULTS if config.get(name) is not None}
    if config.get("max_new_tokens") is not None:
        defaults["max_tokens"] = config["max_new_tokens"]
    return defaults


def end_tokens(source: str) -> EndTokens:
    """The token ids that end a generation of the model."""
    from transformers import AutoTokenizer

    eos = AutoTokenizer.from_pretrained(source).eos_token_id
    listed = _generation_config(source).get("eos_token_id") or []
    others = frozenset(listed if isinstance(listed, list) else [listed]) - {eos}
    return EndTokens(eos=eos, others=others)


def _generation_config(source: str) -> dict[str, Any]:
    from transformers import GenerationConfig

    try:
        return dict(GenerationConfig.from_pretrained(source).to_diff_dict())
    except OSError:  # the model has none
        return {}


class Bodies:
    """Turns finished rows into responses; see ``ray_job.engines`` for the columns."""

    def __init__(self, batch_id: str, model: str, ends: EndTokens) -> None:
        self._batch_id = batch_id
        self._model = model
        self._ends = ends

    def __call__(self, row: dict[str, Any]) -> dict[str, Any]:
        """One finished row in, one response out."""
        status, body = response_body(
            row, batch_id=self._batch_id, model=self._model, created=int(time.time()), ends=self._ends
        )
        return _response(row, status, body)


def _response(row: Mapping[str, Any], status: int, body: bytes) -> dict[str, Any]:
    return {"line": row["line"], "custom_id": row["custom_id"], "status_code": status, "response_body": body}


def to_engine(row: dict[str, Any]) -> dict[str, Any]:
    """What the processor's engine stage is given for a row; a refused row passes it by."""
    params = row["sampling_params"]
    return {
        "ended_by": {name: params[name] for name in _ENDED_BY},
        "pooling_params": {"use_activation": None},
        "__inference_error__": row["refusal"],
    }


def only_responses(row: dict[str, Any]) -> dict[str, Any]:
    """Brings the rows that failed, which the processor passes on as they are, into the form of the others."""
    error = row.get("__inference_error__")
    if not error:
        return _response(row, row["status_code"], row["response_body"])
    return _response(row, *error_response(error))


def engine_runtime_env(model: ModelSpec) -> dict[str, Any]:
    """The environment of an actor that holds an engine.

    On a CPU vLLM starts the engine core's only worker as a second process, which imports vLLM once more and
    waits for the same cores, unless this is off. The engine core still runs in a process of its own.
    """
    return {"env_vars": {"VLLM_ENABLE_V1_MULTIPROCESSING": "0"} if model.accelerator == "cpu" else {}}


def processor_lane(spec: JobSpec, requests: "Dataset") -> "Dataset":
    """Adds the prompt stage, Ray's engine stage, and the stage that makes the bodies."""
    from ray.data import ActorPoolStrategy
    from ray.data.llm import build_processor, vLLMEngineProcessorConfig

    model = spec.model
    arguments = effective_engine_args(model)
    del arguments["model"], arguments["served_model_name"]
    config = vLLMEngineProcessorConfig(
        model_source=model.source,
        engine_kwargs=arguments,
        task_type="embed" if spec.endpoint == EMBEDDINGS else "generate",
        batch_size=model.batch_size,
        max_concurrent_batches=model.max_concurrent_batches,
        concurrency=(model.concurrency, model.concurrency),
        should_continue_on_error=True,
        runtime_env=engine_runtime_env(model),
        log_engine_metrics=False,
        chat_template_stage=False,
        tokenize_stage=False,
        detokenize_stage=False,
        # Without this the engine stage waits for a GPU for ever, silently.
        placement_group_config={"bundle_per_worker": {"CPU": model.engine_num_cpus}}
        if model.accelerator == "cpu"
        else None,
    )
    stage = {"num_cpus": model.stage_num_cpus}
    processor = build_processor(
        config,
        preprocess=to_engine,
        postprocess=Bodies(spec.batch_id, model.id, end_tokens(model.source)).__call__,
        preprocess_map_kwargs=stage,
        postprocess_map_kwargs=stage,
    )
    prompts = requests.map_batches(
        Prompts, fn_constructor_args=(model.source,), compute=ActorPoolStrategy(size=1), batch_size=None, **stage
    )
    return processor(prompts).map(only_responses, **stage)
