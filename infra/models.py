"""What cannot work of a model on the stack's pools, found before anything is deployed. Pure.

Memory of one GPU, in GiB::

    share of the weights + 2 + 10 % of the GPU  <=  gpu_memory_utilization (0.9 by default) * the GPU

The share of the weights is ``weights_gib`` divided by the GPUs of an engine, and a tenth more where there are several:
embeddings and norms are on each of them, and layers do not divide evenly. 2 GiB are for activations, CUDA graphs and
communication. 10 % is the least of a key-value cache with which a batch is worth its GPU. A model that passes can
still be too large for its ``max_model_len``; the engine then says so when it starts.
"""

from collections.abc import Iterator, Mapping
from pathlib import PurePosixPath
from typing import Final

from infra.pools import LANES, NodePool, PoolName, RayImage, version_problem
from infra.ray_job_sizes import engine_gpus, hosts_per_engine
from infra.weights import DIRECTORY, ImageWeights, Weights
from ray_job.contract.job_spec import Accelerator, ModelSpec
from service.model_catalogue import Catalogue, CatalogueModel

OVERHEAD_GIB: Final = 2.0
CACHE_SHARE: Final = 0.1
SPLIT_FACTOR: Final = 1.1
DEFAULT_UTILIZATION: Final = 0.9
MIN_MEMORY_GIB: Final = 8

_V100_DTYPES: Final = ("float16", "half", "float32", "float")
# Of a model on CPUs: vLLM, Ray and the operating system's cache of files; its key-value cache is a quarter.
_CPU_OVERHEAD_GIB: Final = 3.0


def pool_problems(catalogue: Catalogue, pools: Mapping[PoolName, NodePool], weights: Weights) -> list[str]:
    """Everything that cannot work, as ``key: what is wrong; what to do``. A model without a pool is skipped here.

    Args:
        catalogue: the models, with keys ``models[0]`` and so on.
        pools: by name; keys are ``node_pools.cpu`` and so on.
        weights: where the models' directories come from.
    """
    problems = list(_cpu_pool_problems(pools["cpu"])) if "cpu" in pools else []
    for index, model in enumerate(catalogue.models.values()):
        pool = pools.get(model.spec.accelerator)
        if model.spec.lane != "http" and pool is not None:
            problems += [f"models[{index}].{problem}" for problem in _model_problems(model, pool, weights)]
    return problems


def image_problems(images: Mapping[Accelerator, RayImage]) -> list[str]:
    """Images whose Ray or vLLM is not one of their lane's, by the keys ``images.ray_cpu`` and so on."""
    return [
        f"images.ray_{accelerator}: {problem}"
        for accelerator, image in images.items()
        for problem in (
            version_problem("Ray", image.ray, LANES[accelerator].ray_range),
            version_problem("vLLM", image.vllm, LANES[accelerator].vllm_range),
        )
        if problem
    ]


def _cpu_pool_problems(pool: NodePool) -> Iterator[str]:
    if pool.memory_gib < MIN_MEMORY_GIB:
        yield (
            f"node_pools.cpu.memory_gib: must be at least {MIN_MEMORY_GIB}: a Ray head and a worker share a node, not "
            f"{pool.memory_gib}"
        )


def _model_problems(model: CatalogueModel, pool: NodePool, weights: Weights) -> Iterator[str]:
    yield from _source_problems(model.spec, weights)
    if pool.gpus_per_node:
        yield from _dtype_problems(model.spec)
        yield from _shape_problems(model.spec, pool)
        yield from _gpu_memory_problems(model, pool)
    else:
        yield from _cpu_memory_problems(model, pool)
    yield from _concurrency_problems(model.spec, pool)


def _source_problems(model: ModelSpec, weights: Weights) -> Iterator[str]:
    source = PurePosixPath(model.source)
    if not source.is_absolute() or ".." in source.parts:
        yield (
            f"source: must be the path of a directory, not {model.source!r}: jobs reach no model hub; put the model's "
            f"directory where model_weights says, and write {DIRECTORY}/{source.name}"
        )
    elif not isinstance(weights, ImageWeights) and PurePosixPath(DIRECTORY) not in source.parents:
        yield f"source: must be a directory below {DIRECTORY}, where model_weights are mounted, not {model.source!r}"


def _dtype_problems(model: ModelSpec) -> Iterator[str]:
    # bfloat16 and fp8 in writing are refused by the catalogue itself.
    dtype = str(model.engine_args.get("dtype", "auto"))
    if model.accelerator == "v100" and dtype not in _V100_DTYPES:
        yield (
            f"engine_args.dtype: must be float16 on a v100, not {dtype!r}: most models are stored in bfloat16, which "
            "it cannot compute in"
        )


def _shape_problems(model: ModelSpec, pool: NodePool) -> Iterator[str]:
    gpus, per_node = engine_gpus(model), pool.gpus_per_node
    if gpus <= per_node:
        return
    if model.lane == "direct":
        yield (
            f"lane: an engine of {gpus} GPUs (tensor_parallel_size * pipeline_parallel_size) does not fit on a node "
            f"with {per_node}, and one of the direct lane lives on one node; set lane: processor, or make it smaller"
        )
    elif gpus % per_node or model.tensor_parallel_size > per_node:
        yield (
            f"tensor_parallel_size: an engine of {gpus} GPUs must take whole nodes of {per_node}, with the GPUs that "
            f"share a layer on one of them; set tensor_parallel_size: {per_node} and let pipeline_parallel_size be the "
            "number of nodes"
        )


def _gpu_memory_problems(model: CatalogueModel, pool: NodePool) -> Iterator[str]:
    if model.weights_gib is None:
        yield (
            "weights_gib: is required for a model on GPUs: the size of its weights in GiB as the engine holds them, "
            "which is that of its *.safetensors unless engine_args change the type"
        )
        return
    gpus = engine_gpus(model.spec)
    share = model.weights_gib / gpus * (SPLIT_FACTOR if gpus > 1 else 1.0)
    needed = share + OVERHEAD_GIB + CACHE_SHARE * pool.gpu_memory_gib
    usable = _utilization(model.spec) * pool.gpu_memory_gib
    if needed > usable:
        yield (
            f"weights_gib: {model.weights_gib:g} GiB on {gpus} GPU(s) need {needed:.1f} GiB of each, and of the "
            f"{pool.gpu_memory_gib} GiB of a {pool.name} an engine gets {usable:.1f}; spread it over more GPUs "
            "(tensor_parallel_size), quantize it, or take another accelerator"
        )


def _utilization(model: ModelSpec) -> float:
    value = model.engine_args.get("gpu_memory_utilization", DEFAULT_UTILIZATION)
    return float(value) if isinstance(value, int | float) else DEFAULT_UTILIZATION


def _cpu_memory_problems(model: CatalogueModel, pool: NodePool) -> Iterator[str]:
    """An engine's pod has half of a node, so that a Ray head fits beside it."""
    pod_gib = pool.memory_gib / 2
    needed = (model.weights_gib or 0) + _CPU_OVERHEAD_GIB + pod_gib / 4
    if model.weights_gib and needed > pod_gib:
        yield (
            f"weights_gib: {model.weights_gib:g} GiB need {needed:.1f} GiB of a worker, which gets half of a node of "
            f"node_pools.{pool.name}, {pod_gib:g} GiB; take a smaller model or larger nodes"
        )


def _concurrency_problems(model: ModelSpec, pool: NodePool) -> Iterator[str]:
    hosts = hosts_per_engine(model, pool)
    workers = model.concurrency * hosts
    if workers > pool.max_workers:
        yield (
            f"concurrency: {model.concurrency} engines are {workers} workers, and node_pools.{pool.name}.max_workers "
            f"is {pool.max_workers}; lower the one or raise the other"
        )
    there = pool.node_count * pool.gpus_per_node
    if there and model.concurrency * engine_gpus(model) > there:
        yield (
            f"concurrency: {model.concurrency} engines take {model.concurrency * engine_gpus(model)} GPUs, and the "
            f"nodes of node_pools.{pool.name} have {there}; lower it or add nodes"
        )
