"""Checks that models fit the stack's pools, before anything is deployed.

``ray_job.contract.model_fit`` has the rules of a GPU's memory.
"""

import re
from collections.abc import Iterator, Mapping
from pathlib import PurePosixPath
from typing import Final

from infra.capacity.job_sizes import hosts_per_engine
from infra.capacity.pools import IMAGE_VARIANTS, NodePool, RayImage, pools_of
from ray_job.contract.accelerators import ImageVariant, capability_text
from ray_job.contract.model_fit import needed_gib, usable_gib
from ray_job.contract.weights import MODELS_DIRECTORY
from service.model_catalogue import CatalogueModel

MIN_MEMORY_GIB: Final = 8
# A model on CPUs: vLLM, Ray and the operating system's file cache. Its key-value cache is a quarter.
_CPU_OVERHEAD_GIB: Final = 3.0


def pool_problems(
    models: Mapping[int, CatalogueModel], pools: Mapping[str, NodePool], *, weights_are_mounted: bool
) -> Iterator[str]:
    """Yield what cannot work, as ``key: what is wrong; what to do``. Models without a pool are skipped.

    Args:
        models: by their index in the stack file.
        pools: by name; ``cpu`` and the GPU pools.
        weights_are_mounted: models' directories come from a volume or the object store, not from the image.
    """
    cpu = pools.get("cpu")
    if cpu and cpu.cpus and cpu.memory_gib < MIN_MEMORY_GIB:
        smallest = min(cpu.hosts, key=lambda host: host.spare_memory_gib, default=None)
        key = f"{smallest.name}.spare_memory_gib" if smallest else "cpu.memory_gib"
        yield (
            f"node_pools.{key}: must be at least {MIN_MEMORY_GIB}: a Ray head and a worker share a node, not "
            f"{cpu.memory_gib}"
        )
    for index, model in models.items():
        spec, usable = model.spec, pools_of(model, pools)
        if spec.engine == "http" or not usable:
            continue
        at, source = f"models[{index}]", PurePosixPath(spec.source)
        if not source.is_absolute() or ".." in source.parts:
            yield (
                f"{at}.source: must be the path of a directory, not {spec.source!r}: jobs reach no model hub; put the "
                f"model's directory where model_weights points, and write {MODELS_DIRECTORY}/{source.name}"
            )
        elif weights_are_mounted and PurePosixPath(MODELS_DIRECTORY) not in source.parents:
            yield (
                f"{at}.source: must be a directory below {MODELS_DIRECTORY}, where weights are mounted, not "
                f"{spec.source!r}"
            )
        for pool in usable:
            # On CPUs, an engine's pod has half of a node, so that a Ray head fits beside it.
            pod_gib = pool.memory_gib / 2
            needed = (model.weights_gib or 0) + _CPU_OVERHEAD_GIB + pod_gib / 4
            if pool.gpus_per_node:
                yield from (f"{at}.{problem}" for problem in _gpu_problems(model, pool))
            elif model.weights_gib and needed > pod_gib:
                yield (
                    f"{at}.weights_gib: {model.weights_gib:g} GiB need {needed:.1f} GiB of a worker, which gets half "
                    f"of a node of node_pools.{pool.name}, {pod_gib:g} GiB; use a smaller model or larger nodes"
                )
        named = " and ".join(f"node_pools.{pool.name}" for pool in usable)
        workers, most = spec.concurrency * hosts_per_engine(spec, usable[0]), sum(pool.max_workers for pool in usable)
        if workers > most:
            yield (
                f"{at}.concurrency: {spec.concurrency} engines are {workers} workers, and "
                f"{' + '.join(f'node_pools.{pool.name}.max_workers' for pool in usable)} is {most}; lower the one or "
                "raise the other"
            )
        gpus = spec.concurrency * spec.num_gpus
        available = sum(pool.node_count * pool.gpus_per_node for pool in usable)
        if available and gpus > available:
            yield (
                f"{at}.concurrency: {spec.concurrency} engines take {gpus} GPUs, and the nodes of {named} have "
                f"{available}; lower it or add nodes"
            )


def image_problems(images: Mapping[ImageVariant, RayImage]) -> list[str]:
    """Return which images hold a Ray or vLLM that their variant does not run, as ``images.ray_cpu: problem``."""
    problems = []
    for variant, image in images.items():
        versions = IMAGE_VARIANTS[variant]
        for software, version, (least, below) in (
            ("Ray", image.ray, versions.ray_range),
            ("vLLM", image.vllm, versions.vllm_range),
        ):
            if not re.fullmatch(r"\d+(\.\d+){1,2}", version):
                problem = f"{version!r} is not a version of {software}; write it as in {least}.0"
                problems.append(f"images.ray_{variant}: {problem}")
                continue
            numbers, start, end = (
                tuple(int(number) for number in (*text.split("."), "0", "0"))[:3] for text in (version, least, below)
            )
            if not start <= numbers < end:
                problems.append(
                    f"images.ray_{variant}: holds {software} {version}, this variant runs {least} to below {below}; "
                    "build the image of this variant"
                )
    return problems


def _gpu_problems(model: CatalogueModel, pool: NodePool) -> Iterator[str]:
    spec, accelerator = model.spec, pool.accelerator
    gpus, per_node = spec.num_gpus, pool.gpus_per_node
    # The catalogue checks data types that an entry names. `auto` is what the weights are stored in.
    dtype = str(spec.engine_args.get("dtype", "auto"))
    if dtype == "auto" and accelerator.capability and accelerator.missing_capability("dtype", "bfloat16"):
        yield (
            f"engine_args.dtype: must be float16 or float32, not {dtype!r}: most models are stored in bfloat16, which "
            f"needs compute capability 8.0; {accelerator.name} has {capability_text(accelerator.capability)}"
        )
    if gpus > 1 and accelerator.is_mig:
        yield f"tensor_parallel_size: an engine must run on one slice of a GPU, not {gpus}: slices cannot communicate"
        return
    if gpus > per_node and spec.engine == "direct":
        yield (
            f"engine: an engine of {gpus} GPUs (tensor_parallel_size * pipeline_parallel_size) does not fit on a node "
            f"with {per_node}, and a direct engine lives on one node; set engine: processor, or make it smaller"
        )
    elif gpus > per_node and (gpus % per_node or spec.tensor_parallel_size > per_node):
        yield (
            f"tensor_parallel_size: an engine of {gpus} GPUs must take whole nodes of {per_node}, with the GPUs that "
            f"share a layer on one of them; set tensor_parallel_size: {per_node} and pipeline_parallel_size to the "
            "number of nodes"
        )
    if model.weights_gib is None:
        yield (
            "weights_gib: is required for a model on GPUs: the size of its weights in GiB as the engine holds them, "
            "which is that of its *.safetensors unless engine_args change the type"
        )
        return
    gpu_gib = pool.gpu_memory_mib / 1024
    usable = usable_gib(spec.engine_args, gpu_gib=gpu_gib)
    needed = needed_gib(model.weights_gib, gpus=gpus, gpu_gib=gpu_gib)
    if needed > usable:
        yield (
            f"weights_gib: {model.weights_gib:g} GiB on {gpus} GPU(s) need {needed:.1f} GiB of each; an engine gets "
            f"{usable:.1f} of the {gpu_gib:.1f} GiB of {pool.name}; spread it over more GPUs "
            "(tensor_parallel_size), quantize it, or use another accelerator"
        )
