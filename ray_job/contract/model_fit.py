"""Rules by which the weights of a model fit an accelerator. Pure.

Memory of one GPU, in GiB::

    share of the weights + 2 + 10 % of the GPU  <=  gpu_memory_utilization (0.9 by default) * the GPU

The share of the weights is their size divided by the GPUs of an engine, and a tenth more for several GPUs: embeddings
and norms are on each of them, and layers do not divide evenly. 2 GiB are for activations, CUDA graphs and
communication. 10 % is the smallest key-value cache with which a batch is worth its GPU. The GPU is what its driver
reports, 22.5 GiB on an A10G. A model that passes can still be too large for its ``max_model_len``; the engine reports
that when it starts.
"""

from collections.abc import Mapping
from typing import Any, Final

from ray_job.contract.accelerators import Accelerator, capability_text

OVERHEAD_GIB: Final = 2.0
CACHE_SHARE: Final = 0.1
SPLIT_FACTOR: Final = 1.1
DEFAULT_UTILIZATION: Final = 0.9


def needed_gib(weights_gib: float, *, gpus: int, gpu_gib: float) -> float:
    """Return the memory that an engine needs of each of its GPUs, in GiB."""
    share = weights_gib / gpus * (SPLIT_FACTOR if gpus > 1 else 1.0)
    return share + OVERHEAD_GIB + CACHE_SHARE * gpu_gib


def usable_gib(engine_args: Mapping[str, Any], *, gpu_gib: float) -> float:
    """Return the memory of one GPU that an engine with these arguments uses, in GiB."""
    utilization = engine_args.get("gpu_memory_utilization", DEFAULT_UTILIZATION)
    return (float(utilization) if isinstance(utilization, int | float) else DEFAULT_UTILIZATION) * gpu_gib


def misfit(
    accelerator: Accelerator,
    *,
    weights_gib: float,
    dtype: str,
    quantization: str = "",
    engine_args: Mapping[str, Any] | None = None,
) -> str:
    """Return why an engine on one unit of an accelerator cannot run a model; empty if it can.

    A CPU fits every model that is not quantized: its memory is that of the node.

    Args:
        accelerator: the accelerator.
        weights_gib: size of the weights, in GiB.
        dtype: the data type that the weights are stored in, by vLLM's name; empty if it is unknown.
        quantization: the quantization method, by vLLM's name; empty for none.
        engine_args: vLLM's engine arguments. ``dtype`` replaces the stored type.
    """
    given = engine_args or {}
    if accelerator.capability is None:
        return f"{quantization} weights need a GPU" if quantization else ""
    used = str(given.get("dtype", "auto"))
    for argument, value in (("dtype", dtype if used == "auto" else used), ("quantization", quantization)):
        if needed := accelerator.missing_capability(argument, value):
            has = capability_text(accelerator.capability)
            return f"{value} needs compute capability {capability_text(needed)}; {accelerator.name} has {has}"
    gpu_gib = accelerator.memory_mib / 1024
    needs, usable = needed_gib(weights_gib, gpus=1, gpu_gib=gpu_gib), usable_gib(given, gpu_gib=gpu_gib)
    if needs > usable:
        return (
            f"{weights_gib:.1f} GiB of weights need {needs:.1f} GiB; an engine gets {usable:.1f} of the "
            f"{gpu_gib:.1f} GiB of {accelerator.name}"
        )
    return ""
