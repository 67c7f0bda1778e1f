"""How large the pods of a batch's Ray cluster are, and how many engines need how many of them. Pure.

Requests equal limits everywhere, so that a node's promise to one job is not another's surprise. All sizes follow from
the pools: a head and one CPU worker fit together on one node of the CPU pool, however small it is.
"""

import math
from dataclasses import dataclass
from typing import Final

from infra.pools import NodePool
from ray_job.contract.job_spec import ModelSpec

_GIB: Final = 1024  # in MiB

# Enough for the job's own process, Ray's services and the lines of the largest input file.
_HEAD_CPUS: Final = 1.0
_HEAD_MIB: Final = 4 * _GIB
# Eight readers and writers of a quarter of a CPU each, or the tokenizer of the processor lane beside some.
_STAGE_CPUS: Final = 2.0
_STAGE_MIB: Final = 6 * _GIB
_AUTOSCALER_CPUS: Final = 0.25
AUTOSCALER_MIB: Final = 512
# Engines over several GPUs talk through shared memory.
_SHARED_MIB_ONE_GPU: Final = 4 * _GIB
_SHARED_MIB_GPUS: Final = 8 * _GIB


@dataclass(frozen=True, slots=True, kw_only=True)
class PodSize:
    """What a Ray container gets, and what it tells Ray.

    Attributes:
        cpu_m: thousandths of a CPU.
        memory_mib: memory, with the shared memory in it.
        shared_mib: the most of it that /dev/shm holds.
        object_store_mib: the most of that which Ray's object store takes.
        disk_gib: disk for temporary files.
        ray_cpus: CPUs that Ray counts. They share the engine and the stages out, and limit nothing.
        gpus: whole GPUs.
    """

    cpu_m: int
    memory_mib: int
    shared_mib: int
    object_store_mib: int
    disk_gib: int
    ray_cpus: int
    gpus: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupSize:
    """A worker group: the size of a pod, and how many there are."""

    pod: PodSize
    min_replicas: int
    max_replicas: int


def head_size(cpu_pool: NodePool) -> PodSize:
    """The Ray head. Ray counts no CPU on it: nothing but the job's own process runs there."""
    memory_mib = min(_HEAD_MIB, cpu_pool.memory_mib * 3 // 8)
    return PodSize(
        cpu_m=_thousandths(min(_HEAD_CPUS, cpu_pool.cpus / 4)),
        memory_mib=memory_mib,
        shared_mib=memory_mib // 4,
        # The whole input lies in it while the job runs.
        object_store_mib=memory_mib // 5,
        disk_gib=6,
        ray_cpus=0,
    )


def autoscaler_cpu_m(cpu_pool: NodePool) -> int:
    """Ray's autoscaler, which runs beside the head, in thousandths of a CPU."""
    return _thousandths(min(_AUTOSCALER_CPUS, cpu_pool.cpus / 8))


def cpu_workers(model: ModelSpec, cpu_pool: NodePool) -> GroupSize:
    """The workers that read, prepare and write lines; of a model on CPUs each holds one engine too."""
    if model.accelerator == "cpu" and model.lane != "http":
        return _cpu_engines(model, cpu_pool)
    memory_mib = min(_STAGE_MIB, cpu_pool.memory_mib // 2)
    pod = PodSize(
        cpu_m=_thousandths(min(_STAGE_CPUS, cpu_pool.cpus / 2)),
        memory_mib=memory_mib,
        shared_mib=memory_mib // 4,
        object_store_mib=memory_mib // 5,
        disk_gib=4,
        ray_cpus=max(2, _stage_cpus(model)),
    )
    # The first starts together with the head, so that a GPU never waits for a reader.
    return GroupSize(pod=pod, min_replicas=1, max_replicas=cpu_pool.max_workers)


def _cpu_engines(model: ModelSpec, cpu_pool: NodePool) -> GroupSize:
    memory_mib = cpu_pool.memory_mib // 2
    pod = PodSize(
        cpu_m=_thousandths(cpu_pool.cpus / 2),
        memory_mib=memory_mib,
        shared_mib=memory_mib // 4,
        object_store_mib=memory_mib // 8,
        disk_gib=6,
        ray_cpus=_engine_ray_cpus(model) + _stage_cpus(model),
    )
    return GroupSize(pod=pod, min_replicas=1, max_replicas=max(model.concurrency, 1))


def _engine_ray_cpus(model: ModelSpec) -> int:
    """CPUs that Ray counts for one engine, on all of its pods together."""
    # Ray's own engine stages reserve CPUs for each part of an engine.
    return math.ceil(model.engine_num_cpus * model.tensor_parallel_size * model.pipeline_parallel_size)


def _stage_cpus(model: ModelSpec) -> int:
    """CPUs that Ray counts for the stages of a lane that must run at the same time, and for some tasks beside them."""
    waiting = model.concurrency if model.lane in ("http", "serve") else 1
    return max(1, math.ceil(model.stage_num_cpus * (waiting + 3)))


def engine_gpus(model: ModelSpec) -> int:
    """GPUs of one engine."""
    return model.num_gpus if model.lane != "http" else 0


def hosts_per_engine(model: ModelSpec, pool: NodePool) -> int:
    """Pods that one engine spreads over: 1 where a node has GPUs enough for all of it."""
    return max(1, math.ceil(engine_gpus(model) / max(1, pool.gpus_per_node)))


def gpu_workers(model: ModelSpec, pool: NodePool) -> GroupSize:
    """The workers that hold engines, each with the share of its node that its GPUs are.

    An engine that fits on a node has one pod; a larger one has as many full nodes as it needs. There are none until
    an engine asks for one. KubeRay's ``numOfHosts`` stays 1: Ray asks for all GPUs of an engine at once (a placement
    group), and its autoscaler counts pods.
    """
    hosts = hosts_per_engine(model, pool)
    gpus = math.ceil(engine_gpus(model) / hosts)
    memory_mib = pool.memory_mib * gpus // pool.gpus_per_node
    shared_mib = min(_SHARED_MIB_ONE_GPU if gpus == 1 else _SHARED_MIB_GPUS, memory_mib // 4)
    pod = PodSize(
        cpu_m=_thousandths(pool.cpus * gpus / pool.gpus_per_node),
        memory_mib=memory_mib,
        shared_mib=shared_mib,
        object_store_mib=shared_mib // 2,
        disk_gib=12,
        ray_cpus=max(math.ceil(model.engine_num_cpus), gpus) + 1,
        gpus=gpus,
    )
    return GroupSize(pod=pod, min_replicas=0, max_replicas=model.concurrency * hosts)


def _thousandths(cpus: float) -> int:
    # A tenth of a CPU is the least with which Ray's processes start within their own time limits.
    return max(100, int(cpus * 1000))
