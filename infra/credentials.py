"""The stack's passwords and keys, and the one way in which a pod gets them: as files that nobody else reads.

libpq ignores a password file that its group can read
(https://www.postgresql.org/docs/current/libpq-pgpass.html), and Kubernetes makes a Secret's files readable by the
group of the pod. So an init container copies them into a volume in memory, each with mode 0600.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

import pulumi
from pulumi_kubernetes import core, meta

from infra.naming import StackNames
from infra.pod_security import container_security_context, resources, secret_volume

DIRECTORY: Final = "/run/cloister/credentials"
DATABASE_LOGIN: Final = "database-credentials"
OBJECT_STORE_LOGIN: Final = "object-store-credentials"
HTTP_LANE_LOGIN: Final = "http-lane"
"""The key of the endpoints of the http lane, which the workers of its models mount where there is one."""
ENVIRONMENT: Final = {
    "PGPASSFILE": f"{DIRECTORY}/pgpass",
    "AWS_SHARED_CREDENTIALS_FILE": f"{DIRECTORY}/aws",
    # Without it boto3 and PyArrow ask the address of a cloud's metadata service, and wait for it.
    "AWS_EC2_METADATA_DISABLED": "true",
}
"""Plain environment variables: where the files are."""

_VOLUME: Final = "credentials"
_COPY: Final = "umask 077 && cp -L /etc/cloister/secrets/*/* " + DIRECTORY


def volume_mount() -> dict[str, Any]:
    """Where a container finds the files."""
    return {"name": _VOLUME, "mountPath": DIRECTORY, "readOnly": True}


def volumes(*, database: bool = True, object_store: bool = True) -> list[dict[str, Any]]:
    """The volumes of a pod that has the files: the Secrets, and the memory that they are copied to."""
    secrets = _secrets(database=database, object_store=object_store)
    return [
        {"name": _VOLUME, "emptyDir": {"medium": "Memory", "sizeLimit": "1Mi"}},
        *(secret_volume(secret, secret=secret) for secret in secrets),
    ]


def init_container(image: Any, *, database: bool = True, object_store: bool = True) -> dict[str, Any]:
    """The init container that copies the files.

    Args:
        image: any image with a shell, by digest; the pod's own, so that no other has to be pulled.
        database: whether the pod has a database role.
        object_store: whether the pod reaches the object store.
    """
    secrets = _secrets(database=database, object_store=object_store)
    mounts = [{"name": secret, "mountPath": f"/etc/cloister/secrets/{secret}", "readOnly": True} for secret in secrets]
    return {
        "name": "credentials",
        "image": image,
        "command": ["/bin/sh", "-ec", _COPY],
        "volumeMounts": [{"name": _VOLUME, "mountPath": DIRECTORY}, *mounts],
        "securityContext": container_security_context(),
        "resources": resources(cpu="10m", memory="32Mi", cpu_limit="500m", ephemeral_storage="16Mi"),
    }


def _secrets(*, database: bool, object_store: bool) -> list[str]:
    return [*([DATABASE_LOGIN] if database else []), *([OBJECT_STORE_LOGIN] if object_store else [])]


def pgpass_line(*, host: str, port: int, database: str, role: str, password: str) -> str:
    """One line of libpq's password file; colons and backslashes in a field are escaped."""
    fields = (host, str(port), database, role, password)
    return ":".join(field.replace("\\", "\\\\").replace(":", "\\:") for field in fields) + "\n"


def aws_credentials(*, access_key_id: str, secret_access_key: str) -> str:
    """The shared credentials file of the AWS SDKs, with one profile."""
    return f"[default]\naws_access_key_id = {access_key_id}\naws_secret_access_key = {secret_access_key}\n"


@dataclass(frozen=True, slots=True, kw_only=True)
class DatabaseLogin:
    """One database role, and where it logs in."""

    host: pulumi.Input[str]
    port: int
    database: str
    role: str
    password: pulumi.Input[str]


@dataclass(frozen=True, slots=True, kw_only=True)
class CredentialsArgs:
    """What the Secrets of a stack are made of.

    Attributes:
        names: the stack.
        owner: the role of the service, which owns the schema.
        job: the role of jobs, which executes one function.
        service_key: the service's key of the object store: its public and its secret half.
        job_key: the jobs' key of the object store.
        http_lane_api_key: of the endpoints of the http lane; None where they ask for none.
    """

    names: StackNames
    owner: DatabaseLogin
    job: DatabaseLogin
    service_key: tuple[str, pulumi.Input[str]]
    job_key: tuple[str, pulumi.Input[str]]
    http_lane_api_key: pulumi.Input[str] | None = None


class Credentials(pulumi.ComponentResource):
    """The Secrets of the service's namespace and of the jobs' namespace; each role stands in one of them only."""

    secrets: tuple[core.v1.Secret, ...]

    def __init__(self, name: str, args: CredentialsArgs, opts: pulumi.ResourceOptions | None = None) -> None:
        super().__init__("cloister:credentials:Credentials", name, None, opts)
        namespaces = (
            (args.names.service_namespace, args.owner, args.service_key),
            (args.names.jobs_namespace, args.job, args.job_key),
        )
        self.secrets = tuple(
            self._secret(args.names, namespace, secret, content)
            for namespace, login, key in namespaces
            for secret, content in (
                (DATABASE_LOGIN, {"pgpass": _pgpass(login)}),
                (OBJECT_STORE_LOGIN, {"aws": _aws(key)}),
            )
        )
        if args.http_lane_api_key is not None:
            content = {"api_key": pulumi.Output.secret(args.http_lane_api_key)}
            self.secrets += (self._secret(args.names, args.names.jobs_namespace, HTTP_LANE_LOGIN, content),)
        self.register_outputs({})

    def _secret(
        self, names: StackNames, namespace: str, secret: str, content: Mapping[str, pulumi.Input[str]]
    ) -> core.v1.Secret:
        return core.v1.Secret(
            f"{namespace}-{secret}",
            metadata=meta.v1.ObjectMetaArgs(name=secret, namespace=namespace, labels=names.labels("credentials")),
            string_data=dict(content),
            opts=pulumi.ResourceOptions(parent=self),
        )


def _pgpass(login: DatabaseLogin) -> pulumi.Output[str]:
    return pulumi.Output.all(login.host, pulumi.Output.secret(login.password)).apply(
        lambda pair: pgpass_line(
            host=pair[0], port=login.port, database=login.database, role=login.role, password=pair[1]
        )
    )


def _aws(key: tuple[str, pulumi.Input[str]]) -> pulumi.Output[str]:
    access_key_id, secret = key
    return pulumi.Output.secret(secret).apply(
        lambda known: aws_credentials(access_key_id=access_key_id, secret_access_key=known)
    )
