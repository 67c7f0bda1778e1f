"""GPUs: nodes, drivers and runtime classes of the GPU pools, and a computation in a pod of each."""

import csv
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Final, Self

from ray_job.contract.accelerators import Accelerator, capability_text
from service.doctor.cluster_api import ClusterApi, JsonObject
from service.doctor.findings import Finding
from service.doctor.nodes import Node
from service.doctor.preflight.stack_facts import Pool, StackFacts

# Labels of NVIDIA's GPU feature discovery, newer and older ones:
# https://github.com/NVIDIA/k8s-device-plugin/tree/main/docs/gpu-feature-discovery
_DRIVER_LABELS: Final = (
    "nvidia.com/cuda.driver-version.full",
    "nvidia.com/cuda.driver-version.major",
    "nvidia.com/cuda.driver.major",
)
_OWN_RUNTIMES: Final = ("+k3s", "+rke2")
_RUNTIME_CLASSES: Final = "/apis/node.k8s.io/v1/runtimeclasses"
_SMI_FIELDS: Final = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class GpuFacts:
    """Result of the computation in a pod.

    Attributes:
        name: name of the GPU.
        driver: version of the driver; empty without ``nvidia-smi``.
        memory_mib: its memory in MiB, by ``nvidia-smi``; that of a MIG slice, and without ``nvidia-smi``, by torch.
        capability: compute capability.
    """

    name: str
    driver: str
    memory_mib: int
    capability: tuple[int, int]

    @classmethod
    def parse(cls, answer: Mapping[str, Any], *, is_mig: bool) -> Self | None:
        """Parse the output of ``gpu_program``; None if torch found no GPU."""
        seen = answer["torch"]
        if not seen:
            return None
        rows = [[cell.strip() for cell in row] for row in csv.reader(str(answer["smi"]).splitlines())]
        smi = rows[0] if rows and len(rows[0]) == _SMI_FIELDS and rows[0][2].isdecimal() else None
        major, minor = seen["capability"]
        return cls(
            name=str(smi[0] if smi else seen["name"]),
            driver=smi[1] if smi else "",
            memory_mib=int(smi[2]) if smi and not is_mig else int(seen["memory_mib"]),
            capability=(int(major), int(minor)),
        )


def check_pool_nodes(api: ClusterApi, facts: StackFacts) -> Iterator[Finding]:
    """Check the nodes that the stack file names: that they exist, and GPUs, driver and runtime of GPU pools."""
    nodes = {node["metadata"]["name"]: node for node in api.items("/api/v1/nodes")}
    handlers = {each["metadata"]["name"]: each.get("handler") for each in api.items(_RUNTIME_CLASSES)}
    for pool in facts.pools:
        key = f"node_pools.{pool.name}"
        if missing := [name for name in pool.nodes if name not in nodes]:
            yield Finding.failed(
                f"nodes of {pool.name}", f"the cluster has no node {', '.join(missing)}: correct `{key}.nodes`"
            )
        if not pool.accelerator:
            continue
        if pool.runtime_class and pool.runtime_class not in handlers:
            yield Finding.failed(
                f"runtime class of {pool.name}",
                f"there is no RuntimeClass {pool.runtime_class} (`{key}.runtime_class`). The cluster has: "
                f"{', '.join(handlers) or 'none'}",
            )
        for name in pool.nodes:
            if name in nodes:
                yield from _check_gpu_node(nodes[name], pool, pool.accelerator, facts, handlers)


def _check_gpu_node(
    body: JsonObject, pool: Pool, accelerator: Accelerator, facts: StackFacts, handlers: Mapping[str, str | None]
) -> Iterator[Finding]:
    node, resource = Node.parse(body), accelerator.resource
    check = f"GPUs of {node.name}"
    if count := node.allocatable[resource]:
        yield Finding.ok(check, f"{count} x {resource} in Allocatable")
    elif facts.installs_device_plugin:
        yield Finding.not_checked(
            check, f"no {resource} in Allocatable; `pulumi up` installs the device plugin (`device_plugin.install`)"
        )
    else:
        yield Finding.failed(
            check,
            f"no {resource} in Allocatable, and `device_plugin.install` is false: set it to true, or repair the "
            "device plugin of the cluster. It needs the driver and the NVIDIA container toolkit on the node",
        )
    labels = body["metadata"].get("labels", {})
    if driver := next((labels[label] for label in _DRIVER_LABELS if label in labels), ""):
        yield driver_finding(f"driver of {node.name}", driver, accelerator)
    version = body["status"].get("nodeInfo", {}).get("kubeletVersion", "")
    nvidia = [name for name, handler in handlers.items() if handler == "nvidia"]
    if not pool.runtime_class and any(mark in version for mark in _OWN_RUNTIMES):
        create = "" if nvidia else "create a RuntimeClass with the handler `nvidia` and "
        yield Finding.warning(
            f"runtime class of {pool.name}",
            f"{node.name} runs {version}, whose default runtime gives containers no GPU: {create}set "
            f"`node_pools.{pool.name}.runtime_class: {next(iter(nvidia), 'nvidia')}`. With a GPU Operator from 25.10 "
            "nothing is needed. `--gpu-check` shows which holds",
        )


def driver_finding(check: str, driver: str, accelerator: Accelerator) -> Finding:
    """Compare a driver with the oldest that the image of an accelerator runs with.

    Args:
        check: the subject of the finding.
        driver: its version, ``580.65.06``, or its major version.
        accelerator: the accelerator.
    """
    floor, major = accelerator.min_driver, driver.partition(".")[0]
    if not major.isdecimal():
        return Finding.not_checked(check, f"{driver!r} is not the version of a driver")
    if int(major) < floor:
        return Finding.failed(
            check,
            f"{driver} is older than {floor}, which the image `images.ray_{accelerator.image_variant}` needs: upgrade "
            "the driver of the node",
        )
    return Finding.ok(check, f"{driver}; `images.ray_{accelerator.image_variant}` needs {floor} or newer")


def gpu_findings(pool: Pool, accelerator: Accelerator, answer: Mapping[str, Any]) -> Iterator[Finding]:
    """Compare a GPU with the accelerator table.

    Args:
        pool: the node pool.
        accelerator: its accelerator.
        answer: output of ``gpu_program`` in one of its pods.
    """
    check = f"GPU of {pool.name}"
    found = GpuFacts.parse(answer, is_mig=accelerator.is_mig)
    if found is None:
        devices = ", ".join(answer["devices"]) or "no /dev/nvidia* device"
        mend = (
            f"check that the handler of RuntimeClass {pool.runtime_class} is NVIDIA's"
            if pool.runtime_class
            else f"set `node_pools.{pool.name}.runtime_class`, or make `nvidia` the default runtime of the nodes"
        )
        yield Finding.failed(
            check,
            f"a pod that requests {accelerator.resource} computes nothing: {answer['error']} The pod has {devices}: "
            f"{mend}",
        )
        return
    seen = f"{found.name}, {found.memory_mib:,} MiB, compute capability {capability_text(found.capability)}"
    if answer["error"]:
        yield Finding.failed(check, f"{seen}: {answer['error']}. Check driver and image")
        return
    problems = []
    if accelerator.capability and found.capability != accelerator.capability:
        problems.append(f"the table has compute capability {capability_text(accelerator.capability)}")
    if accelerator.product and accelerator.product not in found.name:
        problems.append(f"the table has a {accelerator.product}")
    if problems:
        yield Finding.failed(
            check, f"{seen}; {' and '.join(problems)}: name the pool after its GPU, or add it to `accelerators`"
        )
    elif found.memory_mib < accelerator.memory_mib:
        limit = found.memory_mib // 1024
        yield Finding.warning(
            check,
            f"{seen}; the table has {accelerator.memory_mib:,} MiB, so a model can pass the preview and not fit: set "
            f"`node_pools.{pool.name}.gpu_memory_gib: {limit}`",
        )
    else:
        yield Finding.ok(check, f"{seen}: a product of matrices is right")
    if found.driver:
        yield driver_finding(f"driver of {pool.name}", found.driver, accelerator)
