"""Job template of a model: shape, deadlines, isolation."""

import json
import re
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import kubernetes_validate
import pytest

from infra.capacity.job_sizes import AUTOSCALER_MIB
from infra.jobs.template import ray_job_templates
from infra.stack_file.sections import JobsSection, ModelWeightsSection, ObjectStoreWeightsSection, VolumeWeightsSection
from ray_job.contract.job_spec import JobSpec
from ray_job.contract.rayjobs import HOSTS_ANNOTATION
from ray_job.contract.weights import WeightsCopy
from ray_job.engines.http import API_KEY_FILE_VARIABLE
from service.adapters.rayjob_templates import load_templates
from service.adapters.rayjob_templates import rayjob as submitted
from service.model_catalogue import CatalogueModel, parse_catalogue
from tests.infra.ray_job_args import NAMES, POOLS, STORE, args, digest, groups, model, pods, rayjob

KUBERNETES = "1.35"
COPIED = ObjectStoreWeightsSection(kind="object_store", prefix="models", cache_gib=100)
MOUNTED = VolumeWeightsSection(kind="volume", claim="model-weights")
GPU = {"accelerator": "v100", "weights_gib": 15}
SHAPES: dict[str, CatalogueModel] = {
    "cpu": model(),
    "one GPU": model(**GPU),
    "a part of a node": model(**GPU, tensor_parallel_size=2, concurrency=2),
    "two nodes": model(**GPU, tensor_parallel_size=4, pipeline_parallel_size=2, engine="processor"),
    "http": model(engine="http", base_url="http://gpu.example/v1"),
    "serve": model(**GPU, engine="serve", concurrency=2),
}
every_shape = pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
every_weights = pytest.mark.parametrize("weights", [MOUNTED, COPIED], ids=["volume", "copied"])


def containers(pod: dict[str, Any]) -> list[dict[str, Any]]:
    return [*pod["spec"]["initContainers"], *pod["spec"]["containers"]]


@every_shape
@every_weights
def test_pods_match_the_schema_of_kubernetes(shape: CatalogueModel, weights: ModelWeightsSection) -> None:
    rendered = rayjob(shape, weights=weights, has_pull_secret=True, priority_class="jobs")
    for name, pod in pods(rendered).items():
        manifest = {"apiVersion": "v1", "kind": "Pod", **pod, "metadata": {**pod["metadata"], "name": name}}
        kubernetes_validate.validate(manifest, KUBERNETES, strict=True)


@every_shape
def test_requests_equal_limits_of_memory_disk_and_gpus(shape: CatalogueModel) -> None:
    for pod in pods(rayjob(shape, weights=COPIED)).values():
        for container in containers(pod):
            given = container["resources"]
            for name in ("memory", "ephemeral-storage", "nvidia.com/gpu"):
                assert given["requests"].get(name) == given["limits"].get(name)


@every_shape
def test_volumes_of_a_pod_are_within_its_limits(shape: CatalogueModel) -> None:
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
def test_object_store_of_ray_fits_into_shared_memory(shape: CatalogueModel) -> None:
    cluster = rayjob(shape)["spec"]["rayClusterSpec"]
    for group in (cluster["headGroupSpec"], *cluster["workerGroupSpecs"]):
        volumes = {volume["name"]: volume for volume in group["template"]["spec"]["volumes"]}
        shared_mib = mib(volumes["shared-memory"]["emptyDir"]["sizeLimit"])
        assert int(group["rayStartParams"]["object-store-memory"]) <= shared_mib * 2**20


@every_shape
def test_containers_are_restricted_and_pods_have_no_token(shape: CatalogueModel) -> None:
    rendered = rayjob(shape, weights=COPIED)
    for pod in pods(rendered).values():
        assert pod["spec"]["automountServiceAccountToken"] is False
        assert pod["spec"]["securityContext"]["runAsNonRoot"] is True
        assert all(container["securityContext"]["readOnlyRootFilesystem"] for container in containers(pod))
        assert all(container["securityContext"]["capabilities"] == {"drop": ["ALL"]} for container in containers(pod))
    assert rendered["spec"]["rayClusterSpec"]["autoscalerOptions"]["securityContext"]["readOnlyRootFilesystem"] is True


def test_only_the_autoscaler_has_a_token_of_the_kubernetes_api() -> None:
    rendered = rayjob()
    mounts = [mount["name"] for container in containers(pods(rendered)["head"]) for mount in container["volumeMounts"]]
    assert "autoscaler-token" not in mounts
    options = rendered["spec"]["rayClusterSpec"]["autoscalerOptions"]
    assert "autoscaler-token" in [mount["name"] for mount in options["volumeMounts"]]


@every_shape
def test_ray_has_no_credential_but_the_token_in_the_head_and_the_key_of_the_http_engine(shape: CatalogueModel) -> None:
    for name, pod in pods(rayjob(shape, weights=COPIED, has_http_engine_key=True)).items():
        (ray,) = pod["spec"]["containers"]
        secrets = {volume["name"] for volume in pod["spec"]["volumes"] if "secret" in volume}
        mounted = secrets & {mount["name"] for mount in ray["volumeMounts"]}
        assert mounted <= {"job-token"} if name == "head" else mounted <= {"http-engine"}
        environment = {variable["name"]: variable["value"] for variable in ray["env"]}
        assert not environment.keys() & {"PGPASSFILE", "AWS_SHARED_CREDENTIALS_FILE", "CLOISTER_JOB_TOKEN"}
        assert ("CLOISTER_JOB_TOKEN_FILE" in environment) == (name == "head")


def test_head_reads_the_token_where_it_is_mounted() -> None:
    pod = pods(rayjob())["head"]["spec"]
    (ray,) = pod["containers"]
    environment = {variable["name"]: variable["value"] for variable in ray["env"]}
    mounts = {mount["name"]: mount["mountPath"] for mount in ray["volumeMounts"]}
    assert environment["CLOISTER_JOB_TOKEN_FILE"] == f"{mounts['job-token']}/token"


def test_only_the_copy_of_weights_has_a_key_of_the_object_store() -> None:
    pod = pods(rayjob(model(**GPU), weights=COPIED))["v100"]["spec"]
    (copy,) = pod["initContainers"]
    environment = {variable["name"]: variable["value"] for variable in copy["env"]}
    mounts = {mount["name"]: mount["mountPath"] for mount in copy["volumeMounts"]}
    assert environment["AWS_SHARED_CREDENTIALS_FILE"] == f"{mounts['weights-credentials']}/aws"
    assert "weights-credentials" not in str(pods(rayjob(model(**GPU), weights=MOUNTED)))


@every_shape
def test_pods_run_offline_without_usage_reports(shape: CatalogueModel) -> None:
    quiet = {("HF_HUB_OFFLINE", "1"), ("RAY_USAGE_STATS_ENABLED", "0"), ("VLLM_NO_USAGE_STATS", "1")}
    for pod in pods(rayjob(shape)).values():
        environment = {(variable["name"], variable["value"]) for variable in pod["spec"]["containers"][0]["env"]}
        assert quiet <= environment


@every_shape
def test_pods_keep_the_niceness_of_engines(shape: CatalogueModel) -> None:
    for pod in pods(rayjob(shape)).values():
        assert {"name": "RAY_worker_niceness", "value": "0"} in pod["spec"]["containers"][0]["env"]


@every_shape
def test_pods_of_a_cluster_run_the_same_image(shape: CatalogueModel) -> None:
    images = {
        container["image"] for pod in pods(rayjob(shape, weights=COPIED)).values() for container in containers(pod)
    }
    assert images == {digest(1 if shape.spec.accelerator == "v100" else 0)}


@pytest.mark.parametrize(("accelerator", "version"), [("cpu", "2.60.0"), ("v100", "2.55.1"), ("a10g", "2.60.0")])
def test_ray_version_is_that_of_the_image_variant(accelerator: str, version: str) -> None:
    cluster = rayjob(model(accelerator=accelerator, weights_gib=1))["spec"]["rayClusterSpec"]
    assert cluster["rayVersion"] == version
    assert cluster["authOptions"] == {"mode": "token"}


@pytest.mark.parametrize(
    ("shape", "gpus", "most"),
    [("one GPU", "1", 1), ("a part of a node", "2", 2), ("two nodes", "4", 2), ("serve", "1", 2)],
)
def test_worker_has_the_gpus_of_its_engine(shape: str, gpus: str, most: int) -> None:
    group = groups(rayjob(SHAPES[shape]))["v100"]
    limits = group["template"]["spec"]["containers"][0]["resources"]["limits"]
    assert limits["nvidia.com/gpu"] == gpus
    assert (group["replicas"], group["minReplicas"], group["maxReplicas"], group["numOfHosts"]) == (0, 0, most, 1)


def test_worker_share_of_a_node_is_proportional_to_its_gpus() -> None:
    limits = pods(rayjob(SHAPES["a part of a node"]))["v100"]["spec"]["containers"][0]["resources"]["limits"]
    assert (limits["cpu"], limits["memory"]) == ("16000m", f"{120 * 1024}Mi")


def test_gpu_workers_run_in_their_pool_and_others_in_the_cpu_pool() -> None:
    for name, pod in pods(rayjob(model(**GPU))).items():
        assert pod["spec"]["nodeSelector"] == {"cloister.dev/pool": "v100" if name == "v100" else "cpu"}
        tolerated = [toleration["key"] for toleration in pod["spec"]["tolerations"]]
        assert tolerated == (["nvidia.com/gpu"] if name == "v100" else [])


@pytest.mark.parametrize("shape", ["cpu", "http"])
def test_model_without_gpus_has_cpu_workers_only(shape: str) -> None:
    workers = groups(rayjob(SHAPES[shape]))
    assert list(workers) == ["cpu"]
    assert workers["cpu"]["minReplicas"] == 1


def test_cpu_engine_is_limited_to_its_share_of_the_node() -> None:
    environment = {v["name"]: v["value"] for v in pods(rayjob())["cpu"]["spec"]["containers"][0]["env"]}
    assert (environment["OMP_NUM_THREADS"], environment["VLLM_CPU_KVCACHE_SPACE"]) == ("8", "7")


@pytest.mark.parametrize(("cpus", "memory_gib"), [(1, 8), (2, 8), (4, 16), (16, 60), (128, 1000)])
@every_shape
def test_head_and_cpu_worker_fit_on_one_node(shape: CatalogueModel, cpus: int, memory_gib: int) -> None:
    pools = {**POOLS, "cpu": replace(POOLS["cpu"], cpus=cpus, memory_gib=memory_gib)}
    rendered = rayjob(shape, pools=pools)
    both = [pods(rendered)[name]["spec"]["containers"][0]["resources"]["limits"] for name in ("head", "cpu")]
    beside = rendered["spec"]["rayClusterSpec"]["autoscalerOptions"]["resources"]["limits"]
    assert sum(int(limits["cpu"].removesuffix("m")) for limits in (*both, beside)) <= cpus * 1000
    assert sum(mib(limits["memory"]) for limits in both) + AUTOSCALER_MIB <= memory_gib * 1024


def test_head_offers_no_cpus_to_ray() -> None:
    head = rayjob()["spec"]["rayClusterSpec"]["headGroupSpec"]
    assert head["rayStartParams"]["num-cpus"] == "0"


@every_shape
def test_rayjob_follows_the_rules_of_kuberay(shape: CatalogueModel) -> None:
    rendered = rayjob(shape)
    spec, cluster = rendered["spec"], rendered["spec"]["rayClusterSpec"]
    assert "shutdownAfterJobFinishes" not in spec  # excluded by deletion rules
    assert "ttlSecondsAfterFinished" not in spec
    assert cluster["autoscalerOptions"]["version"] == "v2"
    assert all(pod["spec"]["restartPolicy"] == "Never" for pod in pods(rendered).values())
    for group in (cluster["headGroupSpec"], *cluster["workerGroupSpecs"]):
        assert all(isinstance(value, str) for value in group["rayStartParams"].values())
        # KubeRay's services select their pods by these two labels.
        labels = group["template"]["metadata"]["labels"]
        assert labels["app.kubernetes.io/name"] == "kuberay"
        assert "app.kubernetes.io/created-by" not in labels


def test_ray_cluster_is_deleted_before_its_rayjob() -> None:
    rules = rayjob(times=JobsSection(keep_finished_s=300))["spec"]["deletionStrategy"]["deletionRules"]
    by_end: dict[str, dict[str, int]] = {}
    for rule in rules:
        condition = dict(rule["condition"])
        ttl_s = condition.pop("ttlSeconds")
        by_end.setdefault(str(condition), {})[rule["policy"]] = ttl_s
    assert len(by_end) == 3
    assert all(ttl["DeleteCluster"] < ttl["DeleteSelf"] for ttl in by_end.values())
    assert all(ttl["DeleteSelf"] >= 300 for ttl in by_end.values())  # so that the launcher can read the result


def test_deadlines_follow_the_settings() -> None:
    times = JobsSection(start_limit_s=600, idle_timeout_s=120)
    spec = rayjob(model(**GPU), times=times)["spec"]
    assert (spec["preRunningDeadlineSeconds"], spec["backoffLimit"]) == (600, 0)
    assert "activeDeadlineSeconds" not in spec  # a job runs as long as it has work
    assert {group["idleTimeoutSeconds"] for group in spec["rayClusterSpec"]["workerGroupSpecs"]} == {120}


def test_wait_for_a_gpu_node_is_limited_for_named_nodes_only() -> None:
    on_demand = {**POOLS, "v100": replace(POOLS["v100"], nodes=(), max_nodes=2)}
    named, on_demand_pod = (
        pods(rayjob(model(**GPU), pools=pools))["v100"]["metadata"]["annotations"] for pools in (POOLS, on_demand)
    )
    assert named == on_demand_pod | {"cloister.dev/node-limit-s": "1800"}


@every_shape
def test_node_autoscalers_do_not_evict_running_jobs(shape: CatalogueModel) -> None:
    for pod in pods(rayjob(shape)).values():
        assert pod["metadata"]["annotations"]["karpenter.sh/do-not-disrupt"] == "true"
        assert pod["metadata"]["annotations"]["cluster-autoscaler.kubernetes.io/safe-to-evict"] == "false"


@every_shape
def test_copy_of_weights_requests_no_more_than_its_pod(shape: CatalogueModel) -> None:
    pools = {**POOLS, "cpu": replace(POOLS["cpu"], cpus=1, memory_gib=8)}
    for pod in pods(rayjob(shape, pools=pools, weights=COPIED)).values():
        (ray,) = pod["spec"]["containers"]
        for container in pod["spec"]["initContainers"]:
            requested, own = container["resources"]["requests"], ray["resources"]["requests"]
            assert int(requested["cpu"].removesuffix("m")) <= int(own["cpu"].removesuffix("m"))
            assert mib(requested["memory"]) <= mib(own["memory"])


def test_weights_on_a_volume_are_mounted_read_only() -> None:
    for pod in pods(rayjob(model(**GPU), weights=MOUNTED)).values():
        volumes = {volume["name"]: volume for volume in pod["spec"]["volumes"]}
        assert volumes["weights"]["persistentVolumeClaim"] == {"claimName": "model-weights", "readOnly": True}
        mounts = {mount["name"]: mount for mount in pod["spec"]["containers"][0]["volumeMounts"]}
        assert mounts["weights"] == {"name": "weights", "mountPath": "/models", "readOnly": True}


@pytest.mark.parametrize(
    ("engine", "copied"), [("direct", {"v100": True}), ("processor", {"head": False, "cpu": False, "v100": True})]
)
def test_weights_are_copied_to_the_pods_that_need_them(engine: str, copied: dict[str, bool]) -> None:
    found: dict[str, bool] = {}
    for name, pod in pods(rayjob(model(**GPU, engine=engine, source="/models/a/b"), weights=COPIED)).items():
        for container in pod["spec"]["initContainers"]:
            for variable in container.get("env", ()):
                if variable["name"] == "CLOISTER_WEIGHTS":
                    copy = WeightsCopy.from_json(variable["value"])
                    assert (copy.prefix, copy.directory, copy.object_store) == ("models/a/b/", "/models/a/b", STORE)
                    found[name] = copy.whole
    assert found == copied


def copies(shape: CatalogueModel) -> Iterator[tuple[dict[str, Any], WeightsCopy]]:
    """Yield the weights volume and the copy settings of each pod that copies a model."""
    for pod in pods(rayjob(shape, weights=COPIED)).values():
        for container in pod["spec"]["initContainers"]:
            environment = {variable["name"]: variable["value"] for variable in container.get("env", ())}
            if "CLOISTER_WEIGHTS" in environment:
                (volume,) = [volume for volume in pod["spec"]["volumes"] if volume["name"] == "weights"]
                yield volume, WeightsCopy.from_json(environment["CLOISTER_WEIGHTS"])


@every_shape
def test_copy_of_weights_gets_the_sizes_of_its_volume_and_the_engines(shape: CatalogueModel) -> None:
    engine_gib = 18 if shape.weights_gib else 100
    for volume, copy in copies(shape):
        assert volume["emptyDir"] == {"sizeLimit": f"{copy.volume_gib}Gi"}
        assert copy.engine_volume_gib == engine_gib
        assert (copy.volume_gib == engine_gib) == copy.whole


@pytest.mark.parametrize(
    ("engine_args", "load_format"), [({}, "auto"), ({"load_format": "gguf"}, "gguf")], ids=["default", "own"]
)
def test_copy_of_weights_gets_the_load_format_of_the_engine(engine_args: dict[str, Any], load_format: str) -> None:
    assert [copy.load_format for _, copy in copies(model(**GPU, engine_args=engine_args))] == [load_format]


def test_pod_of_a_multi_node_engine_has_the_number_of_nodes() -> None:
    annotations = {
        name: groups(rayjob(SHAPES[name]))["v100"]["template"]["metadata"]["annotations"].get(HOSTS_ANNOTATION)
        for name in ("one GPU", "a part of a node", "two nodes")
    }
    assert annotations == {"one GPU": None, "a part of a node": None, "two nodes": "2"}


def test_http_engine_has_no_weights() -> None:
    for pod in pods(rayjob(SHAPES["http"], weights=COPIED)).values():
        assert pod["spec"]["initContainers"] == []


def test_only_workers_of_the_http_engine_mount_its_api_key() -> None:
    found = {
        (shape, name)
        for shape in ("http", "cpu")
        for name, pod in pods(rayjob(SHAPES[shape], has_http_engine_key=True)).items()
        for volume in pod["spec"]["volumes"]
        if volume["name"] == "http-engine"
    }
    assert found == {("http", "cpu")}
    (container,) = pods(rayjob(SHAPES["http"], has_http_engine_key=True))["cpu"]["spec"]["containers"]
    environment = {variable["name"]: variable["value"] for variable in container["env"]}
    mounts = {mount["name"]: mount["mountPath"] for mount in container["volumeMounts"]}
    assert environment[API_KEY_FILE_VARIABLE] == f"{mounts['http-engine']}/api_key"


def test_service_loads_and_completes_the_templates(tmp_path: Any) -> None:
    catalogue = parse_catalogue({"models": [{"id": "Org/Demo 1", "source": "/models/demo"}]})
    for files in ray_job_templates(catalogue, args()).values():
        for name, content in files.items():
            (tmp_path / name).write_text(content)
    templates = load_templates(tmp_path, catalogue, namespace=NAMES.jobs_namespace)
    demo = catalogue["Org/Demo 1"]
    spec = JobSpec(
        job_id="job_0",
        coordinator_url="http://coordinator:8100",
        model=demo.spec,
    )
    body = submitted(templates[demo.id], spec)
    head_pod = body["spec"]["rayClusterSpec"]["headGroupSpec"]["template"]["spec"]
    head = head_pod["containers"][0]
    job_specs = [variable["value"] for variable in head["env"] if variable["name"] == "CLOISTER_JOB_SPEC"]
    assert [json.loads(value)["job_id"] for value in job_specs] == ["job_0"]
    secrets = [v["secret"]["secretName"] for v in head_pod["volumes"] if v["name"] == "job-token"]
    assert secrets == ["job-0"]
    assert body["metadata"]["namespace"] == "cloister-acme-dev-jobs"
