"""Deploy the batch service: derive its settings and the RayJob templates from the stack file."""

import hashlib
from collections.abc import Mapping, Sequence
from typing import Any

import pulumi

from infra.batch_service.components import BatchService
from infra.batch_service.pods import ServiceSettings
from infra.capacity.job_sizes import job_slots
from infra.data.database import DatabaseConnection
from infra.data.object_store import ObjectStoreConnection
from infra.jobs.pods import RayJobArgs
from infra.jobs.template import ray_job_templates
from infra.kubernetes.images import PULL_SECRET
from infra.kubernetes.pod_spec import secret_digest
from infra.stack_file.reading import StackConfig
from infra.tenancy.credentials import OBJECT_STORE_LOGIN, OWNER_LOGIN, SERVICE_LOGIN
from ray_job.contract.job_spec import ObjectStoreLocation


def deploy_batch_service(
    config: StackConfig,
    postgres: DatabaseConnection,
    store: ObjectStoreConnection,
    *,
    placement: Mapping[str, Any],
    jobs_priority: str,
    before_migrations: Sequence[pulumi.Resource],
    opts: pulumi.ResourceOptions,
) -> BatchService:
    """Create API, reconciler, coordinator, migrations and the export of the audit log.

    Args:
        config: the stack file.
        postgres: the database.
        store: the object store.
        placement: placement of its pods.
        jobs_priority: priority class of jobs.
        before_migrations: resources to create before the database is migrated.
        opts: options of the component.
    """
    file, key, encryption_keys = config.file, store.service, config.secret("encryption_keys")
    templates = _ray_job_templates(config, store, jobs_priority)
    texts = (text for files in templates.values() for text in files.values())
    configuration = "\0".join((config.models_yaml, *texts, postgres.ca_pem, file.trust.ca_bundle or ""))
    settings = ServiceSettings(
        names=config.names,
        image=str(file.images.mirrored(file.images.service)),
        pull_secret=PULL_SECRET if file.images.pull_secret else "",
        placement=placement,
        database_url=postgres.url(postgres.service),
        database_owner_url=postgres.url(postgres.owner),
        database_service_role="" if postgres.service.role == postgres.owner.role else postgres.service.role,
        database_ca=postgres.ca_volume,
        has_ca_bundle=bool(file.trust.ca_bundle),
        object_store_url=store.url,
        max_running_jobs=file.limits.max_running_jobs,
        job_slots=job_slots(config.catalogue.values(), config.pools, most=file.limits.max_running_jobs),
        retention_days=file.retention_days,
        usage_retention_days=file.usage_retention_days,
        workspace_gib=file.workspace_gib,
        max_key_days=file.api.max_key_days,
        trusted_proxies=tuple(file.api.trusted_proxies),
        oidc=file.oidc.model_dump_json(exclude_none=True) if file.oidc else "",
        webhook_networks=tuple(file.network.webhook_networks),
        otlp_endpoint=file.tracing.endpoint if file.tracing else "",
        trace_segments=file.tracing.sampled_segments if file.tracing else 0,
        log_level=file.log_level,
        job_templates=tuple(templates),
        configuration_digest=hashlib.sha256(configuration.encode()).hexdigest()[:16],
        credentials_digest=secret_digest(
            encryption_keys,
            postgres.service.password or "",
            key.access_key_id if key else "",
            key.secret_access_key if key else "",
            encryption_keys,
            config.secret("receipt_key"),
        ),
        absent_secrets=frozenset(
            [
                *([OWNER_LOGIN] if postgres.owner.password is None else []),
                *([SERVICE_LOGIN] if postgres.service.password is None else []),
                *([OBJECT_STORE_LOGIN] if key is None else []),
            ]
        ),
    )
    return BatchService(
        "batch-service",
        settings=settings,
        models_yaml=config.models_yaml,
        ray_job_templates=templates,
        replicas=file.api.replicas,
        max_replicas=file.api.max_replicas,
        external_access=file.api.ingress or file.api.gateway,
        audit_export=file.audit_export,
        before_migrations=before_migrations,
        opts=opts,
    )


def _ray_job_templates(
    config: StackConfig, store: ObjectStoreConnection, priority_class: str
) -> dict[str, dict[str, str]]:
    file = config.file
    location = ObjectStoreLocation(
        kind="s3", bucket=store.bucket, prefix=store.prefix, endpoint_url=store.endpoint_url, region=store.region
    )
    args = RayJobArgs(
        names=config.names,
        images=file.images.ray,
        pools=config.pools,
        weights=file.model_weights,
        object_store=location,
        times=file.jobs,
        has_pull_secret=file.images.pull_secret is not None,
        has_http_engine_key="http_engine_api_key" in config.secrets,
        has_ca_bundle=bool(file.trust.ca_bundle),
        priority_class=priority_class,
    )
    at_run_time = file.models_at_run_time
    return ray_job_templates(config.catalogue, args, at_run_time=at_run_time.accelerators if at_run_time.allow else ())
