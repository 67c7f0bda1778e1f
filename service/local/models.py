"""The model catalogue of ``cloister local``: from the options of the command line, or a whole file."""

import shutil
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from ray_job.contract.job_spec import Accelerator
from service.local.errors import LocalError

# vLLM on a CPU: float32 because bfloat16 answers change with what else is in the same step; no
# compilation, which takes minutes on few cores; a short context, because it sizes the KV cache.
CPU_ENGINE_ARGS: Mapping[str, Any] = {"dtype": "float32", "enforce_eager": True, "max_model_len": 2048}
# Arguments of the engine that are settings of the model in the catalogue.
MODEL_SETTINGS = ("tensor_parallel_size", "pipeline_parallel_size")


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelOptions:
    """What the command line says about the model; an empty ``source``: nothing."""

    source: str = ""
    model_id: str = ""
    engine_args: tuple[str, ...] = ()
    models_file: Path | None = None


def detect_accelerator() -> Accelerator:
    """What engines run on here: ``cpu`` without a GPU, else the image lane that fits the GPU."""
    if shutil.which("nvidia-smi") is None:
        return "cpu"
    query = ["nvidia-smi", "--query-gpu=compute_cap", "--format=csv,noheader"]
    return accelerator_of(subprocess.run(query, capture_output=True, text=True, check=False).stdout)


def accelerator_of(compute_capabilities: str) -> Accelerator:
    """The accelerator for the output of nvidia-smi, one compute capability on each line."""
    first = compute_capabilities.split()[:1]
    if not first or not first[0][0].isdecimal():
        return "cpu"
    return "v100" if first[0] == "7.0" else "a10g"


def parse_engine_args(arguments: Sequence[str]) -> dict[str, Any]:
    """Reads ``key=value`` arguments; values are YAML, so that numbers, booleans and lists keep their type.

    Raises:
        LocalError: an argument without ``=``, or a value that is not YAML.
    """
    parsed: dict[str, Any] = {}
    for argument in arguments:
        name, separator, value = argument.partition("=")
        name = name.strip().removeprefix("--").replace("-", "_")
        if not separator or not name:
            raise LocalError(f"--engine-arg {argument!r} is not key=value, e.g. --engine-arg max_model_len=4096")
        try:
            parsed[name] = yaml.safe_load(value)
        except yaml.YAMLError as error:
            raise LocalError(f"--engine-arg {argument!r}: the value is not YAML: {error}") from error
    return parsed


def catalogue(options: ModelOptions, accelerator: Accelerator) -> dict[str, Any]:
    """A catalogue with the one model that the options name."""
    local = Path(options.source)
    source = str(local.resolve()) if local.is_dir() else options.source
    given = parse_engine_args(options.engine_args)
    defaults = CPU_ENGINE_ARGS if accelerator == "cpu" else {}
    engine_args = {**defaults, **{name: value for name, value in given.items() if name not in MODEL_SETTINGS}}
    pooling = engine_args.get("runner") == "pooling"
    return {
        "models": [
            {
                "id": options.model_id or (local.resolve().name if local.is_dir() else options.source),
                "source": source,
                "accelerator": accelerator,
                "endpoints": ["/v1/embeddings"] if pooling else ["/v1/chat/completions", "/v1/completions"],
                "engine_args": engine_args,
                **{name: given[name] for name in MODEL_SETTINGS if name in given},
            }
        ]
    }


def write_catalogue(path: Path, content: Mapping[str, Any]) -> None:
    """Writes a catalogue file, whole or not at all."""
    staging = path.with_name(f"{path.name}.new")
    staging.write_text(yaml.safe_dump(dict(content), sort_keys=False, allow_unicode=True))
    staging.replace(path)


def read_models(path: Path) -> list[dict[str, Any]]:
    """The models of a catalogue file, unchecked; the service checks them.

    Raises:
        LocalError: the file cannot be read, or names no model.
    """
    try:
        content = yaml.safe_load(path.read_text())
        models = [dict(model) for model in content["models"]]
    except (OSError, yaml.YAMLError, KeyError, TypeError, ValueError) as error:
        raise LocalError(f"cannot read the model catalogue {path}: {error}") from error
    if not models:
        raise LocalError(f"the model catalogue {path} names no model; add one under `models:`")
    return models


def all_local(models: Sequence[Mapping[str, Any]]) -> bool:
    """Whether every model lies on this machine or is served by an endpoint, so that nothing is downloaded."""
    return all(model.get("lane") == "http" or Path(str(model.get("source", ""))).is_dir() for model in models)
