"""vLLM's engine arguments for a model of the catalogue. Pure functions."""

import json
from collections.abc import Mapping
from typing import Any, Final

from ray_job.contract.job_spec import ModelSpec

ENGINE_ENVIRONMENT: Final = {
    # For what gets past the engine argument allowed_media_domains, which vLLM does not apply to redirects.
    "VLLM_MEDIA_URL_ALLOW_REDIRECTS": "0",
    "VLLM_MEDIA_CONNECTOR": "http",
    # vLLM imports every plugin that is installed, unless this variable names those to import.
    "VLLM_PLUGINS": "",
    # They would accept pickled objects, serve routes for development, load adapters from paths in requests, and log
    # responses.
    "VLLM_ALLOW_INSECURE_SERIALIZATION": "0",
    "VLLM_SERVER_DEV_MODE": "0",
    "VLLM_ALLOW_RUNTIME_LORA_UPDATING": "0",
    "VLLM_DEBUG_LOG_API_SERVER_RESPONSE": "false",
    "VLLM_NO_USAGE_STATS": "1",
}
"""Environment variables of every engine, whatever the machine or the image sets."""

# Validation refuses URLs of media, and the engine refuses them again. An empty list would allow every host. This one
# allows none, because no host has a colon.
_NO_MEDIA_URLS: Final = {"allowed_media_domains": ["data:"], "allowed_local_media_path": ""}


def effective_engine_args(model: ModelSpec) -> dict[str, Any]:
    """Return the model's engine arguments and the defaults of this stack, by vLLM's Python names.

    An engine argument of the model overrides a default, but none lets the engine fetch media. On a CPU, chunked prefill
    is off: a request with a seed whose prefill is split over two steps ends vLLM's CPU engine ("CPU Generator does not
    use offset", seen with vLLM 0.32), and with it every request in flight. On a GPU vLLM's own defaults apply: prefix
    caching and chunked prefill are on.
    """
    defaults: dict[str, Any] = {
        "enable_prefix_caching": True,
        "tensor_parallel_size": model.tensor_parallel_size,
        "pipeline_parallel_size": model.pipeline_parallel_size,
        "disable_log_stats": True,
    }
    if model.accelerator == "cpu":
        defaults["enable_chunked_prefill"] = False
        defaults["max_num_batched_tokens"] = max(8192, model.engine_args.get("max_model_len") or 0)
        if model.tensor_parallel_size * model.pipeline_parallel_size == 1:
            # One process for scheduler and worker: two of them would wait for each other on the same cores.
            defaults["distributed_executor_backend"] = "uni"
    if model.engine_args.get("runner") == "pooling":
        # A pooling model has no decode steps and does not use a prefix cache.
        defaults.pop("enable_prefix_caching")
    own = {"model": model.source, "served_model_name": model.id}
    return {**defaults, **model.engine_args, **_NO_MEDIA_URLS, **own}


def server_args(model: ModelSpec) -> dict[str, Any]:
    """Return the arguments of vLLM's API server for a model: those of the engine, and its own.

    Responses report how many tokens of their prompt were found in the prefix cache, as OpenAI's do.
    """
    return {"enable_prompt_tokens_details": True, **effective_engine_args(model)}


def engine_flags(engine_args: Mapping[str, Any]) -> list[str]:
    """Convert engine arguments to vLLM's command-line options.

    Example: ``{"max_model_len": 8}`` → ``["--max-model-len", "8"]``. Arguments that are None are left out.
    """
    flags: list[str] = []
    for name, value in engine_args.items():
        option = name.replace("_", "-")
        if value is None:
            continue
        if isinstance(value, bool):
            flags.append(f"--{option}" if value else f"--no-{option}")
        elif isinstance(value, Mapping):
            flags += [f"--{option}", json.dumps(value)]
        elif isinstance(value, list | tuple):
            flags += [f"--{option}", *map(str, value)]
        else:
            flags += [f"--{option}", str(value)]
    return flags
