"""Passwords and keys of a stack, and how a pod reads them: as files that only its user can read.

libpq ignores a password file that its group can read
(https://www.postgresql.org/docs/current/libpq-pgpass.html), and Kubernetes makes a Secret's files readable by the
group of the pod. So an init container copies them into a volume in memory, each with mode 0600.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

import pulumi
from pulumi_kubernetes import core, meta

from infra.kubernetes.naming import StackNames
from infra.kubernetes.pod_spec import container_security_context, resources, secret_volume
from infra.tenancy import trust

DIRECTORY: Final = "/run/cloister/credentials"
SERVICE_LOGIN: Final = "database-service-credentials"
"""Secret with the login of the service's role in the database."""
OWNER_LOGIN: Final = "database-credentials"
"""Secret with the login of the role that owns the database, which the migrations mount.

Earlier versions of the service mount it too: its name and content stay, so that their pods start until they roll.
"""
OBJECT_STORE_LOGIN: Final = "object-store-credentials"
ENCRYPTION_KEYS: Final = "encryption-keys"
"""Secret with the keys that encrypt secrets in the database; API, reconciler and migrations mount it."""
RECEIPT_KEY: Final = "receipt-key"
"""Secret with the key that signs deletion receipts, and the name of its file; API and reconciler mount it."""
WEIGHTS_LOGIN: Final = "weights-credentials"
"""Secret with the key of the object store that the program which copies weights mounts, in the jobs' namespace."""
HTTP_ENGINE_LOGIN: Final = "http-engine"
"""Secret with the API key of the http engine's endpoints; the workers of its models mount it if it exists."""
ENVIRONMENT: Final = {
    # Otherwise boto3 and PyArrow query the address of a cloud's metadata service, and wait for it.
    "AWS_EC2_METADATA_DISABLED": "true",
}
"""Environment variables of all pods of the service."""
_DATABASE_ENVIRONMENT: Final = {"PGPASSFILE": f"{DIRECTORY}/pgpass"}
ENVIRONMENT_OF: Final[Mapping[str, Mapping[str, str]]] = {
    SERVICE_LOGIN: _DATABASE_ENVIRONMENT,
    OWNER_LOGIN: _DATABASE_ENVIRONMENT,
    OBJECT_STORE_LOGIN: {"AWS_SHARED_CREDENTIALS_FILE": f"{DIRECTORY}/aws"},
    ENCRYPTION_KEYS: {"CLOISTER_ENCRYPTION_KEYS_FILE": f"{DIRECTORY}/encryption_keys"},
    RECEIPT_KEY: {"CLOISTER_RECEIPT_KEY_FILE": f"{DIRECTORY}/{RECEIPT_KEY}"},
}
"""Environment variables of a pod of the service with the paths of its files, by Secret."""

_VOLUME: Final = "credentials"
VOLUME_MOUNT: Final = {"name": _VOLUME, "mountPath": DIRECTORY, "readOnly": True}
"""The mount of the files in a container."""
_COPY: Final = "umask 077 && cp -L /etc/cloister/secrets/*/* " + DIRECTORY
_BUNDLES_FILE: Final = f"{DIRECTORY}/ca-bundle.crt"
# certifi's authorities are those that boto3 trusts without AWS_CA_BUNDLE.
_JOIN_BUNDLES: Final = f'cat "$(python -m certifi)" {trust.CA_BUNDLE_FILE} >{_BUNDLES_FILE}'
CA_BUNDLE_ENVIRONMENT: Final = {"SSL_CERT_FILE": _BUNDLES_FILE, "AWS_CA_BUNDLE": _BUNDLES_FILE}
"""Environment variables of the service in a stack with private certificate authorities."""


def pod_fields(
    image: Any, secrets: Sequence[str], *, has_ca_bundle: bool = False
) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """Return the init container that copies the files, and the volumes: the Secrets and the memory with the copies.

    A pod without files has no such container.

    Args:
        image: any image with a shell, by digest. Use the pod's own image to avoid pulling another one.
        secrets: names of the Secrets.
        has_ca_bundle: also write the public and the stack's private certificate authorities to one file.
    """
    mounts = [{"name": secret, "mountPath": f"/etc/cloister/secrets/{secret}", "readOnly": True} for secret in secrets]
    bundle_mounts, bundle_volumes = ([trust.VOLUME_MOUNT], [trust.VOLUME]) if has_ca_bundle else ([], [])
    commands = [*([_COPY] if secrets else []), *([_JOIN_BUNDLES] if has_ca_bundle else [])]
    init_container = {
        "name": "credentials",
        "image": image,
        "command": ["/bin/sh", "-ec", " && ".join(commands)],
        "volumeMounts": [{"name": _VOLUME, "mountPath": DIRECTORY}, *mounts, *bundle_mounts],
        "securityContext": container_security_context(),
        "resources": resources(cpu="10m", memory="32Mi", cpu_limit="500m", ephemeral_storage="16Mi"),
    }
    memory = {"name": _VOLUME, "emptyDir": {"medium": "Memory", "sizeLimit": "4Mi"}}
    containers = [init_container] if commands else []
    return containers, [memory, *bundle_volumes, *(secret_volume(secret, secret=secret) for secret in secrets)]


@dataclass(frozen=True, slots=True, kw_only=True)
class DatabaseLogin:
    """A database role, and the address of its database.

    Attributes:
        host: host name of the server.
        port: its port.
        database: name of the database.
        role: name of the role.
        password: the role's password; None if the service gets one at each connection.
        options: parameters of the connection string that name where it gets one (``service.db.login``).
    """

    host: pulumi.Input[str]
    port: int
    database: str
    role: str
    password: pulumi.Input[str] | None
    options: Mapping[str, pulumi.Input[str]] = field(default_factory=dict)

    def pgpass_line(self, password: pulumi.Input[str]) -> pulumi.Output[str]:
        """Return the line of libpq's password file, with colons and backslashes escaped; a secret."""

        def line(values: list[str]) -> str:
            host, password = values
            fields = (host, str(self.port), self.database, self.role, password)
            return ":".join(field.replace("\\", "\\\\").replace(":", "\\:") for field in fields) + "\n"

        return pulumi.Output.all(self.host, pulumi.Output.secret(password)).apply(line)


@dataclass(frozen=True, slots=True, kw_only=True)
class ObjectStoreLogin:
    """A key of the object store."""

    access_key_id: str
    secret_access_key: pulumi.Input[str]

    def aws_file(self) -> pulumi.Output[str]:
        """Return the shared credentials file of the AWS SDKs, with one profile; a secret."""
        return pulumi.Output.secret(self.secret_access_key).apply(
            lambda secret: f"[default]\naws_access_key_id = {self.access_key_id}\naws_secret_access_key = {secret}\n"
        )


class Credentials(pulumi.ComponentResource):
    """The Secrets of the service's and of the jobs' namespace; each login is in one of them only.

    Pods that run Ray have none of these logins but the key of the http engine's endpoints. Each job has a token of its
    own, which the service creates (``service.adapters.rayjob_templates``).

    Args:
        name: logical name of the component.
        names: names of the stack.
        owner: the role that owns the schema.
        service: the service's role in the database.
        service_key: the service's key of the object store; None if pods reach it by their identity.
        encryption_keys: keys that encrypt secrets in the database.
        receipt_key: the key that signs deletion receipts.
        weights_key: the key that copies weights from the object store; None if the weights are elsewhere.
        http_engine_api_key: key of the http engine's endpoints; None if they require none.
        opts: options of the component.
    """

    secrets: tuple[core.v1.Secret, ...]

    def __init__(
        self,
        name: str,
        *,
        names: StackNames,
        owner: DatabaseLogin,
        service: DatabaseLogin,
        service_key: ObjectStoreLogin | None,
        encryption_keys: pulumi.Input[str],
        receipt_key: pulumi.Input[str],
        weights_key: ObjectStoreLogin | None,
        http_engine_api_key: pulumi.Input[str] | None = None,
        opts: pulumi.ResourceOptions | None = None,
    ) -> None:
        super().__init__("cloister:credentials:Credentials", name, None, opts)
        contents: list[tuple[str, str, dict[str, pulumi.Input[str]]]] = [
            (names.service_namespace, ENCRYPTION_KEYS, {"encryption_keys": pulumi.Output.secret(encryption_keys)}),
            (names.service_namespace, RECEIPT_KEY, {RECEIPT_KEY: pulumi.Output.secret(receipt_key)}),
        ]
        for secret, login in ((OWNER_LOGIN, owner), (SERVICE_LOGIN, service)):
            if login.password is not None:
                contents.append((names.service_namespace, secret, {"pgpass": login.pgpass_line(login.password)}))
        if service_key is not None:
            contents.append((names.service_namespace, OBJECT_STORE_LOGIN, {"aws": service_key.aws_file()}))
        if weights_key is not None:
            contents.append((names.jobs_namespace, WEIGHTS_LOGIN, {"aws": weights_key.aws_file()}))
        if http_engine_api_key is not None:
            api_key = {"api_key": pulumi.Output.secret(http_engine_api_key)}
            contents.append((names.jobs_namespace, HTTP_ENGINE_LOGIN, dict(api_key)))
        self.secrets = tuple(
            core.v1.Secret(
                f"{namespace}-{secret}",
                metadata=meta.v1.ObjectMetaArgs(name=secret, namespace=namespace, labels=names.labels("credentials")),
                string_data=content,
                opts=pulumi.ResourceOptions(parent=self),
            )
            for namespace, secret, content in contents
        )
        self.register_outputs({})
