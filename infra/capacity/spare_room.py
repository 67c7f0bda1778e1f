"""Check that pods without a GPU fit on the spare part of GPU nodes, where they have no nodes of their own. Pure."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from infra.capacity.job_sizes import AUTOSCALER_MIB, autoscaler_cpu_m, cpu_workers, head_size
from infra.capacity.pools import NodePool
from service.model_catalogue import CatalogueModel

API: Final = (250, 1_024)
RECONCILERS: Final = ((100, 1_024), (100, 1_024))
COORDINATOR: Final = (100, 512)
KUBERAY: Final = (500, 1_024)
BUNDLED: Final = (250, 1_024)
DATABASE_INSTANCE: Final = (1_100, 2_560)
"""Requests of the service's pods: thousandths of a CPU, and MiB. A database instance includes its backups' sidecar."""

Pods = Sequence[tuple[int, int]]


@dataclass(frozen=True, slots=True, kw_only=True)
class RunningJobs:
    """Jobs that run at the same time on one accelerator.

    Attributes:
        count: the most jobs.
        models: the models of the accelerator.
    """

    count: int
    models: Sequence[CatalogueModel]

    def pods(self, cpu_pool: NodePool) -> list[tuple[int, int]]:
        """Return the requests of the heads and of the first CPU workers: thousandths of a CPU, and MiB."""
        head, workers = head_size(cpu_pool), [cpu_workers(model.spec, cpu_pool) for model in self.models]
        own = (head.cpu_m + autoscaler_cpu_m(cpu_pool), head.memory_mib + AUTOSCALER_MIB)
        worker = (max(each.cpu_m for each in workers), max(each.memory_mib for each in workers))
        return [own, worker] * self.count


def room_problems(pools: Mapping[str, NodePool], service: Pods, jobs: Sequence[RunningJobs]) -> Iterator[str]:
    """Yield a problem, in numbers, if the pods do not fit on spare CPUs and memory of GPU nodes.

    A head without room fails its job after ``jobs.start_limit_s``, and four such jobs in a row fail batches.

    Args:
        pools: the pools by name.
        service: requests of the pods of the service.
        jobs: the jobs by accelerator.
    """
    cpu, system = pools["cpu"], pools["system"]
    hosts = cpu.hosts or (cpu,)
    if not (cpu.hosts or system.hosts) or not cpu.cpus:
        return
    of_jobs = [pod for each in jobs for pod in each.pods(cpu)]
    of_service = list(service) if system.hosts else []
    rooms = [_room(host) for host in hosts for _ in range(host.node_count)]
    if _fit([*of_service, *of_jobs], rooms):
        return
    key = f"{hosts[0].name}.{'spare_cpus' if cpu.hosts else 'cpus'}"
    shares = f"heads and CPU workers of {sum(each.count for each in jobs)} jobs need {_amount(of_jobs)}"
    if of_service:
        shares = f"the service needs {_amount(of_service)}, {shares}"
    raised = "spare_cpus and spare_memory_gib, add a pool cpu" if cpu.hosts else "cpus and memory_gib, add nodes"
    yield (
        f"node_pools.{key}: {shares}, which do not fit on {len(rooms)} nodes that have {_amount(rooms)} for them; "
        f"raise {raised}, or lower limits.max_running_jobs"
    )


def _room(host: NodePool) -> tuple[int, int]:
    """Return the part of a node that engines leave: thousandths of a CPU, and MiB."""
    if host.gpus_per_node:
        return host.spare_cpus * 1_000, host.spare_memory_gib * 1_024
    return host.cpus * 1_000, host.memory_mib


def _fit(pods: Pods, rooms: Pods) -> bool:
    """Place the largest pods first, each on the first node with room, and return whether all of them have a node."""
    free = [list(room) for room in rooms]
    for cpu_m, memory_mib in sorted(pods, key=lambda pod: (pod[1], pod[0]), reverse=True):
        node = next((node for node in free if node[0] >= cpu_m and node[1] >= memory_mib), None)
        if node is None:
            return False
        node[0] -= cpu_m
        node[1] -= memory_mib
    return True


def _amount(pods: Pods) -> str:
    cpus, memory_gib = sum(cpu_m for cpu_m, _ in pods) / 1_000, sum(memory_mib for _, memory_mib in pods) / 1_024
    return f"{cpus:g} CPUs and {memory_gib:g} GiB"
