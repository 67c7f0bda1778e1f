"""The database of a stack: bundled with it, made by CloudNativePG (``infra.cloudnative_pg``), or the customer's own.

Each kind gives the same ``DatabaseConnection``: one database, the role that owns it, and the role of jobs. What the
role of jobs may do is decided by the migration, which the owner runs.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, Literal
from urllib.parse import quote, urlencode

import pulumi
from pulumi_kubernetes import apps, core, meta

from infra.credentials import DatabaseLogin
from infra.digests import digest
from infra.images import ImageReference
from infra.naming import StackNames
from infra.pod_security import container_security_context, pod_security_context, resources, secret_volume

SslMode = Literal["disable", "require", "verify-ca", "verify-full"]
"""libpq's word; see https://www.postgresql.org/docs/current/libpq-ssl.html."""

COMPONENT: Final = "database"
PORT: Final = 5432
CA_FILE: Final = "/etc/cloister/database-ca/ca.crt"
"""Where a pod of the stack finds the certificate of the database's authority, if the stack file has one."""

_PASSWORDS: Final = "database-passwords"
_SCRIPTS: Final = "database-scripts"
_SCRIPT_FILES: Final = ("postgres_start.sh", "postgres_roles.sql")
_SCRIPTS_DIRECTORY: Final = "/etc/cloister/scripts"
_PASSWORDS_DIRECTORY: Final = "/etc/cloister/passwords"
_SOCKETS: Final = "/var/run/postgresql"
_VOLUME: Final = "database-data"
_VOLUME_DIRECTORY: Final = "/var/lib/cloister/postgres"


@dataclass(frozen=True, slots=True, kw_only=True)
class DatabaseConnection:
    """How the stack reaches its database.

    Attributes:
        owner: the role of the service, which owns the database and its schema.
        job: the role of jobs, which executes one function.
        ssl_mode: how much of the server's identity is checked.
        ca_pem: who signed the server's certificate; empty for the authorities that the system knows.
        pod_labels: the labels of the database's pods, for network policies; empty outside of the cluster.
        depends_on: what must exist before anything connects.
    """

    owner: DatabaseLogin
    job: DatabaseLogin
    ssl_mode: SslMode
    ca_pem: str = ""
    pod_labels: Mapping[str, str] = field(default_factory=dict)
    depends_on: tuple[pulumi.Resource, ...] = ()

    def url(self, login: DatabaseLogin) -> pulumi.Output[str]:
        """A libpq connection string without a password, which libpq finds by PGPASSFILE."""
        options: dict[str, str] = {"sslmode": self.ssl_mode}
        if self.ssl_mode.startswith("verify"):
            options["sslrootcert"] = CA_FILE if self.ca_pem else "system"
        path = f"{login.port}/{quote(login.database)}?{urlencode(options, safe='/')}"
        return pulumi.Output.from_input(login.host).apply(
            lambda host: f"postgresql://{quote(login.role)}@{host}:{path}"
        )


def external_database(
    *,
    host: str,
    port: int,
    database: str,
    owner: tuple[str, pulumi.Input[str]],
    job: tuple[str, pulumi.Input[str]],
    ssl_mode: SslMode,
    ca_pem: str = "",
) -> DatabaseConnection:
    """The customer's own database, in which nothing is made but the schema.

    Args:
        host: a name or an address that pods can reach.
        port: a TCP port.
        database: exists already, in UTF-8, and is empty at the first deployment.
        owner: name and password of the role that owns the database.
        job: name and password of another role, without any right.
        ssl_mode: ``verify-full`` unless there is a reason.
        ca_pem: the authority's certificate in PEM; empty for those that the system knows.

    Raises:
        ValueError: owner and job are one role.
    """
    if owner[0] == job[0]:
        raise ValueError(f"the role {owner[0]!r} cannot be both owner and job: jobs would own every table")
    address: dict[str, Any] = {"host": host, "port": port, "database": database}
    return DatabaseConnection(
        owner=DatabaseLogin(**address, role=owner[0], password=owner[1]),
        job=DatabaseLogin(**address, role=job[0], password=job[1]),
        ssl_mode=ssl_mode,
        ca_pem=ca_pem,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class BundledDatabaseArgs:
    """What the bundled Postgres is made of.

    Attributes:
        names: the stack.
        image: any with Postgres 15 or newer and a shell, e.g. the official one or CloudNativePG's.
        storage: of the volume, a Kubernetes quantity.
        storage_class: empty for the cluster's default.
        keep_data: the volume is protected, and stays when Pulumi forgets it.
        owner_password: of the service's role.
        job_password: of the jobs' role.
        cpu: requested, a Kubernetes quantity; at most two CPUs are used.
        memory: requested and most, a Kubernetes quantity.
        uid: the user that the server runs as; the official image has 999.
        pull_secret: the name of the pull secret; empty for none.
        placement: what the pods have besides: ``nodeSelector``, ``tolerations``, ``priorityClassName``.
    """

    names: StackNames
    image: ImageReference
    storage: str
    storage_class: str = ""
    keep_data: bool = True
    owner_password: pulumi.Input[str]
    job_password: pulumi.Input[str]
    cpu: str = "250m"
    memory: str = "1Gi"
    uid: int = 999
    pull_secret: str = ""
    placement: Mapping[str, Any] = field(default_factory=dict)


class BundledDatabase(pulumi.ComponentResource):
    """One Postgres on one volume, for development and small stacks.

    It speaks without TLS, so it must not leave the cluster's network: only the pods that the network policies name
    reach it. It has no backup of its own and no second instance.
    """

    connection: DatabaseConnection

    def __init__(self, name: str, args: BundledDatabaseArgs, opts: pulumi.ResourceOptions | None = None) -> None:
        super().__init__("cloister:database:BundledDatabase", name, None, opts)
        own = pulumi.ResourceOptions(parent=self)
        passwords = core.v1.Secret(
            _PASSWORDS,
            metadata=_metadata(args.names, _PASSWORDS),
            string_data={
                "owner": pulumi.Output.secret(args.owner_password),
                "job": pulumi.Output.secret(args.job_password),
            },
            opts=own,
        )
        scripts = core.v1.ConfigMap(
            _SCRIPTS,
            metadata=_metadata(args.names, _SCRIPTS),
            data={file: script(file) for file in _SCRIPT_FILES},
            opts=own,
        )
        volume = kept_volume(
            _VOLUME,
            names=args.names,
            component=COMPONENT,
            storage=args.storage,
            storage_class=args.storage_class,
            keep=args.keep_data,
            parent=self,
        )
        service = core.v1.Service(
            COMPONENT, metadata=_metadata(args.names, COMPONENT), spec=bundled_service(args.names), opts=own
        )
        server = apps.v1.StatefulSet(
            COMPONENT,
            metadata=_metadata(args.names, COMPONENT),
            spec=bundled_stateful_set(args),
            opts=pulumi.ResourceOptions(parent=self, depends_on=[passwords, scripts, volume]),
        )
        self.connection = _bundled_connection(args, (service, server))
        self.register_outputs({})


def _bundled_connection(args: BundledDatabaseArgs, made: tuple[pulumi.Resource, ...]) -> DatabaseConnection:
    names = args.names
    host = f"{COMPONENT}.{names.service_namespace}.svc"
    address: dict[str, Any] = {"host": host, "port": PORT, "database": names.database}
    return DatabaseConnection(
        owner=DatabaseLogin(**address, role=names.database, password=args.owner_password),
        job=DatabaseLogin(**address, role=names.job_role, password=args.job_password),
        ssl_mode="disable",
        pod_labels=names.selector(COMPONENT),
        depends_on=made,
    )


def bundled_service(names: StackNames) -> Any:
    """The spec of the Service before the bundled Postgres."""
    port = {"name": "postgres", "port": PORT, "targetPort": "postgres"}
    return {"selector": names.selector(COMPONENT), "ports": [port]}


def bundled_stateful_set(args: BundledDatabaseArgs) -> Any:
    """The spec of the bundled Postgres; a changed password or script makes a new pod, which sets them."""
    return {
        "serviceName": COMPONENT,
        "replicas": 1,
        "selector": {"matchLabels": args.names.selector(COMPONENT)},
        "template": {
            "metadata": {
                "labels": args.names.labels(COMPONENT),
                "annotations": {
                    "cloister.dev/passwords": digest(args.owner_password, args.job_password),
                    "cloister.dev/scripts": digest(*(script(file) for file in _SCRIPT_FILES)),
                },
            },
            "spec": _bundled_pod(args),
        },
    }


def _bundled_pod(args: BundledDatabaseArgs) -> dict[str, Any]:
    return {
        **args.placement,
        "automountServiceAccountToken": False,
        "enableServiceLinks": False,
        "terminationGracePeriodSeconds": 120,
        **({"imagePullSecrets": [{"name": args.pull_secret}]} if args.pull_secret else {}),
        "securityContext": pod_security_context(uid=args.uid),
        "containers": [_postgres(args)],
        "volumes": [
            {"name": "data", "persistentVolumeClaim": {"claimName": _VOLUME}},
            {"name": "sockets", "emptyDir": {"medium": "Memory", "sizeLimit": "1Mi"}},
            {"name": "shared-memory", "emptyDir": {"medium": "Memory", "sizeLimit": "256Mi"}},
            {"name": "scripts", "configMap": {"name": _SCRIPTS, "defaultMode": 0o444}},
            secret_volume("passwords", secret=_PASSWORDS),
        ],
    }


def _postgres(args: BundledDatabaseArgs) -> dict[str, Any]:
    environment = {
        "PGDATA": f"{_VOLUME_DIRECTORY}/data",
        "SOCKETS": _SOCKETS,
        "SCRIPTS": _SCRIPTS_DIRECTORY,
        "PASSWORDS": _PASSWORDS_DIRECTORY,
        "DATABASE": args.names.database,
        "OWNER": args.names.database,
        "JOB": args.names.job_role,
    }
    # Over TCP: the socket answers while the roles are still being made.
    ready = 'for d in /usr/lib/postgresql/*/bin; do PATH="$PATH:$d"; done; pg_isready -q -h 127.0.0.1 -U postgres'
    probe = {"exec": {"command": ["/bin/sh", "-c", ready]}, "periodSeconds": 10, "timeoutSeconds": 5}
    return {
        "name": "postgres",
        "image": str(args.image),
        "command": ["/bin/sh", f"{_SCRIPTS_DIRECTORY}/postgres_start.sh"],
        "env": [{"name": name, "value": value} for name, value in environment.items()],
        "ports": [{"name": "postgres", "containerPort": PORT}],
        # The first start makes the database; a start after a crash replays its log.
        "startupProbe": probe | {"periodSeconds": 1, "failureThreshold": 600},
        "readinessProbe": probe,
        "livenessProbe": probe | {"periodSeconds": 20, "failureThreshold": 6},
        # At SIGTERM Postgres waits for its clients; at SIGINT it ends their transactions and stops cleanly.
        "lifecycle": {"preStop": {"exec": {"command": ["/bin/sh", "-c", "kill -INT 1"]}}},
        "resources": resources(cpu=args.cpu, memory=args.memory, cpu_limit="2"),
        "securityContext": container_security_context(),
        "volumeMounts": [
            {"name": "data", "mountPath": _VOLUME_DIRECTORY},
            {"name": "sockets", "mountPath": _SOCKETS},
            {"name": "shared-memory", "mountPath": "/dev/shm"},  # noqa: S108 - Postgres' own place for it
            {"name": "scripts", "mountPath": _SCRIPTS_DIRECTORY, "readOnly": True},
            {"name": "passwords", "mountPath": _PASSWORDS_DIRECTORY, "readOnly": True},
        ],
    }


def kept_volume(
    name: str,
    *,
    names: StackNames,
    component: str,
    storage: str,
    storage_class: str,
    keep: bool,
    parent: pulumi.Resource,
) -> core.v1.PersistentVolumeClaim:
    """A volume for one node at a time, in the service's namespace.

    Args:
        name: of the claim.
        names: the stack.
        component: the part of the stack that writes it.
        storage: a Kubernetes quantity.
        storage_class: empty for the cluster's default.
        keep: Pulumi refuses to delete it, and leaves it where it is when it forgets it.
        parent: the component's resource.
    """
    spec: Any = {
        "accessModes": ["ReadWriteOnce"],
        "resources": {"requests": {"storage": storage}},
        **({"storageClassName": storage_class} if storage_class else {}),
    }
    return core.v1.PersistentVolumeClaim(
        name,
        metadata=meta.v1.ObjectMetaArgs(
            name=name,
            namespace=names.service_namespace,
            labels=names.labels(component),
            # Many storage classes make a volume for its first pod only, and that pod comes later.
            annotations={"pulumi.com/skipAwait": "true"},
        ),
        spec=spec,
        opts=pulumi.ResourceOptions(parent=parent, protect=keep, retain_on_delete=keep),
    )


def script(file: str) -> str:
    """The text of a file of ``infra/scripts``."""
    return (Path(__file__).parent / "scripts" / file).read_text()


def _metadata(names: StackNames, name: str) -> meta.v1.ObjectMetaArgs:
    return meta.v1.ObjectMetaArgs(name=name, namespace=names.service_namespace, labels=names.labels(COMPONENT))
