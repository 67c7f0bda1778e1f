"""Engine arguments of a model that weaken a boundary: code, connections, deserialization, logs with prompts.

The names are those of vLLM 0.19 to 0.32: its engine arguments and those of its API server. An argument also counts
below another one, as ``reasoning_parser_plugin`` in ``structured_outputs_config``.
"""

import contextlib
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import Any, Final

FORBIDDEN: Final[Mapping[str, str]] = MappingProxyType(
    {
        "allowed_local_media_path": "lets requests read files; requests hold their media as data: URLs",
        "allowed_media_domains": "lets requests fetch URLs; requests hold their media as data: URLs",
        "enable_log_outputs": "logs completions",
        "enable_log_requests": "logs prompts",
        "log_error_stack": "logs tracebacks, which may quote prompts",
    }
)
"""Reasons of the arguments that no setting allows, by name."""

UNSAFE: Final[Mapping[str, str]] = MappingProxyType(
    {
        "config": "reads further arguments from a file, which nothing checks",
        # Code.
        "distributed_executor_backend": "imports a class, unless it is one of mp, ray, uni and external_launcher",
        "hf_overrides": "changes which classes load the model, also those of the model's own code",
        "io_processor_plugin": "imports a plugin",
        "logits_processor_pattern": "lets requests name Python functions",
        "logits_processors": "imports classes, which see every token",
        "middleware": "imports functions, which see every request",
        "model_class_overrides": "imports classes for the model",
        "reasoning_parser_plugin": "imports a file",
        "scheduler_cls": "imports a class",
        "tool_parser_plugin": "imports a file",
        "tool_server": "runs code and opens web pages for the model",
        "trust_remote_code": "runs Python code that comes with the model",
        "worker_cls": "imports a class",
        "worker_extension_cls": "imports a class",
        # Deserialization.
        "enable_mm_embeds": "deserializes tensors in requests",
        "enable_prompt_embeds": "deserializes tensors in requests",
        "load_format": "may unpickle weights, unless it is a format of safetensors or GGUF",
        "model_loader_extra_config": "configures loaders that may unpickle or download weights",
        "trust_request_chat_template": "runs Jinja programs in requests",
        "trust_request_mm_kwargs": "lets requests raise the memory that media take",
        # Connections.
        "ec_transfer_config": "opens connections that ask for no credential, and may import a module",
        "kv_events_config": "publishes token ids of prompts on a port",
        "kv_transfer_config": "opens connections that ask for no credential, and may import a module",
        "lora_modules": "loads adapters, which may be unpickled",
        "weight_transfer_config": "accepts weights over the network",
        # Logs and traces.
        "collect_detailed_traces": "writes facts about requests to traces",
        "log_config_file": "may send logs elsewhere, or log prompts",
        "log_level": "may log prompts",
        "logging_config": "may send logs elsewhere, or log prompts",
        "otlp_traces_endpoint": "sends facts about requests to a server",
        "profiler_config": "writes traces of the engine to a disk",
    }
)
"""Reasons of the arguments that a model may have only if it acknowledges them, by name."""

# Values that make an argument of the table harmless, besides False.
_SAFE_VALUES: Final[Mapping[str, frozenset[str]]] = MappingProxyType(
    {
        "distributed_executor_backend": frozenset({"mp", "ray", "uni", "external_launcher"}),
        # "auto" reads pickled weights only if there are no safetensors, and then as tensors only.
        "load_format": frozenset(
            {"auto", "bitsandbytes", "dummy", "fastsafetensors", "gguf", "mistral", "safetensors"}
        ),
    }
)
_NAME: Final = re.compile(r"[A-Za-z][\w-]*(\.[\w-]+\+?)*", re.ASCII)
_OPTION: Final = re.compile(r"-\D")


def unsafe_arg_problems(
    engine_args: Mapping[str, Any], acknowledged: Sequence[str]
) -> Iterator[tuple[tuple[str, ...], str]]:
    """Yield path and message of each argument that is refused, and of each acknowledgement that has no effect.

    Args:
        engine_args: the engine arguments of a model.
        acknowledged: the model's ``unsafe_engine_args``.
    """
    used = set()
    for name, value in engine_args.items():
        if not _NAME.fullmatch(name):
            yield ("engine_args", name), "is not a name of an engine argument. Use letters, digits and underscores"
            continue
        items = value if isinstance(value, list) else [value]
        if any(isinstance(item, str) and _OPTION.match(item) for item in items):
            # On the command line of the engine it would be another argument.
            yield ("engine_args", name.replace("-", "_")), "has a value that begins with a hyphen. Remove the hyphen"
        for path, unsafe in _found(name.replace("-", "_"), value):
            used.add(unsafe)
            if unsafe in FORBIDDEN:
                yield ("engine_args", path), f"{FORBIDDEN[unsafe]}. Remove it"
            elif unsafe not in acknowledged:
                remedy = f"Remove it, or acknowledge the risk with unsafe_engine_args: [{unsafe}]"
                yield ("engine_args", path), f"{UNSAFE[unsafe]}. {remedy}"
    for name in acknowledged:
        if name in FORBIDDEN:
            yield ("unsafe_engine_args",), f"{name} cannot be acknowledged: it {FORBIDDEN[name]}. Remove it"
        elif name not in used:
            yield ("unsafe_engine_args",), f"{name!r} is no unsafe argument in engine_args. Remove it"


def _found(path: str, value: Any) -> Iterator[tuple[str, str]]:
    """Yield path and name of each argument of the tables in a value, or in the path itself."""
    *outer, last = (part.rstrip("+").replace("-", "_").lower() for part in path.split("."))
    for name in outer:
        if name in FORBIDDEN or name in UNSAFE:
            yield path, name
    if isinstance(value, str) and value.lstrip().startswith("{"):
        with contextlib.suppress(ValueError):
            value = json.loads(value)  # vLLM reads such a text as JSON too
    is_safe = value is False or (isinstance(value, str) and value in _SAFE_VALUES.get(last, ()))
    if (last in FORBIDDEN or last in UNSAFE) and not is_safe:
        yield path, last
    elif isinstance(value, Mapping):
        for name, item in value.items():
            # The names above were looked at.
            yield from ((f"{path}.{inner}", unsafe) for inner, unsafe in _found(str(name), item))
