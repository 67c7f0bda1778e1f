"""Faults during a batch: every component fails once, the batch continues, and in the end it has every line once.

The tests follow the order of the faults. Each waits until the batch has made progress, and its failure names the fault.
On a fast machine the batch may nearly be finished before the last fault; then another batch takes its place.
"""

import logging
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from tests.cluster.api import KubernetesApi
from tests.cluster.batches import done, events, results, retrieve, wait, wait_for_end
from tests.cluster.deployed import JOBS, SERVICE
from tests.cluster.node.waiting import wait_until_available, wait_until_node_ready
from tests.cluster.readiness import pod_problem
from tests.cluster.running_batches import ENDED_S, RunningBatches
from tests.cluster.whole_stack import WholeStack

pytestmark = [
    pytest.mark.cluster,
    pytest.mark.timeout(1800),
    # Pulumi's Automation API leaves the event loop of a failed program to the garbage collector.
    pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning"),
]

# Lines that may be committed but not reported when a fault happens; more than these are new.
IN_FLIGHT = 64
RECOVERED_S = 500
HEAD = {"ray.io/node-type": "head"}
WORKER = {"ray.io/node-type": "worker"}

logger = logging.getLogger(__name__)


@contextmanager
def survived(stack: WholeStack, api: KubernetesApi, batches: RunningBatches, fault: str) -> Iterator[None]:
    """Expect a running batch before a fault, and progress of it afterwards."""
    batch_id = batches.running()
    began = time.monotonic()
    yield
    is_further = _further_than(done(retrieve(stack, batch_id)))
    try:
        wait(stack, batch_id, is_further, within_s=RECOVERED_S, what=f"getting on after this: {fault}")
    except AssertionError as error:
        error.add_note("\n".join(_what_is_wrong(api)))
        raise
    logger.info("%s: on after %.0f s", fault, time.monotonic() - began)


def _further_than(lines: int) -> Callable[[Any], bool]:
    return lambda batch: done(batch) > lines + IN_FLIGHT or batch.status == "completed"


def _what_is_wrong(api: KubernetesApi) -> Iterator[str]:
    for namespace in (SERVICE, JOBS):
        for pod in api.list("v1", "Pod", namespace):
            if problem := pod_problem(pod):
                yield f"{namespace}/{pod['metadata']['name']}: {problem}"


def remove_pods(api: KubernetesApi, namespace: str, labels: dict[str, str], *, by_eviction: bool = False) -> None:
    """Delete or evict all pods with these labels, and wait until they are gone."""
    pods = [
        pod["metadata"]
        for pod in api.list("v1", "Pod", namespace)
        if labels.items() <= pod["metadata"]["labels"].items()
    ]
    assert pods, f"no pod in {namespace} has the labels {labels}"
    for pod in pods:
        if by_eviction:
            api.evict(pod["name"], namespace)
        else:
            api.delete("v1", "Pod", pod["name"], namespace)
    end = time.monotonic() + 120
    for pod in pods:
        while (found := api.find("v1", "Pod", pod["name"], namespace)) and found["metadata"]["uid"] == pod["uid"]:
            assert time.monotonic() < end, f"{pod['name']} does not end"
            time.sleep(0.5)


@pytest.mark.parametrize("component", ["api", "reconciler", "coordinator", "database"])
def test_batch_survives_deletion_of_service_pods(
    component: str, whole_stack: WholeStack, node_api: KubernetesApi, batches: RunningBatches
) -> None:
    with survived(whole_stack, node_api, batches, f"all pods of {component} were deleted"):
        remove_pods(node_api, SERVICE, {"app.kubernetes.io/component": component})
    for name in ("api", "reconciler", "coordinator"):
        wait_until_available(node_api, name, SERVICE)


def test_batch_survives_restart_of_the_kubelet(
    whole_stack: WholeStack, node_api: KubernetesApi, batches: RunningBatches
) -> None:
    with survived(whole_stack, node_api, batches, "the kubelet of node-2 was restarted"):
        before = uids_of_pods(node_api)
        whole_stack.cluster.nodes["node-2"].restart_kubelet(node_api)
    # No other batch was created; a fast batch may be over.
    assert uids_of_pods(node_api) <= before


def uids_of_pods(api: KubernetesApi) -> set[str]:
    return {pod["metadata"]["uid"] for pod in api.list("v1", "Pod", JOBS)}


# To KubeRay and Ray both are the same, so each kind of pod has one of them.
@pytest.mark.parametrize(("labels", "by_eviction"), [(WORKER, True), (HEAD, False)], ids=["worker", "head"])
def test_batch_survives_deletion_and_eviction_of_a_ray_pod(
    labels: dict[str, str],
    by_eviction: bool,
    whole_stack: WholeStack,
    node_api: KubernetesApi,
    batches: RunningBatches,
) -> None:
    fault = f"the pod of Ray with {labels} was {'evicted' if by_eviction else 'deleted'}"
    with survived(whole_stack, node_api, batches, fault):
        remove_pods(node_api, JOBS, labels, by_eviction=by_eviction)


def test_batch_survives_deletion_of_its_node(
    whole_stack: WholeStack, node_api: KubernetesApi, batches: RunningBatches
) -> None:
    node = whole_stack.cluster.nodes["node-2"]
    with survived(whole_stack, node_api, batches, "node-2 was cordoned and deleted, and came back"):
        body = {"apiVersion": "v1", "kind": "Node", "metadata": {"name": "node-2"}}
        node_api.patch({**body, "spec": {"unschedulable": True}}, field_manager="kubectl-cordon")
        node.stop_kubelet()
        node_api.delete("v1", "Node", "node-2")
        node_api.wait_until_gone("v1", "Node", "node-2", within_s=60)
        node.start_kubelet()
        wait_until_node_ready(node_api, "node-2")
        # The label of the pool was deleted with the node; docs/how-to/troubleshoot.md describes this repair.
        whole_stack.deployment.up(refresh=True)


def test_each_batch_has_every_line_once_and_events_of_its_faults(
    whole_stack: WholeStack, node_api: KubernetesApi, batches: RunningBatches
) -> None:
    assert batches.lines
    for batch_id, lines in batches.lines.items():
        batch = wait_for_end(whole_stack, batch_id, within_s=ENDED_S)
        assert batch.status == "completed"
        custom_ids = [each["custom_id"] for each in results(whole_stack, batch)]
        assert custom_ids == [f"line-{number}" for number in range(lines)]
        types = [event.type for event in events(whole_stack, batch_id)]
        assert {"batch.in_progress", "job.launched", "job.running"} <= set(types)
        assert types[-1] == "batch.completed"
    reasons = {
        each["reason"] for each in node_api.list("v1", "Event", JOBS) if each["involvedObject"]["kind"] == "RayCluster"
    }
    assert {"CreatedHeadPod", "CreatedWorkerPod"} <= reasons
