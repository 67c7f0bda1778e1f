"""Nodes without a kubelet: the scheduler binds pods to them, and the pods never run."""

import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from datetime import UTC, datetime
from types import MappingProxyType
from typing import Any, Final

import httpx

from tests.cluster.api import ApiError, KubernetesApi

_PAUSE_S: Final = 0.5
_KUBELET: Final = "kubelet"


def add_node(
    api: KubernetesApi, name: str, capacity: Mapping[str, str], annotations: Mapping[str, str] = MappingProxyType({})
) -> None:
    """Create a node that is ready.

    Args:
        api: API server of the cluster.
        name: name of the node.
        capacity: quantity of cpu, memory and other resources, e.g. ``nvidia.com/gpu``.
        annotations: its annotations.
    """
    metadata = {"name": name, "annotations": dict(annotations)}
    node: dict[str, Any] = {"apiVersion": "v1", "kind": "Node", "metadata": metadata}
    api.create(node)
    room = {"pods": "110", "ephemeral-storage": "200Gi", **capacity}
    api.patch({**node, "status": {"capacity": room, "allocatable": room}}, field_manager=_KUBELET, subresource="status")
    set_ready(api, name, ready=True)


def set_ready(api: KubernetesApi, name: str, *, ready: bool) -> None:
    """Set the node's Ready condition, as its kubelet would."""
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
    """Remove pods that are being deleted, as a kubelet does after their containers have ended."""
    done = threading.Event()

    def end_pods() -> None:
        while not done.wait(_PAUSE_S):
            # A failed attempt is repeated after the pause.
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


@contextmanager
def pods_become_ready(api: KubernetesApi) -> Iterator[None]:
    """Report scheduled pods as ready, those of Jobs as succeeded, and provide volumes for claims.

    The real provider waits for this, and without a kubelet nobody else does it.
    """
    done = threading.Event()

    def act() -> None:
        while not done.wait(_PAUSE_S):
            # A failed attempt is repeated after the pause.
            with suppress(ApiError, httpx.TransportError):
                for claim in api.list("v1", "PersistentVolumeClaim"):
                    if claim["status"].get("phase") == "Pending" and not claim["spec"].get("volumeName"):
                        api.create(_volume(claim))
                for number, pod in enumerate(api.list("v1", "Pod"), start=1):
                    if pod["spec"].get("nodeName") and pod["status"].get("phase") == "Pending":
                        status = _status(pod, f"10.250.{number // 250}.{number % 250 + 1}")
                        api.patch({**_bare(pod), "status": status}, field_manager=_KUBELET, subresource="status")

    thread = threading.Thread(target=act)
    thread.start()
    try:
        yield
    finally:
        done.set()
        thread.join()


def _bare(pod: dict[str, Any]) -> dict[str, Any]:
    metadata = {key: pod["metadata"][key] for key in ("name", "namespace")}
    return {"apiVersion": "v1", "kind": "Pod", "metadata": metadata}


def _status(pod: dict[str, Any], address: str) -> dict[str, Any]:
    owners = {each["kind"] for each in pod["metadata"].get("ownerReferences", ())}
    if "Job" in owners:
        return {"phase": "Succeeded"}
    conditions = [{"type": kind, "status": "True"} for kind in ("Initialized", "ContainersReady", "Ready")]
    return {"phase": "Running", "podIP": address, "podIPs": [{"ip": address}], "conditions": conditions}


def _volume(claim: dict[str, Any]) -> dict[str, Any]:
    metadata, spec = claim["metadata"], claim["spec"]
    return {
        "apiVersion": "v1",
        "kind": "PersistentVolume",
        "metadata": {"name": f"volume-{metadata['uid']}"},
        "spec": {
            "capacity": spec["resources"]["requests"],
            "accessModes": spec["accessModes"],
            "storageClassName": spec.get("storageClassName", ""),
            "claimRef": {key: metadata[key] for key in ("namespace", "name", "uid")},
            "hostPath": {"path": "/nowhere"},
        },
    }


def wait_until_untainted(api: KubernetesApi, name: str, *, within_s: float = 30) -> None:
    """Wait until the node controller has noticed that a new node is ready."""
    end = time.monotonic() + within_s
    while (node := api.find("v1", "Node", name)) and node["spec"].get("taints"):
        if time.monotonic() > end:
            raise TimeoutError(f"the node {name} still has the taints {node['spec']['taints']}")
        time.sleep(0.2)
