"""Job template of each model: the RayJob of a job without its name, job spec and token. Pure.

Fields: https://github.com/ray-project/kuberay/tree/v1.6.1/ray-operator/apis/ray/v1

KubeRay submits the job itself (``HTTPMode``). In the other modes, ``ray job submit`` runs in another pod or container
that must be scheduled, pulled and kept alive, and a broken log connection ends the RayJob. In ``HTTPMode`` KubeRay
stores the submission id before it submits the job, so a repeated request does not start the job twice.
"""

import json
from collections.abc import Sequence
from typing import Any, Final

from infra.capacity.job_sizes import (
    GroupSize,
    autoscaler_cpu_m,
    cpu_workers,
    gpu_workers,
    head_size,
    hosts_per_engine,
)
from infra.capacity.pools import pools_of
from infra.jobs.pods import COMPONENT, RayJobArgs, autoscaler_options, head_pod, worker_pod
from infra.jobs.weights import PodWeights, pod_weights
from infra.stack_file.sections import JobsSection
from ray_job.contract.cluster import RAY_METRICS_PORT, job_templates_name
from ray_job.contract.job_spec import ModelSpec
from ray_job.contract.rayjobs import (
    FINGERPRINT_ANNOTATION,
    GROUP,
    HOSTS_ANNOTATION,
    MODEL_ANNOTATION,
    NODE_LIMIT_ANNOTATION,
    STUCK_LIMIT_ANNOTATION,
    VERSION,
    model_fingerprint,
    run_time_template_key,
    template_key,
)
from ray_job.contract.weights import MODELS_DIRECTORY
from service.model_catalogue import Catalogue, CatalogueModel

ENTRYPOINT: Final = "python -m ray_job"
# A failed cluster is kept for a moment, so that the launcher can read the reason from its pods.
_KEEP_FAILED_CLUSTER_S: Final = 60
# No manifest has it, so a pod that the launcher did not complete loads nothing.
_NO_DIGEST: Final = f"sha256:{'0' * 64}"
# The API server refuses more than 1 MiB: https://kubernetes.io/docs/concepts/configuration/configmap/
_CONFIG_MAP_BYTES: Final = 900_000


def ray_job_templates(
    catalogue: Catalogue, args: RayJobArgs, *, at_run_time: Sequence[str] = ()
) -> dict[str, dict[str, str]]:
    """Return the JSON of each model's RayJob by ConfigMap and file name. Many models need several ConfigMaps.

    Args:
        catalogue: the models of the stack file.
        args: what all templates share.
        at_run_time: accelerators of models that operators enable while the stack runs; each has a template too.
    """
    templates = {template_key(model.id): model for model in catalogue.values()}
    templates |= {run_time_template_key(accelerator): _model_at_run_time(accelerator) for accelerator in at_run_time}
    config_maps: list[dict[str, str]] = [{}]
    size = 0
    for file, model in templates.items():
        text = json.dumps(ray_job_template(model, args), separators=(",", ":"))
        if size + len(text) > _CONFIG_MAP_BYTES:
            config_maps.append({})
            size = 0
        config_maps[-1][file] = text
        size += len(text)
    return {job_templates_name(number): files for number, files in enumerate(config_maps)}


def ray_job_template(model: CatalogueModel, args: RayJobArgs) -> dict[str, Any]:
    """Return the RayJob of one model. The launcher completes it (``service.adapters.rayjob_templates``).

    It has no ``activeDeadlineSeconds``: a job runs as long as there is work for it, and ends by itself.

    Raises:
        IndexError: no pool exists for the model's accelerator (the rules of a stack file refuse that earlier).
        KeyError: no image exists for it (the same).
    """
    times = args.times
    ended: tuple[tuple[dict[str, str], int], ...] = (
        ({"jobStatus": "SUCCEEDED"}, 0),
        ({"jobStatus": "FAILED"}, _KEEP_FAILED_CLUSTER_S),
        ({"jobDeploymentStatus": "Failed"}, _KEEP_FAILED_CLUSTER_S),
    )
    return {
        "apiVersion": f"{GROUP}/{VERSION}",
        "kind": "RayJob",
        "metadata": {
            "name": "named-by-the-launcher",
            "namespace": args.names.jobs_namespace,
            "labels": args.names.labels(COMPONENT),
            "annotations": {
                MODEL_ANNOTATION: model.id,
                FINGERPRINT_ANNOTATION: model_fingerprint(model.spec),
                STUCK_LIMIT_ANNOTATION: str(times.stuck_limit_s),
            },
        },
        "spec": {
            "submissionMode": "HTTPMode",
            "entrypoint": ENTRYPOINT,
            # The service starts another job, because it knows which failures are worth a retry.
            "backoffLimit": 0,
            "preRunningDeadlineSeconds": times.start_limit_s,
            # The Ray cluster is deleted when the job ends, the RayJob some time later; both also if the job was never
            # submitted.
            "deletionStrategy": {
                "deletionRules": [
                    {"policy": policy, "condition": {**condition, "ttlSeconds": ttl_s}}
                    for condition, cluster_s in ended
                    for policy, ttl_s in (("DeleteCluster", cluster_s), ("DeleteSelf", times.keep_finished_s))
                ]
            },
            "rayClusterSpec": _cluster(model, args),
        },
    }


def _model_at_run_time(accelerator: str) -> CatalogueModel:
    """Return a stand-in for a model that nobody knows yet. The launcher replaces its name, directory and digest."""
    spec = ModelSpec(
        id="model-at-run-time", source=f"{MODELS_DIRECTORY}/model", digest=_NO_DIGEST, accelerator=accelerator
    )
    return CatalogueModel(spec=spec)


def _cluster(model: CatalogueModel, args: RayJobArgs) -> dict[str, Any]:
    spec, cpu_pool, times = model.spec, args.pools["cpu"], args.times
    pools = pools_of(model, args.pools)
    image = args.images[pools[0].accelerator.image_variant]

    def weights(size: GroupSize, *, whole: bool) -> PodWeights:
        return pod_weights(args.weights, args.object_store, model, image.reference, size, whole=whole)

    has_gpus = spec.num_gpus > 0
    head = head_size(cpu_pool)
    workers = cpu_workers(spec, cpu_pool)
    environment = {}
    if spec.accelerator == "cpu" and spec.engine != "http":
        # An engine on CPUs cannot detect its share of the node.
        environment = {
            "OMP_NUM_THREADS": str(max(1, workers.cpu_m // 1_000)),
            "VLLM_CPU_KVCACHE_SPACE": str(max(1, workers.memory_mib // 4 // 1_024)),
        }
    cpu_pod = worker_pod(
        args,
        image.reference,
        workers,
        cpu_pool,
        weights=weights(workers, whole=not has_gpus),
        environment=environment,
        http_engine=spec.engine == "http",
    )
    groups = [_group("cpu", workers, cpu_pod, times)]
    for gpu_pool in pools if has_gpus else ():
        engines = gpu_workers(spec, gpu_pool)
        engine_weights = weights(engines, whole=True)
        gpu_pod = worker_pod(args, image.reference, engines, gpu_pool, weights=engine_weights)
        if gpu_pool.nodes:
            gpu_pod["metadata"]["annotations"][NODE_LIMIT_ANNOTATION] = str(times.start_limit_s)
        if (hosts := hosts_per_engine(spec, gpu_pool)) > 1:
            gpu_pod["metadata"]["annotations"][HOSTS_ANNOTATION] = str(hosts)
        groups.append(_group(gpu_pool.name, engines, gpu_pod, times))
    return {
        "rayVersion": image.ray,
        "authOptions": {"mode": "token"},
        "enableInTreeAutoscaling": True,
        "autoscalerOptions": autoscaler_options(autoscaler_cpu_m(cpu_pool), times.idle_timeout_s),
        "headGroupSpec": {
            "serviceType": "ClusterIP",
            # KubeRay reads the job's status from the dashboard's port. A network policy denies all other clients.
            "rayStartParams": {**_start_params(head), "dashboard-host": "0.0.0.0"},  # noqa: S104
            "template": head_pod(args, image.reference, head, weights(head, whole=False)),
        },
        "workerGroupSpecs": groups,
    }


def _group(name: str, size: GroupSize, pod: dict[str, Any], times: JobsSection) -> dict[str, Any]:
    return {
        "groupName": name,
        "replicas": size.min_replicas,
        "minReplicas": size.min_replicas,
        "maxReplicas": size.max_replicas,
        "numOfHosts": 1,
        "idleTimeoutSeconds": times.idle_timeout_s,
        "rayStartParams": _start_params(size),
        "template": pod,
    }


def _start_params(size: GroupSize) -> dict[str, str]:
    """Return the parameters of ``ray start`` as strings. KubeRay adds memory from the container's limits.

    GPUs are explicit: Ray's autoscaler finds only resources whose names end in ``gpu`` in the limits, and would start
    no worker with MIG slices. Source: ``_get_num_gpus`` in ray/autoscaler/_private/kuberay/autoscaling_config.py.
    """
    return {
        "num-cpus": str(size.ray_cpus),
        **({"num-gpus": str(size.gpus)} if size.gpus else {}),
        "object-store-memory": str(size.object_store_mib * 2**20),
        "metrics-export-port": str(RAY_METRICS_PORT),
    }
