"""Waits for conditions of the cluster; timeouts report the reason."""

import time
from collections.abc import Callable
from typing import Final

from tests.cluster.api import JsonObject, KubernetesApi
from tests.cluster.readiness import wait_until_ready

_PAUSE_S: Final = 0.2


def wait_until_node_ready(api: KubernetesApi, name: str, *, within_s: float = 60) -> None:
    """Wait until pods can be scheduled on a node."""

    def takes_pods() -> bool:
        node = api.find("v1", "Node", name)
        return node is not None and is_ready(node) and not node["spec"].get("taints")

    def why() -> str:
        node = api.find("v1", "Node", name)
        return str(node["status"].get("conditions")) if node else "it has not been registered"

    wait_until(takes_pods, f"node {name} ready", why, within_s=within_s)


def wait_until_available(api: KubernetesApi, name: str, namespace: str, *, within_s: float = 120) -> None:
    """Wait until a Deployment is available."""
    metadata = {"name": name, "namespace": namespace}
    wait_until_ready(api, {"apiVersion": "apps/v1", "kind": "Deployment", "metadata": metadata}, within_s=within_s)


def wait_until(is_so: Callable[[], bool], what: str, why_not: Callable[[], str], *, within_s: float) -> None:
    """Poll until the condition is true.

    Raises:
        TimeoutError: it was not true in time; the message names the condition and the state instead.
    """
    end = time.monotonic() + within_s
    while not is_so():
        if time.monotonic() > end:
            raise TimeoutError(f"{what}: not so after {within_s:.0f} s; {why_not()}")
        time.sleep(_PAUSE_S)


def is_ready(node: JsonObject) -> bool:
    """Return whether the node's Ready condition is true, which it stays for a while after the kubelet has stopped."""
    return ("Ready", "True") in {(each["type"], each["status"]) for each in node["status"].get("conditions", ())}
