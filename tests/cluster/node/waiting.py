"""Waits for what the cluster does in its own time, and says why when it does not come."""

import time
from collections.abc import Callable
from typing import Final

from tests.cluster.api import JsonObject, KubernetesApi
from tests.cluster.readiness import wait_until_ready

_PAUSE_S: Final = 0.2


def wait_until_node_ready(api: KubernetesApi, name: str, *, within_s: float = 60) -> None:
    """Waits until pods can be scheduled on a node."""

    def takes_pods() -> bool:
        node = api.find("v1", "Node", name)
        return node is not None and is_ready(node) and not node["spec"].get("taints")

    def why() -> str:
        node = api.find("v1", "Node", name)
        return str(node["status"].get("conditions")) if node else "it has not been registered"

    wait_until(takes_pods, f"node {name} ready", why, within_s=within_s)


def wait_until_available(api: KubernetesApi, name: str, namespace: str, *, within_s: float = 120) -> None:
    """Waits until a Deployment's pods serve."""
    metadata = {"name": name, "namespace": namespace}
    wait_until_ready(api, {"apiVersion": "apps/v1", "kind": "Deployment", "metadata": metadata}, within_s=within_s)


def wait_until(is_so: Callable[[], bool], what: str, why_not: Callable[[], str], *, within_s: float) -> None:
    """Asks until it says yes.

    Raises:
        TimeoutError: it did not; the message says what was waited for and what was there instead.
    """
    end = time.monotonic() + within_s
    while not is_so():
        if time.monotonic() > end:
            raise TimeoutError(f"{what}: not so after {within_s:.0f} s; {why_not()}")
        time.sleep(_PAUSE_S)


def is_ready(node: JsonObject) -> bool:
    """Whether its kubelet says so, or did until it fell silent."""
    return ("Ready", "True") in {(each["type"], each["status"]) for each in node["status"].get("conditions", ())}
