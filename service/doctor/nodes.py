"""Node pools: ready nodes, GPUs that Kubernetes can allocate, and room for the pods of every model."""

import itertools
import json
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from decimal import Decimal
from typing import Any, Final, Self

from kubernetes.utils.quantity import parse_quantity

from ray_job.contract.cluster import GPU_RESOURCE, JOB_TEMPLATES, POOL_LABEL, job_templates_name
from service.doctor.cluster_api import ClusterApi, JsonObject
from service.doctor.findings import Finding
from service.errors import SettingsError

# Pools without GPUs. A stack may do without them, where nodes with GPUs have spare CPUs.
_CPU_POOLS: Final = ("system", "cpu")
# Set by NVIDIA's GPU feature discovery, if it runs.
_PRODUCT_LABEL: Final = "nvidia.com/gpu.product"


@dataclass(frozen=True, slots=True, kw_only=True)
class Node:
    """A node of a pool.

    Attributes:
        name: its name.
        labels: its labels.
        allocatable: the amount of each resource that pods can request.
        gpu_product: the product name of its GPUs.
        unavailable: the reason why it takes no new pods now; empty if it takes pods.
        has_taint: whether a taint keeps pods without a toleration away.
    """

    name: str
    labels: Mapping[str, str]
    allocatable: Mapping[str, Decimal]
    gpu_product: str
    unavailable: str
    has_taint: bool

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
            labels=labels,
            allocatable=allocatable,
            gpu_product=labels.get(_PRODUCT_LABEL, "GPU"),
            unavailable=cordoned if is_ready else "not ready",
            has_taint=any(taint["effect"] == "NoSchedule" for taint in spec.get("taints", [])),
        )

    def __str__(self) -> str:
        gpus = self.allocatable[GPU_RESOURCE]
        described = f"{self.name} with {gpus} x {self.gpu_product}" if gpus else self.name
        return f"{described} ({self.unavailable})" if self.unavailable else described

    def gpu_problems(self, resource: str) -> Iterator[str]:
        """Yield the reasons why pods cannot use the GPUs of this node, or others may take its CPUs.

        Args:
            resource: the resource name of the GPUs.
        """
        if not self.allocatable[resource]:
            yield (
                f"{self.name}: no {resource} in its Allocatable. Check that the driver and the NVIDIA container "
                "toolkit are installed, that `nvidia` is the default runtime, and that the device plugin runs there "
                "(`device_plugin.install`)"
            )
        if not self.has_taint:
            yield (
                f"{self.name}: no taint, so pods that need no GPU can run there: `kubectl taint node "
                f"NAME {GPU_RESOURCE}=present:NoSchedule`"
            )


@dataclass(frozen=True, slots=True)
class Place:
    """Nodes with certain labels, to which pods are bound.

    Attributes:
        labels: the labels, in the order of their names.
    """

    labels: tuple[tuple[str, str], ...]

    def __str__(self) -> str:
        named = dict(self.labels).get(POOL_LABEL)
        return named if named and len(self.labels) == 1 else ",".join("=".join(label) for label in self.labels)

    @property
    def selector(self) -> str:
        """The labels as ``kubectl`` takes them."""
        return ",".join("=".join(label) for label in self.labels)

    def has(self, node: Node) -> bool:
        """Return whether a node has the labels."""
        return self.labels == tuple((name, node.labels.get(name)) for name, _ in self.labels)


def _pool(name: str) -> Place:
    return Place(((POOL_LABEL, name),))


def _places(pod: Mapping[str, Any]) -> tuple[Place, ...]:
    """Return the alternatives of a pod specification, none if it may run on any node."""
    if selector := pod.get("nodeSelector"):
        return (Place(tuple(sorted(selector.items()))),)
    required = pod.get("affinity", {}).get("nodeAffinity", {}).get("requiredDuringSchedulingIgnoredDuringExecution", {})
    return tuple(
        Place(tuple(sorted((each["key"], each["values"][0]) for each in term["matchExpressions"])))
        for term in required.get("nodeSelectorTerms", [])
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class PodGroup:
    """Pods of one kind in a job template.

    Attributes:
        template: the name of the job template.
        name: the name of the group.
        places: its nodes, as alternatives; empty for any node.
        requests: the amount of each resource that one pod requests.
        claims: the volume claims that it mounts.
    """

    template: str
    name: str
    places: tuple[Place, ...]
    requests: Mapping[str, Decimal]
    claims: tuple[str, ...]

    @property
    def gpu_resource(self) -> str:
        """The resource name of the GPUs that a pod requests; empty for pods without GPUs."""
        # A MIG slice has a resource name of its own.
        return next((name for name in self.requests if "/" in name), "")

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
                        places=_places(spec),
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
    """Check that the nodes of each pool can run the pods of the service and of every model.

    Args:
        api: the cluster.
        namespace: the service namespace; empty before there is a stack, when nodes need no label.
    """
    groups = read_pod_groups(api, namespace) if namespace else []
    nodes = [Node.parse(node) for node in api.items("/api/v1/nodes")]
    labelled = dict.fromkeys(node.labels[POOL_LABEL] for node in nodes if POOL_LABEL in node.labels)
    if not namespace and not labelled:
        yield Finding.not_checked("node pools", f"no node has the label {POOL_LABEL}; the first `pulumi up` sets it")
        return
    service = [] if not namespace else api.items(f"/apis/apps/v1/namespaces/{namespace}/deployments")
    bound = [_places(each["spec"]["template"]["spec"]) for each in service] + [group.places for group in groups]
    for place in dict.fromkeys((*itertools.chain(*bound), *map(_pool, labelled))):
        of_place = [group for group in groups if place in group.places]
        resource = next(filter(None, (group.gpu_resource for group in of_place)), "")
        if not resource and place.labels[0][0] == POOL_LABEL and str(place) not in _CPU_POOLS:
            resource = GPU_RESOURCE  # a pool that no model uses
        # An empty pool is a problem if its pods have no alternative, and no autoscaler creates nodes for them.
        may_be_empty = bool(resource) or all(len(alternatives) > 1 for alternatives in bound if place in alternatives)
        yield _place_finding(place, [node for node in nodes if place.has(node)], of_place, resource, may_be_empty)


def _place_finding(
    place: Place, nodes: Sequence[Node], groups: Sequence[PodGroup], resource: str, may_be_empty: bool
) -> Finding:
    """Return the finding of a place.

    Args:
        place: the place.
        nodes: its nodes.
        groups: the pods of jobs that it runs.
        resource: the resource name of its GPUs; empty if it has none.
        may_be_empty: whether it is right that it has no node.
    """
    check = f"node pool {place}"
    if not nodes:
        advice = f"run `kubectl label node NAME {place.selector}`, or set `node_pools.manage_nodes`"
        if may_be_empty:
            return Finding.not_checked(
                check, f"it has no node now. This is right if an autoscaler creates them; otherwise {advice}"
            )
        return Finding.failed(check, f"no node has the label {place.selector}, so its pods stay Pending: {advice}")
    problems = [problem for node in nodes if resource for problem in node.gpu_problems(resource)]
    if all(node.unavailable for node in nodes):
        problems.append(
            "none of its nodes takes pods; `kubectl describe node` shows the reason, `kubectl uncordon` ends a drain"
        )
    # Pods with alternatives may fit elsewhere.
    problems += filter(None, (group.capacity_problem(nodes) for group in groups if len(group.places) == 1))
    described = ", ".join(map(str, nodes))
    return Finding.failed(check, f"{described}: {'; '.join(problems)}") if problems else Finding.ok(check, described)
