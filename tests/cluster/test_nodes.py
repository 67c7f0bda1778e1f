"""Labels and taints that a stack sets on nodes by server-side apply, beside other owners of taints."""

import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from infra.capacity.pools import GPU_TAINT, NodePool
from infra.shared_platform.node_pools import node_patch
from ray_job.contract.accelerators import ACCELERATORS
from tests.cluster.api import ApiError, KubernetesApi
from tests.cluster.nodes import add_node, set_ready, wait_until_untainted

pytestmark = pytest.mark.cluster

POOL = NodePool(
    name="v100",
    nodes=("gpu-1",),
    cpus=8,
    memory_gib=32,
    gpus_per_node=1,
    accelerator=ACCELERATORS["v100"],
    taint=GPU_TAINT,
)
GPU = "nvidia.com/gpu"
MANAGER = "cloister-acme-dev-nodes"


@pytest.fixture
def node(api: KubernetesApi, request: pytest.FixtureRequest) -> Iterator[str]:
    name = "gpu-" + request.node.name.replace("_", "-")[-40:]
    add_node(api, name, {"cpu": "8", "memory": "32Gi", GPU: "1"})
    wait_until_untainted(api, name)
    yield name
    api.delete("v1", "Node", name)


def applied(api: KubernetesApi, name: str) -> dict[str, Any]:
    body = {"apiVersion": "v1", "kind": "Node", **node_patch(POOL, name, field_manager=MANAGER)}
    return api.apply(body, field_manager=MANAGER).body


def withdrawn(api: KubernetesApi, name: str) -> None:
    api.apply({"apiVersion": "v1", "kind": "Node", "metadata": {"name": name}}, field_manager=MANAGER)


def taints(api: KubernetesApi, name: str) -> set[str]:
    found = api.find("v1", "Node", name)
    assert found is not None
    return {taint["key"] for taint in found["spec"].get("taints", [])}


def until(done: Callable[[], bool], *, within_s: float = 30) -> None:
    end = time.monotonic() + within_s
    while not done():
        assert time.monotonic() < end
        time.sleep(0.1)


def test_label_and_taint_are_removed_with_the_stack(api: KubernetesApi, node: str) -> None:
    assert applied(api, node)["metadata"]["labels"]["cloister.dev/pool"] == "v100"
    assert taints(api, node) == {GPU}
    withdrawn(api, node)
    assert taints(api, node) == set()


def test_equal_taint_has_two_owners(api: KubernetesApi, node: str) -> None:
    place = {"apiVersion": "v1", "kind": "Node", "metadata": {"name": node}}
    api.patch({**place, "spec": {"taints": POOL.taints}}, field_manager="cloud")
    applied(api, node)
    withdrawn(api, node)
    assert taints(api, node) == {GPU}


def test_other_taints_are_a_conflict_and_stay_unchanged(api: KubernetesApi, node: str) -> None:
    place = {"apiVersion": "v1", "kind": "Node", "metadata": {"name": node}}
    api.patch({**place, "spec": {"taints": [{"key": "theirs", "effect": "NoSchedule"}]}}, field_manager="cloud")
    with pytest.raises(ApiError, match=r"409.*conflict.*\.spec\.taints"):
        applied(api, node)
    assert taints(api, node) == {"theirs"}


def test_node_controller_owns_taints_of_a_node_that_was_not_ready(api: KubernetesApi, node: str) -> None:
    applied(api, node)
    set_ready(api, node, ready=False)
    until(lambda: taints(api, node) > {GPU})
    set_ready(api, node, ready=True)
    until(lambda: taints(api, node) == {GPU})
    applied(api, node)
    withdrawn(api, node)
    # docs/how-to/remove-a-customer.md: the label is removed, the taint has to be removed manually.
    found = api.find("v1", "Node", node)
    assert found is not None
    assert "cloister.dev/pool" not in found["metadata"].get("labels", {})
    assert taints(api, node) == {GPU}
