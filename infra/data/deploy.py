"""Deploy the data services that the stack file asks for: the object store and the database."""

from collections.abc import Mapping
from typing import Any, cast
from urllib.parse import parse_qsl, unquote, urlsplit

import pulumi

from infra.data.cloudnative_pg import CloudNativePgArgs, CloudNativePgDatabase
from infra.data.database import PORT, BundledDatabase, BundledDatabaseArgs, DatabaseConnection, SslMode
from infra.data.object_store import BundledObjectStore, BundledObjectStoreArgs, ObjectStoreConnection
from infra.kubernetes.images import PULL_SECRET
from infra.kubernetes.kept_data import DataProtection
from infra.stack_file.reading import StackConfig
from infra.stack_file.sections import CloudNativePgSection, ExternalDatabaseSection, S3ObjectStoreSection
from infra.tenancy.credentials import DatabaseLogin, ObjectStoreLogin


def deploy_object_store(
    config: StackConfig, placement: Mapping[str, Any], protection: DataProtection, opts: pulumi.ResourceOptions
) -> ObjectStoreConnection:
    """Create the bundled object store, or return the connection to the customer's S3.

    Args:
        config: the stack file.
        placement: placement of the bundled store's pods.
        protection: protection of the stack's data.
        opts: options of the component.
    """
    file, names = config.file, config.names
    section, secret = file.object_store, config.secret("object_store_secret_access_key")
    if isinstance(section, S3ObjectStoreSection):
        service = job = ObjectStoreLogin(access_key_id=section.access_key_id, secret_access_key=secret)
        if section.job_access_key_id is not None:
            job_secret = config.secret("object_store_job_secret_access_key")
            job = ObjectStoreLogin(access_key_id=section.job_access_key_id, secret_access_key=job_secret)
        return ObjectStoreConnection(
            bucket=section.bucket,
            prefix=(section.prefix or names.object_prefix).strip("/"),
            endpoint_url=section.endpoint_url,
            region=section.region,
            service=service,
            job=job,
        )
    args = BundledObjectStoreArgs(
        names=names,
        image=file.images.mirrored(file.images.versitygw),
        service_image=file.images.mirrored(file.images.service),
        secret_access_key=secret,
        digest_key=config.secret("encryption_keys"),
        weights_prefix=file.model_weights.prefix if file.model_weights.kind == "object_store" else "models",
        placement=placement,
        protection=protection,
        storage=f"{section.volume.size_gib}Gi",
        storage_class=section.volume.storage_class or "",
        pull_secret=PULL_SECRET if file.images.pull_secret else "",
    )
    return BundledObjectStore("object-store", args, opts=opts).connection


def deploy_database(
    config: StackConfig,
    placement: Mapping[str, Any],
    store: ObjectStoreConnection,
    protection: DataProtection,
    opts: pulumi.ResourceOptions,
) -> DatabaseConnection:
    """Create the database in the cluster, or return the connection to the customer's own.

    Args:
        config: the stack file.
        placement: placement of the database's pods.
        store: the object store, where CloudNativePG writes backups.
        protection: protection of the stack's data.
        opts: options of the component.
    """
    file = config.file
    section = file.database
    owner_password = config.secret("database_owner_password")
    if isinstance(section, ExternalDatabaseSection):
        url = urlsplit(section.url)
        address: dict[str, Any] = {
            "host": url.hostname or "",
            "port": url.port or PORT,
            "database": unquote(url.path[1:]),
        }
        owner = service = DatabaseLogin(**address, role=unquote(url.username or ""), password=owner_password)
        if section.service_role is not None:
            password = config.secret("database_service_password")
            service = DatabaseLogin(**address, role=section.service_role, password=password)
        return DatabaseConnection(
            owner=owner,
            service=service,
            ssl_mode=cast("SslMode", dict(parse_qsl(url.query))["sslmode"]),
            ca_pem=section.ca_certificate or file.trust.ca_bundle or "",
        )
    in_cluster: dict[str, Any] = {
        "names": config.names,
        "image": file.images.mirrored(file.images.postgres),
        "owner_password": owner_password,
        "service_password": config.secret("database_service_password"),
        "placement": placement,
        "protection": protection,
        "storage": f"{section.volume.size_gib}Gi",
        "storage_class": section.volume.storage_class or "",
        "pull_secret": PULL_SECRET if file.images.pull_secret else "",
    }
    if not isinstance(section, CloudNativePgSection):
        bundled = BundledDatabaseArgs(**in_cluster, digest_key=config.secret("encryption_keys"))
        return BundledDatabase("database", bundled, opts=opts).connection
    cluster = CloudNativePgArgs(
        **in_cluster,
        postgres_version=section.postgres_version,
        instances=section.instances,
        store=store,
        backup=section.backup,
        ca_bundle=file.trust.ca_bundle or "",
        recovery=section.recovery,
    )
    return CloudNativePgDatabase("database", cluster, opts=opts).connection
