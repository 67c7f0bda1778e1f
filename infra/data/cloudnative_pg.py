"""Database of a stack as a CloudNativePG cluster, with backups by its Barman Cloud plugin.

The operator (1.26 or newer) and, for backups, the plugin must already be in the Kubernetes cluster: all stacks share
them. The operator's own backups to object stores are removed in version 1.31
(https://cloudnative-pg.io/docs/current/release_notes/), so they are not used here.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import certifi
import pulumi
from pulumi_kubernetes import apiextensions, core, meta

from infra.data.database import COMPONENT, PORT, DatabaseConnection
from infra.data.object_store import ObjectStoreConnection
from infra.kubernetes.images import ImageReference
from infra.kubernetes.kept_data import DataProtection
from infra.kubernetes.naming import StackNames
from infra.kubernetes.pod_spec import resources
from infra.stack_file.sections import BackupSection, RecoverySection
from infra.tenancy.credentials import DatabaseLogin

_API: Final = "postgresql.cnpg.io/v1"
_PLUGIN_API: Final = "barmancloud.cnpg.io/v1"
_PLUGIN: Final = "barman-cloud.cloudnative-pg.io"
_RELOAD: Final = {"cnpg.io/reload": "true"}
"""Label of a Secret that makes the operator read it again when it changes."""
_FIRST_NAME: Final = "database"
_BACKUP_KEY: Final = "database-backup-key"
_CA_KEY: Final = "ca.crt"
_BACKUP_STORE: Final = "database-backups"


@dataclass(frozen=True, slots=True, kw_only=True)
class CloudNativePgArgs:
    """Settings of the CloudNativePG cluster.

    Attributes:
        names: names of the stack.
        image: one of CloudNativePG's operand images.
        postgres_version: the image's major version, which a digest does not contain.
        instances: one primary and its replicas.
        storage: size of each instance's volume, a Kubernetes quantity.
        storage_class: empty for the cluster's default.
        protection: protection of the stack's data.
        owner_password: password of the role that owns the database.
        service_password: password of the service's role.
        store: the stack's object store; backups and the write-ahead log are below ``database/`` in it.
        backup: schedule and retention of base backups; None for no backups.
        ca_bundle: private certificate authorities in PEM, one of which may have signed the object store's certificate.
        recovery: None for an empty database. It stays in the stack file after the recovery, because the name of the
            restored cluster depends on it.
        cpu: CPUs requested by each instance; the limit is four CPUs.
        memory: request and limit of each instance's memory.
        pull_secret: name of the pull secret; empty for none.
        placement: ``nodeSelector`` or ``affinity``, ``tolerations`` and ``priorityClassName`` of the pods.
    """

    names: StackNames
    image: ImageReference
    postgres_version: int
    instances: int = 3
    storage: str
    storage_class: str = ""
    protection: DataProtection
    owner_password: pulumi.Input[str]
    service_password: pulumi.Input[str]
    store: ObjectStoreConnection
    backup: BackupSection | None = None
    ca_bundle: str = ""
    recovery: RecoverySection | None = None
    cpu: str = "1"
    memory: str = "2Gi"
    pull_secret: str = ""
    placement: Mapping[str, Any] = field(default_factory=dict)

    @property
    def cluster(self) -> str:
        """Name of the cluster and of its backups. A restored cluster never overwrites the backups it started from."""
        return f"{self.recovery.from_server}-restored" if self.recovery else _FIRST_NAME


class CloudNativePgDatabase(pulumi.ComponentResource):
    """A Postgres cluster with failover, backups, and recovery to a point in time."""

    connection: DatabaseConnection

    def __init__(self, name: str, args: CloudNativePgArgs, opts: pulumi.ResourceOptions | None = None) -> None:
        super().__init__("cloister:cloudnative_pg:CloudNativePgDatabase", name, None, opts)
        names = args.names
        labels = names.labels(COMPONENT)
        passwords = [
            core.v1.Secret(
                secret,
                metadata=meta.v1.ObjectMetaArgs(
                    name=secret, namespace=names.service_namespace, labels=labels | _RELOAD
                ),
                type="kubernetes.io/basic-auth",
                string_data={"username": role, "password": pulumi.Output.secret(password)},
                opts=pulumi.ResourceOptions(parent=self),
            )
            for secret, role, password in (
                (f"{args.cluster}-owner", names.database, args.owner_password),
                (f"{args.cluster}-service", names.database_service_role, args.service_password),
            )
        ]
        # The operator reads the version from an image's tag, and a digest has none.
        images = [{"major": args.postgres_version, "image": str(args.image)}]
        catalog = {"api_version": _API, "kind": "ImageCatalog", "name": args.cluster, "spec": {"images": images}}
        before: list[pulumi.Resource] = [*passwords, self._custom_resource(names, catalog)]
        schedule: dict[str, Any] | None = None
        if args.backup:
            store, login = args.store, args.store.service
            if login is None:
                raise TypeError("backups need a key of the object store, which the rules of a stack file check")
            backup_store, schedule = backup_manifests(args, args.backup)
            key = core.v1.Secret(
                _BACKUP_KEY,
                metadata=meta.v1.ObjectMetaArgs(
                    name=_BACKUP_KEY, namespace=names.service_namespace, labels=labels | _RELOAD
                ),
                string_data={
                    "access_key_id": login.access_key_id,
                    "secret_access_key": pulumi.Output.secret(login.secret_access_key),
                    "region": store.region,
                    # It replaces the authorities of the image.
                    **(
                        {_CA_KEY: pulumi.Output.secret(Path(certifi.where()).read_text() + args.ca_bundle)}
                        if args.ca_bundle
                        else {}
                    ),
                },
                opts=pulumi.ResourceOptions(parent=self, depends_on=list(store.depends_on)),
            )
            before.append(self._custom_resource(names, backup_store, depends_on=[key]))
        cluster = self._custom_resource(
            names, cluster_manifest(args), opts=args.protection.never_deleted(self, *before)
        )
        if schedule:
            self._custom_resource(names, schedule, depends_on=[cluster])
        # The Service of the operator that selects the primary.
        host = f"{args.cluster}-rw.{names.service_namespace}.svc"
        address: dict[str, Any] = {"host": host, "port": PORT, "database": names.database}
        self.connection = DatabaseConnection(
            owner=DatabaseLogin(**address, role=names.database, password=args.owner_password),
            service=DatabaseLogin(**address, role=names.database_service_role, password=args.service_password),
            ssl_mode="verify-full",
            # The operator creates and renews it; its server certificates name the Service. Source:
            # https://cloudnative-pg.io/docs/current/certificates/
            ca_secret=f"{args.cluster}-ca",
            pod_labels={"cnpg.io/cluster": args.cluster},
            depends_on=(cluster,),
        )
        self.register_outputs({})

    def _custom_resource(
        self,
        names: StackNames,
        manifest: dict[str, Any],
        *,
        depends_on: list[Any] | None = None,
        opts: pulumi.ResourceOptions | None = None,
    ) -> apiextensions.CustomResource:
        name = manifest["name"]
        return apiextensions.CustomResource(
            f"{name}-{manifest['kind'].lower()}",
            api_version=manifest["api_version"],
            kind=manifest["kind"],
            metadata=meta.v1.ObjectMetaArgs(
                name=name, namespace=names.service_namespace, labels=names.labels(COMPONENT)
            ),
            spec=manifest["spec"],
            opts=opts or pulumi.ResourceOptions(parent=self, depends_on=depends_on or []),
        )


def cluster_manifest(args: CloudNativePgArgs) -> dict[str, Any]:
    """Return the Cluster; see https://cloudnative-pg.io/docs/current/cloudnative-pg.v1/ for its fields."""
    names = args.names
    placement = dict(args.placement)
    priority = placement.pop("priorityClassName", "")
    # The fields of a pod's affinity and placement are on one level here.
    placement |= placement.pop("affinity", {})
    # The operator creates it soon after the cluster is ready. The migrations are repeated until it exists.
    service_role = {
        "name": names.database_service_role,
        "comment": "service: reads and writes rows, owns nothing",
        "ensure": "present",
        "login": True,
        "superuser": False,
        "passwordSecret": {"name": f"{args.cluster}-service"},
    }
    owner = {"database": names.database, "owner": names.database, "secret": {"name": f"{args.cluster}-owner"}}
    settings = {"encoding": "UTF8", "localeCollate": "C", "localeCType": "C", "dataChecksums": True}
    bootstrap: dict[str, Any] = {"initdb": {**owner, **settings}}
    if args.recovery:
        target = {"recoveryTarget": {"targetTime": args.recovery.until}} if args.recovery.until else {}
        bootstrap = {"recovery": {**owner, "source": "source", **target}}
    spec: dict[str, Any] = {
        "instances": args.instances,
        "imageCatalogRef": {
            "apiGroup": "postgresql.cnpg.io",
            "kind": "ImageCatalog",
            "name": args.cluster,
            "major": args.postgres_version,
        },
        "bootstrap": bootstrap,
        "managed": {"roles": [service_role]},
        "enableSuperuserAccess": False,
        "enablePDB": True,
        "storage": {"size": args.storage, **({"storageClass": args.storage_class} if args.storage_class else {})},
        "resources": resources(cpu=args.cpu, memory=args.memory, cpu_limit="4", ephemeral_storage="2Gi"),
        # Statements are never logged with their values, which may be metadata or the digest of a key.
        "postgresql": {
            "parameters": {
                "log_statement": "none",
                "log_parameter_max_length_on_error": "0",
                "log_min_error_statement": "panic",
            }
        },
        "affinity": {
            "enablePodAntiAffinity": True,
            "topologyKey": "kubernetes.io/hostname",
            # Preferred, so that a cluster with fewer nodes than instances still gets its database.
            "podAntiAffinityType": "preferred",
            **placement,
        },
        "inheritedMetadata": {"labels": names.labels(COMPONENT)},
        **({"priorityClassName": priority} if priority else {}),
        **({"imagePullSecrets": [{"name": args.pull_secret}]} if args.pull_secret else {}),
    }
    if args.backup:
        parameters = {"barmanObjectName": _BACKUP_STORE, "serverName": args.cluster}
        spec["plugins"] = [{"name": _PLUGIN, "enabled": True, "isWALArchiver": True, "parameters": parameters}]
    if args.recovery:
        parameters = {"barmanObjectName": _BACKUP_STORE, "serverName": args.recovery.from_server}
        spec["externalClusters"] = [{"name": "source", "plugin": {"name": _PLUGIN, "parameters": parameters}}]
    return {"api_version": _API, "kind": "Cluster", "name": args.cluster, "spec": spec}


def backup_manifests(args: CloudNativePgArgs, backup: BackupSection) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the plugin's ObjectStore, with location, key and retention of backups, and the ScheduledBackup.

    The first backup starts at once, so that a recovery is possible from then on.
    """
    store = args.store
    path = "/".join(segment for segment in (store.bucket, store.prefix, "database") if segment)
    keys = {"accessKeyId": "access_key_id", "secretAccessKey": "secret_access_key", "region": "region"}
    location: dict[str, Any] = {
        "configuration": {
            "destinationPath": f"s3://{path}",
            "endpointURL": store.endpoint_url,
            "s3Credentials": {name: {"name": _BACKUP_KEY, "key": key} for name, key in keys.items()},
            **({"endpointCA": {"name": _BACKUP_KEY, "key": _CA_KEY}} if args.ca_bundle else {}),
            "wal": {"compression": "gzip"},
            "data": {"compression": "gzip"},
        },
        "retentionPolicy": f"{backup.retention_days}d",
        "instanceSidecarConfiguration": {
            "resources": resources(cpu="100m", memory="512Mi", cpu_limit="1", ephemeral_storage="2Gi")
        },
    }
    schedule = {
        "schedule": backup.schedule,
        "immediate": True,
        "backupOwnerReference": "self",
        "cluster": {"name": args.cluster},
        "method": "plugin",
        "pluginConfiguration": {"name": _PLUGIN},
    }
    return (
        {"api_version": _PLUGIN_API, "kind": "ObjectStore", "name": _BACKUP_STORE, "spec": location},
        {"api_version": _API, "kind": "ScheduledBackup", "name": args.cluster, "spec": schedule},
    )
