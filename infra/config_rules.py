"""The rules between the sections of a stack file: each gives its problems as ``key: what is wrong; what to do``."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Final
from urllib.parse import parse_qsl, urlsplit

from infra.config_mapping import model_weights, node_pools, ray_images
from infra.config_schema import SECRET_KEYS
from infra.config_sections import (
    Api,
    BundledObjectStore,
    CloudNativePgDatabase,
    DevicePlugin,
    ExternalDatabase,
    Images,
    KubeRay,
    Kubernetes,
    Limits,
    Network,
    NodePools,
    S3ObjectStore,
)
from infra.kuberay import MIN_VERSION
from infra.models import image_problems, pool_problems
from infra.pools import NodePool
from infra.ray_job_sizes import AUTOSCALER_MIB, autoscaler_cpu_m, cpu_workers, engine_gpus, gpu_workers, head_size
from ray_job.contract.job_spec import ModelSpec, ObjectStoreLocation
from service.model_catalogue import Catalogue

Problems = Iterator[str]

_TLS_MODES: Final = ("require", "verify-ca", "verify-full")


@dataclass(frozen=True, slots=True, kw_only=True)
class Rule:
    """A rule and the keys whose sections it looks at; it is skipped where one of them is wrong by itself."""

    looks_at: tuple[str, ...]
    check: Callable[..., Problems]


RULES: Final[list[Rule]] = []


def _rule(*looks_at: str) -> Callable[[Callable[..., Problems]], Callable[..., Problems]]:
    def add(check: Callable[..., Problems]) -> Callable[..., Problems]:
        RULES.append(Rule(looks_at=looks_at, check=check))
        return check

    return add


@_rule("secrets")
def _needed_secrets(secrets: frozenset[str]) -> Problems:
    for name, secret in SECRET_KEYS.items():
        if secret.needed == "always" and name not in secrets:
            yield f"{name}: is required: {secret.meaning}; set it with `{secret.command}`"


@_rule("secrets", "images")
def _registry_password(secrets: frozenset[str], images: Images) -> Problems:
    secret = SECRET_KEYS["registry_password"]
    if images.pull_secret and secret.name not in secrets:
        yield f"{secret.name}: is required because of images.pull_secret; set it with `{secret.command}`"
    if not images.pull_secret and secret.name in secrets:
        yield f"{secret.name}: belongs to images.pull_secret, which is not there; add it or remove the secret"


@_rule("secrets", "catalogue")
def _http_lane_key(secrets: frozenset[str], catalogue: Catalogue) -> Problems:
    name = "http_lane_api_key"
    if name in secrets and not any(model.spec.lane == "http" for model in catalogue.models.values()):
        yield f"{name}: no model is in the http lane; remove the secret or add the model"


@_rule("secrets", "kubernetes")
def _one_kubeconfig(secrets: frozenset[str], kubernetes: Kubernetes) -> Problems:
    if "kubeconfig" in secrets and kubernetes.kubeconfig:
        yield "kubernetes.kubeconfig: the secret kubeconfig is there too; keep one of the two"


@_rule("secrets", "object_store")
def _job_key(secrets: frozenset[str], object_store: Any) -> Problems:
    secret = SECRET_KEYS["object_store_job_secret_access_key"]
    has_id = isinstance(object_store, S3ObjectStore) and object_store.job_access_key_id is not None
    if has_id and secret.name not in secrets:
        yield f"{secret.name}: is required because of object_store.job_access_key_id; set it with `{secret.command}`"
    if not has_id and secret.name in secrets:
        yield f"{secret.name}: belongs to object_store.job_access_key_id, which is not there; add it or remove this"


@_rule("images", "database", "object_store", "kuberay", "device_plugin")
def _images_of_parts(
    images: Images, database: Any, object_store: Any, kuberay: KubeRay, device_plugin: DevicePlugin
) -> Problems:
    needed = {
        "postgres": not isinstance(database, ExternalDatabase) and f"database.kind is {database.kind}",
        "versitygw": isinstance(object_store, BundledObjectStore) and "object_store.kind is bundled",
        "kuberay_operator": kuberay.install == "helm" and "kuberay.install is helm",
        "device_plugin": device_plugin.install and "device_plugin.install is true",
    }
    for name, reason in needed.items():
        if reason and getattr(images, name) is None:
            yield f"images.{name}: is required because {reason}"


@_rule("images", "node_pools", "catalogue")
def _accelerators(images: Images, pools: NodePools, catalogue: Catalogue) -> Problems:
    for index, model in enumerate(catalogue.models.values()):
        accelerator = model.spec.accelerator
        if getattr(pools, accelerator) is None:
            yield (
                f"models[{index}].accelerator: {model.id} needs node_pools.{accelerator}, which is not there; "
                f"add that pool, or take one of {', '.join(_pools(pools))}"
            )
        if getattr(images, f"ray_{accelerator}") is None:
            yield f"images.ray_{accelerator}: is required because models[{index}].accelerator is {accelerator}"


def _pools(pools: NodePools) -> list[str]:
    return [name for name in ("cpu", "v100", "a10g") if getattr(pools, name) is not None]


@_rule("catalogue", "node_pools", "model_weights")
def _models_on_pools(catalogue: Catalogue, pools: NodePools, weights: Any) -> Problems:
    # Where the bucket is does not matter here.
    yield from pool_problems(catalogue, node_pools(pools), model_weights(weights, ObjectStoreLocation(kind="s3")))


@_rule("images")
def _lanes(images: Images) -> Problems:
    yield from image_problems(ray_images(images))


@_rule("catalogue", "network")
def _endpoints(catalogue: Catalogue, network: Network) -> Problems:
    for index, model in enumerate(catalogue.models.values()):
        if model.spec.lane == "http" and not network.endpoint_networks:
            yield f"network.endpoint_networks: is required because models[{index}].lane is http"


@_rule("node_pools", "device_plugin")
def _nodes(pools: NodePools, device_plugin: DevicePlugin) -> Problems:
    seen: dict[str, str] = {}
    for name, pool in node_pools(pools).items():
        if bool(pool.nodes) == bool(pool.max_nodes):
            yield (
                f"node_pools.{name}.nodes: must be there, or max_nodes, and not both; name the nodes that the cluster "
                "has, or say how many an autoscaler makes at most"
            )
        for node in pool.nodes:
            if node in seen:
                yield f"node_pools.{name}.nodes: {node} is in node_pools.{seen[node]} too; a node belongs to one pool"
            seen.setdefault(node, name)
    if device_plugin.install and not (pools.v100 or pools.a10g):
        yield "device_plugin.install: there is no GPU pool; add node_pools.v100 or node_pools.a10g, or say false"


@_rule("database", "object_store")
def _backups(database: Any, object_store: Any) -> Problems:
    if not isinstance(database, CloudNativePgDatabase) or not isinstance(object_store, BundledObjectStore):
        return
    for name in ("backup", "recovery"):
        if getattr(database, name):
            yield (
                f"database.{name}: needs object_store.kind s3: the bundled object store is lost with the same cluster; "
                "name an S3 bucket, or leave this out"
            )


@_rule("database")
def _recovery(database: Any) -> Problems:
    if isinstance(database, CloudNativePgDatabase) and database.recovery and not database.backup:
        yield "database.recovery: reads from where backups go; add database.backup"


@_rule("database")
def _own_database(database: Any) -> Problems:
    if not isinstance(database, ExternalDatabase):
        return
    url = urlsplit(database.url)
    mode = dict(parse_qsl(url.query)).get("sslmode", "")
    if mode not in _TLS_MODES:
        yield f"database.url: must end in ?sslmode= and {' or '.join(_TLS_MODES)}: passwords cross a network"
    elif mode.startswith("verify") and not database.ca_certificate:
        yield f"database.ca_certificate: is required with sslmode={mode}: the certificate of the server's authority"
    if url.username == database.job_role:
        yield "database.job_role: must be another role than that of database.url, which owns the tables"


@_rule("api")
def _ways_in(api: Api) -> Problems:
    if api.max_replicas < api.replicas:
        yield f"api.max_replicas: must be at least api.replicas, which is {api.replicas}, not {api.max_replicas}"
    if api.ingress and bool(api.ingress.tls.secret_name) == bool(api.ingress.tls.cluster_issuer):
        yield "api.ingress.tls: must have one of secret_name and cluster_issuer"


@_rule("limits", "node_pools")
def _limits(limits: Limits, pools: NodePools) -> Problems:
    job_pools = [pool for pool in node_pools(pools).values() if pool.name != "system"]
    there = {
        "job_cpus": sum(pool.node_count * pool.cpus for pool in job_pools),
        "job_memory_gib": sum(pool.node_count * pool.memory_gib for pool in job_pools),
        "job_gpus": sum(pool.node_count * pool.gpus_per_node for pool in job_pools),
    }
    for name, most in there.items():
        if (limit := getattr(limits, name)) is not None and limit > most:
            yield f"limits.{name}: must be at most {most}, which is what the stack's pools have, not {limit}"


@_rule("limits", "catalogue", "node_pools")
def _room_for_a_job(limits: Limits, catalogue: Catalogue, pools: NodePools) -> Problems:
    """A limit below one job of one engine would leave that job's pods refused for ever."""
    by_name = node_pools(pools)
    jobs = [
        (_least_of_a_job(model.spec, by_name["cpu"], by_name[model.spec.accelerator]), index)
        for index, model in enumerate(catalogue.models.values())
        if model.spec.accelerator in by_name
    ]
    for name in ("job_cpus", "job_memory_gib", "job_gpus"):
        least, index = max(((job[name], index) for job, index in jobs), default=(0, 0))
        if (limit := getattr(limits, name)) is not None and limit < least:
            yield (
                f"limits.{name}: must be at least {least}, which is what a job of models[{index}] takes with one "
                f"engine, not {limit}"
            )


def _least_of_a_job(model: ModelSpec, cpu_pool: NodePool, pool: NodePool) -> dict[str, int]:
    """A head with its autoscaler, one CPU worker, and the pods of one engine; in whole CPUs, GiB and GPUs."""
    head, stages = head_size(cpu_pool), cpu_workers(model, cpu_pool).pod
    cpu_m = head.cpu_m + autoscaler_cpu_m(cpu_pool) + stages.cpu_m
    memory_mib = head.memory_mib + AUTOSCALER_MIB + stages.memory_mib
    if gpus := engine_gpus(model):
        engines = gpu_workers(model, pool)
        pods = engines.max_replicas // model.concurrency
        cpu_m += pods * engines.pod.cpu_m
        memory_mib += pods * engines.pod.memory_mib
    return {"job_cpus": -(-cpu_m // 1_000), "job_memory_gib": -(-memory_mib // 1_024), "job_gpus": gpus}


@_rule("kuberay", "network")
def _namespaces(kuberay: KubeRay, network: Network) -> Problems:
    version = tuple(int(part) for part in kuberay.chart.version.split(".") if part.isdecimal())[:2]
    if kuberay.install == "helm" and version < MIN_VERSION:
        least = ".".join(map(str, MIN_VERSION))
        yield f"kuberay.chart.version: must be at least {least}.0, not {kuberay.chart.version!r}"
    if kuberay.namespace == network.dns_namespace:
        yield f"kuberay.namespace: {kuberay.namespace} belongs to the cluster; give the operator one of its own"
