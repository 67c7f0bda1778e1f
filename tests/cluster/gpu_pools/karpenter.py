"""Karpenter with its kwok provider: real decisions about nodes that kwok then simulates."""

import json
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Final

import yaml

from infra.capacity.pools import NodePool
from ray_job.contract.cluster import GPU_RESOURCE
from service.local.ray_head import free_ports
from tests.cluster.api import JsonObject, KubernetesApi
from tests.cluster.control_plane import ControlPlane
from tests.cluster.go_modules import module_directory
from tests.cluster.ports import answers
from tests.cluster.processes import Process

_MODULE: Final = "sigs.k8s.io/karpenter"
_REQUIRING: Final = Path(__file__).parents[1] / "go_karpenter"
_DEFINITIONS: Final = ("pkg/apis/crds", "kwok/apis/crds")
_NODE_POOLS: Final = ("karpenter.sh/v1", "NodePool")
_NODE_CLASSES: Final = ("karpenter.kwok.sh/v1alpha1", "KWOKNodeClass")
_MACHINES: Final = "machines"


def install_crds(api: KubernetesApi) -> None:
    """Create the custom resource definitions, and return when the server serves them."""
    source = module_directory(_REQUIRING, _MODULE)
    for directory in _DEFINITIONS:
        for path in sorted((source / directory).glob("*.yaml")):
            api.create(yaml.load(path.read_text(), Loader=yaml.CSafeLoader))
    for kind in (_NODE_POOLS, _NODE_CLASSES):
        api.wait_until_known(*kind)


def karpenter(cluster: ControlPlane, pools: Iterable[NodePool]) -> Process:
    """Return Karpenter as a process outside of the cluster; its definitions must exist.

    Args:
        cluster: control plane with the pods that need nodes.
        pools: pools for which it can provide machines of the size of their nodes.
    """
    machines = cluster.directory / "machines.json"
    machines.write_text(json.dumps([_machine(pool) for pool in pools]))
    metrics, probes = free_ports(2)
    command = [
        str(cluster.bin / "karpenter"),
        f"--instance-types-file-path={machines}",
        f"--metrics-port={metrics}",
        f"--health-probe-port={probes}",
        "--disable-leader-election",
        "--batch-idle-duration=100ms",
    ]
    environment = {"KUBECONFIG": str(cluster.kubeconfig), "HOME": str(cluster.directory), "SYSTEM_NAMESPACE": "default"}
    log = cluster.directory / "karpenter.log"
    return Process(command, log=log, environment=environment, is_ready=answers(f"http://127.0.0.1:{probes}/readyz"))


@contextmanager
def node_pools(api: KubernetesApi, pools: Iterable[NodePool]) -> Iterator[None]:
    """Return Karpenter's objects for a stack's pools, with the labels and taints that the stack's pods select."""
    made = [_node_class(), *(_node_pool(pool) for pool in pools)]
    for each in made:
        api.create(each)
    try:
        yield
    finally:
        for each in reversed(made):
            place = (each["apiVersion"], each["kind"], each["metadata"]["name"])
            api.delete(*place)
            # Remove its nodes before it ends, so that Karpenter terminates them.
            api.wait_until_gone(*place, within_s=60)


def _node_class() -> JsonObject:
    api_version, kind = _NODE_CLASSES
    return {"apiVersion": api_version, "kind": kind, "metadata": {"name": _MACHINES}, "spec": {}}


def _machine(pool: NodePool) -> JsonObject:
    resources = {
        # The provider reserves a tenth of a CPU and 10 MiB of each machine for the system.
        "cpu": f"{pool.cpus * 1000 + 100}m",
        "memory": f"{pool.memory_mib + 10}Mi",
        "ephemeral-storage": "500Gi",
        GPU_RESOURCE: str(pool.gpus_per_node),
    }
    where = {"karpenter.sh/capacity-type": "on-demand", "topology.kubernetes.io/zone": "here"}
    return {
        "name": pool.name,
        "architecture": "amd64",
        "operatingSystems": ["linux"],
        "resources": resources,
        "offerings": [{"Price": 1.0, "Available": True, "Requirements": _requirements(where)}],
    }


def _node_pool(pool: NodePool) -> JsonObject:
    api_version, kind = _NODE_POOLS
    return {
        "apiVersion": api_version,
        "kind": kind,
        "metadata": {"name": pool.name},
        "spec": {
            "limits": {GPU_RESOURCE: str(pool.node_count * pool.gpus_per_node)},
            # Also for nodes with pods: a job's pods request not to be moved themselves.
            "disruption": {"consolidationPolicy": "WhenEmptyOrUnderutilized", "consolidateAfter": "1s"},
            "template": {
                "metadata": {"labels": pool.labels},
                "spec": {
                    "nodeClassRef": {"group": "karpenter.kwok.sh", "kind": _NODE_CLASSES[1], "name": _MACHINES},
                    "taints": pool.taints,
                    "requirements": _requirements({"node.kubernetes.io/instance-type": pool.name}),
                },
            },
        },
    }


def _requirements(values: Mapping[str, str]) -> list[JsonObject]:
    return [{"key": key, "operator": "In", "values": [value]} for key, value in values.items()]
