"""Rules between the sections of a stack file.

A function covers one topic and skips what it cannot judge because a section is missing or wrong. A problem is one line:
``key: what is wrong; what to do``.
"""

import math
import re
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any, Final
from urllib.parse import parse_qsl, unquote, urlsplit

from infra.capacity import spare_room
from infra.capacity.job_sizes import (
    AUTOSCALER_MIB,
    autoscaler_cpu_m,
    cpu_workers,
    gpu_workers,
    head_size,
    hosts_per_engine,
    job_slots,
)
from infra.capacity.model_fit import image_problems, pool_problems
from infra.capacity.pools import NodePool, gpu_capacity, job_pools, pools_of, pools_with
from infra.stack_file.aws import aws_rules
from infra.stack_file.hosts import host_rules
from infra.stack_file.layers import customer_problems
from infra.stack_file.sections import (
    ApiSection,
    BundledDatabaseSection,
    BundledObjectStoreSection,
    CloudNativePgSection,
    DurabilitySection,
    ExternalDatabaseSection,
    ImageWeightsSection,
    LimitsSection,
    MonitoringSection,
    ObjectStoreWeightsSection,
    S3ObjectStoreSection,
    TracingSection,
    TransportSection,
    TrustSection,
)
from ray_job.contract.accelerators import Accelerator
from ray_job.contract.cluster import MIN_KUBERAY
from ray_job.contract.object_keys import MODELS_PREFIX
from service.config_sections import unknown_key
from service.model_catalogue import (
    CatalogueModel,
    ModelsAtRunTimeSection,
    models_at_run_time_problems,
    price_problems,
)

if TYPE_CHECKING:
    from infra.stack_file.cluster_sections import DevicePluginSection, ImagesSection, KubeRaySection, NetworkSection
    from infra.stack_file.hosts import HostsSection

Sections = Mapping[str, Any]
Models = Mapping[int, CatalogueModel]
Problems = Iterator[str]

_POOL_NAME: Final = re.compile(r"[a-z0-9]([-a-z0-9]{0,38}[a-z0-9])?")
# NCCL, Gloo, UCX and libfabric. Other variables could undo what a job's pods set: their GPUs, directories or hubs.
_ENVIRONMENT: Final = ("NCCL_", "TORCH_NCCL_", "GLOO_", "UCX_", "FI_")
_DEVELOPMENT: Final = "dev"
"""Environment whose data may be lost."""
_TLS_MODES: Final = ("require", "verify-ca", "verify-full")


def section_problems(sections: Sections, models: Models, accelerators: Mapping[str, Accelerator]) -> Problems:
    """Yield everything that contradicts something else.

    Args:
        sections: the valid sections by key.
        models: the valid models by their index in the file.
        accelerators: the known accelerators by name.
    """
    section = sections.get("node_pools")
    pools: dict[str, NodePool] = section.pools(accelerators) if section else {}
    for name, given in section.gpu_pools.items() if section else ():
        if (accelerator := given.accelerator or name) not in accelerators:
            yield f"node_pools.{name}.accelerator: {unknown_key(accelerator, list(accelerators), kind='accelerator')}"
    yield from host_rules(sections)
    yield from map(str, price_problems(sections.get("prices", {}), accelerators))
    yield from aws_rules(sections, pools)
    yield from image_rules(sections)
    yield from pool_rules(sections, models, pools, accelerators)
    yield from pushed_model_rules(sections, models, pools, accelerators)
    if pools:
        yield from limit_rules(sections, models, pools)
        yield from room_rules(sections, models, pools)
    yield from customer_problems(sections.get("customers") or (), pools)
    yield from data_rules(sections)
    yield from durability_rules(sections)
    yield from transport_rules(sections, models)
    api: ApiSection | None = sections.get("api")
    if api and api.max_replicas < api.replicas:
        yield f"api.max_replicas: must be at least api.replicas, which is {api.replicas}, not {api.max_replicas}"
    kuberay: KubeRaySection | None = sections.get("kuberay")
    network: NetworkSection | None = sections.get("network")
    if kuberay and kuberay.install == "helm":
        version = tuple(int(part) for part in kuberay.chart.version.split(".") if part.isdecimal())
        if version < MIN_KUBERAY:
            least = ".".join(map(str, MIN_KUBERAY))
            yield f"kuberay.chart.version: must be at least {least}.0, not {kuberay.chart.version!r}"
    yield from network_rules(sections)
    yield from external_access_rules(sections)
    monitoring: MonitoringSection | None = sections.get("monitoring")
    if monitoring and monitoring.dcgm_namespace and monitoring.prometheus == "none":
        yield (
            "monitoring.dcgm_namespace: needs a ServiceMonitor; set monitoring.prometheus to operator, or leave it out "
            "and let your Prometheus scrape the exporter"
        )
    if kuberay and network and kuberay.namespace == network.dns_namespace:
        yield f"kuberay.namespace: {kuberay.namespace} belongs to the cluster; use another one for the operator"


def network_rules(sections: Sections) -> Problems:
    """Check that the network plugin can express the ends of connections."""
    network: NetworkSection | None = sections.get("network")
    if network is None:
        return
    if network.plugin == "kubernetes" and not network.kubernetes_api.networks and not sections.get("aws"):
        yield (
            "network.kubernetes_api.networks: is required with network.plugin kubernetes; "
            "`kubectl get endpointslices -n default` lists the addresses"
        )
    hosts: HostsSection | None = sections.get("hosts")
    if hosts and (hosts.network_plugin == "cilium") != (network.plugin == "cilium"):
        yield (
            f"network.plugin: is {network.plugin}, but hosts.network_plugin is {hosts.network_plugin}; "
            "set cilium in both or in none"
        )
    for purpose in ("webhook", "oidc"):
        if network.plugin != "cilium" and getattr(network, f"{purpose}_hosts"):
            yield (
                f"network.{purpose}_hosts: network.plugin {network.plugin} cannot allow host names, only cilium can; "
                f"list addresses in network.{purpose}_networks"
            )


def external_access_rules(sections: Sections) -> Problems:
    """Check Ingress and Gateway: one of them, with a certificate, and with pods that network policies can select."""
    api: ApiSection | None = sections.get("api")
    network: NetworkSection | None = sections.get("network")
    if api is None:
        return
    if api.ingress and api.gateway:
        yield "api.gateway: api.ingress exists too; remove one of the two"
    if api.ingress and bool(api.ingress.tls.secret_name) == bool(api.ingress.tls.cluster_issuer):
        yield "api.ingress.tls: must have one of secret_name and cluster_issuer"
    if api.ingress and api.ingress.controller == "custom" and not api.ingress.class_name:
        yield "api.ingress.class_name: is required because api.ingress.controller is custom"
    for name, section in (("ingress", api.ingress), ("gateway", api.gateway)):
        if section is None or (section is api.ingress and api.ingress.controller != "custom"):
            continue
        is_placed = section.controller_namespace or section.controller_networks
        if not is_placed and network and network.plugin != "cilium":
            yield (
                f"api.{name}.controller_namespace: is required, or controller_networks for a controller on the network "
                "of its nodes: network policies allow requests from there only"
            )


def image_rules(sections: Sections) -> Problems:
    """Check that images exist for the components that need them, with versions that their variants run."""
    images: ImagesSection | None = sections.get("images")
    if images is None:
        return
    database, store = sections.get("database"), sections.get("object_store")
    kuberay: KubeRaySection | None = sections.get("kuberay")
    plugin: DevicePluginSection | None = sections.get("device_plugin")
    needed = {
        "service": database is not None and "the stack runs the service",
        "postgres": isinstance(database, BundledDatabaseSection | CloudNativePgSection)
        and f"database.kind is {database.kind}",
        "versitygw": isinstance(store, BundledObjectStoreSection) and "object_store.kind is bundled",
        "kuberay_operator": kuberay and kuberay.install == "helm" and "kuberay.install is helm",
        "device_plugin": plugin and plugin.install and "device_plugin.install is true",
    }
    for name, reason in needed.items():
        if reason and getattr(images, name) is None:
            yield f"images.{name}: is required because {reason}"
    yield from image_problems(images.ray)


def pool_rules(
    sections: Sections, models: Models, pools: Mapping[str, NodePool], accelerators: Mapping[str, Accelerator]
) -> Problems:
    """Check that each model has a pool, an image, room and a way to its endpoint, and each node one pool."""
    images: ImagesSection | None = sections.get("images")
    network: NetworkSection | None = sections.get("network")
    usable = ", ".join(dict.fromkeys(pool.accelerator.name for pool in pools.values() if pool.name != "system"))
    for index, model in models.items():
        accelerator = model.spec.accelerator
        own = [pool.name for pool in pools_with(pools, accelerator)]
        if pools and not own:
            yield (
                f"models[{index}].accelerator: {model.id} needs node_pools.{accelerator}, which is missing; "
                f"add that pool, or use one of {usable}"
            )
        elif pools and model.node_pool and model.node_pool not in own:
            yield (
                f"models[{index}].node_pool: must be a pool with the accelerator {accelerator}, which are "
                f"{', '.join(own)}, not {model.node_pool!r}"
            )
        variant = accelerators[accelerator].image_variant
        if images and variant not in images.ray:
            yield f"images.ray_{variant}: is required because models[{index}].accelerator is {accelerator}"
        if network and model.spec.engine == "http" and not network.endpoint_networks:
            yield f"network.endpoint_networks: is required because models[{index}].engine is http"
    weights = sections.get("model_weights")
    if pools and weights:
        yield from pool_problems(models, pools, weights_are_mounted=not isinstance(weights, ImageWeightsSection))
    if pools and not pools["cpu"].cpus:
        yield (
            "node_pools.cpu: is required: Ray heads and CPU workers need nodes; add the pool, or leave them CPUs and "
            "memory of GPU nodes with spare_cpus and spare_memory_gib"
        )
    by_accelerator: dict[str, NodePool] = {}
    seen: dict[str, str] = {}
    for name, pool in pools.items():
        if pool.hosts:
            continue
        if pool.gpus_per_node:
            yield from _gpu_pool_rules(pool, by_accelerator.setdefault(pool.accelerator.name, pool))
        if bool(pool.nodes) == bool(pool.max_nodes):
            yield (
                f"node_pools.{name}.nodes: set either nodes or max_nodes: the names of existing nodes, or the most "
                "that an autoscaler creates"
            )
        for node in pool.nodes:
            if node in seen:
                yield f"node_pools.{name}.nodes: {node} is in node_pools.{seen[node]} too; a node belongs to one pool"
            seen.setdefault(node, name)
    plugin: DevicePluginSection | None = sections.get("device_plugin")
    if pools and plugin and plugin.install and not any(pool.gpus_per_node for pool in pools.values()):
        yield "device_plugin.install: the stack has no GPU pool; add one below node_pools, or set false"


def pushed_model_rules(
    sections: Sections, models: Models, pools: Mapping[str, NodePool], accelerators: Mapping[str, Accelerator]
) -> Problems:
    """Check that jobs copy pushed models, and that models at run time have pools and images."""
    at_run_time: ModelsAtRunTimeSection | None = sections.get("models_at_run_time")
    images: ImagesSection | None = sections.get("images")
    weights = sections.get("model_weights")
    users = [f"models[{index}].digest is set" for index, model in models.items() if model.spec.digest]
    if at_run_time:
        yield from map(str, models_at_run_time_problems(at_run_time, accelerators))
    if at_run_time and at_run_time.allow:
        users.append("models_at_run_time.allow is true")
        for index, name in enumerate(at_run_time.accelerators):
            at = f"models_at_run_time.accelerators[{index}]"
            if pools and not pools_with(pools, name):
                yield f"{at}: needs a pool with the accelerator {name} below node_pools; add it, or leave this out"
            if images and name in accelerators and accelerators[name].image_variant not in images.ray:
                yield f"images.ray_{accelerators[name].image_variant}: is required because {at} is {name}"
    prefix = MODELS_PREFIX.rstrip("/")
    is_copied = isinstance(weights, ObjectStoreWeightsSection) and weights.prefix.strip("/") == prefix
    if users and weights and not is_copied:
        yield (
            f"model_weights: must be {{kind: object_store, prefix: {prefix}}}, where `cloister models push` stores "
            f"models, because {users[0]}"
        )


def _gpu_pool_rules(pool: NodePool, first: NodePool) -> Problems:
    """Check a GPU pool by itself, and against the first pool with the same accelerator."""
    at = f"node_pools.{pool.name}"
    if not _POOL_NAME.fullmatch(pool.name):
        yield f"{at}: a pool's name is a label of nodes: at most 40 lower case letters, digits and '-'"
    if pool.selector and pool.nodes:
        yield f"{at}.selector: selects nodes by labels that they have; set max_nodes instead of nodes"
    if pool.spare_cpus >= pool.cpus or pool.spare_memory_gib >= pool.memory_gib:
        yield f"{at}.spare_cpus: must leave CPUs and memory to engines; lower spare_cpus or spare_memory_gib"
    if bool(pool.spare_cpus) != bool(pool.spare_memory_gib):
        yield f"{at}.spare_memory_gib: set both spare_cpus and spare_memory_gib, or none of them"
    for name in pool.environment:
        if not name.startswith(_ENVIRONMENT):
            yield (
                f"{at}.environment.{name}: is not a setting of communication between GPUs, whose names start with "
                f"{', '.join(_ENVIRONMENT)}; leave it out: jobs set the other variables"
            )
    if pool.gpus_per_node != first.gpus_per_node:
        yield (
            f"{at}.gpus_per_node: must be {first.gpus_per_node}, as in node_pools.{first.name}, which has the same "
            f"accelerator, not {pool.gpus_per_node}: an engine has one shape; add a row to accelerators for the other"
        )
    if pool.accelerator.resource != first.accelerator.resource:
        yield (
            f"{at}.resource: must be {first.accelerator.resource}, as in node_pools.{first.name}, which has the same "
            "accelerator; add a row to accelerators for the other"
        )


def limit_rules(sections: Sections, models: Models, pools: Mapping[str, NodePool]) -> Problems:
    """Check that limits are within the pools, and that one job of each model fits below them."""
    limits: LimitsSection | None = sections.get("limits")
    if limits is None:
        return
    nodes = job_pools(pools)
    available = {
        "job_cpus": sum(pool.node_count * pool.cpus for pool in nodes),
        "job_memory_gib": sum(pool.node_count * pool.memory_gib for pool in nodes),
        "job_gpus": max(gpu_capacity(nodes).values()),
    }
    # What a head with its autoscaler, one CPU worker and one engine take, in whole CPUs, GiB and GPUs.
    smallest: dict[int, dict[str, int]] = {}
    cpu_pool = pools["cpu"]
    for index, model in models.items() if cpu_pool.cpus else ():
        spec, pool = model.spec, next(iter(pools_of(model, pools)), None)
        if pool is None:
            continue
        head, stages = head_size(cpu_pool), cpu_workers(spec, cpu_pool)
        cpu_m = head.cpu_m + autoscaler_cpu_m(cpu_pool) + stages.cpu_m
        memory_mib = head.memory_mib + AUTOSCALER_MIB + stages.memory_mib
        if spec.num_gpus:
            engine, pods = gpu_workers(spec, pool), hosts_per_engine(spec, pool)
            cpu_m += pods * engine.cpu_m
            memory_mib += pods * engine.memory_mib
        smallest[index] = {
            "job_cpus": math.ceil(cpu_m / 1_000),
            "job_memory_gib": math.ceil(memory_mib / 1_024),
            "job_gpus": spec.num_gpus,
        }
    for name, most in available.items():
        limit: int | None = getattr(limits, name)
        if limit is None:
            continue
        if limit > most:
            yield f"limits.{name}: must be at most {most}, which is what the stack's pools have, not {limit}"
        # The pods of a job that is larger than the quota would be refused for ever.
        least, index = max(((job[name], index) for index, job in smallest.items()), default=(0, 0))
        if limit < least:
            yield (
                f"limits.{name}: must be at least {least}, which is what a job of models[{index}] takes with one "
                f"engine, not {limit}"
            )


def room_rules(sections: Sections, models: Models, pools: Mapping[str, NodePool]) -> Problems:
    """Check that service and jobs have room where GPU nodes or the pool ``cpu`` host them too."""
    limits: LimitsSection | None = sections.get("limits")
    api: ApiSection | None = sections.get("api")
    database, kuberay = sections.get("database"), sections.get("kuberay")
    if limits is None or api is None:
        return
    service = [spare_room.API] * api.max_replicas + [*spare_room.RECONCILERS, spare_room.COORDINATOR]
    if kuberay and kuberay.install == "helm":
        service.append(spare_room.KUBERAY)
    if isinstance(database, BundledDatabaseSection):
        service.append(spare_room.BUNDLED)
    elif isinstance(database, CloudNativePgSection):
        service += [spare_room.DATABASE_INSTANCE] * database.instances
    if isinstance(sections.get("object_store"), BundledObjectStoreSection):
        service.append(spare_room.BUNDLED)
    slots = job_slots(models.values(), pools, most=limits.max_running_jobs)
    by_accelerator: dict[str, list[CatalogueModel]] = {}
    for model in models.values():
        by_accelerator.setdefault(model.spec.accelerator, []).append(model)
    jobs = [
        spare_room.RunningJobs(count=slots.get(accelerator, limits.max_running_jobs), models=own)
        for accelerator, own in by_accelerator.items()
    ]
    yield from spare_room.room_problems(pools, service, jobs)


def data_rules(sections: Sections) -> Problems:
    """Check the database against TLS and the place of its backups."""
    database = sections.get("database")
    if isinstance(database, CloudNativePgSection) and database.recovery and not database.backup:
        yield "database.recovery: reads from the backups' location; add database.backup"
    if isinstance(database, ExternalDatabaseSection):
        url = urlsplit(database.url)
        if database.service_role == unquote(url.username or ""):
            yield "database.service_role: is the role in database.url, which owns the database; create another role"
        mode = dict(parse_qsl(url.query)).get("sslmode", "")
        if mode not in _TLS_MODES:
            yield f"database.url: must end in ?sslmode= and {' or '.join(_TLS_MODES)}: passwords cross a network"
        trust: TrustSection | None = sections.get("trust")
        if mode.startswith("verify") and not database.ca_certificate and trust and not trust.ca_bundle:
            yield (
                f"database.ca_certificate: is required with sslmode={mode}: the certificate of the server's authority; "
                "or set trust.ca_bundle"
            )


def durability_rules(sections: Sections) -> Problems:
    """Check that data outside of development has more than one copy, except where the stack file allows one."""
    durability: DurabilitySection | None = sections.get("durability")
    if durability is None or sections.get("environment") in (None, _DEVELOPMENT):
        return
    kept_once = (
        ("database", BundledDatabaseSection, "Postgres", "cloudnative_pg or external"),
        ("object_store", BundledObjectStoreSection, "object store", "s3"),
    )
    for name, bundled, title, instead in kept_once:
        if isinstance(sections.get(name), bundled) and name not in durability.allow_single_copy:
            yield (
                f"{name}.kind: the bundled {title} keeps one copy on one volume, which is for environment dev; "
                f"use {instead}, or add {name} to durability.allow_single_copy"
            )


def transport_rules(sections: Sections, models: Models) -> Problems:
    """Check that all connections are by verified TLS, except those that the stack file allows in clear text."""
    transport: TransportSection | None = sections.get("transport")
    if transport is None:
        return
    database, store, kuberay = sections.get("database"), sections.get("object_store"), sections.get("kuberay")
    found: list[tuple[str, str]] = []
    if isinstance(database, BundledDatabaseSection):
        found.append(("database", "database.kind: the bundled Postgres has no TLS; use cloudnative_pg or external"))
    if isinstance(database, ExternalDatabaseSection):
        mode = dict(parse_qsl(urlsplit(database.url).query)).get("sslmode", "")
        if mode in _TLS_MODES and mode != "verify-full":
            problem = f"sslmode={mode} does not verify the server's name; use sslmode=verify-full"
            found.append(("database", f"database.url: {problem}"))
    if isinstance(store, BundledObjectStoreSection):
        found.append(("object_store", "object_store.kind: the bundled object store has no TLS; use s3"))
    if isinstance(store, S3ObjectStoreSection) and _is_clear_text(store.endpoint_url):
        found.append(("object_store", "object_store.endpoint_url: is in clear text; use https://"))
    if kuberay and kuberay.install == "helm" and _is_clear_text(kuberay.chart.repository):
        found.append(("kuberay_chart", "kuberay.chart.repository: is in clear text; use https:// or oci://"))
    for index, model in models.items():
        if model.spec.engine == "http" and _is_clear_text(model.spec.base_url):
            found.append(("http_engine", f"models[{index}].base_url: sends prompts in clear text; use https://"))
    tracing: TracingSection | None = sections.get("tracing")
    if tracing and _is_clear_text(tracing.endpoint):
        found.append(("tracing", "tracing.endpoint: is in clear text; use https://"))
    for name, problem in found:
        if name not in transport.allow_clear_text:
            yield f"{problem}, or add {name} to transport.allow_clear_text"


def _is_clear_text(url: str) -> bool:
    return urlsplit(url).scheme == "http"
