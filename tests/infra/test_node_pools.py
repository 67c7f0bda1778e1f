"""Labels and taints of nodes, and the device plugin on them."""

from typing import Any

import kubernetes_validate
import pytest

from infra.device_plugin import DevicePlugin, DevicePluginArgs
from infra.images import ImageReference
from infra.node_pools import NodePools, NodePoolsArgs
from infra.pools import NodePool, PoolName
from infra.ray_job_pods import PodArgs, worker_pod
from infra.ray_job_sizes import cpu_workers
from infra.recording import RecordedResource, is_secret, record
from infra.weights import WeightsParts
from tests.infra.ray_job_args import NAMES, POOLS, model

IMAGE = ImageReference.parse("registry.example/nvidia/k8s-device-plugin@sha256:" + "0" * 64)


def patches(*pools: NodePool) -> dict[str, dict[str, Any]]:
    recording = record(lambda: NodePools("nodes", NodePoolsArgs(names=NAMES, pools=pools)) and None)
    return {patch.inputs["metadata"]["name"]: patch.inputs for patch in recording.of_type("NodePatch")}


def test_each_node_gets_the_label_of_its_pool() -> None:
    made = patches(POOLS["cpu"], POOLS["v100"])
    labels = {node: patch["metadata"]["labels"] for node, patch in made.items()}
    assert labels == {
        "cpu-1": {"cloister.dev/pool": "cpu"},
        "v-1": {"cloister.dev/pool": "v100"},
        "v-2": {"cloister.dev/pool": "v100"},
    }


@pytest.mark.parametrize("name", ["system", "cpu", "v100", "a10g"])
def test_a_pod_of_a_pool_tolerates_the_taints_of_its_nodes(name: PoolName) -> None:
    pool = NodePool(name=name, nodes=("n-1",))
    taints = patches(pool)["n-1"].get("spec", {}).get("taints", [])
    args = PodArgs(names=NAMES, image="r")
    size = cpu_workers(model().spec, POOLS["cpu"]).pod
    pod = worker_pod(args, size, name, weights=WeightsParts())["spec"]
    assert [taint["key"] for taint in taints] == [toleration["key"] for toleration in pod["tolerations"]]
    assert pod["nodeSelector"] == pool.labels


def test_only_gpu_nodes_are_kept_free_of_others() -> None:
    assert "spec" not in patches(POOLS["cpu"])["cpu-1"]
    assert patches(POOLS["v100"])["v-1"]["spec"]["taints"][0]["effect"] == "NoSchedule"


def test_two_stacks_that_both_look_after_a_node_are_a_conflict_and_not_a_draw() -> None:
    annotations = patches(POOLS["cpu"])["cpu-1"]["metadata"]["annotations"]
    assert annotations == {"pulumi.com/patchFieldManager": "cloister-acme-dev-nodes"}  # and no patchForce


def plugin(docker_config: str | None = None) -> dict[str, RecordedResource]:
    args = DevicePluginArgs(names=NAMES, image=IMAGE, pools=("v100", "a10g"), docker_config=docker_config)
    recording = record(lambda: DevicePlugin("device-plugin", args) and None)
    return {resource.name: resource for resource in recording.resources if resource.custom}


def test_the_device_plugin_runs_on_gpu_nodes_only() -> None:
    made = plugin()["device-plugin"].inputs
    kubernetes_validate.validate(made, "1.35", strict=True)
    pod = made["spec"]["template"]["spec"]
    required = pod["affinity"]["nodeAffinity"]["requiredDuringSchedulingIgnoredDuringExecution"]
    (expression,) = required["nodeSelectorTerms"][0]["matchExpressions"]
    assert (expression["key"], expression["values"]) == ("cloister.dev/pool", ["v100", "a10g"])
    assert [toleration["key"] for toleration in pod["tolerations"]] == ["nvidia.com/gpu"]


def test_the_device_plugin_may_no_more_than_it_must() -> None:
    (container,) = plugin()["device-plugin"].inputs["spec"]["template"]["spec"]["containers"]
    security = container["securityContext"]
    assert (security["privileged"], security["allowPrivilegeEscalation"]) == (False, False)
    assert (security["readOnlyRootFilesystem"], security["capabilities"]) == (True, {"drop": ["ALL"]})
    assert container["image"] == str(IMAGE)


def test_the_device_plugin_has_a_namespace_of_its_own() -> None:
    made = plugin()
    assert (
        made["cloister-device-plugin"].inputs["metadata"]["labels"]["pod-security.kubernetes.io/enforce"]
        == "privileged"
    )
    assert made["device-plugin"].inputs["metadata"]["namespace"] == "cloister-device-plugin"


def test_a_login_to_the_registry_is_a_secret() -> None:
    login = plugin(docker_config="{}")["cloister-device-plugin-image-pull"]
    assert is_secret(login, ("stringData", ".dockerconfigjson"))
