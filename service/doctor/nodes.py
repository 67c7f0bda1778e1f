"""Node pools: ready nodes, GPUs that Kubernetes can allocate, and room for the pods of every model."""

import itertools
import json
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from decimal import Decimal
from typing import Final, Self

from kubernetes.utils.quantity import parse_quantity

from ray_job.contract.cluster import GPU_RESOURCE, JOB_TEMPLATES, POOL_LABEL, job_templates_name
from service.doctor.cluster_api import ClusterApi, JsonObject
from service.doctor.findings import Finding
from service.errors import SettingsError

# Every stack needs these pools; all other pools have GPUs.
_CPU_POOLS: Final = ("system", "cpu")
# Set by NVIDIA's GPU feature discovery, if it runs.
_PRODUCT_LABEL: Final = "nvidia.com/gpu.product"


@dataclass(frozen=True, slots=True, kw_only=True)
class Node:
    """A node of a pool.

    Attributes:
        name: its name.
        pool: its pool; empty without the label.
        allocatable: the amount of each resource that pods can request.
        gpu_product: the product name of its GPUs.
        unavailable: the reason why it takes no new pods now; empty if it takes pods.
        has_gpu_taint: whether the taint keeps pods that request no GPU away.
    """

    name: str
    pool: str
    allocatable: Mapping[str, Decimal]
    gpu_product: str
    unavailable: str
    has_gpu_taint: bool

    @classmethod
    def parse(cls, node: JsonObject) -> Self:
        """Parse a node as the Kubernetes API returns it."""
        metadata, spec, status = node["metadata"], node.get("spec", {}), node.get("status", {})
        labels = metadata.get("labels", {})
        allocatable: dict[str, Decimal] = defaultdict(Decimal)
        for resource, quantity in status.get("allocatable", {}).items():
            allocatable[resource] = parse_quantity(quantity)  # type: ignore[no-untyped-call]
        conditions = {each["type"]: each["status"] for each in status.get("conditions", [])}
        is_ready = conditions.get("Ready") == "True"
        cordoned = "cordoned" if spec.get("unschedulable") else ""
        return cls(
            name=str(metadata["name"]),
            pool=labels.get(POOL_LABEL, ""),
            allocatable=allocatable,
            gpu_product=labels.get(_PRODUCT_LABEL, "GPU"),
            unavailable=cordoned if is_ready else "not ready",
            has_gpu_taint=any(taint["key"] == GPU_RESOURCE for taint in spec.get("taints", [])),
        )

    def __str__(self) -> str:
        gpus = self.allocatable[GPU_RESOURCE]
        described = f"{self.name} with {gpus} x {self.gpu_product}" if gpus else self.name
        return f"{described} ({self.unavailable})" if self.unavailable else described

    def gpu_problems(self, resource: str) -> Iterator[str]:
        """Yield the reasons why pods cannot use the GPUs of this node, which have this resource name."""
        if not self.allocatable[resource]:
            yield (
                f"{self.name}: no {resource} in its Allocatable. Check that the driver and the NVIDIA container "
                "toolkit are installed, that `nvidia` is the default runtime, and that the device plugin runs there "
                "(`device_plugin.install`)"
            )
        if not self.has_gpu_taint:
            yield (
                f"{self.name}: no taint {GPU_RESOURCE}, so pods that need no GPU can run there: `kubectl taint node "
                f"NAME {GPU_RESOURCE}=present:NoSchedule`"
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class PodGroup:
    """Pods of one kind in a job template.

    Attributes:
        template: the name of the job template.
        name: the name of the group.
        pool: the pool of its nodes; empty for any node.
        requests: the amount of each resource that one pod requests.
        claims: the volume claims that it mounts.
    """

    template: str
    name: str
    pool: str
    requests: Mapping[str, Decimal]
    claims: tuple[str, ...]

    def capacity_problem(self, nodes: Sequence[Node]) -> str:
        """Return the reason why no node has room for one pod, even if the node is empty; empty if one has."""
        compared = [resource for resource, requested in self.requests.items() if requested]
        if any(all(self.requests[each] <= node.allocatable[each] for each in compared) for node in nodes):
            return ""
        missing = []
        for resource in compared:
            largest, requested = max(node.allocatable[resource] for node in nodes), self.requests[resource]
            if largest < requested and resource in {"memory", "ephemeral-storage"}:
                missing.append(f"{resource} {requested / 1024**3:.1f} GiB (largest node: {largest / 1024**3:.1f} GiB)")
            elif largest < requested:
                missing.append(f"{resource} {requested.normalize():f} (largest node: {largest.normalize():f})")
        return (
            f"no node has room for a pod {self.name!r} of {self.template}, which requests "
            f"{', '.join(missing) or 'more than any one node has'}: it stays Pending. Correct the size of the pool's "
            "nodes in the stack file"
        )


def read_pod_groups(api: ClusterApi, namespace: str) -> list[PodGroup]:
    """Return the pod groups in the job templates of a stack.

    Raises:
        SettingsError: a job template is not a RayJob.
    """
    texts: dict[str, str] = {}
    for number in itertools.count():
        config_map = api.find(f"/api/v1/namespaces/{namespace}/configmaps/{job_templates_name(number)}") or {}
        if not config_map.get("data"):
            break
        texts |= config_map["data"]
    groups = []
    try:
        for template, text in texts.items():
            cluster = json.loads(text)["spec"]["rayClusterSpec"]
            for group in (cluster["headGroupSpec"], *cluster.get("workerGroupSpecs", [])):
                spec = group["template"]["spec"]
                requests: dict[str, Decimal] = defaultdict(Decimal)
                for container in spec["containers"]:
                    for resource, quantity in container.get("resources", {}).get("requests", {}).items():
                        requests[resource] += parse_quantity(quantity)  # type: ignore[no-untyped-call]
                volumes = [each.get("persistentVolumeClaim") for each in spec.get("volumes", [])]
                groups.append(
                    PodGroup(
                        template=template,
                        name=group.get("groupName", "head"),
                        pool=spec.get("nodeSelector", {}).get(POOL_LABEL, ""),
                        requests=requests,
                        claims=tuple(volume["claimName"] for volume in volumes if volume),
                    )
                )
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise SettingsError(
            f"the ConfigMap {JOB_TEMPLATES} of {namespace} holds a template that is not a RayJob: `pulumi up "
            "--refresh` restores it"
        ) from error
    return groups


def check_node_pools(api: ClusterApi, namespace: str) -> Iterator[Finding]:
    """Check that the nodes of each pool can run the pods of every model.

    Args:
        api: the cluster.
        namespace: the service namespace; empty before there is a stack, when nodes need no label.
    """
    groups = read_pod_groups(api, namespace) if namespace else []
    pools: dict[str, list[Node]] = defaultdict(list)
    for node in map(Node.parse, api.items("/api/v1/nodes")):
        if node.pool:
            pools[node.pool].append(node)
    if not pools and not namespace:
        yield Finding.not_checked("node pools", f"no node has the label {POOL_LABEL}; the first `pulumi up` sets it")
        return
    for pool in dict.fromkeys((*_CPU_POOLS, *pools, *(group.pool for group in groups if group.pool))):
        check, nodes, is_gpu_pool = f"node pool {pool}", pools.get(pool, []), pool not in _CPU_POOLS
        if not nodes:
            advice = f"run `kubectl label node NAME {POOL_LABEL}={pool}`, or set `node_pools.manage_nodes`"
            if is_gpu_pool:
                yield Finding.not_checked(
                    check, f"it has no node now. This is right if an autoscaler creates them; otherwise {advice}"
                )
            else:
                yield Finding.failed(
                    check, f"no node has the label {POOL_LABEL}={pool}, so its pods stay Pending: {advice}"
                )
            continue
        # A MIG slice has a resource name of its own, which the job templates request.
        requested = (name for group in groups if group.pool == pool for name in group.requests if "/" in name)
        resource = next(requested, GPU_RESOURCE)
        problems = [problem for node in nodes if is_gpu_pool for problem in node.gpu_problems(resource)]
        if all(node.unavailable for node in nodes):
            problems.append(
                "none of its nodes takes pods; `kubectl describe node` shows the reason, `kubectl uncordon` ends a "
                "drain"
            )
        problems += filter(None, (group.capacity_problem(nodes) for group in groups if group.pool == pool))
        described = ", ".join(map(str, nodes))
        if problems:
            yield Finding.failed(check, f"{described}: {'; '.join(problems)}")
        else:
            yield Finding.ok(check, described)
