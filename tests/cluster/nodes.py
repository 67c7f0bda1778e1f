"""Nodes without a kubelet: the scheduler binds pods to them, and nothing runs there."""

import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from datetime import UTC, datetime
from typing import Any, Final

import httpx

from tests.cluster.api import ApiError, KubernetesApi

_PAUSE_S: Final = 0.5
_KUBELET: Final = "kubelet"


def add_node(api: KubernetesApi, name: str, capacity: Mapping[str, str]) -> None:
    """Makes a node that is ready.

    Args:
        api: the cluster.
        name: of the node.
        capacity: of cpu, memory and other resources, e.g. ``nvidia.com/gpu``.
    """
    node: dict[str, Any] = {"apiVersion": "v1", "kind": "Node", "metadata": {"name": name}}
    api.create(node)
    room = {"pods": "110", "ephemeral-storage": "200Gi", **capacity}
    api.patch({**node, "status": {"capacity": room, "allocatable": room}}, field_manager=_KUBELET, subresource="status")
    set_ready(api, name, ready=True)


def set_ready(api: KubernetesApi, name: str, *, ready: bool) -> None:
    """Says what the node's kubelet would say of it."""
    now = datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
    condition = {
        "type": "Ready",
        "status": str(ready),
        "reason": "StandIn",
        "message": "",
        "lastHeartbeatTime": now,
        "lastTransitionTime": now,
    }
    node: dict[str, Any] = {"apiVersion": "v1", "kind": "Node", "metadata": {"name": name}}
    api.patch({**node, "status": {"conditions": [condition]}}, field_manager=_KUBELET, subresource="status")


@contextmanager
def deleted_pods_end(api: KubernetesApi) -> Iterator[None]:
    """Does what a kubelet does at the end of a pod: says that it is gone, so that its deletion ends."""
    done = threading.Event()

    def end_pods() -> None:
        while not done.wait(_PAUSE_S):
            # What is not done now is done next time.
            with suppress(ApiError, httpx.TransportError):
                for pod in api.list("v1", "Pod"):
                    metadata = pod["metadata"]
                    if "deletionTimestamp" in metadata:
                        api.delete("v1", "Pod", metadata["name"], metadata["namespace"], now=True)

    thread = threading.Thread(target=end_pods)
    thread.start()
    try:
        yield
    finally:
        done.set()
        thread.join()


def wait_until_untainted(api: KubernetesApi, name: str, *, within_s: float = 30) -> None:
    """Waits until the node controller has noticed that a new node is ready."""
    end = time.monotonic() + within_s
    while (node := api.find("v1", "Node", name)) and node["spec"].get("taints"):
        if time.monotonic() > end:
            raise TimeoutError(f"the node {name} still has the taints {node['spec']['taints']}")
        time.sleep(0.2)
