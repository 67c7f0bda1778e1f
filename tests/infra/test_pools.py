"""Pools as clusters have them: GPU nodes alone, several pools of one accelerator, own labels and runtime classes."""

import json
from pathlib import Path
from typing import Any

import pytest
from ray.autoscaler._private.kuberay.autoscaling_config import _node_type_from_group_spec

from infra.capacity.job_sizes import autoscaler_cpu_m, cpu_workers, gpu_workers, head_size
from infra.jobs.template import ray_job_templates
from infra.rendering.render import record_stack
from infra.stack_file.reading import ConfigError, parse_config, read_stack_file
from service.adapters.rayjob_status import RayJobView
from service.adapters.rayjob_templates import load_templates
from service.model_catalogue import parse_catalogue
from tests.infra.previewed_stacks import changed, parse
from tests.infra.ray_job_args import args, groups, model, rayjob

GPU_NODES_ONLY = Path(__file__).parents[2] / "docs/stacks/Pulumi.gpu-nodes-only.yaml"
A10G = {"nodes": ["g-1"], "gpus_per_node": 1, "cpus": 14, "memory_gib": 56}
SELECTED = {"acme.example/gpu": "a10g"}
CONFIG_MAP_BYTES = 2**20


def node_pools(**pools: dict[str, Any]) -> dict[str, Any]:
    base = {"system": {"nodes": ["s-1"]}, "cpu": {"nodes": ["c-1"], "cpus": 16, "memory_gib": 60}}
    return {**base, **pools}


def templates(path: Path = GPU_NODES_ONLY) -> dict[str, Any]:
    recording = record_stack(path)
    texts = [each.inputs["data"] for each in recording.of_type("ConfigMap") if "ray-job-templates" in each.name]
    return {name: json.loads(text) for data in texts for name, text in data.items()}


def test_stack_of_gpu_nodes_alone_is_complete() -> None:
    recording = record_stack(GPU_NODES_ONLY)
    for deployment in recording.of_type("Deployment"):
        pod = deployment.inputs["spec"]["template"]["spec"]
        (first, second) = pod["affinity"]["nodeAffinity"]["requiredDuringSchedulingIgnoredDuringExecution"][
            "nodeSelectorTerms"
        ]
        selected = [term["matchExpressions"][0]["values"] for term in (first, second)]
        assert selected == [["v100"], ["a10g"]]
        assert [each["key"] for each in pod["tolerations"]] == ["nvidia.com/gpu"]


def test_database_and_operator_run_on_the_spare_cpus_of_gpu_nodes_too() -> None:
    recording = record_stack(GPU_NODES_ONLY)
    (api,) = [each for each in recording.of_type("Deployment") if each.name == "api"]
    on_nodes = api.inputs["spec"]["template"]["spec"]["affinity"]["nodeAffinity"]
    (database,) = [each for each in recording.of_type("postgresql.cnpg.io/v1:Cluster")]
    assert database.inputs["spec"]["affinity"]["nodeAffinity"] == on_nodes
    assert "affinity" not in database.inputs["spec"]["affinity"]
    (chart,) = recording.of_type("Chart")
    assert chart.inputs["values"]["affinity"] == {"nodeAffinity": on_nodes}


def test_head_and_cpu_worker_fit_beside_engines_on_every_gpu_node() -> None:
    text = read_stack_file(GPU_NODES_ONLY)
    config = parse_config(text.values, secret_keys=text.secret_keys, stack=text.stack)
    cpu = config.pools["cpu"]
    for model in config.catalogue.values():
        pool = config.pools[model.spec.accelerator]
        engines = gpu_workers(model.spec, pool)
        others = (head_size(cpu), cpu_workers(model.spec, cpu))
        full = pool.gpus_per_node // engines.gpus
        cpus = full * engines.cpu_m + sum(each.cpu_m for each in others) + autoscaler_cpu_m(cpu)
        assert cpus <= 1_000 * pool.cpus
        assert full * engines.memory_mib + sum(each.memory_mib for each in others) <= pool.memory_mib


def test_only_pods_with_a_gpu_get_the_runtime_class() -> None:
    for template in templates().values():
        cluster = template["spec"]["rayClusterSpec"]
        pods = [cluster["headGroupSpec"], *cluster["workerGroupSpecs"]]
        for spec in (group["template"]["spec"] for group in pods):
            limits = spec["containers"][0]["resources"]["limits"]
            assert spec.get("runtimeClassName") == ("nvidia" if "nvidia.com/gpu" in limits else None)


def test_device_plugin_has_a_daemon_set_for_each_runtime_class() -> None:
    pools = node_pools(a10g={**A10G, "runtime_class": "nvidia"}, t4={**A10G, "nodes": ["g-2"]})
    config = parse(changed(node_pools=pools))
    classes = {pool.name: pool.runtime_class for pool in config.pools.values() if pool.gpus_per_node}
    assert classes == {"a10g": "nvidia", "t4": ""}
    (daemon_set,) = record_stack(GPU_NODES_ONLY).of_type("DaemonSet")
    assert daemon_set.inputs["spec"]["template"]["spec"]["runtimeClassName"] == "nvidia"


def test_model_runs_in_all_pools_of_its_accelerator() -> None:
    small = {**A10G, "accelerator": "a10g", "taint": "none", "environment": {"NCCL_DEBUG": "INFO"}}
    small |= {"selector": SELECTED, "tolerations": [{"key": "acme.example/team", "operator": "Exists"}]}
    del small["nodes"]
    pools = parse(changed(node_pools=node_pools(a10g=A10G, rented={**small, "max_nodes": 3}))).pools
    catalogue = parse_catalogue({"models": [{"id": "m", "source": "/models/m", "accelerator": "a10g"}]})
    (files,) = ray_job_templates(catalogue, args(pools=pools)).values()
    (template,) = map(json.loads, files.values())
    workers = {name: group["template"]["spec"] for name, group in groups(template).items()}
    assert workers.keys() == {"cpu", "a10g", "rented"}
    assert workers["a10g"]["nodeSelector"] == {"cloister.dev/pool": "a10g"}
    assert workers["rented"]["nodeSelector"] == SELECTED
    assert [each["key"] for each in workers["rented"]["tolerations"]] == ["nvidia.com/gpu", "acme.example/team"]
    variables = {each["name"] for each in workers["rented"]["containers"][0]["env"]}
    assert "NCCL_DEBUG" in variables
    assert "NCCL_DEBUG" not in {each["name"] for each in workers["a10g"]["containers"][0]["env"]}


def test_own_taint_is_tolerated_beside_the_usual_one() -> None:
    own = {"key": "acme.example/gpu", "effect": "NoExecute"}
    pools = parse(changed(node_pools=node_pools(a10g={**A10G, "taint": own}))).pools
    assert pools["a10g"].tolerated == [
        {**own, "operator": "Exists"},
        {"key": "nvidia.com/gpu", "effect": "NoSchedule", "operator": "Exists"},
    ]


@pytest.mark.parametrize("resource", ["nvidia.com/mig-1g.10gb", "nvidia.com/a10g"])
def test_ray_counts_gpus_of_any_resource_name(resource: str) -> None:
    pools = parse(changed(node_pools=node_pools(a10g={**A10G, "resource": resource}))).pools
    rendered = rayjob(model(accelerator="a10g", weights_gib=15), pools=pools)
    # Ray's autoscaler starts no worker of a group without the resource that an engine requests.
    assert _node_type_from_group_spec(groups(rendered)["a10g"], is_head=False)["resources"]["GPU"] == 1
    assert RayJobView.parse(rendered).gpu_groups == {"a10g"}


def test_two_hundred_models_fit_into_config_maps(tmp_path: Path) -> None:
    entries = [{"id": f"org/model {number}", "source": f"/models/{number}"} for number in range(200)]
    catalogue = parse_catalogue({"models": entries})
    config_maps = ray_job_templates(catalogue, args())
    for files in config_maps.values():
        assert sum(len(name) + len(text) for name, text in files.items()) < CONFIG_MAP_BYTES
        for name, text in files.items():
            (tmp_path / name).write_text(text)
    assert len(load_templates(tmp_path, catalogue, namespace="cloister-acme-dev-jobs")) == len(entries)


def test_all_mistakes_in_pools_are_reported_at_once() -> None:
    pools: dict[str, Any] = {
        "system": {"nodes": ["s-1"]},
        "a10g": {**A10G, "spare_cpus": 14},
        "Rented": {**A10G, "accelerator": "a10g", "gpus_per_node": 2, "nodes": ["g-2"], "selector": SELECTED},
        "b": {**A10G, "accelerator": "a10", "nodes": ["g-3"], "resource": "nvidia.com/a10"},
        "c": {**A10G, "accelerator": "a10", "nodes": ["g-4"]},
    }
    with pytest.raises(ConfigError) as caught:
        parse(changed(node_pools=pools))
    for problem in (
        "node_pools.cpu: is required",
        "node_pools.a10g.spare_cpus: must leave",
        "node_pools.a10g.spare_memory_gib: set both",
        "node_pools.Rented: a pool's name",
        "node_pools.Rented.selector: selects nodes",
        "node_pools.Rented.gpus_per_node: must be 1",
        "node_pools.c.resource: must be nvidia.com/a10",
    ):
        assert problem in str(caught.value)


def test_unknown_accelerator_of_a_pool_is_reported() -> None:
    with pytest.raises(ConfigError, match=r"node_pools\.rented\.accelerator: .*a11"):
        parse(changed(node_pools=node_pools(rented={**A10G, "accelerator": "a11"})))
