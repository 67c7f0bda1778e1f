"""Labels and taints of nodes, and the device plugin on them."""

from typing import Any

import kubernetes_validate
import pytest

from infra.capacity.pools import NodePool, gpu_capacity, gpu_taint, placement
from infra.kubernetes.images import ImageReference
from infra.rendering.recording import RecordedResource, record
from infra.shared_platform.device_plugin import DevicePlugin, DevicePluginArgs
from infra.shared_platform.node_pools import NodePools
from ray_job.contract.accelerators import ACCELERATORS
from tests.infra.ray_job_args import NAMES, POOLS

IMAGE = ImageReference.parse("registry.example/nvidia/k8s-device-plugin@sha256:" + "0" * 64)


def patches(*pools: NodePool) -> dict[str, dict[str, Any]]:
    recording = record(lambda: NodePools("nodes", names=NAMES, pools=pools, owners={}) and None)
    return {patch.inputs["metadata"]["name"]: patch.inputs for patch in recording.of_type("NodePatch")}


def test_node_gets_the_label_of_its_pool() -> None:
    found = patches(POOLS["cpu"], POOLS["v100"])
    labels = {node: patch["metadata"]["labels"] for node, patch in found.items()}
    assert labels == {
        "cpu-1": {"cloister.dev/pool": "cpu"},
        "v-1": {"cloister.dev/pool": "v100"},
        "v-2": {"cloister.dev/pool": "v100"},
    }


@pytest.mark.parametrize("name", ["cpu", "v100", "l40s", "h100-1g-10gb"])
def test_pod_of_a_pool_tolerates_the_taints_of_its_nodes(name: str) -> None:
    accelerator = ACCELERATORS[name]
    taint = gpu_taint(accelerator.resource) if accelerator.resource else {}
    pool = NodePool(name=name, accelerator=accelerator, nodes=("n-1",), taint=taint)
    taints = patches(pool)["n-1"].get("spec", {}).get("taints", [])
    pod = placement(pool)
    assert [taint["key"] for taint in taints] == [toleration["key"] for toleration in pod["tolerations"]]
    assert pod["nodeSelector"] == pool.labels


def test_gpus_are_counted_by_resource() -> None:
    slices = NodePool(name="a", accelerator=ACCELERATORS["a100-2g-20gb"], nodes=("n-1", "n-2"), gpus_per_node=3, cpus=1)
    assert gpu_capacity([POOLS["cpu"], POOLS["v100"], POOLS["a10g"], slices]) == {
        "nvidia.com/gpu": 9,
        "nvidia.com/mig-2g.20gb": 6,
    }


def test_only_gpu_nodes_are_tainted() -> None:
    assert "spec" not in patches(POOLS["cpu"])["cpu-1"]
    assert patches(POOLS["v100"])["v-1"]["spec"]["taints"][0]["effect"] == "NoSchedule"


def test_two_stacks_that_manage_one_node_conflict() -> None:
    annotations = patches(POOLS["cpu"])["cpu-1"]["metadata"]["annotations"]
    assert annotations == {"pulumi.com/patchFieldManager": "cloister-acme-dev-nodes"}  # and no patchForce


GPU_POOLS = (POOLS["v100"], POOLS["a10g"])


def plugin(docker_config: str | None = None, pools: tuple[NodePool, ...] = GPU_POOLS) -> dict[str, RecordedResource]:
    args = DevicePluginArgs(names=NAMES, image=IMAGE, pools=pools, docker_config=docker_config)
    recording = record(lambda: DevicePlugin("device-plugin", args) and None)
    return {resource.name: resource for resource in recording.resources if resource.custom}


def test_device_plugin_runs_on_gpu_nodes_only() -> None:
    resources = plugin()["device-plugin"].inputs
    kubernetes_validate.validate(resources, "1.35", strict=True)
    pod = resources["spec"]["template"]["spec"]
    required = pod["affinity"]["nodeAffinity"]["requiredDuringSchedulingIgnoredDuringExecution"]
    selected = [expression for term in required["nodeSelectorTerms"] for expression in term["matchExpressions"]]
    assert [(each["key"], each["values"]) for each in selected] == [
        ("cloister.dev/pool", ["v100"]),
        ("cloister.dev/pool", ["a10g"]),
    ]
    assert [toleration["key"] for toleration in pod["tolerations"]] == ["nvidia.com/gpu", "cloister.dev/customer"]


def test_device_plugin_has_no_privileges_but_root() -> None:
    (container,) = plugin()["device-plugin"].inputs["spec"]["template"]["spec"]["containers"]
    security = container["securityContext"]
    assert (security["privileged"], security["allowPrivilegeEscalation"]) == (False, False)
    assert (security["readOnlyRootFilesystem"], security["capabilities"]) == (True, {"drop": ["ALL"]})
    assert container["image"] == str(IMAGE)


def test_device_plugin_has_its_own_namespace() -> None:
    resources = plugin()
    assert (
        resources["cloister-device-plugin"].inputs["metadata"]["labels"]["pod-security.kubernetes.io/enforce"]
        == "privileged"
    )
    assert resources["device-plugin"].inputs["metadata"]["namespace"] == "cloister-device-plugin"


def test_registry_login_is_a_secret() -> None:
    login = plugin(docker_config="{}")["cloister-device-plugin-image-pull"]
    assert login.is_secret(("stringData", ".dockerconfigjson"))


def test_device_plugin_offers_mig_slices_where_a_pool_has_them() -> None:
    slices = NodePool(name="a", accelerator=ACCELERATORS["a100-2g-20gb"], nodes=("n-1",), gpus_per_node=3)
    for pools, strategy in ((GPU_POOLS, []), ((*GPU_POOLS, slices), ["mixed"])):
        (container,) = plugin(pools=pools)["device-plugin"].inputs["spec"]["template"]["spec"]["containers"]
        assert [each["value"] for each in container["env"] if each["name"] == "MIG_STRATEGY"] == strategy
