"""Deploy the data services that the stack file asks for: the object store and the database."""

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, cast
from urllib.parse import parse_qsl, unquote, urlsplit

import pulumi

from infra.data.cloudnative_pg import CloudNativePgArgs, CloudNativePgDatabase
from infra.data.database import PORT, BundledDatabase, BundledDatabaseArgs, DatabaseConnection, SslMode
from infra.data.object_store import BundledObjectStore, BundledObjectStoreArgs, ObjectStoreConnection
from infra.kubernetes.images import PULL_SECRET
from infra.kubernetes.kept_data import DataProtection
from infra.stack_file.reading import StackConfig
from infra.stack_file.sections import (
    AwsDatabaseSection,
    BundledDatabaseSection,
    BundledObjectStoreSection,
    CloudNativePgSection,
    ExternalDatabaseSection,
    S3ObjectStoreSection,
)
from infra.tenancy.credentials import DatabaseLogin, ObjectStoreLogin

if TYPE_CHECKING:
    from infra.aws.data import Database
    from infra.aws.deploy import AwsCloud


def deploy_object_store(
    config: StackConfig,
    placement: Mapping[str, Any],
    protection: DataProtection,
    opts: pulumi.ResourceOptions,
    *,
    cloud: "AwsCloud | None",
) -> ObjectStoreConnection:
    """Create the bundled object store, or return the connection to the customer's S3 or the stack's bucket.

    Args:
        config: the stack file.
        placement: placement of the bundled store's pods.
        protection: protection of the stack's data.
        opts: options of the component.
        cloud: the stack's parts on AWS; None elsewhere.
    """
    file, names = config.file, config.names
    section = file.object_store
    if cloud is not None and cloud.bucket is not None:
        return ObjectStoreConnection(
            bucket=cloud.bucket.name,
            prefix=names.object_prefix,
            endpoint_url="",
            region=cloud.place.region,
            service=None,
            job=None,
            depends_on=cloud.bucket.resources,
        )
    secret = config.secret("object_store_secret_access_key")
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
    if not isinstance(section, BundledObjectStoreSection):
        raise TypeError(
            f"object_store.kind {section.kind} needs the section aws, which the rules of a stack file check"
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
    *,
    cloud: "AwsCloud | None",
) -> DatabaseConnection:
    """Create the database in the cluster, or return the connection to the customer's own or that of RDS.

    Args:
        config: the stack file.
        placement: placement of the database's pods.
        store: the object store, where CloudNativePG writes backups.
        protection: protection of the stack's data.
        opts: options of the component.
        cloud: the stack's parts on AWS; None elsewhere.
    """
    file = config.file
    section = file.database
    if isinstance(section, AwsDatabaseSection) and cloud is not None and cloud.database is not None:
        return _rds_connection(config, section, cloud, cloud.database)
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
    if not isinstance(section, BundledDatabaseSection | CloudNativePgSection):
        raise TypeError(f"database.kind {section.kind} needs the section aws, which the rules of a stack file check")
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


def _rds_connection(
    config: StackConfig, section: AwsDatabaseSection, cloud: "AwsCloud", database: "Database"
) -> DatabaseConnection:
    """Return the connection to RDS: the owner's password is in Secrets Manager, the service's role has none."""
    names = config.names
    address: dict[str, Any] = {"host": database.host, "port": PORT, "database": names.database, "password": None}
    return DatabaseConnection(
        owner=DatabaseLogin(**address, role=names.database, options={"aws_secret_arn": database.master_secret_arn}),
        service=DatabaseLogin(
            **address, role=names.database_service_role, options={"aws_iam_region": cloud.place.region}
        ),
        ssl_mode="verify-full",
        ca_pem=section.ca_certificate,
        depends_on=database.resources,
    )
