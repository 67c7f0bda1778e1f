"""The RayJob of each model of the catalogue: what the service submits for a batch, but for its name and job spec. Pure.

Fields and their rules: https://github.com/ray-project/kuberay/tree/v1.6.1/ray-operator/apis/ray/v1

KubeRay submits the job itself (``HTTPMode``). The other modes run ``ray job submit`` in a pod or container that must
be scheduled, pulled and kept alive beside the job, and a broken connection of its log ends the RayJob. Here KubeRay
asks for the submission id first, which it wrote down before: so a repeated request submits nothing twice.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Final

from infra.naming import StackNames
from infra.pools import NodePool, PoolName, RayImage
from infra.ray_job_pods import COMPONENT, PodArgs, autoscaler_options, head_pod, with_http_lane_key, worker_pod
from infra.ray_job_sizes import (
    GroupSize,
    PodSize,
    autoscaler_cpu_m,
    cpu_workers,
    engine_gpus,
    gpu_workers,
    head_size,
    hosts_per_engine,
)
from infra.weights import ImageWeights, Weights, WeightsParts, weights_parts
from ray_job.contract.job_spec import Accelerator
from ray_job.contract.rayjobs import (
    FINGERPRINT_ANNOTATION,
    GROUP,
    HOSTS_ANNOTATION,
    MODEL_ANNOTATION,
    NODE_LIMIT_ANNOTATION,
    STUCK_LIMIT_ANNOTATION,
    VERSION,
    model_fingerprint,
    template_key,
)
from service.model_catalogue import Catalogue, CatalogueModel

ENTRYPOINT: Final = "python -m ray_job"
# The launcher reads how a job ended from its RayJob; one that is gone at once would be run again.
MIN_KEEP_FINISHED_S: Final = 300
# What failed is kept for a moment, so that its pods can still say why.
_KEEP_FAILED_CLUSTER_S: Final = 60


@dataclass(frozen=True, slots=True, kw_only=True)
class JobTimes:
    """How long KubeRay lets the parts of a job be.

    Attributes:
        deadline_s: the longest that one attempt runs; the service ends a batch at its own deadline, this holds where
            the service is not there to do so.
        start_limit_s: until the head and one CPU worker are ready, with the pull of a large image in it; and for how
            long a GPU pool whose nodes have names may have none of them.
        stuck_limit_s: how long a pod may wait for what waiting does not bring before the service gives the batch up.
        idle_timeout_s: how long a worker without work is kept.
        keep_finished_s: how long a finished RayJob can be looked at; at least five minutes.
    """

    deadline_s: int = 24 * 3_600
    start_limit_s: int = 1_800
    stuck_limit_s: int = 300
    idle_timeout_s: int = 60
    keep_finished_s: int = 600


@dataclass(frozen=True, slots=True, kw_only=True)
class RayJobArgs:
    """What the templates of a stack are made of.

    Attributes:
        names: the stack.
        images: of each accelerator that a model uses.
        pools: by name; ``cpu`` and those of the models' accelerators.
        weights: where the models' directories are.
        times: deadlines.
        has_pull_secret: whether the jobs' namespace has the pull secret.
        priority_class: of the pods; empty for none.
        has_database_ca: whether the jobs' namespace has the certificate of the database's authority.
    """

    names: StackNames
    images: Mapping[Accelerator, RayImage]
    pools: Mapping[PoolName, NodePool]
    weights: Weights = field(default_factory=ImageWeights)
    times: JobTimes = field(default_factory=JobTimes)
    has_pull_secret: bool = False
    priority_class: str = ""
    has_database_ca: bool = False


def ray_job_templates(catalogue: Catalogue, args: RayJobArgs) -> dict[str, str]:
    """The content of the ConfigMap ``ray-job-templates``: JSON by file name, one for each model."""
    return {
        template_key(model.id): json.dumps(ray_job_template(model, args), indent=1) + "\n"
        for model in catalogue.models.values()
    }


def ray_job_template(model: CatalogueModel, args: RayJobArgs) -> dict[str, Any]:
    """The RayJob of one model. Its name is the launcher's to give.

    Raises:
        KeyError: there is no pool or no image for the model's accelerator; ``infra.models.pool_problems`` tells first.
    """
    times = args.times
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
            # The service makes a new attempt where one failed, and knows which failures are worth it.
            "backoffLimit": 0,
            "activeDeadlineSeconds": times.deadline_s,
            "preRunningDeadlineSeconds": times.start_limit_s,
            "deletionStrategy": {"deletionRules": _deletion_rules(times)},
            "rayClusterSpec": _cluster(model, args),
        },
    }


def _deletion_rules(times: JobTimes) -> list[dict[str, Any]]:
    """The cluster goes when the job ends, the RayJob somewhat later; also where the job was never submitted."""
    keep_s = max(times.keep_finished_s, MIN_KEEP_FINISHED_S)
    ended: tuple[tuple[dict[str, str], int], ...] = (
        ({"jobStatus": "SUCCEEDED"}, 0),
        ({"jobStatus": "FAILED"}, _KEEP_FAILED_CLUSTER_S),
        ({"jobDeploymentStatus": "Failed"}, _KEEP_FAILED_CLUSTER_S),
    )
    return [
        {"policy": policy, "condition": {**condition, "ttlSeconds": ttl_s}}
        for condition, cluster_s in ended
        for policy, ttl_s in (("DeleteCluster", cluster_s), ("DeleteSelf", keep_s))
    ]


def _cluster(model: CatalogueModel, args: RayJobArgs) -> dict[str, Any]:
    spec, cpu_pool, times = model.spec, args.pools["cpu"], args.times
    image = args.images[spec.accelerator]
    pod_args = PodArgs(
        names=args.names,
        image=image.reference,
        has_pull_secret=args.has_pull_secret,
        priority_class=args.priority_class,
        has_database_ca=args.has_database_ca,
    )

    def weights(size: PodSize, *, whole: bool) -> WeightsParts:
        return weights_parts(args.weights, model, image.reference, size, whole=whole)

    has_gpus = engine_gpus(spec) > 0
    head = head_size(cpu_pool)
    workers = cpu_workers(spec, cpu_pool)
    cpu_pod = worker_pod(
        pod_args,
        workers.pod,
        "cpu",
        weights=weights(workers.pod, whole=not has_gpus),
        environment=_cpu_engine(model, workers.pod),
    )
    if spec.lane == "http":
        cpu_pod = with_http_lane_key(cpu_pod)
    groups = [_group("cpu", workers, cpu_pod, times)]
    if has_gpus:
        gpu_pool = args.pools[spec.accelerator]
        engines = gpu_workers(spec, gpu_pool)
        gpu_pod = worker_pod(pod_args, engines.pod, spec.accelerator, weights=weights(engines.pod, whole=True))
        if gpu_pool.nodes:
            gpu_pod["metadata"]["annotations"][NODE_LIMIT_ANNOTATION] = str(times.start_limit_s)
        if (hosts := hosts_per_engine(spec, gpu_pool)) > 1:
            gpu_pod["metadata"]["annotations"][HOSTS_ANNOTATION] = str(hosts)
        groups.append(_group(spec.accelerator, engines, gpu_pod, times))
    return {
        "rayVersion": image.ray,
        "authOptions": {"mode": "token"},
        "enableInTreeAutoscaling": True,
        "autoscalerOptions": autoscaler_options(autoscaler_cpu_m(cpu_pool), times.idle_timeout_s),
        "headGroupSpec": {
            "serviceType": "ClusterIP",
            # KubeRay asks the dashboard's port how the job goes; a network policy lets nobody else.
            "rayStartParams": {**_start_params(head), "dashboard-host": "0.0.0.0"},  # noqa: S104
            "template": head_pod(pod_args, head, weights(head, whole=False)),
        },
        "workerGroupSpecs": groups,
    }


def _cpu_engine(model: CatalogueModel, size: PodSize) -> dict[str, str]:
    """What an engine on CPUs needs to know of its pod: nothing else tells it how much of the node it has."""
    if model.spec.accelerator != "cpu" or model.spec.lane == "http":
        return {}
    return {
        "OMP_NUM_THREADS": str(max(1, size.cpu_m // 1_000)),
        "VLLM_CPU_KVCACHE_SPACE": str(max(1, size.memory_mib // 4 // 1_024)),
    }


def _group(name: str, size: GroupSize, pod: dict[str, Any], times: JobTimes) -> dict[str, Any]:
    return {
        "groupName": name,
        "replicas": size.min_replicas,
        "minReplicas": size.min_replicas,
        "maxReplicas": size.max_replicas,
        "numOfHosts": 1,
        "idleTimeoutSeconds": times.idle_timeout_s,
        "rayStartParams": _start_params(size.pod),
        "template": pod,
    }


def _start_params(size: PodSize) -> dict[str, str]:
    """Parameters of ``ray start``, all strings. KubeRay adds memory and GPUs from the container's limits."""
    return {
        "num-cpus": str(size.ray_cpus),
        "object-store-memory": str(size.object_store_mib * 2**20),
    }
