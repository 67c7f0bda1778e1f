"""Nodes whose kubelet kwok simulates: pods bound to them run at once and end when they are deleted."""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final

from infra.capacity.pools import NodePool
from infra.shared_platform.node_pools import node_patch
from ray_job.contract.cluster import GPU_RESOURCE
from service.local.ray_head import free_ports
from tests.cluster.api import KubernetesApi
from tests.cluster.control_plane import ControlPlane
from tests.cluster.go_modules import module_directory
from tests.cluster.nodes import wait_until_untainted
from tests.cluster.ports import answers
from tests.cluster.processes import Process

ANNOTATION: Final = "kwok.x-k8s.io/node"
_MODULE: Final = "sigs.k8s.io/kwok"
_REQUIRING: Final = Path(__file__).parents[1] / "go_addons"
_MANAGER: Final = "stack"
_STAGES: Final = ("node/fast/node-initialize", "pod/fast/pod-ready", "pod/fast/pod-delete")
"""What kwok does with nodes and pods, by its own files. Leases are left out: nobody here doubts that nodes live."""


def kwok(cluster: ControlPlane) -> Process:
    """Return the kwok controller, for nodes with its annotation."""
    (port,) = free_ports(1)
    stages = module_directory(_REQUIRING, _MODULE) / "kustomize" / "stage"
    command = [
        str(cluster.bin / "kwok"),
        f"--kubeconfig={cluster.kubeconfig}",
        *(f"--config={stages / stage}.yaml" for stage in _STAGES),
        f"--manage-nodes-with-annotation-selector={ANNOTATION}=fake",
        "--node-lease-duration-seconds=0",
        f"--server-address=127.0.0.1:{port}",
    ]
    # Otherwise it reads a configuration in the home directory.
    environment = {"HOME": str(cluster.directory)}
    log = cluster.directory / "kwok.log"
    return Process(command, log=log, environment=environment, is_ready=answers(f"http://127.0.0.1:{port}/healthz"))


@contextmanager
def nodes_of(api: KubernetesApi, pools: Iterable[NodePool]) -> Iterator[None]:
    """Return the nodes that pools name, with the size, labels and taints of the stack."""
    made = [(pool, node) for pool in pools for node in pool.nodes]
    for pool, node in made:
        _add_node(api, pool, node)
    try:
        yield
    finally:
        for _, node in made:
            api.delete("v1", "Node", node)


def _add_node(api: KubernetesApi, pool: NodePool, name: str) -> None:
    kind = {"apiVersion": "v1", "kind": "Node"}
    room = {
        "pods": "110",
        "ephemeral-storage": "500Gi",
        "cpu": str(pool.cpus),
        "memory": f"{pool.memory_gib}Gi",
        GPU_RESOURCE: str(pool.gpus_per_node),
    }
    metadata = {"name": name, "annotations": {ANNOTATION: "fake"}}
    api.create({**kind, "metadata": metadata, "status": {"capacity": room, "allocatable": room}})
    wait_until_untainted(api, name)
    api.apply({**kind, **node_patch(pool, name, field_manager=_MANAGER)}, field_manager=_MANAGER)
