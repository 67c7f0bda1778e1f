"""GPU pools from zero and back to zero, with the real operator, launcher, Ray autoscaler, scheduler and Karpenter.

kwok simulates the nodes, and Ray's processes run beside their pods. The v100 pool has one node with four GPUs;
Karpenter creates the nodes of the a10g pool. The tests follow the lives of three jobs.
"""

from collections.abc import Iterator
from datetime import UTC, datetime, timedelta

import pytest

from infra.capacity.pools import GPU_TAINT
from ray_job.contract.cluster import GPU_RESOURCE, POOL_LABEL
from ray_job.contract.job_spec import JobSpec
from service.adapters.rayjob_status import WaitingPod, waiting_pods
from tests.cluster.api import JsonObject, KubernetesApi
from tests.cluster.control_plane import ControlPlane
from tests.cluster.deployed import SERVICE, job_spec
from tests.cluster.gpu_pools.gpu_stack import JOBS, GpuStack, eventually, gpu_stack
from tests.cluster.gpu_pools.ray_pods import RayPods

pytestmark = pytest.mark.cluster

V100 = job_spec(21, model="qwen2.5-32b")
V100_TOO = job_spec(22, model="qwen2.5-32b")
A10G = job_spec(23, model="llama-3.1-8b")


@pytest.fixture(scope="module")
def stack(cluster: ControlPlane, api: KubernetesApi, tmp_path_factory: pytest.TempPathFactory) -> Iterator[GpuStack]:
    with gpu_stack(cluster, api, tmp_path_factory.mktemp("gpus")) as running:
        yield running


@pytest.fixture(scope="module")
def heads(stack: GpuStack) -> dict[str, JsonObject]:
    """Running heads of all jobs by job id."""
    return {job.job_id: stack.launch(job) for job in (V100, V100_TOO, A10G)}


def node_of(pod: JsonObject) -> str | None:
    name: str | None = pod["spec"].get("nodeName")
    return name


def running(pods: list[JsonObject]) -> bool:
    return bool(pods) and all(pod["status"]["phase"] == "Running" for pod in pods)


def test_job_starts_on_the_cpu_pool_without_gpu_workers(stack: GpuStack, heads: dict[str, JsonObject]) -> None:
    assert heads.keys() == {V100.job_id, V100_TOO.job_id, A10G.job_id}
    for job in (V100, V100_TOO, A10G):
        assert {node_of(pod) for pod in stack.pods(job)} <= stack.nodes("cpu").keys()
        assert (stack.pods(job, "v100"), stack.pods(job, "a10g")) == ([], [])
    assert stack.nodes("a10g") == {}


def label_v100(stack: GpuStack, pool: str | None) -> None:
    node = {"apiVersion": "v1", "kind": "Node", "metadata": {"name": "v100-1", "labels": {POOL_LABEL: pool}}}
    stack.api.patch(node, field_manager="somebody")


def waits(stack: GpuStack, job: JobSpec) -> WaitingPod:
    """Return the launcher's status of a job whose V100 worker has been unschedulable for two hours."""
    eventually(lambda: any("conditions" in pod["status"] for pod in stack.pods(job, "v100")))
    (found,) = waiting_pods(stack.pods(job, "v100"), datetime.now(UTC) + timedelta(hours=2))
    return found


def test_worker_is_stuck_while_its_pool_has_no_node(stack: GpuStack, heads: dict[str, JsonObject]) -> None:
    label_v100(stack, None)
    stack.scale(heads[V100.job_id], "v100", 1)
    assert waits(stack, V100).is_stuck


def test_v100_worker_gets_a_node_of_its_pool(stack: GpuStack, heads: dict[str, JsonObject]) -> None:
    assert V100.job_id in heads
    label_v100(stack, "v100")
    eventually(lambda: running(stack.pods(V100, "v100")))
    assert [node_of(pod) for pod in stack.pods(V100, "v100")] == list(stack.nodes("v100"))


def test_worker_waits_with_the_reason_while_its_pool_is_full(stack: GpuStack, heads: dict[str, JsonObject]) -> None:
    stack.scale(heads[V100_TOO.job_id], "v100", 1)
    assert not waits(stack, V100_TOO).is_stuck
    message = eventually(lambda: stack.launcher.status(V100_TOO.job_id).message)
    assert message.startswith("v100 pod")
    assert f"1 Insufficient {GPU_RESOURCE}" in message
    assert [node_of(pod) for pod in stack.pods(V100_TOO, "v100")] == [None]
    # Karpenter has no machine for it: A10Gs are no V100s.
    assert stack.nodes("a10g") == {}


def test_autoscalers_add_a_worker_with_a_node_and_remove_the_worker(
    stack: GpuStack, heads: dict[str, JsonObject]
) -> None:
    with RayPods(stack.cluster, stack.api, heads[A10G.job_id]) as ray:
        with ray.demand(engines=1, gpus=1):
            eventually(lambda: running(stack.pods(A10G, "a10g")))
            (worker,) = stack.pods(A10G, "a10g")
            (node,) = stack.nodes("a10g").values()
            assert node_of(worker) == node["metadata"]["name"]
            assert GPU_TAINT in node["spec"]["taints"]
            ray.join(worker)
        # The worker is idle.
        eventually(lambda: not stack.pods(A10G, "a10g"))
    assert {pod["metadata"]["labels"]["ray.io/group"] for pod in stack.pods(A10G)} == {"headgroup", "cpu"}


def test_stopped_job_makes_room_for_a_waiting_job(stack: GpuStack, heads: dict[str, JsonObject]) -> None:
    assert V100.job_id in heads
    stack.launcher.stop(V100.job_id)
    eventually(lambda: running(stack.pods(V100_TOO, "v100")))
    # The head may end after its worker.
    eventually(lambda: not stack.pods(V100))
    stack.launcher.stop(V100_TOO.job_id)


def test_autoscaler_beside_a_head_can_only_scale(stack: GpuStack, heads: dict[str, JsonObject]) -> None:
    asked: list[tuple[str, str, str, str]] = [
        ("", "pods", "create", JOBS),
        ("", "pods", "list", SERVICE),
        ("", "pods/exec", "create", JOBS),
        ("", "secrets", "get", JOBS),
        ("", "nodes", "list", ""),
        ("ray.io", "rayjobs", "create", JOBS),
        ("ray.io", "rayclusters", "create", JOBS),
        ("ray.io", "rayclusters", "patch", SERVICE),
    ]
    with stack.account(heads[A10G.job_id]) as own:
        assert own.may("ray.io", "rayclusters", "patch", JOBS)
        assert [each for each in asked if own.may(*each)] == []


def test_stopped_job_leaves_no_pod_and_no_node(stack: GpuStack, heads: dict[str, JsonObject]) -> None:
    assert A10G.job_id in heads
    stack.launcher.stop(A10G.job_id)
    eventually(lambda: not stack.pods(V100_TOO) + stack.pods(A10G))
    eventually(lambda: not stack.nodes("a10g"))
