"""Where a stack keeps its data: the database and the object store that its stack file asks for."""

from collections.abc import Mapping
from typing import Any, cast
from urllib.parse import parse_qsl, unquote, urlsplit

import pulumi

from infra.cloudnative_pg import BackupArgs, CloudNativePgArgs, CloudNativePgDatabase, RecoveryArgs
from infra.config import StackConfig
from infra.config_mapping import mirrored
from infra.config_sections import CloudNativePgDatabase as CloudNativePgSection
from infra.config_sections import ExternalDatabase, S3ObjectStore
from infra.database import BundledDatabase, BundledDatabaseArgs, DatabaseConnection, SslMode, external_database
from infra.images import PULL_SECRET
from infra.object_store import (
    BundledObjectStore,
    BundledObjectStoreArgs,
    ObjectStoreConnection,
    ObjectStoreLogin,
    customer_object_store,
)

_POSTGRES_PORT = 5432


def object_store(
    config: StackConfig, placement: Mapping[str, Any], opts: pulumi.ResourceOptions
) -> ObjectStoreConnection:
    """The stack's object store.

    Args:
        config: the stack file.
        placement: of the pods, where it is bundled.
        opts: of the component.
    """
    file, names = config.file, config.names
    section, secret = file.object_store, config.secret("object_store_secret_access_key")
    if isinstance(section, S3ObjectStore):
        return _customers(config, section, secret)
    args = BundledObjectStoreArgs(
        names=names,
        image=mirrored(file.images, file.images.versitygw or ""),
        service_image=mirrored(file.images, file.images.service),
        secret_access_key=secret,
        weights_prefix=file.model_weights.prefix if file.model_weights.kind == "object_store" else "models",
        placement=placement,
        **_volume(config, section),
    )
    return BundledObjectStore("object-store", args, opts=opts).connection


def _customers(config: StackConfig, section: S3ObjectStore, secret: pulumi.Output[str]) -> ObjectStoreConnection:
    job = None
    if section.job_access_key_id is not None:
        job_secret = config.secret("object_store_job_secret_access_key")
        job = ObjectStoreLogin(access_key_id=section.job_access_key_id, secret_access_key=job_secret)
    return customer_object_store(
        bucket=section.bucket,
        prefix=section.prefix or config.names.object_prefix,
        endpoint_url=section.endpoint_url,
        region=section.region,
        service=ObjectStoreLogin(access_key_id=section.access_key_id, secret_access_key=secret),
        job=job,
    )


def database(
    config: StackConfig, placement: Mapping[str, Any], store: ObjectStoreConnection, opts: pulumi.ResourceOptions
) -> DatabaseConnection:
    """The stack's database.

    Args:
        config: the stack file.
        placement: of the pods, where it is in the cluster.
        store: where backups go.
        opts: of the component.
    """
    section = config.file.database
    if isinstance(section, ExternalDatabase):
        return _external(config, section)
    if isinstance(section, CloudNativePgSection):
        cluster = _cloudnative_pg(config, section, placement, store)
        return CloudNativePgDatabase("database", cluster, opts=opts).connection
    args = BundledDatabaseArgs(
        names=config.names,
        image=mirrored(config.file.images, config.file.images.postgres or ""),
        owner_password=config.secret("database_owner_password"),
        job_password=config.secret("database_job_password"),
        placement=placement,
        **_volume(config, section),
    )
    return BundledDatabase("database", args, opts=opts).connection


def _volume(config: StackConfig, section: Any) -> dict[str, Any]:
    """What all components with a volume take."""
    return {
        "storage": f"{section.volume.size_gib}Gi",
        "storage_class": section.volume.storage_class or "",
        "keep_data": config.file.keep_data,
        "pull_secret": PULL_SECRET if config.file.images.pull_secret else "",
    }


def _cloudnative_pg(
    config: StackConfig, section: CloudNativePgSection, placement: Mapping[str, Any], store: ObjectStoreConnection
) -> CloudNativePgArgs:
    backup = recovery = None
    if section.backup:
        backup = BackupArgs(store=store, schedule=section.backup.schedule, retention_days=section.backup.retention_days)
    if section.recovery:
        recovery = RecoveryArgs(from_server=section.recovery.from_server, until=section.recovery.until or "")
    return CloudNativePgArgs(
        names=config.names,
        image=mirrored(config.file.images, config.file.images.postgres or ""),
        postgres_version=section.postgres_version,
        instances=section.instances,
        owner_password=config.secret("database_owner_password"),
        job_password=config.secret("database_job_password"),
        backup=backup,
        recovery=recovery,
        placement=placement,
        **_volume(config, section),
    )


def _external(config: StackConfig, section: ExternalDatabase) -> DatabaseConnection:
    url = urlsplit(section.url)
    return external_database(
        host=url.hostname or "",
        port=url.port or _POSTGRES_PORT,
        database=unquote(url.path[1:]),
        owner=(unquote(url.username or ""), config.secret("database_owner_password")),
        job=(section.job_role, config.secret("database_job_password")),
        ssl_mode=cast("SslMode", dict(parse_qsl(url.query))["sslmode"]),
        ca_pem=section.ca_certificate or "",
    )
