"""Sizes of the pods of a batch's Ray cluster, and how many pods an engine needs.

Requests equal limits everywhere, so that one job never takes what another was promised. All sizes follow from the
pools: a head and one CPU worker fit together on one node of the CPU pool, however small it is.
"""

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Final

from infra.capacity.pools import NodePool, pools_of
from ray_job.contract.job_spec import ModelSpec
from service.model_catalogue import CatalogueModel

_GIB: Final = 1024  # in MiB

# Enough for the job's own process, Ray's services and the lines of the largest input file.
_HEAD_CPUS: Final = 1.0
_HEAD_MIB: Final = 4 * _GIB
# Eight readers and writers of a quarter of a CPU each, or the tokenizer of the processor engine beside some.
_STAGE_CPUS: Final = 2.0
_STAGE_MIB: Final = 6 * _GIB
_AUTOSCALER_CPUS: Final = 0.25
AUTOSCALER_MIB: Final = 512
# Engines over several GPUs communicate through shared memory.
_SHARED_MIB_ONE_GPU: Final = 4 * _GIB
_SHARED_MIB_GPUS: Final = 8 * _GIB


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupSize:
    """Resources of each Ray container of a group, what it reports to Ray, and the number of pods. A head is one pod.

    Attributes:
        cpu_m: thousandths of a CPU.
        memory_mib: memory, including the shared memory, in MiB.
        shared_mib: the most of it that /dev/shm holds.
        object_store_mib: the most of that which Ray's object store takes.
        disk_gib: disk for temporary files, in GiB.
        ray_cpus: CPUs that Ray counts. They distribute the engine and the stages, and limit nothing.
        gpus: whole GPUs or MIG slices.
        gpu_resource: the extended resource of the GPUs; empty for none.
        min_replicas: pods that start with the job.
        max_replicas: the most pods that Ray's autoscaler requests.
    """

    cpu_m: int
    memory_mib: int
    shared_mib: int
    object_store_mib: int
    disk_gib: int
    ray_cpus: int
    gpus: int = 0
    gpu_resource: str = ""
    min_replicas: int = 1
    max_replicas: int = 1


def head_size(cpu_pool: NodePool) -> GroupSize:
    """Return the size of the Ray head. Ray counts no CPU on it: only the job's own process runs there."""
    memory_mib = min(_HEAD_MIB, cpu_pool.memory_mib * 3 // 8)
    return GroupSize(
        cpu_m=_thousandths(min(_HEAD_CPUS, cpu_pool.cpus / 4)),
        memory_mib=memory_mib,
        shared_mib=memory_mib // 4,
        # It holds the whole input while the job runs.
        object_store_mib=memory_mib // 5,
        disk_gib=6,
        ray_cpus=0,
    )


def autoscaler_cpu_m(cpu_pool: NodePool) -> int:
    """Return the CPU of Ray's autoscaler, which runs beside the head, in thousandths."""
    return _thousandths(min(_AUTOSCALER_CPUS, cpu_pool.cpus / 8))


def cpu_workers(model: ModelSpec, cpu_pool: NodePool) -> GroupSize:
    """Return the workers that read, prepare and write lines; for a model on CPUs, each holds one engine too."""
    # CPUs that Ray counts for the stages of a job that run at the same time, and for some tasks beside them.
    waiting = model.concurrency if model.engine in ("http", "serve") else 1
    stage_cpus = max(1, math.ceil(model.stage_num_cpus * (waiting + 3)))
    if model.accelerator == "cpu" and model.engine != "http":
        memory_mib = cpu_pool.memory_mib // 2
        # Ray's own engine stages reserve CPUs for each part of an engine.
        engine_cpus = math.ceil(model.engine_num_cpus * model.tensor_parallel_size * model.pipeline_parallel_size)
        return GroupSize(
            cpu_m=_thousandths(cpu_pool.cpus / 2),
            memory_mib=memory_mib,
            shared_mib=memory_mib // 4,
            object_store_mib=memory_mib // 8,
            disk_gib=6,
            ray_cpus=engine_cpus + stage_cpus,
            max_replicas=max(model.concurrency, 1),
        )
    memory_mib = min(_STAGE_MIB, cpu_pool.memory_mib // 2)
    return GroupSize(
        cpu_m=_thousandths(min(_STAGE_CPUS, cpu_pool.cpus / 2)),
        memory_mib=memory_mib,
        shared_mib=memory_mib // 4,
        object_store_mib=memory_mib // 5,
        disk_gib=4,
        ray_cpus=max(2, stage_cpus),
        # The first starts together with the head, so that a GPU never waits for a reader.
        min_replicas=1,
        max_replicas=cpu_pool.max_workers,
    )


def hosts_per_engine(model: ModelSpec, pool: NodePool) -> int:
    """Count the pods that one engine spreads over: 1 if a node has enough GPUs for all of it."""
    return max(1, math.ceil(model.num_gpus / max(1, pool.gpus_per_node)))


def gpu_workers(model: ModelSpec, pool: NodePool) -> GroupSize:
    """Return the workers that hold engines. A worker gets the share of its node's free CPUs that its GPUs are.

    An engine that fits on a node has one pod; a larger one has as many full nodes as it needs. No worker exists until
    an engine requests one. KubeRay's ``numOfHosts`` stays 1: Ray requests all GPUs of an engine at once (a placement
    group), and its autoscaler counts pods.
    """
    hosts = hosts_per_engine(model, pool)
    gpus = math.ceil(model.num_gpus / hosts)
    memory_mib = (pool.memory_gib - pool.spare_memory_gib) * _GIB * gpus // pool.gpus_per_node
    shared_mib = min(_SHARED_MIB_ONE_GPU if gpus == 1 else _SHARED_MIB_GPUS, memory_mib // 4)
    return GroupSize(
        cpu_m=_thousandths((pool.cpus - pool.spare_cpus) * gpus / pool.gpus_per_node),
        memory_mib=memory_mib,
        shared_mib=shared_mib,
        object_store_mib=shared_mib // 2,
        disk_gib=12,
        ray_cpus=max(math.ceil(model.engine_num_cpus), gpus) + 1,
        gpus=gpus,
        gpu_resource=pool.accelerator.resource,
        min_replicas=0,
        max_replicas=min(model.concurrency * hosts, pool.max_workers),
    )


def job_slots(models: Iterable[CatalogueModel], pools: Mapping[str, NodePool], *, most: int) -> dict[str, int]:
    """Return how many jobs may run at the same time on accelerators where an engine takes several nodes.

    All engines of all of these jobs find their nodes together. With more jobs, each could hold a part of the nodes that
    its engine needs and wait for the others for ever. Other accelerators are left out: an engine on one node either
    runs or holds nothing.

    Args:
        models: the models of the stack.
        pools: the node pools by name.
        most: the limit of jobs on any accelerator.
    """
    needed: dict[str, int] = {}
    available: dict[str, int] = {}
    spread: set[str] = set()
    for model in models:
        name, gpu_pools = model.spec.accelerator, [pool for pool in pools_of(model, pools) if pool.gpus_per_node]
        if gpu_pools:
            hosts, nodes = hosts_per_engine(model.spec, gpu_pools[0]), sum(pool.node_count for pool in gpu_pools)
            needed[name] = max(needed.get(name, 0), model.spec.concurrency * hosts)
            available[name] = min(available.get(name, nodes), nodes)
            if hosts > 1:
                spread.add(name)
    return {name: max(1, min(most, available[name] // needed[name])) for name in sorted(spread)}


def _thousandths(cpus: float) -> int:
    # With less than a tenth of a CPU, Ray's processes miss their own time limits at start.
    return max(100, int(cpus * 1000))
