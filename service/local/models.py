"""The model catalogue of ``cloister local``: from the options of the command line, or a whole file."""

import re
import shutil
import subprocess
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import yaml

from ray_job.contract.accelerators import ACCELERATORS, CPU, OLDEST_SUPPORTED, Accelerator, capability_text
from service.local.errors import LocalError

# vLLM on a CPU: float32 because with bfloat16 an answer depends on the other requests in the same step; no
# compilation, which takes minutes on few cores; a short context, because it sizes the KV cache.
CPU_ENGINE_ARGS: Mapping[str, Any] = {"dtype": "float32", "enforce_eager": True, "max_model_len": 2048}
# A person works with the local stack, and pauses between two batches.
KEEP_WARM_S: Final = 600
# Arguments of the engine that are settings of the model in the catalogue.
MODEL_SETTINGS = ("tensor_parallel_size", "pipeline_parallel_size")
_SMI_LINE: Final = re.compile(r"(?P<name>[^,\n]+), *(?P<memory>\d+)[^,\n]*, *(?P<major>\d+)\.(?P<minor>\d+)")


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelOptions:
    """The command line's options about the model. An empty ``source`` means that no model is given."""

    source: str = ""
    model_id: str = ""
    engine_args: tuple[str, ...] = ()
    keep_warm_s: int = KEEP_WARM_S
    models_file: Path | None = None


def detect_accelerator() -> Accelerator:
    """Return what engines run on here: a row of the accelerator table.

    Raises:
        LocalError: the GPU is too old.
    """
    if shutil.which("nvidia-smi") is None:
        return CPU
    query = ["nvidia-smi", "--query-gpu=name,memory.total,compute_cap", "--format=csv,noheader,nounits"]
    return accelerator_of(subprocess.run(query, capture_output=True, text=True, check=False).stdout)


def accelerator_of(output: str) -> Accelerator:
    """Find the row of the accelerator table for the output of nvidia-smi.

    The first GPU counts. Its product name selects rows, its memory the row among them. A GPU that the table lacks gets
    the row with the same compute capability, or the nearest older one.

    Args:
        output: a line ``name, memory in MiB, compute capability`` for each GPU.

    Raises:
        LocalError: the GPU is older than every row.
    """
    found = _SMI_LINE.match(output)
    if found is None:
        return CPU
    capability = (int(found["major"]), int(found["minor"]))
    words = set(re.split(r"[^A-Za-z0-9]+", found["name"]))
    gpus = [row for row in ACCELERATORS.values() if row.capability and row.product]
    rows = [row for row in gpus if row.product in words]
    if not rows:
        newest = max((row.capability for row in gpus if row.capability and row.capability <= capability), default=None)
        rows = [row for row in gpus if row.capability == newest]
    if not rows:
        raise LocalError(
            f"{found['name']} has compute capability {capability_text(capability)}, and engines need "
            f"{capability_text(OLDEST_SUPPORTED)}; take nvidia-smi off the PATH to run on CPUs, or use another machine"
        )
    return min(rows, key=lambda row: abs(row.memory_mib - int(found["memory"])))


def parse_engine_args(arguments: Iterable[str]) -> dict[str, Any]:
    """Parse engine arguments of the command line, ``key=value`` each.

    The values are YAML, so that numbers, booleans and lists keep their type.

    Raises:
        LocalError: an argument without ``=``, or with a value that is not YAML.
    """
    given: dict[str, Any] = {}
    for argument in arguments:
        name, separator, value = argument.partition("=")
        name = name.strip().removeprefix("--").replace("-", "_")
        if not separator or not name:
            raise LocalError(f"--engine-arg {argument!r} is not key=value, e.g. --engine-arg max_model_len=4096")
        try:
            given[name] = yaml.safe_load(value)
        except yaml.YAMLError as error:
            raise LocalError(f"--engine-arg {argument!r}: the value is not YAML: {error}") from error
    return given


def catalogue(options: ModelOptions, accelerator: Accelerator) -> dict[str, Any]:
    """Return a catalogue with the one model that the options name.

    Raises:
        LocalError: see ``parse_engine_args``.
    """
    given = parse_engine_args(options.engine_args)
    local = Path(options.source)
    source = str(local.resolve()) if local.is_dir() else options.source
    defaults = CPU_ENGINE_ARGS if accelerator is CPU else {}
    engine_args = {**defaults, **{name: value for name, value in given.items() if name not in MODEL_SETTINGS}}
    pooling = engine_args.get("runner") == "pooling"
    return {
        "models": [
            {
                "id": options.model_id or (local.resolve().name if local.is_dir() else options.source),
                "source": source,
                "accelerator": accelerator.name,
                "endpoints": ["/v1/embeddings"] if pooling else ["/v1/chat/completions", "/v1/completions"],
                "engine_args": engine_args,
                "keep_warm_s": options.keep_warm_s,
                **{name: given[name] for name in MODEL_SETTINGS if name in given},
            }
        ]
    }


def read_models(path: Path) -> list[dict[str, Any]]:
    """Return the unchecked models of a catalogue file; the service checks them.

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
