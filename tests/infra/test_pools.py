"""Pools as clusters have them: GPU nodes alone, several pools of one accelerator, own labels and runtime classes."""

import json
from pathlib import Path
from typing import Any

import pytest
from kubernetes.utils.quantity import parse_quantity
from ray.autoscaler._private.kuberay.autoscaling_config import _node_type_from_group_spec

from infra.capacity import spare_room
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
    (database,) = recording.of_type("postgresql.cnpg.io/v1:Cluster")
    assert database.inputs["spec"]["affinity"]["nodeAffinity"] == on_nodes
    assert "affinity" not in database.inputs["spec"]["affinity"]
    (chart,) = recording.of_type("Chart")
    assert chart.inputs["values"]["affinity"] == {"nodeAffinity": on_nodes}


def test_head_and_cpu_worker_fit_beside_engines_on_every_gpu_node() -> None:
    text = read_stack_file(GPU_NODES_ONLY)
    config = parse_config(text.values, secret_keys=text.secret_keys, stack=text.stack)
    cpu = config.pools["cpu"]
    for entry in config.catalogue.values():
        pool = config.pools[entry.spec.accelerator]
        engines = gpu_workers(entry.spec, pool)
        others = (head_size(cpu), cpu_workers(entry.spec, cpu))
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


def test_model_runs_in_the_pool_that_it_names() -> None:
    pools = parse(
        changed(node_pools=node_pools(a10g=A10G, rented={**A10G, "accelerator": "a10g", "nodes": ["g-2"]}))
    ).pools
    rendered = rayjob(model(accelerator="a10g", weights_gib=15, node_pool="rented"), pools=pools)
    assert groups(rendered).keys() == {"cpu", "rented"}


def test_model_with_a_pool_of_another_accelerator_is_refused() -> None:
    pools = node_pools(a10g=A10G, t4={**A10G, "nodes": ["g-2"]})
    entry = {"id": "m", "source": "/models/m", "accelerator": "t4", "weights_gib": 5, "node_pool": "a10g"}
    with pytest.raises(
        ConfigError, match=r"models\[0\]\.node_pool: must be a pool with the accelerator t4, which are t4"
    ):
        parse(changed(node_pools=pools, models=[entry]))


def test_pods_that_do_not_fit_on_spare_cpus_are_refused_in_numbers() -> None:
    text = read_stack_file(GPU_NODES_ONLY)
    pools = {
        name: {**pool, "spare_cpus": 2, "spare_memory_gib": 9} if isinstance(pool, dict) else pool
        for name, pool in text.values["node_pools"].items()
    }
    with pytest.raises(ConfigError) as caught:
        parse_config({**text.values, "node_pools": pools}, secret_keys=text.secret_keys, stack=text.stack)
    (problem,) = caught.value.problems
    assert problem == (
        "cloister:node_pools.v100.spare_cpus: the service needs 5.1 CPUs and 15 GiB, heads and CPU workers of 4 jobs "
        "need 7 CPUs and 33.5 GiB, which do not fit on 4 nodes that have 8 CPUs and 36 GiB for them; raise spare_cpus "
        "and spare_memory_gib, add a pool cpu, or lower limits.max_running_jobs"
    )


def test_pool_for_service_and_jobs_needs_room_for_both() -> None:
    pools = {"cpu": {"nodes": ["c-1"], "cpus": 4, "memory_gib": 12}}
    with pytest.raises(ConfigError, match=r"node_pools\.cpu\.cpus: the service needs .* raise cpus and memory_gib"):
        parse(changed(node_pools=pools))


def test_check_counts_what_the_pods_of_the_service_request() -> None:
    recording = record_stack(GPU_NODES_ONLY)
    counted = {"api": spare_room.API, "reconciler": spare_room.RECONCILERS[0], "coordinator": spare_room.COORDINATOR}
    for deployment in recording.of_type("Deployment"):
        (container,) = deployment.inputs["spec"]["template"]["spec"]["containers"]
        assert amounts(container) == counted[deployment.name]
    (database,) = recording.of_type("postgresql.cnpg.io/v1:Cluster")
    # The sidecar of backups is another 100m and 512 MiB.
    assert amounts(database.inputs["spec"]) == (1_000, 2_048)
    assert spare_room.DATABASE_INSTANCE == (1_000 + 100, 2_048 + 512)


def amounts(container: dict[str, Any]) -> tuple[int, int]:
    """Return the requests of a container: thousandths of a CPU, and MiB."""
    requests = container["resources"]["requests"]
    cpu, memory = (parse_quantity(requests[name]) for name in ("cpu", "memory"))  # type: ignore[no-untyped-call]
    return int(cpu * 1_000), int(memory / 2**20)


@pytest.mark.parametrize(
    "name", ["NVIDIA_VISIBLE_DEVICES", "HF_HUB_OFFLINE", "RAY_AUTH_MODE", "CLOISTER_JOB_SPEC", "HOME"]
)
def test_environment_of_a_pool_cannot_change_what_a_job_sets(name: str) -> None:
    with pytest.raises(ConfigError, match=rf"node_pools\.a10g\.environment\.{name}: is not a setting of communication"):
        parse(changed(node_pools=node_pools(a10g={**A10G, "environment": {name: "1"}})))


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
