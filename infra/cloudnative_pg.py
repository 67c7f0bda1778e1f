"""The database of a stack as a cluster of CloudNativePG, with backups by its Barman Cloud plugin.

The operator (1.26 or newer) and, for backups, the plugin must be in the cluster already: both serve all stacks. The
operator's own backups to object stores end with its version 1.31
(https://cloudnative-pg.io/docs/current/release_notes/), so they are not used here.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any, Final

import pulumi
from pulumi_kubernetes import apiextensions, core, meta

from infra.credentials import DatabaseLogin
from infra.database import COMPONENT, PORT, DatabaseConnection
from infra.images import ImageReference
from infra.naming import StackNames
from infra.object_store import ObjectStoreConnection
from infra.pod_security import resources

_API: Final = "postgresql.cnpg.io/v1"
_PLUGIN_API: Final = "barmancloud.cnpg.io/v1"
_PLUGIN: Final = "barman-cloud.cloudnative-pg.io"
_RELOAD: Final = {"cnpg.io/reload": "true"}
"""The operator looks at a Secret again when it changes, if it has this label."""
_FIRST_NAME: Final = "database"
_BACKUP_KEY: Final = "database-backup-key"
_BACKUP_STORE: Final = "database-backups"
_CRON_FIELDS: Final = 6


@dataclass(frozen=True, slots=True, kw_only=True)
class BackupArgs:
    """Base backups and the write-ahead log, in the stack's object store below ``database/``.

    Attributes:
        store: where they go.
        schedule: when a base backup starts; six fields, from seconds to weekday.
        retention_days: how far back one can go.

    Raises:
        ValueError: the schedule has not six fields.
    """

    store: ObjectStoreConnection
    schedule: str
    retention_days: int

    def __post_init__(self) -> None:
        if len(self.schedule.split()) != _CRON_FIELDS:
            raise ValueError(f"the schedule {self.schedule!r} must have six fields, seconds first: 0 0 3 * * *")


@dataclass(frozen=True, slots=True, kw_only=True)
class RecoveryArgs:
    """Start from a backup instead of from nothing.

    Attributes:
        from_server: the name of the cluster that wrote it.
        until: the moment to go back to, RFC 3339 with its offset; empty for the last one.

    Raises:
        ValueError: ``until`` is no such moment.
    """

    from_server: str
    until: str = ""

    def __post_init__(self) -> None:
        if not re.fullmatch(r"[a-z]([-a-z0-9]{0,38}[a-z0-9])?", self.from_server):
            raise ValueError(f"{self.from_server!r} is no name of a cluster; the first one is called {_FIRST_NAME}")
        if not self.until:
            return
        try:
            moment = datetime.fromisoformat(self.until)
        except ValueError:
            moment = None
        if moment is None or moment.tzinfo is None:
            raise ValueError(f"{self.until!r} is no moment with its offset, as in 2030-01-31T12:00:00Z")


@dataclass(frozen=True, slots=True, kw_only=True)
class CloudNativePgArgs:
    """What the cluster of CloudNativePG is made of.

    Attributes:
        names: the stack.
        image: one of CloudNativePG's operand images.
        postgres_version: the image's major version; a digest does not say it.
        instances: one primary and its replicas.
        storage: of each instance, a Kubernetes quantity.
        storage_class: empty for the cluster's default.
        keep_data: the cluster is protected, and stays when Pulumi forgets it.
        owner_password: of the service's role.
        job_password: of the jobs' role.
        backup: None for none.
        recovery: None to start from nothing. It stays in the stack file after the recovery: the name of the
            restored cluster follows from it.
        cpu: requested by each instance; at most four CPUs are used.
        memory: requested by each instance, and the most.
        pull_secret: the name of the pull secret; empty for none.
        placement: ``nodeSelector``, ``tolerations`` and ``priorityClassName`` of the pods.

    Raises:
        ValueError: a recovery without a backup section, which names where backups are.
    """

    names: StackNames
    image: ImageReference
    postgres_version: int
    instances: int = 3
    storage: str
    storage_class: str = ""
    keep_data: bool = True
    owner_password: pulumi.Input[str]
    job_password: pulumi.Input[str]
    backup: BackupArgs | None = None
    recovery: RecoveryArgs | None = None
    cpu: str = "1"
    memory: str = "2Gi"
    pull_secret: str = ""
    placement: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.recovery and not self.backup:
            raise ValueError("a recovery reads from where backups go: give the section `backup` too")

    @property
    def cluster(self) -> str:
        """The name of the cluster and of its backups; a restored one never writes over those it came from."""
        return f"{self.recovery.from_server}-restored" if self.recovery else _FIRST_NAME


class CloudNativePgDatabase(pulumi.ComponentResource):
    """A Postgres cluster with failover, backups, and recovery to a moment."""

    connection: DatabaseConnection

    def __init__(self, name: str, args: CloudNativePgArgs, opts: pulumi.ResourceOptions | None = None) -> None:
        super().__init__("cloister:cloudnative_pg:CloudNativePgDatabase", name, None, opts)
        passwords = [
            self._login(args, f"{args.cluster}-owner", args.names.database, args.owner_password),
            self._login(args, f"{args.cluster}-job", args.names.job_role, args.job_password),
        ]
        before: list[pulumi.Resource] = [*passwords, self._custom(args, _catalog(args))]
        if args.backup:
            key = self._backup_key(args.names, args.backup)
            before.append(self._custom(args, backup_store(args.backup), depends_on=[key]))
        cluster = self._custom(args, cluster_manifest(args), depends_on=before, keep=args.keep_data)
        if args.backup:
            self._custom(args, scheduled_backup(args, args.backup), depends_on=[cluster])
        self.connection = _connection(args, cluster)
        self.register_outputs({})

    def _login(self, args: CloudNativePgArgs, name: str, role: str, password: pulumi.Input[str]) -> core.v1.Secret:
        return core.v1.Secret(
            name,
            metadata=meta.v1.ObjectMetaArgs(
                name=name, namespace=args.names.service_namespace, labels=args.names.labels(COMPONENT) | _RELOAD
            ),
            type="kubernetes.io/basic-auth",
            string_data={"username": role, "password": pulumi.Output.secret(password)},
            opts=pulumi.ResourceOptions(parent=self),
        )

    def _backup_key(self, names: StackNames, backup: BackupArgs) -> core.v1.Secret:
        login = backup.store.service
        return core.v1.Secret(
            _BACKUP_KEY,
            metadata=meta.v1.ObjectMetaArgs(
                name=_BACKUP_KEY, namespace=names.service_namespace, labels=names.labels(COMPONENT) | _RELOAD
            ),
            string_data={
                "access_key_id": login.access_key_id,
                "secret_access_key": pulumi.Output.secret(login.secret_access_key),
                "region": backup.store.region,
            },
            opts=pulumi.ResourceOptions(parent=self, depends_on=list(backup.store.depends_on)),
        )

    def _custom(
        self,
        args: CloudNativePgArgs,
        manifest: dict[str, Any],
        *,
        depends_on: list[Any] | None = None,
        keep: bool = False,
    ) -> apiextensions.CustomResource:
        name = manifest["name"]
        return apiextensions.CustomResource(
            f"{name}-{manifest['kind'].lower()}",
            api_version=manifest["api_version"],
            kind=manifest["kind"],
            metadata=meta.v1.ObjectMetaArgs(
                name=name, namespace=args.names.service_namespace, labels=args.names.labels(COMPONENT)
            ),
            spec=manifest["spec"],
            opts=pulumi.ResourceOptions(parent=self, depends_on=depends_on or [], protect=keep, retain_on_delete=keep),
        )


def _connection(args: CloudNativePgArgs, cluster: pulumi.Resource) -> DatabaseConnection:
    names = args.names
    # The operator's own Service before the primary.
    host = f"{args.cluster}-rw.{names.service_namespace}.svc"
    address: dict[str, Any] = {"host": host, "port": PORT, "database": names.database}
    return DatabaseConnection(
        owner=DatabaseLogin(**address, role=names.database, password=args.owner_password),
        job=DatabaseLogin(**address, role=names.job_role, password=args.job_password),
        # The operator makes the authority with the cluster, and jobs are in another namespace than its certificate.
        ssl_mode="require",
        pod_labels={"cnpg.io/cluster": args.cluster},
        depends_on=(cluster,),
    )


def _catalog(args: CloudNativePgArgs) -> dict[str, Any]:
    # The operator reads the version from an image's tag, and a digest has none.
    images = [{"major": args.postgres_version, "image": str(args.image)}]
    return {"api_version": _API, "kind": "ImageCatalog", "name": args.cluster, "spec": {"images": images}}


def cluster_manifest(args: CloudNativePgArgs) -> dict[str, Any]:
    """The Cluster; see https://cloudnative-pg.io/docs/current/cloudnative-pg.v1/ for its fields."""
    placement = dict(args.placement)
    priority = placement.pop("priorityClassName", "")
    spec: dict[str, Any] = {
        "instances": args.instances,
        "imageCatalogRef": {
            "apiGroup": "postgresql.cnpg.io",
            "kind": "ImageCatalog",
            "name": args.cluster,
            "major": args.postgres_version,
        },
        "bootstrap": _bootstrap(args),
        "managed": {"roles": [_job_role(args)]},
        "enableSuperuserAccess": False,
        "enablePDB": True,
        "storage": {"size": args.storage, **({"storageClass": args.storage_class} if args.storage_class else {})},
        "resources": resources(cpu=args.cpu, memory=args.memory, cpu_limit="4", ephemeral_storage="2Gi"),
        # A statement is never logged with its values: they may be the digest of a key, or metadata.
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
            # Preferred: a cluster with fewer nodes than instances still gets its database.
            "podAntiAffinityType": "preferred",
            **placement,
        },
        "inheritedMetadata": {"labels": args.names.labels(COMPONENT)},
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


def _bootstrap(args: CloudNativePgArgs) -> dict[str, Any]:
    owner = {
        "database": args.names.database,
        "owner": args.names.database,
        "secret": {"name": f"{args.cluster}-owner"},
    }
    if not args.recovery:
        return {
            "initdb": {**owner, "encoding": "UTF8", "localeCollate": "C", "localeCType": "C", "dataChecksums": True}
        }
    target = {"recoveryTarget": {"targetTime": args.recovery.until}} if args.recovery.until else {}
    return {"recovery": {**owner, "source": "source", **target}}


def _job_role(args: CloudNativePgArgs) -> dict[str, Any]:
    return {
        "name": args.names.job_role,
        "comment": "jobs: executes one function",
        "ensure": "present",
        "login": True,
        "superuser": False,
        "passwordSecret": {"name": f"{args.cluster}-job"},
    }


def backup_store(backup: BackupArgs) -> dict[str, Any]:
    """The plugin's ObjectStore: where backups are, with which key, and for how long."""
    store = backup.store
    path = "/".join(part for part in (store.bucket, store.prefix, "database") if part)
    keys = {"accessKeyId": "access_key_id", "secretAccessKey": "secret_access_key", "region": "region"}
    spec: dict[str, Any] = {
        "configuration": {
            "destinationPath": f"s3://{path}",
            "endpointURL": store.endpoint_url,
            "s3Credentials": {name: {"name": _BACKUP_KEY, "key": key} for name, key in keys.items()},
            "wal": {"compression": "gzip"},
            "data": {"compression": "gzip"},
        },
        "retentionPolicy": f"{backup.retention_days}d",
        "instanceSidecarConfiguration": {
            "resources": resources(cpu="100m", memory="512Mi", cpu_limit="1", ephemeral_storage="2Gi")
        },
    }
    return {"api_version": _PLUGIN_API, "kind": "ObjectStore", "name": _BACKUP_STORE, "spec": spec}


def scheduled_backup(args: CloudNativePgArgs, backup: BackupArgs) -> dict[str, Any]:
    """The ScheduledBackup: the first one at once, so that there is something to go back to."""
    spec = {
        "schedule": backup.schedule,
        "immediate": True,
        "backupOwnerReference": "self",
        "cluster": {"name": args.cluster},
        "method": "plugin",
        "pluginConfiguration": {"name": _PLUGIN},
    }
    return {"api_version": _API, "kind": "ScheduledBackup", "name": args.cluster, "spec": spec}
