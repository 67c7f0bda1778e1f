"""Node pools and Ray images: what a pool's nodes have, how a pod requests one, and which versions an image may hold."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Final

from ray_job.contract.accelerators import CPU, Accelerator, ImageVariant
from ray_job.contract.cluster import CUSTOMER_LABEL, GPU_RESOURCE, POOL_LABEL
from service.model_catalogue import CatalogueModel

# The taint that GPU nodes of managed clusters have, and that NVIDIA's own DaemonSets tolerate. Nodes with MIG have it
# too: it does not name the slice.
GPU_TAINT: Final = {"key": GPU_RESOURCE, "value": "present", "effect": "NoSchedule"}


@dataclass(frozen=True, slots=True, kw_only=True)
class NodePool:
    """Nodes of one kind, or the spare part of nodes of other pools.

    Attributes:
        name: ``system``, ``cpu`` or the name of a GPU pool.
        accelerator: what engines run on in this pool.
        nodes: names of the nodes. Where the stack manages nodes, they get the pool's label and the taint of GPU nodes.
        max_nodes: the most nodes of a pool that an autoscaler fills; 0 for a pool of named nodes.
        cpus: CPUs of one node that pods can have; 0 where no job runs (``system``).
        memory_gib: memory of one node that pods can have, in GiB.
        gpus_per_node: GPUs or MIG slices of one node.
        gpu_memory_limit_mib: use no more than this of a GPU, in MiB; 0 for all that the accelerator has.
        max_workers: the most workers of one kind that one job starts in the pool.
        selector: labels of the nodes; empty for the label of the pool.
        taint: the taint of the nodes; empty for none.
        tolerations: further tolerations of pods on the nodes.
        runtime_class: the RuntimeClass of pods that request a GPU; empty for the default.
        environment: environment variables of the pool's workers.
        spare_cpus: CPUs of one node that engines leave to pods without a GPU.
        spare_memory_gib: memory of one node that engines leave to pods without a GPU, in GiB.
        hosts: the pools whose spare CPUs and memory make up this one; empty for a pool with nodes of its own.
        customer: the one customer whose pods run on the nodes; empty for nodes that customers share.
    """

    name: str
    accelerator: Accelerator = CPU
    nodes: tuple[str, ...] = ()
    max_nodes: int = 0
    cpus: int = 0
    memory_gib: int = 0
    gpus_per_node: int = 0
    gpu_memory_limit_mib: int = 0
    max_workers: int = 2
    selector: Mapping[str, str] = field(default_factory=dict)
    taint: Mapping[str, str] = field(default_factory=dict)
    tolerations: tuple[Mapping[str, str], ...] = ()
    runtime_class: str = ""
    environment: Mapping[str, str] = field(default_factory=dict)
    spare_cpus: int = 0
    spare_memory_gib: int = 0
    hosts: tuple["NodePool", ...] = ()
    customer: str = ""

    @property
    def node_count(self) -> int:
        """The most nodes that exist at the same time."""
        return sum(host.node_count for host in self.hosts) or self.max_nodes or len(self.nodes)

    @property
    def memory_mib(self) -> int:
        """``memory_gib`` in MiB."""
        return self.memory_gib * 1024

    @property
    def gpu_memory_mib(self) -> int:
        """Memory of one GPU that engines can use, in MiB."""
        return min(self.accelerator.memory_mib, self.gpu_memory_limit_mib or self.accelerator.memory_mib)

    @property
    def labels(self) -> dict[str, str]:
        """The labels of the pool's nodes."""
        own = {CUSTOMER_LABEL: self.customer} if self.customer else {}
        return {**(self.selector or {POOL_LABEL: self.name}), **own}

    @property
    def taints(self) -> list[dict[str, str]]:
        """The taints of the pool's nodes."""
        own = [{"key": CUSTOMER_LABEL, "value": self.customer, "effect": "NoSchedule"}] if self.customer else []
        return [*([dict(self.taint)] if self.taint else []), *own]

    @property
    def tolerated(self) -> list[dict[str, str]]:
        """The tolerations of a pod on the pool's nodes: of their taint, of the usual one of GPU nodes, and more."""
        usual = [gpu_taint(self.accelerator.resource)] if self.accelerator.resource else []
        found: list[dict[str, str]] = []
        for each in (*self.taints, *usual):
            toleration = {"key": each["key"], "operator": "Exists", "effect": each["effect"]}
            if toleration not in found:
                found.append(toleration)
        own = [{"key": CUSTOMER_LABEL, "operator": "Equal", "value": self.customer, "effect": "NoSchedule"}]
        return [*found, *(dict(each) for each in self.tolerations), *(own if self.customer else [])]


def of_customer(pool: NodePool, customer: str) -> NodePool:
    """Return the part of a pool whose nodes belong to one customer."""
    return replace(pool, customer=customer, hosts=tuple(of_customer(host, customer) for host in pool.hosts))


def gpu_taint(resource: str) -> dict[str, str]:
    """Return the taint of nodes that offer an extended resource."""
    return dict(GPU_TAINT) if resource.startswith("nvidia.com/") else {**GPU_TAINT, "key": resource}


def placement(pool: NodePool) -> dict[str, Any]:
    """Return ``tolerations``, and ``nodeSelector`` or ``affinity``, of the pods of a pool."""
    if not pool.hosts:
        return {"nodeSelector": pool.labels, "tolerations": pool.tolerated}
    if len(pool.hosts) == 1:
        return placement(pool.hosts[0])
    # The terms are alternatives.
    terms = [
        {"matchExpressions": [{"key": key, "operator": "In", "values": [value]} for key, value in host.labels.items()]}
        for host in pool.hosts
    ]
    required = {"requiredDuringSchedulingIgnoredDuringExecution": {"nodeSelectorTerms": terms}}
    tolerations: list[dict[str, str]] = []
    for host in pool.hosts:
        tolerations += [each for each in host.tolerated if each not in tolerations]
    return {"affinity": {"nodeAffinity": required}, "tolerations": tolerations}


def pools_with(pools: Mapping[str, NodePool], accelerator: str) -> list[NodePool]:
    """Return the pools whose nodes have an accelerator, ``cpu`` included."""
    return [pool for pool in pools.values() if pool.accelerator.name == accelerator and pool.name != "system"]


def pools_of(model: CatalogueModel, pools: Mapping[str, NodePool]) -> list[NodePool]:
    """Return the pools of a model's engines: the one that the model names, or all of its accelerator."""
    found = pools_with(pools, model.spec.accelerator)
    return [pool for pool in found if model.node_pool in ("", pool.name)]


def job_pools(pools: Mapping[str, NodePool]) -> list[NodePool]:
    """Return the pools whose nodes run jobs. Each node is in one of them."""
    return [pool for pool in pools.values() if pool.name != "system" and not pool.hosts]


def gpu_capacity(pools: Iterable[NodePool]) -> dict[str, int]:
    """Count the GPUs of all pools by extended resource. NVIDIA's whole GPUs are always listed."""
    capacity = {GPU_RESOURCE: 0}
    for pool in pools:
        if pool.gpus_per_node:
            resource = pool.accelerator.resource
            capacity[resource] = capacity.get(resource, 0) + pool.gpus_per_node * pool.node_count
    return capacity


@dataclass(frozen=True, slots=True, kw_only=True)
class VariantVersions:
    """Versions in the image of a variant, and those that it may have. All nodes of one Ray cluster need the same.

    A range starts with its first version and ends before its second.
    """

    ray: str
    vllm: str
    cuda: str
    ray_range: tuple[str, str]
    vllm_range: tuple[str, str]


# After 0.19.1 vLLM's wheels have no code for compute capability 7.0; CUDA 13 has none either. Before Ray 2.53 KubeRay's
# probes run wget, which the image lacks.
IMAGE_VARIANTS: Final[dict[ImageVariant, VariantVersions]] = {
    "cpu": VariantVersions(
        ray="2.60.0",
        vllm="0.32.0",
        cuda="",
        ray_range=("2.60", "3"),
        vllm_range=("0.32", "1"),
    ),
    "v100": VariantVersions(
        ray="2.55.1",
        vllm="0.19.1",
        cuda="12.8",
        ray_range=("2.53", "2.56"),
        vllm_range=("0.19", "0.19.2"),
    ),
    "cuda13": VariantVersions(
        ray="2.60.0",
        vllm="0.29.0",
        cuda="13.0",
        ray_range=("2.60", "3"),
        vllm_range=("0.29", "1"),
    ),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class RayImage:
    """The image of a variant, and what it holds.

    Attributes:
        reference: the image by digest.
        ray: the version of Ray.
        vllm: the version of vLLM.
    """

    reference: str
    ray: str
    vllm: str
