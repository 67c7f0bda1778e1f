"""The RayJob of a model: shape, deadlines, isolation."""

import json
import re
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import kubernetes_validate
import pytest

from infra.ray_job_sizes import AUTOSCALER_MIB
from infra.ray_job_template import JobTimes, ray_job_templates
from infra.weights import ObjectStoreWeights, VolumeWeights, Weights
from ray_job.contract.job_spec import JobSpec, ObjectStoreLocation
from ray_job.contract.rayjobs import HOSTS_ANNOTATION
from ray_job.contract.weights import WeightsCopy
from ray_job.engines.http import API_KEY_FILE_VARIABLE
from service.adapters.rayjob_templates import load_templates
from service.adapters.rayjob_templates import rayjob as submitted
from service.model_catalogue import CatalogueModel, parse_catalogue
from tests.infra.ray_job_args import NAMES, POOLS, args, digest, groups, model, pods, rayjob

KUBERNETES = "1.35"
STORE = ObjectStoreLocation(kind="s3", bucket="acme", prefix="acme/dev")
COPIED = ObjectStoreWeights(location=STORE, prefix="models", cache_gib=100)
GPU = {"accelerator": "v100", "weights_gib": 15}
SHAPES: dict[str, CatalogueModel] = {
    "cpu": model(),
    "one GPU": model(**GPU),
    "a part of a node": model(**GPU, tensor_parallel_size=2, concurrency=2),
    "two nodes": model(**GPU, tensor_parallel_size=4, pipeline_parallel_size=2, lane="processor"),
    "http": model(lane="http", base_url="http://gpu.example/v1"),
    "serve": model(**GPU, lane="serve", concurrency=2),
}
every_shape = pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
every_weights = pytest.mark.parametrize("weights", [VolumeWeights(claim="weights"), COPIED], ids=["volume", "copied"])


def containers(pod: dict[str, Any]) -> list[dict[str, Any]]:
    return [*pod["spec"]["initContainers"], *pod["spec"]["containers"]]


@every_shape
@every_weights
def test_every_pod_is_one_that_kubernetes_knows(shape: CatalogueModel, weights: Weights) -> None:
    rendered = rayjob(shape, weights=weights, has_pull_secret=True, has_database_ca=True, priority_class="jobs")
    for name, pod in pods(rendered).items():
        manifest = {"apiVersion": "v1", "kind": "Pod", **pod, "metadata": {**pod["metadata"], "name": name}}
        kubernetes_validate.validate(manifest, KUBERNETES, strict=True)


@every_shape
def test_every_container_asks_for_no_less_than_it_may_use_of_memory_and_gpus(shape: CatalogueModel) -> None:
    for pod in pods(rayjob(shape, weights=COPIED)).values():
        for container in containers(pod):
            given = container["resources"]
            for name in ("memory", "ephemeral-storage", "nvidia.com/gpu"):
                assert given["requests"].get(name) == given["limits"].get(name)


@every_shape
def test_what_a_pod_keeps_in_memory_and_on_disk_is_within_its_limits(shape: CatalogueModel) -> None:
    for pod in pods(rayjob(shape, weights=COPIED)).values():
        limits = pod["spec"]["containers"][0]["resources"]["limits"]
        volumes = [volume["emptyDir"] for volume in pod["spec"]["volumes"] if "emptyDir" in volume]
        in_memory = sum(mib(volume["sizeLimit"]) for volume in volumes if volume.get("medium") == "Memory")
        on_disk = sum(mib(volume["sizeLimit"]) for volume in volumes if "medium" not in volume)
        assert in_memory < mib(limits["memory"]) / 2
        assert on_disk < mib(limits["ephemeral-storage"])


def mib(quantity: str) -> int:
    number, unit = re.fullmatch(r"(\d+)(Mi|Gi)", quantity).groups()  # type: ignore[union-attr]
    return int(number) * (1024 if unit == "Gi" else 1)


@every_shape
def test_rays_object_store_has_room_in_shared_memory(shape: CatalogueModel) -> None:
    cluster = rayjob(shape)["spec"]["rayClusterSpec"]
    for group in (cluster["headGroupSpec"], *cluster["workerGroupSpecs"]):
        volumes = {volume["name"]: volume for volume in group["template"]["spec"]["volumes"]}
        shared_mib = mib(volumes["shared-memory"]["emptyDir"]["sizeLimit"])
        assert int(group["rayStartParams"]["object-store-memory"]) <= shared_mib * 2**20


@every_shape
def test_every_container_is_restricted_and_no_pod_has_a_token_of_its_own(shape: CatalogueModel) -> None:
    rendered = rayjob(shape, weights=COPIED)
    for pod in pods(rendered).values():
        assert pod["spec"]["automountServiceAccountToken"] is False
        assert pod["spec"]["securityContext"]["runAsNonRoot"] is True
        assert all(container["securityContext"]["readOnlyRootFilesystem"] for container in containers(pod))
        assert all(container["securityContext"]["capabilities"] == {"drop": ["ALL"]} for container in containers(pod))
    assert rendered["spec"]["rayClusterSpec"]["autoscalerOptions"]["securityContext"]["readOnlyRootFilesystem"] is True


def test_the_autoscaler_alone_has_the_token_for_the_kubernetes_api() -> None:
    rendered = rayjob()
    mounts = [mount["name"] for container in containers(pods(rendered)["head"]) for mount in container["volumeMounts"]]
    assert "autoscaler-token" not in mounts
    options = rendered["spec"]["rayClusterSpec"]["autoscalerOptions"]
    assert "autoscaler-token" in [mount["name"] for mount in options["volumeMounts"]]


def test_the_head_alone_has_the_database_role() -> None:
    for name, pod in pods(rayjob(model(**GPU), has_database_ca=True)).items():
        volumes = {volume["name"] for volume in pod["spec"]["volumes"]}
        assert ({"database-credentials", "database-ca"} <= volumes) == (name == "head")
        environment = [variable["name"] for variable in pod["spec"]["containers"][0]["env"]]
        assert ("PGPASSFILE" in environment) == (name == "head")


@every_shape
def test_no_pod_reaches_a_hub_or_reports_to_anybody(shape: CatalogueModel) -> None:
    quiet = {("HF_HUB_OFFLINE", "1"), ("RAY_USAGE_STATS_ENABLED", "0"), ("VLLM_NO_USAGE_STATS", "1")}
    for pod in pods(rayjob(shape)).values():
        environment = {(variable["name"], variable["value"]) for variable in pod["spec"]["containers"][0]["env"]}
        assert quiet <= environment


@every_shape
def test_all_pods_of_a_cluster_run_one_image(shape: CatalogueModel) -> None:
    images = {
        container["image"] for pod in pods(rayjob(shape, weights=COPIED)).values() for container in containers(pod)
    }
    assert images == {digest(1 if shape.spec.accelerator == "v100" else 0)}


@pytest.mark.parametrize(("accelerator", "version"), [("cpu", "2.60.0"), ("v100", "2.55.1"), ("a10g", "2.60.0")])
def test_ray_is_that_of_the_models_lane(accelerator: str, version: str) -> None:
    cluster = rayjob(model(accelerator=accelerator, weights_gib=1))["spec"]["rayClusterSpec"]
    assert cluster["rayVersion"] == version
    assert cluster["authOptions"] == {"mode": "token"}


@pytest.mark.parametrize(
    ("shape", "gpus", "most"),
    [("one GPU", "1", 1), ("a part of a node", "2", 2), ("two nodes", "4", 2), ("serve", "1", 2)],
)
def test_an_engine_has_the_gpus_that_it_needs(shape: str, gpus: str, most: int) -> None:
    group = groups(rayjob(SHAPES[shape]))["v100"]
    limits = group["template"]["spec"]["containers"][0]["resources"]["limits"]
    assert limits["nvidia.com/gpu"] == gpus
    assert (group["replicas"], group["minReplicas"], group["maxReplicas"], group["numOfHosts"]) == (0, 0, most, 1)


def test_a_worker_has_the_share_of_its_node_that_its_gpus_are() -> None:
    limits = pods(rayjob(SHAPES["a part of a node"]))["v100"]["spec"]["containers"][0]["resources"]["limits"]
    assert (limits["cpu"], limits["memory"]) == ("16000m", f"{120 * 1024}Mi")


def test_gpu_workers_go_to_their_pool_and_the_rest_to_the_cpu_pool() -> None:
    for name, pod in pods(rayjob(model(**GPU))).items():
        assert pod["spec"]["nodeSelector"] == {"cloister.dev/pool": "v100" if name == "v100" else "cpu"}
        tolerated = [toleration["key"] for toleration in pod["spec"]["tolerations"]]
        assert tolerated == (["nvidia.com/gpu"] if name == "v100" else [])


@pytest.mark.parametrize("shape", ["cpu", "http"])
def test_a_model_without_gpus_has_cpu_workers_only(shape: str) -> None:
    workers = groups(rayjob(SHAPES[shape]))
    assert list(workers) == ["cpu"]
    assert workers["cpu"]["minReplicas"] == 1


def test_engines_on_cpus_know_how_much_of_the_node_is_theirs() -> None:
    environment = {v["name"]: v["value"] for v in pods(rayjob())["cpu"]["spec"]["containers"][0]["env"]}
    assert (environment["OMP_NUM_THREADS"], environment["VLLM_CPU_KVCACHE_SPACE"]) == ("8", "7")


@pytest.mark.parametrize(("cpus", "memory_gib"), [(1, 8), (2, 8), (4, 16), (16, 60), (128, 1000)])
@every_shape
def test_a_head_and_a_cpu_worker_fit_on_one_node(shape: CatalogueModel, cpus: int, memory_gib: int) -> None:
    pools = {**POOLS, "cpu": replace(POOLS["cpu"], cpus=cpus, memory_gib=memory_gib)}
    rendered = rayjob(shape, pools=pools)
    both = [pods(rendered)[name]["spec"]["containers"][0]["resources"]["limits"] for name in ("head", "cpu")]
    beside = rendered["spec"]["rayClusterSpec"]["autoscalerOptions"]["resources"]["limits"]
    assert sum(int(limits["cpu"].removesuffix("m")) for limits in (*both, beside)) <= cpus * 1000
    assert sum(mib(limits["memory"]) for limits in both) + AUTOSCALER_MIB <= memory_gib * 1024


def test_ray_counts_no_cpu_on_the_head() -> None:
    head = rayjob()["spec"]["rayClusterSpec"]["headGroupSpec"]
    assert head["rayStartParams"]["num-cpus"] == "0"


@every_shape
def test_kuberays_own_rules_are_kept(shape: CatalogueModel) -> None:
    rendered = rayjob(shape)
    spec, cluster = rendered["spec"], rendered["spec"]["rayClusterSpec"]
    assert "shutdownAfterJobFinishes" not in spec  # excluded by deletion rules
    assert "ttlSecondsAfterFinished" not in spec
    assert cluster["autoscalerOptions"]["version"] == "v2"
    assert all(pod["spec"]["restartPolicy"] == "Never" for pod in pods(rendered).values())
    for group in (cluster["headGroupSpec"], *cluster["workerGroupSpecs"]):
        assert all(isinstance(value, str) for value in group["rayStartParams"].values())
        # By these two KubeRay's services find their pods.
        labels = group["template"]["metadata"]["labels"]
        assert labels["app.kubernetes.io/name"] == "kuberay"
        assert "app.kubernetes.io/created-by" not in labels


def test_the_cluster_goes_before_the_rayjob_whatever_the_end() -> None:
    rules = rayjob(times=JobTimes(keep_finished_s=0))["spec"]["deletionStrategy"]["deletionRules"]
    by_end: dict[str, dict[str, int]] = {}
    for rule in rules:
        condition = dict(rule["condition"])
        ttl_s = condition.pop("ttlSeconds")
        by_end.setdefault(str(condition), {})[rule["policy"]] = ttl_s
    assert len(by_end) == 3
    assert all(ttl["DeleteCluster"] < ttl["DeleteSelf"] for ttl in by_end.values())
    assert all(ttl["DeleteSelf"] >= 300 for ttl in by_end.values())  # the launcher has still to read the end


def test_deadlines_are_those_of_the_stack() -> None:
    times = JobTimes(deadline_s=7_200, start_limit_s=600, idle_timeout_s=120)
    spec = rayjob(model(**GPU), times=times)["spec"]
    assert (spec["activeDeadlineSeconds"], spec["preRunningDeadlineSeconds"], spec["backoffLimit"]) == (7_200, 600, 0)
    assert {group["idleTimeoutSeconds"] for group in spec["rayClusterSpec"]["workerGroupSpecs"]} == {120}


def test_a_pod_on_gpus_waits_for_a_node_without_a_limit_only_where_nodes_are_made() -> None:
    on_demand = {**POOLS, "v100": replace(POOLS["v100"], nodes=(), max_nodes=2)}
    named, made = (
        pods(rayjob(model(**GPU), pools=pools))["v100"]["metadata"]["annotations"] for pools in (POOLS, on_demand)
    )
    assert named == made | {"cloister.dev/node-limit-s": "1800"}


@every_shape
def test_no_autoscaler_of_nodes_moves_a_pod_of_a_job_that_runs(shape: CatalogueModel) -> None:
    for pod in pods(rayjob(shape)).values():
        assert pod["metadata"]["annotations"]["karpenter.sh/do-not-disrupt"] == "true"
        assert pod["metadata"]["annotations"]["cluster-autoscaler.kubernetes.io/safe-to-evict"] == "false"


@every_shape
def test_copying_weights_asks_for_no_more_than_the_pod_itself(shape: CatalogueModel) -> None:
    pools = {**POOLS, "cpu": replace(POOLS["cpu"], cpus=1, memory_gib=8)}
    for pod in pods(rayjob(shape, pools=pools, weights=COPIED)).values():
        (ray,) = pod["spec"]["containers"]
        for container in pod["spec"]["initContainers"]:
            asked, own = container["resources"]["requests"], ray["resources"]["requests"]
            assert int(asked["cpu"].removesuffix("m")) <= int(own["cpu"].removesuffix("m"))
            assert mib(asked["memory"]) <= mib(own["memory"])


def test_weights_on_a_volume_are_mounted_read_only() -> None:
    for pod in pods(rayjob(model(**GPU), weights=VolumeWeights(claim="model-weights"))).values():
        volumes = {volume["name"]: volume for volume in pod["spec"]["volumes"]}
        assert volumes["weights"]["persistentVolumeClaim"] == {"claimName": "model-weights", "readOnly": True}
        mounts = {mount["name"]: mount for mount in pod["spec"]["containers"][0]["volumeMounts"]}
        assert mounts["weights"] == {"name": "weights", "mountPath": "/models", "readOnly": True}


@pytest.mark.parametrize(
    ("lane", "copied"), [("direct", {"v100": True}), ("processor", {"head": False, "cpu": False, "v100": True})]
)
def test_weights_in_the_object_store_are_copied_to_those_who_need_them(lane: str, copied: dict[str, bool]) -> None:
    found: dict[str, bool] = {}
    for name, pod in pods(rayjob(model(**GPU, lane=lane, source="/models/a/b"), weights=COPIED)).items():
        for container in pod["spec"]["initContainers"]:
            for variable in container.get("env", ()):
                if variable["name"] == "CLOISTER_WEIGHTS":
                    copy = WeightsCopy.from_json(variable["value"])
                    assert (copy.prefix, copy.directory, copy.object_store) == ("models/a/b/", "/models/a/b", STORE)
                    found[name] = copy.whole
    assert found == copied


def copies(shape: CatalogueModel) -> Iterator[tuple[dict[str, Any], WeightsCopy]]:
    """The volume of each pod that copies a model, and what its container is told."""
    for pod in pods(rayjob(shape, weights=COPIED)).values():
        for container in pod["spec"]["initContainers"]:
            environment = {variable["name"]: variable["value"] for variable in container.get("env", ())}
            if "CLOISTER_WEIGHTS" in environment:
                (volume,) = [volume for volume in pod["spec"]["volumes"] if volume["name"] == "weights"]
                yield volume, WeightsCopy.from_json(environment["CLOISTER_WEIGHTS"])


@every_shape
def test_who_copies_weights_is_told_how_much_its_volume_and_the_engines_hold(shape: CatalogueModel) -> None:
    engine_gib = 18 if shape.weights_gib else 100
    for volume, copy in copies(shape):
        assert volume["emptyDir"] == {"sizeLimit": f"{copy.volume_gib}Gi"}
        assert copy.engine_volume_gib == engine_gib
        assert (copy.volume_gib == engine_gib) == copy.whole


@pytest.mark.parametrize(
    ("engine_args", "told"), [({}, "auto"), ({"load_format": "npcache"}, "npcache")], ids=["default", "own"]
)
def test_who_copies_weights_is_told_the_format_that_the_engine_loads(engine_args: dict[str, Any], told: str) -> None:
    assert [copy.load_format for _, copy in copies(model(**GPU, engine_args=engine_args))] == [told]


def test_a_pod_of_an_engine_over_several_nodes_says_how_many() -> None:
    said = {
        name: groups(rayjob(SHAPES[name]))["v100"]["template"]["metadata"]["annotations"].get(HOSTS_ANNOTATION)
        for name in ("one GPU", "a part of a node", "two nodes")
    }
    assert said == {"one GPU": None, "a part of a node": None, "two nodes": "2"}


def test_the_http_lane_has_no_weights() -> None:
    for pod in pods(rayjob(SHAPES["http"], weights=COPIED)).values():
        assert [container["name"] for container in pod["spec"]["initContainers"]] == ["credentials"]


def test_workers_of_the_http_lane_alone_have_the_key_of_its_endpoint_if_there_is_one() -> None:
    found = {
        (shape, name): volume["secret"]["optional"]
        for shape in ("http", "cpu")
        for name, pod in pods(rayjob(SHAPES[shape])).items()
        for volume in pod["spec"]["volumes"]
        if volume["name"] == "http-lane"
    }
    assert found == {("http", "cpu"): True}
    (container,) = pods(rayjob(SHAPES["http"]))["cpu"]["spec"]["containers"]
    environment = {variable["name"]: variable["value"] for variable in container["env"]}
    mounts = {mount["name"]: mount["mountPath"] for mount in container["volumeMounts"]}
    assert environment[API_KEY_FILE_VARIABLE] == f"{mounts['http-lane']}/api_key"


def test_the_service_takes_the_templates_and_fills_them_in(tmp_path: Any) -> None:
    catalogue = parse_catalogue({"models": [{"id": "Org/Demo 1", "source": "/models/demo"}]})
    for name, content in ray_job_templates(catalogue, args()).items():
        (tmp_path / name).write_text(content)
    templates = load_templates(tmp_path, catalogue, namespace=NAMES.jobs_namespace)
    demo = catalogue.models["Org/Demo 1"]
    spec = JobSpec(
        job_id="batch_0-1",
        batch_id="batch_0",
        attempt=1,
        endpoint="/v1/completions",
        input_key="files/1",
        object_store=STORE,
        database_url="",
        model=demo.spec,
    )
    body = submitted(templates[demo.id], spec)
    head = body["spec"]["rayClusterSpec"]["headGroupSpec"]["template"]["spec"]["containers"][0]
    told = [variable["value"] for variable in head["env"] if variable["name"] == "CLOISTER_JOB_SPEC"]
    assert [json.loads(value)["job_id"] for value in told] == ["batch_0-1"]
    assert body["metadata"]["namespace"] == "cloister-acme-dev-jobs"
