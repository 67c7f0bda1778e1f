"""Node pools as the rest of the program sees them: what a pool's nodes have, and how a pod asks for one. Pure."""

import re
from dataclasses import dataclass
from typing import Any, Final, Literal

from ray_job.contract.job_spec import Accelerator

PoolName = Literal["system", "cpu", "v100", "a10g"]
POOLS: Final[tuple[PoolName, ...]] = ("system", "cpu", "v100", "a10g")
GPU_POOLS: Final[tuple[PoolName, ...]] = ("v100", "a10g")

POOL_LABEL: Final = "cloister.dev/pool"
GPU_RESOURCE: Final = "nvidia.com/gpu"
# The taint that GPU nodes of managed clusters have anyway, and that NVIDIA's own DaemonSets tolerate.
GPU_TAINT: Final = {"key": GPU_RESOURCE, "value": "present", "effect": "NoSchedule"}


@dataclass(frozen=True, slots=True, kw_only=True)
class NodePool:
    """Nodes of one kind.

    Attributes:
        name: ``system``, ``cpu`` or an accelerator.
        nodes: the nodes' names, which get the pool's label, and the taint of GPU nodes, where the stack manages them.
        max_nodes: the most nodes of a pool whose nodes come and go without names here; 0 for one of named nodes.
        cpus: CPUs of one node that pods can have; 0 where no job runs (``system``).
        memory_gib: memory of one node that pods can have, in GiB.
        gpus_per_node: GPUs of one node.
        gpu_memory_gib: memory of one GPU, in GiB.
        max_workers: the most workers of one kind that one job starts in the pool.
    """

    name: PoolName
    nodes: tuple[str, ...] = ()
    max_nodes: int = 0
    cpus: int = 0
    memory_gib: int = 0
    gpus_per_node: int = 0
    gpu_memory_gib: int = 0
    max_workers: int = 2

    @property
    def node_count(self) -> int:
        """The most nodes that there are at the same time."""
        return self.max_nodes or len(self.nodes)

    @property
    def memory_mib(self) -> int:
        """``memory_gib`` in MiB."""
        return self.memory_gib * 1024

    @property
    def labels(self) -> dict[str, str]:
        """The labels of the pool's nodes."""
        return {POOL_LABEL: self.name}

    @property
    def taints(self) -> list[dict[str, str]]:
        """The taints of the pool's nodes: nothing lands on a GPU node that does not ask for one."""
        return [dict(GPU_TAINT)] if self.name in GPU_POOLS else []


def placement(pool: PoolName) -> dict[str, Any]:
    """``nodeSelector`` and ``tolerations`` of a pod that runs in a pool."""
    tolerations = [{"key": GPU_RESOURCE, "operator": "Exists", "effect": "NoSchedule"}] if pool in GPU_POOLS else []
    return {"nodeSelector": {POOL_LABEL: pool}, "tolerations": tolerations}


@dataclass(frozen=True, slots=True)
class VersionRange:
    """Versions from one to below another, as ``2.53`` and ``2.56``."""

    least: str
    below: str

    def __contains__(self, version: str) -> bool:
        return _numbers(self.least) <= _numbers(version) < _numbers(self.below)


@dataclass(frozen=True, slots=True, kw_only=True)
class LaneVersions:
    """What an image lane holds, and what else it may hold. All nodes of one Ray cluster must have the same."""

    ray: str
    vllm: str
    cuda: str
    ray_range: VersionRange
    vllm_range: VersionRange


# After 0.19.1 vLLM's wheels have no code for sm_70, the V100; CUDA 13 has none either. Before Ray 2.53 KubeRay's
# probes run wget, which the image has not.
LANES: Final[dict[Accelerator, LaneVersions]] = {
    "cpu": LaneVersions(
        ray="2.60.0",
        vllm="0.32.0",
        cuda="",
        ray_range=VersionRange("2.60", "3"),
        vllm_range=VersionRange("0.32", "1"),
    ),
    "v100": LaneVersions(
        ray="2.55.1",
        vllm="0.19.1",
        cuda="12.8",
        ray_range=VersionRange("2.53", "2.56"),
        vllm_range=VersionRange("0.19", "0.19.2"),
    ),
    "a10g": LaneVersions(
        ray="2.60.0",
        vllm="0.29.0",
        cuda="13.0",
        ray_range=VersionRange("2.60", "3"),
        vllm_range=VersionRange("0.29", "1"),
    ),
}


def version_problem(what: str, version: str, allowed: VersionRange) -> str:
    """What is wrong with a version in a lane; empty when nothing is."""
    if not _VERSION.fullmatch(version):
        return f"{version!r} is no version of {what}; write it as in {allowed.least}.0"
    if version in allowed:
        return ""
    return f"holds {what} {version}, and this lane runs {allowed.least} to below {allowed.below}; build its own image"


_VERSION: Final = re.compile(r"\d+(\.\d+){1,2}")


def _numbers(version: str) -> tuple[int, ...]:
    return tuple(int(number) for number in (*version.split("."), "0", "0"))[:3]


@dataclass(frozen=True, slots=True, kw_only=True)
class RayImage:
    """The image of a lane, and what is in it.

    Attributes:
        reference: by digest.
        ray: the version of Ray.
        vllm: the version of vLLM.
    """

    reference: str
    ray: str
    vllm: str


def lane_image(accelerator: Accelerator, reference: str) -> RayImage:
    """An image that holds its lane's own versions."""
    return RayImage(reference=reference, ray=LANES[accelerator].ray, vllm=LANES[accelerator].vllm)
