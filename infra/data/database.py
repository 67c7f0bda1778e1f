"""Database of a stack: bundled, by CloudNativePG (``infra.data.cloudnative_pg``), or the customer's own.

Each kind results in a ``DatabaseConnection``: one database, the role that owns it, and the role that the service logs
in with. The migrations, which the owner runs, grant the service's role what it needs. Jobs do not reach the database.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, Literal
from urllib.parse import quote, urlencode

import pulumi
from pulumi_kubernetes import apps, core, meta

from infra.kubernetes.images import ImageReference
from infra.kubernetes.kept_data import DataProtection, data_volume
from infra.kubernetes.naming import StackNames
from infra.kubernetes.pod_spec import (
    container_security_context,
    digest,
    pod_security_context,
    resources,
    secret_digest,
    secret_volume,
)
from infra.tenancy.credentials import DatabaseLogin

SslMode = Literal["disable", "require", "verify-ca", "verify-full"]
"""Mode of libpq; see https://www.postgresql.org/docs/current/libpq-ssl.html."""

COMPONENT: Final = "database"
PORT: Final = 5432
DATABASE_CA: Final = "database-ca"
"""ConfigMap with the CA certificate of the database, if the stack file has one."""
CA_FILE: Final = "/etc/cloister/database-ca/ca.crt"
"""Path of this certificate in the stack's pods."""

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
    """Connection of a stack to its database.

    Attributes:
        owner: the role that owns the database and its schema, for migrations.
        service: the service's role; the same as ``owner`` if the customer provides one role only.
        ssl_mode: how libpq verifies the server.
        ca_pem: CA certificate of the server; empty for the system's certificate authorities, or with ``ca_secret``.
        ca_secret: name of a Secret of the service's namespace with this certificate under ``ca.crt``; empty for none.
        pod_labels: labels of the database's pods, for network policies; empty outside the cluster.
        depends_on: resources to create before a client connects.
    """

    owner: DatabaseLogin
    service: DatabaseLogin
    ssl_mode: SslMode
    ca_pem: str = ""
    ca_secret: str = ""
    pod_labels: Mapping[str, str] = field(default_factory=dict)
    depends_on: tuple[pulumi.Resource, ...] = ()

    def url(self, login: DatabaseLogin) -> pulumi.Output[str]:
        """Return a connection string without the password, which libpq reads from the file in PGPASSFILE.

        The service takes the login's own options out of it, and gets a password at each connection.
        """
        options: dict[str, str] = {"sslmode": self.ssl_mode}
        if self.ssl_mode.startswith("verify"):
            options["sslrootcert"] = CA_FILE if self.ca_volume else "system"
        address = f"{login.port}/{quote(login.database)}"

        def url(found: list[Any]) -> str:
            host, own = found
            bracketed = f"[{host}]" if ":" in host else host
            return f"postgresql://{quote(login.role)}@{bracketed}:{address}?{urlencode(options | own, safe='/:')}"

        return pulumi.Output.all(login.host, pulumi.Output.from_input(dict(login.options))).apply(url)

    @property
    def ca_volume(self) -> dict[str, Any] | None:
        """The volume with the CA certificate, and nothing else of its Secret; None without one."""
        if self.ca_secret:
            return secret_volume(DATABASE_CA, secret=self.ca_secret, items={"ca.crt": "ca.crt"})
        return {"name": DATABASE_CA, "configMap": {"name": DATABASE_CA, "defaultMode": 0o444}} if self.ca_pem else None


@dataclass(frozen=True, slots=True, kw_only=True)
class BundledDatabaseArgs:
    """Settings of the bundled Postgres.

    Attributes:
        names: names of the stack.
        image: an image with Postgres 15 or newer and a shell, e.g. the official one or CloudNativePG's.
        storage: size of the volume, a Kubernetes quantity.
        storage_class: empty for the cluster's default.
        protection: protection of the stack's data.
        owner_password: password of the role that owns the database.
        service_password: password of the service's role.
        digest_key: key of the digests of secrets in annotations.
        cpu: requested CPUs, a Kubernetes quantity; the limit is two CPUs.
        memory: request and limit of memory, a Kubernetes quantity.
        uid: user that the server runs as; the official image has 999.
        pull_secret: name of the pull secret; empty for none.
        placement: ``nodeSelector`` or ``affinity``, ``tolerations`` and ``priorityClassName`` of the pods.
    """

    names: StackNames
    image: ImageReference
    storage: str
    storage_class: str = ""
    protection: DataProtection
    owner_password: pulumi.Input[str]
    service_password: pulumi.Input[str]
    digest_key: pulumi.Input[str]
    cpu: str = "250m"
    memory: str = "1Gi"
    uid: int = 999
    pull_secret: str = ""
    placement: Mapping[str, Any] = field(default_factory=dict)


class BundledDatabase(pulumi.ComponentResource):
    """One Postgres on one volume, for development and small stacks.

    It speaks without TLS, so it must stay inside the cluster's network: the network policies name the pods that can
    reach it. It has no backups and no second instance.
    """

    connection: DatabaseConnection

    def __init__(self, name: str, args: BundledDatabaseArgs, opts: pulumi.ResourceOptions | None = None) -> None:
        super().__init__("cloister:database:BundledDatabase", name, None, opts)
        names = args.names
        child = pulumi.ResourceOptions(parent=self)

        def metadata(object_name: str) -> meta.v1.ObjectMetaArgs:
            return meta.v1.ObjectMetaArgs(
                name=object_name, namespace=names.service_namespace, labels=names.labels(COMPONENT)
            )

        passwords = core.v1.Secret(
            _PASSWORDS,
            metadata=metadata(_PASSWORDS),
            string_data={
                "owner": pulumi.Output.secret(args.owner_password),
                "service": pulumi.Output.secret(args.service_password),
            },
            opts=child,
        )
        scripts = core.v1.ConfigMap(
            _SCRIPTS, metadata=metadata(_SCRIPTS), data={file: script(file) for file in _SCRIPT_FILES}, opts=child
        )
        volume = data_volume(
            _VOLUME,
            names=names,
            component=COMPONENT,
            storage=args.storage,
            storage_class=args.storage_class,
            protection=args.protection,
            parent=self,
        )
        service_spec: Any = {
            "ipFamilyPolicy": "PreferDualStack",
            "selector": names.selector(COMPONENT),
            "ports": [{"name": "postgres", "port": PORT, "targetPort": "postgres"}],
        }
        service = core.v1.Service(COMPONENT, metadata=metadata(COMPONENT), spec=service_spec, opts=child)
        server = apps.v1.StatefulSet(
            COMPONENT,
            metadata=metadata(COMPONENT),
            spec=bundled_stateful_set(args),
            opts=pulumi.ResourceOptions(parent=self, depends_on=[passwords, scripts, volume]),
        )
        host = f"{COMPONENT}.{names.service_namespace}.svc"
        address: dict[str, Any] = {"host": host, "port": PORT, "database": names.database}
        self.connection = DatabaseConnection(
            owner=DatabaseLogin(**address, role=names.database, password=args.owner_password),
            service=DatabaseLogin(**address, role=names.database_service_role, password=args.service_password),
            ssl_mode="disable",
            pod_labels=names.selector(COMPONENT),
            depends_on=(service, server),
        )
        self.register_outputs({})


def bundled_stateful_set(args: BundledDatabaseArgs) -> Any:
    """Return the spec of the bundled Postgres. A changed password or script replaces the pod, which applies it."""
    return {
        "serviceName": COMPONENT,
        "replicas": 1,
        "selector": {"matchLabels": args.names.selector(COMPONENT)},
        "template": {
            "metadata": {
                "labels": args.names.labels(COMPONENT),
                "annotations": {
                    "cloister.dev/passwords": secret_digest(
                        args.digest_key, args.owner_password, args.service_password
                    ),
                    "cloister.dev/scripts": digest(*(script(file) for file in _SCRIPT_FILES)),
                },
            },
            "spec": {
                **args.placement,
                "automountServiceAccountToken": False,
                "enableServiceLinks": False,
                "terminationGracePeriodSeconds": 120,
                **({"imagePullSecrets": [{"name": args.pull_secret}]} if args.pull_secret else {}),
                "securityContext": pod_security_context(uid=args.uid),
                "containers": [_postgres_container(args)],
                "volumes": [
                    {"name": "data", "persistentVolumeClaim": {"claimName": _VOLUME}},
                    {"name": "sockets", "emptyDir": {"medium": "Memory", "sizeLimit": "1Mi"}},
                    {"name": "shared-memory", "emptyDir": {"medium": "Memory", "sizeLimit": "256Mi"}},
                    {"name": "scripts", "configMap": {"name": _SCRIPTS, "defaultMode": 0o444}},
                    secret_volume("passwords", secret=_PASSWORDS),
                ],
            },
        },
    }


def _postgres_container(args: BundledDatabaseArgs) -> dict[str, Any]:
    environment = {
        "PGDATA": f"{_VOLUME_DIRECTORY}/data",
        "SOCKETS": _SOCKETS,
        "SCRIPTS": _SCRIPTS_DIRECTORY,
        "PASSWORDS": _PASSWORDS_DIRECTORY,
        "DATABASE": args.names.database,
        "OWNER": args.names.database,
        "SERVICE": args.names.database_service_role,
    }
    # Over TCP, because the socket already answers while the start script creates the roles.
    ready = 'for d in /usr/lib/postgresql/*/bin; do PATH="$PATH:$d"; done; pg_isready -q -h 127.0.0.1 -U postgres'
    probe = {"exec": {"command": ["/bin/sh", "-c", ready]}, "periodSeconds": 10, "timeoutSeconds": 5}
    return {
        "name": "postgres",
        "image": str(args.image),
        "command": ["/bin/sh", f"{_SCRIPTS_DIRECTORY}/postgres_start.sh"],
        "env": [{"name": name, "value": value} for name, value in environment.items()],
        "ports": [{"name": "postgres", "containerPort": PORT}],
        # The first start initializes the database; a start after a crash replays its log.
        "startupProbe": probe | {"periodSeconds": 1, "failureThreshold": 600},
        "readinessProbe": probe,
        "livenessProbe": probe | {"periodSeconds": 20, "failureThreshold": 6},
        # SIGTERM makes Postgres wait for its clients; SIGINT aborts their transactions and shuts down cleanly.
        "lifecycle": {"preStop": {"exec": {"command": ["/bin/sh", "-c", "kill -INT 1"]}}},
        "resources": resources(cpu=args.cpu, memory=args.memory, cpu_limit="2"),
        "securityContext": container_security_context(),
        "volumeMounts": [
            {"name": "data", "mountPath": _VOLUME_DIRECTORY},
            {"name": "sockets", "mountPath": _SOCKETS},
            {"name": "shared-memory", "mountPath": "/dev/shm"},  # noqa: S108 - the shared memory of Postgres
            {"name": "scripts", "mountPath": _SCRIPTS_DIRECTORY, "readOnly": True},
            {"name": "passwords", "mountPath": _PASSWORDS_DIRECTORY, "readOnly": True},
        ],
    }


def script(file: str) -> str:
    """Return the text of a file in ``infra/data/scripts``."""
    return (Path(__file__).parent / "scripts" / file).read_text()
