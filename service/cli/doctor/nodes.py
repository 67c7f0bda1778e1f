"""The node pools: nodes that are ready, GPUs that Kubernetes knows of, and room for the pods of every model. Pure."""

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from decimal import Decimal
from typing import Any, Final

from kubernetes.utils.quantity import parse_quantity

from service.cli.doctor.cluster_api import JsonObject
from service.cli.doctor.findings import Finding, failed, not_checked, ok

POOL_LABEL: Final = "cloister.dev/pool"
GPU_RESOURCE: Final = "nvidia.com/gpu"
GPU_POOLS: Final = ("v100", "a10g")
_ALWAYS_THERE: Final = ("system", "cpu")
_COMPARED: Final = ("cpu", "memory", "ephemeral-storage", GPU_RESOURCE)
# What NVIDIA's feature discovery writes, where it runs.
_PRODUCT_LABEL: Final = "nvidia.com/gpu.product"


@dataclass(frozen=True, slots=True, kw_only=True)
class Group:
    """Pods of one kind in a model's RayJob: where they go, what one of them asks for, and its volume claims."""

    template: str
    name: str
    pool: str
    requests: Mapping[str, Decimal]
    claims: tuple[str, ...]


def groups(templates: Mapping[str, JsonObject]) -> Iterator[Group]:
    """The groups of pods of all RayJob templates, by the templates' names."""
    for template, rayjob in templates.items():
        cluster = rayjob["spec"]["rayClusterSpec"]
        for group in (cluster["headGroupSpec"], *cluster.get("workerGroupSpecs", [])):
            spec = group["template"]["spec"]
            requests: dict[str, Decimal] = {}
            for container in spec["containers"]:
                for resource, quantity in container.get("resources", {}).get("requests", {}).items():
                    requests[resource] = requests.get(resource, Decimal()) + _parsed(quantity)
            yield Group(
                template=template,
                name=group.get("groupName", "head"),
                pool=spec.get("nodeSelector", {}).get(POOL_LABEL, ""),
                requests=requests,
                claims=tuple(
                    volume["persistentVolumeClaim"]["claimName"]
                    for volume in spec.get("volumes", [])
                    if "persistentVolumeClaim" in volume
                ),
            )


def judge_nodes(nodes: Sequence[JsonObject], wanted: Sequence[Group], *, is_deployed: bool) -> Iterator[Finding]:
    """What can be said of the pools.

    Args:
        nodes: all nodes of the cluster.
        wanted: what the models of the stack ask for; empty where that is not known.
        is_deployed: whether a stack is there; before, no node need have a label.
    """
    pools: dict[str, list[JsonObject]] = defaultdict(list)
    for node in nodes:
        if pool := node["metadata"].get("labels", {}).get(POOL_LABEL):
            pools[pool].append(node)
    if not pools and not is_deployed:
        yield not_checked("node pools", f"no node has the label {POOL_LABEL} yet; the first `pulumi up` sets it")
        return
    for pool in dict.fromkeys((*_ALWAYS_THERE, *pools, *(group.pool for group in wanted if group.pool))):
        yield from _judge_pool(pool, pools.get(pool, []), [group for group in wanted if group.pool == pool])


def _judge_pool(pool: str, nodes: Sequence[JsonObject], wanted: Iterable[Group]) -> Iterator[Finding]:
    check = f"node pool {pool}"
    if not nodes:
        hint = f"`kubectl label node NAME {POOL_LABEL}={pool}`, or `node_pools.manage_nodes` in the stack file, sets it"
        if pool in GPU_POOLS:
            yield not_checked(check, f"it has no node now. Right where an autoscaler makes them; elsewhere {hint}")
        else:
            yield failed(check, f"no node has the label {POOL_LABEL}={pool}: pods of it wait for ever. {hint}")
        return
    problems = [f"{_name(node)}: {problem}" for node in nodes for problem in _gpu_problems(pool, node)]
    if all(_away(node) for node in nodes):
        problems += ["no node of it takes pods; `kubectl describe node` says why, `kubectl uncordon` ends a drain"]
    for group in wanted:
        problems += _too_small(group, nodes)
    described = ", ".join(map(_described, nodes))
    if problems:
        yield failed(check, f"{described}: {'; '.join(problems)}")
    else:
        yield ok(check, described)


def _away(node: JsonObject) -> str:
    """Why a node takes no pods now, which is normal of one among others; empty where it does."""
    conditions = {each["type"]: each["status"] for each in node.get("status", {}).get("conditions", [])}
    if conditions.get("Ready") != "True":
        return "not ready"
    return "cordoned" if node.get("spec", {}).get("unschedulable") else ""


def _gpu_problems(pool: str, node: JsonObject) -> Iterator[str]:
    if pool not in GPU_POOLS:
        return
    if not _allocatable(node, GPU_RESOURCE):
        yield (
            f"no {GPU_RESOURCE} in its Allocatable. See that driver and NVIDIA container toolkit are on it, that "
            "`nvidia` is its default runtime, and that the device plugin runs there (`device_plugin.install`)"
        )
    if not any(taint["key"] == GPU_RESOURCE for taint in node.get("spec", {}).get("taints", [])):
        yield (
            f"no taint {GPU_RESOURCE}, so that pods without need of a GPU land on it: `kubectl taint node NAME "
            f"{GPU_RESOURCE}=present:NoSchedule`"
        )


def _too_small(group: Group, nodes: Sequence[JsonObject]) -> Iterator[str]:
    compared = [resource for resource in _COMPARED if group.requests.get(resource)]
    if any(all(group.requests[each] <= _allocatable(node, each) for each in compared) for node in nodes):
        return
    lacking = {
        each: most
        for each in compared
        if (most := max(_allocatable(node, each) for node in nodes)) < group.requests[each]
    }
    asked = ", ".join(
        f"{each} {_shown(each, group.requests[each])} (the most is {_shown(each, most)})"
        for each, most in lacking.items()
    )
    yield (
        f"no node holds a pod {group.name!r} of {group.template}, which asks for {asked or 'more than any one has'}: "
        "it stays Pending. Lower what the stack file says of the pool's nodes"
    )


def _allocatable(node: JsonObject, resource: str) -> Decimal:
    return _parsed(node.get("status", {}).get("allocatable", {}).get(resource, "0"))


def _parsed(quantity: Any) -> Decimal:
    parsed: Decimal = parse_quantity(quantity)  # type: ignore[no-untyped-call]
    return parsed


def _described(node: JsonObject) -> str:
    gpus = _allocatable(node, GPU_RESOURCE)
    product = node["metadata"].get("labels", {}).get(_PRODUCT_LABEL, "GPU")
    state = f" ({_away(node)})" if _away(node) else ""
    return f"{_name(node)}{f' with {gpus} x {product}' if gpus else ''}{state}"


def _shown(resource: str, quantity: Decimal) -> str:
    if resource in {"memory", "ephemeral-storage"}:
        return f"{quantity / 1024**3:.1f} GiB"
    return f"{quantity.normalize():f}"


def _name(node: JsonObject) -> str:
    return str(node["metadata"]["name"])
