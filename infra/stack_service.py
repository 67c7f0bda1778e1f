"""What API, reconciler and jobs of a stack are told, from its stack file and from where its data is."""

import hashlib
from collections.abc import Mapping
from typing import Any

from infra.config import StackConfig
from infra.config_mapping import mirrored, model_weights, node_pools, ray_images, url_port
from infra.config_sections import CloudNativePgDatabase, ExternalDatabase, S3ObjectStore
from infra.database import DatabaseConnection
from infra.digests import digest
from infra.images import PULL_SECRET
from infra.network import Database, NetworkArgs, ObjectStore
from infra.network_peers import Networks, Pods
from infra.object_store import ObjectStoreConnection
from infra.ray_job_template import JobTimes, RayJobArgs, ray_job_templates
from infra.service_pods import ServiceSettings
from ray_job.contract.job_spec import ObjectStoreLocation


def ray_job_files(config: StackConfig, store: ObjectStoreConnection, *, priority_class: str) -> dict[str, str]:
    """The RayJob of each model, as JSON, by the file's name.

    Args:
        config: the stack file.
        store: where models' weights may be.
        priority_class: of the pods.
    """
    file = config.file
    location = ObjectStoreLocation(
        kind="s3", bucket=store.bucket, prefix=store.prefix, endpoint_url=store.endpoint_url, region=store.region
    )
    times = JobTimes(
        deadline_s=file.jobs.deadline_h * 3600,
        start_limit_s=file.jobs.start_limit_s,
        stuck_limit_s=file.jobs.stuck_limit_s,
        idle_timeout_s=file.jobs.idle_timeout_s,
        keep_finished_s=file.jobs.keep_finished_s,
    )
    args = RayJobArgs(
        names=config.names,
        images=ray_images(file.images),
        pools=node_pools(file.node_pools),
        weights=model_weights(file.model_weights, location),
        times=times,
        has_pull_secret=file.images.pull_secret is not None,
        priority_class=priority_class,
        has_database_ca=bool(getattr(file.database, "ca_certificate", None)),
    )
    return ray_job_templates(config.catalogue, args)


def service_settings(
    config: StackConfig,
    postgres: DatabaseConnection,
    store: ObjectStoreConnection,
    templates: Mapping[str, str],
    placement: Mapping[str, Any],
) -> ServiceSettings:
    """What the service's pods are told.

    Args:
        config: the stack file.
        postgres: where the database is.
        store: where the object store is.
        templates: of jobs.
        placement: of the pods.
    """
    file = config.file
    files = "\0".join((config.models_yaml, *templates.values(), postgres.ca_pem))
    key = store.service
    return ServiceSettings(
        names=config.names,
        image=str(mirrored(file.images, file.images.service)),
        pull_secret=PULL_SECRET if file.images.pull_secret else "",
        placement=placement,
        database_url=postgres.url(postgres.owner),
        job_database_url=postgres.url(postgres.job),
        job_role=postgres.job.role,
        has_database_ca=bool(postgres.ca_pem),
        object_store_url=store.url,
        max_running_jobs=file.limits.max_running_jobs,
        retention_days=file.retention_days,
        workspace_gib=file.workspace_gib,
        log_level=file.log_level,
        configuration_digest=hashlib.sha256(files.encode()).hexdigest()[:16],
        credentials_digest=digest(postgres.owner.password, key.access_key_id, key.secret_access_key),
    )


def network_args(config: StackConfig, postgres: DatabaseConnection, store: ObjectStoreConnection) -> NetworkArgs:
    """What the flows of the stack follow from."""
    network, api = config.file.network, config.file.api
    endpoints = [model.spec.base_url for model in config.catalogue.models.values() if model.spec.lane == "http"]
    return NetworkArgs(
        names=config.names,
        database=_database(config, postgres),
        object_store=_object_store(config, store),
        kubernetes_api=tuple(network.kubernetes_api.networks),
        kubernetes_api_port=network.kubernetes_api.port,
        kuberay_namespace=config.file.kuberay.namespace,
        dns_namespace=network.dns_namespace,
        dns_networks=tuple(network.dns_networks),
        ingress_namespace=api.ingress.controller_namespace if api.ingress else "",
        client_namespaces=tuple(api.client_namespaces),
        monitoring_namespace=network.monitoring_namespace or "",
        webhook_networks=tuple(network.webhook_networks),
        endpoint_networks=tuple(network.endpoint_networks) if endpoints else (),
        endpoint_ports=tuple(sorted({url_port(url) for url in endpoints})),
    )


def _database(config: StackConfig, postgres: DatabaseConnection) -> Database:
    section = config.file.database
    if isinstance(section, ExternalDatabase):
        return Database(
            peer=Networks(name="customer's Postgres", cidrs=tuple(section.networks)), port=postgres.owner.port
        )
    pods = Pods(name="database", namespace=config.names.service_namespace, labels=postgres.pod_labels)
    if not isinstance(section, CloudNativePgDatabase):
        return Database(peer=pods, port=postgres.owner.port)
    return Database(
        peer=pods,
        port=postgres.owner.port,
        operator_namespace=section.operator_namespace,
        has_backups=section.backup is not None,
    )


def _object_store(config: StackConfig, store: ObjectStoreConnection) -> ObjectStore:
    section, port = config.file.object_store, url_port(store.endpoint_url)
    if isinstance(section, S3ObjectStore):
        return ObjectStore(peer=Networks(name="customer's S3", cidrs=tuple(section.networks)), port=port)
    namespace = config.names.service_namespace
    return ObjectStore(
        peer=Pods(name="object-store", namespace=namespace, labels=store.pod_labels),
        port=port,
        setup=Pods(name="object-store-setup", namespace=namespace, labels=store.setup_labels),
    )
