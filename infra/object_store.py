"""The object store of a stack: bundled with it, or the customer's S3.

Either gives an ``ObjectStoreConnection``: the bucket, a key for the service, and a key for jobs.
"""

import hashlib
import hmac
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Final
from urllib.parse import urlencode

import pulumi
from pulumi_kubernetes import apps, batch, core, meta

from infra.credentials import aws_credentials
from infra.database import kept_volume, script
from infra.digests import digest
from infra.images import ImageReference
from infra.naming import StackNames
from infra.pod_security import UID, container_security_context, pod_security_context, resources, secret_volume

COMPONENT: Final = "object-store"
SETUP_COMPONENT: Final = "object-store-setup"
"""The pod that makes the bucket; it connects to the object store and to nothing else."""
PORT: Final = 7070
REGION: Final = "us-east-1"
"""What the bundled object store's clients sign for; it is nowhere."""

_KEYS: Final = "object-store-keys"
_SCRIPTS: Final = "object-store-scripts"
_START: Final = "versitygw_start.sh"
_SETUP: Final = "object_store_bucket.py"
_SCRIPTS_DIRECTORY: Final = "/etc/cloister/scripts"
_KEYS_DIRECTORY: Final = "/etc/cloister/keys"
_VOLUME: Final = "object-store-data"
_VOLUME_DIRECTORY: Final = "/var/lib/cloister/object-store"


@dataclass(frozen=True, slots=True, kw_only=True)
class ObjectStoreLogin:
    """A key of the object store: its public and its secret half."""

    access_key_id: str
    secret_access_key: pulumi.Input[str]


@dataclass(frozen=True, slots=True, kw_only=True)
class ObjectStoreConnection:
    """How the stack reaches its object store.

    Attributes:
        bucket: the bucket, which exists once ``depends_on`` does.
        prefix: the path below which the stack's objects are, without slashes around it; empty for the whole bucket.
        endpoint_url: http:// or https://, host and port.
        region: what requests are signed for.
        service: the key that may do everything below the prefix.
        job: the key of jobs; the same as ``service`` where the customer gave one key only.
        pod_labels: the labels of the server's pods, for network policies; empty outside of the cluster.
        setup_labels: the labels of the pod that makes the bucket, for network policies; empty for none.
        depends_on: what must exist before anything connects.
    """

    bucket: str
    prefix: str
    endpoint_url: str
    region: str
    service: ObjectStoreLogin
    job: ObjectStoreLogin
    pod_labels: Mapping[str, str] = field(default_factory=dict)
    setup_labels: Mapping[str, str] = field(default_factory=dict)
    depends_on: tuple[pulumi.Resource, ...] = ()

    @property
    def url(self) -> str:
        """What the service reads as CLOISTER_OBJECT_STORE."""
        options = urlencode({"endpoint_url": self.endpoint_url, "region": self.region}, safe=":/")
        return f"s3://{'/'.join(part for part in (self.bucket, self.prefix) if part)}?{options}"


def customer_object_store(
    *,
    bucket: str,
    prefix: str,
    endpoint_url: str,
    region: str,
    service: ObjectStoreLogin,
    job: ObjectStoreLogin | None = None,
) -> ObjectStoreConnection:
    """The customer's own S3, in which nothing is made but objects.

    Args:
        bucket: exists already.
        prefix: of all of the stack's objects.
        endpoint_url: the S3 server.
        region: what requests are signed for.
        service: a key that may read, write, list and delete below the prefix.
        job: a key with the rights of ``job_policy``; ``service`` by default.
    """
    return ObjectStoreConnection(
        bucket=bucket,
        prefix=prefix.strip("/"),
        endpoint_url=endpoint_url,
        region=region,
        service=service,
        job=job or service,
    )


def job_policy(*, bucket: str, prefix: str, principal: str, weights_prefix: str = "models") -> dict[str, Any]:
    """The bucket policy that jobs need: read input files and parts, list, write parts. They delete nothing.

    Args:
        bucket: the bucket.
        prefix: of the stack's objects in it; may be empty.
        principal: who the policy is for; an access key id for versitygw, an ARN for AWS.
        weights_prefix: where the models' directories are, below ``prefix``.
    """
    root = f"arn:aws:s3:::{bucket}"
    objects = "/".join(part for part in (root, prefix.strip("/")) if part)
    parts, files, weights = f"{objects}/batches/*", f"{objects}/files/*", f"{objects}/{weights_prefix.strip('/')}/*"
    rights: tuple[dict[str, Any], ...] = (
        {"Action": ["s3:ListBucket"], "Resource": [root]},
        {"Action": ["s3:GetObject"], "Resource": [files, parts, weights]},
        {"Action": ["s3:PutObject", "s3:AbortMultipartUpload"], "Resource": [parts]},
    )
    if prefix.strip("/"):
        # Others may use the bucket too. versitygw knows no conditions; its bucket is the stack's alone.
        rights[0]["Condition"] = {"StringLike": {"s3:prefix": [f"{prefix.strip('/')}/*"]}}
    return {
        "Version": "2012-10-17",
        "Statement": [{"Effect": "Allow", "Principal": {"AWS": [principal]}, **right} for right in rights],
    }


def derived_secret(secret: str, purpose: str) -> str:
    """Another secret, made of one: the same each time, and no way back.

    Args:
        secret: what it is made of.
        purpose: what it is for; each purpose has its own.

    Returns:
        40 hexadecimal digits.
    """
    return hmac.new(secret.encode(), purpose.encode(), hashlib.sha256).hexdigest()[:40]


@dataclass(frozen=True, slots=True, kw_only=True)
class BundledObjectStoreArgs:
    """What the bundled object store is made of.

    Attributes:
        names: the stack.
        image: versitygw 1.7 or newer with a shell, e.g. the official one.
        service_image: the service's image, whose S3 client makes the bucket.
        storage: of the volume, a Kubernetes quantity.
        storage_class: empty for the cluster's default.
        keep_data: the volume is protected, and stays when Pulumi forgets it.
        secret_access_key: of the service's key, letters, digits and hyphens; the key of jobs is made of it.
        weights_prefix: where the models' directories are, below the stack's prefix: jobs may read there.
        cpu: requested, a Kubernetes quantity; at most four CPUs are used.
        memory: requested and most, a Kubernetes quantity.
        pull_secret: the name of the pull secret; empty for none.
        placement: what the pods have besides: ``nodeSelector``, ``tolerations``, ``priorityClassName``.
    """

    names: StackNames
    image: ImageReference
    service_image: ImageReference
    storage: str
    storage_class: str = ""
    keep_data: bool = True
    secret_access_key: pulumi.Input[str]
    weights_prefix: str = "models"
    cpu: str = "250m"
    memory: str = "1Gi"
    pull_secret: str = ""
    placement: Mapping[str, Any] = field(default_factory=dict)


class BundledObjectStore(pulumi.ComponentResource):
    """One versitygw over one volume, and a job that makes the bucket and says what jobs may do in it.

    It speaks without TLS, so it must not leave the cluster's network: only the pods that the network policies name
    reach it, and every request is signed. The volume's snapshots are its backup.
    """

    connection: ObjectStoreConnection

    def __init__(self, name: str, args: BundledObjectStoreArgs, opts: pulumi.ResourceOptions | None = None) -> None:
        super().__init__("cloister:object_store:BundledObjectStore", name, None, opts)
        own = pulumi.ResourceOptions(parent=self)
        names = args.names
        self.connection = _bundled_connection(args)
        keys = core.v1.Secret(
            _KEYS, metadata=_metadata(names, _KEYS), string_data=_key_files(self.connection), opts=own
        )
        scripts = core.v1.ConfigMap(
            _SCRIPTS,
            metadata=_metadata(names, _SCRIPTS),
            data={file: script(file) for file in (_START, _SETUP)},
            opts=own,
        )
        volume = kept_volume(
            _VOLUME,
            names=names,
            component=COMPONENT,
            storage=args.storage,
            storage_class=args.storage_class,
            keep=args.keep_data,
            parent=self,
        )
        service = core.v1.Service(COMPONENT, metadata=_metadata(names, COMPONENT), spec=service_spec(names), opts=own)
        server = apps.v1.StatefulSet(
            COMPONENT,
            metadata=_metadata(names, COMPONENT),
            spec=stateful_set(args),
            opts=pulumi.ResourceOptions(parent=self, depends_on=[keys, scripts, volume]),
        )
        setup = self._setup(args, (service, server))
        self.connection = _bundled_connection(args, (service, server, setup))
        self.register_outputs({})

    def _setup(self, args: BundledObjectStoreArgs, server: tuple[pulumi.Resource, ...]) -> batch.v1.Job:
        pod = setup_pod(args, self.connection)
        # A Job cannot be changed: another one, with another name, takes its place.
        content = json.dumps(pod, sort_keys=True) + script(_SETUP)
        job: Any = {
            "backoffLimit": 4,
            "activeDeadlineSeconds": 900,
            "template": {"metadata": {"labels": args.names.labels(SETUP_COMPONENT)}, "spec": pod},
        }
        return batch.v1.Job(
            SETUP_COMPONENT,
            metadata=meta.v1.ObjectMetaArgs(
                name=f"{SETUP_COMPONENT}-{hashlib.sha256(content.encode()).hexdigest()[:8]}",
                namespace=args.names.service_namespace,
                labels=args.names.labels(SETUP_COMPONENT),
            ),
            spec=job,
            opts=pulumi.ResourceOptions(parent=self, depends_on=list(server)),
        )


def _bundled_connection(args: BundledObjectStoreArgs, made: tuple[pulumi.Resource, ...] = ()) -> ObjectStoreConnection:
    names = args.names
    secret = pulumi.Output.secret(args.secret_access_key)
    return ObjectStoreConnection(
        bucket=names.bucket,
        prefix=names.object_prefix,
        endpoint_url=f"http://{COMPONENT}.{names.service_namespace}.svc:{PORT}",
        region=REGION,
        service=ObjectStoreLogin(access_key_id=names.service_namespace, secret_access_key=secret),
        job=ObjectStoreLogin(
            access_key_id=names.jobs_namespace,
            secret_access_key=secret.apply(lambda known: derived_secret(known, "object store key of jobs")),
        ),
        pod_labels=names.selector(COMPONENT),
        setup_labels=names.selector(SETUP_COMPONENT),
        depends_on=made,
    )


def _key_files(connection: ObjectStoreConnection) -> dict[str, pulumi.Input[str]]:
    service, job = connection.service, connection.job
    return {
        "access_key_id": service.access_key_id,
        "secret_access_key": service.secret_access_key,
        "job_access_key_id": job.access_key_id,
        "job_secret_access_key": job.secret_access_key,
        "aws": pulumi.Output.from_input(service.secret_access_key).apply(
            lambda secret: aws_credentials(access_key_id=service.access_key_id, secret_access_key=secret)
        ),
    }


def service_spec(names: StackNames) -> Any:
    """The spec of the Service before versitygw."""
    return {"selector": names.selector(COMPONENT), "ports": [{"name": "s3", "port": PORT, "targetPort": "s3"}]}


def stateful_set(args: BundledObjectStoreArgs) -> Any:
    """The spec of versitygw; a changed key or script makes a new pod."""
    volumes = [
        {"name": "data", "persistentVolumeClaim": {"claimName": _VOLUME}},
        {"name": "accounts", "emptyDir": {"medium": "Memory", "sizeLimit": "1Mi"}},
        {"name": "scripts", "configMap": {"name": _SCRIPTS, "defaultMode": 0o444}},
        secret_volume("keys", secret=_KEYS),
    ]
    return {
        "serviceName": COMPONENT,
        "replicas": 1,
        "selector": {"matchLabels": args.names.selector(COMPONENT)},
        "template": {
            "metadata": {
                "labels": args.names.labels(COMPONENT),
                "annotations": {
                    "cloister.dev/keys": digest(args.secret_access_key),
                    "cloister.dev/scripts": digest(script(_START)),
                },
            },
            "spec": _pod(args, _gateway(args), volumes),
        },
    }


def _gateway(args: BundledObjectStoreArgs) -> dict[str, Any]:
    probe = {"httpGet": {"path": "/health", "port": "s3"}, "periodSeconds": 10, "timeoutSeconds": 5}
    accounts = "/run/versitygw"
    environment = {
        "KEYS": _KEYS_DIRECTORY,
        "ACCOUNTS": accounts,
        "VOLUME": _VOLUME_DIRECTORY,
        "REGION": REGION,
    }
    return {
        "name": "versitygw",
        "image": str(args.image),
        "command": ["/bin/sh", f"{_SCRIPTS_DIRECTORY}/{_START}", "--port", f":{PORT}"],
        "env": [{"name": name, "value": value} for name, value in environment.items()],
        "ports": [{"name": "s3", "containerPort": PORT}],
        "startupProbe": probe | {"periodSeconds": 1, "failureThreshold": 120},
        "readinessProbe": probe,
        "livenessProbe": probe | {"periodSeconds": 20, "failureThreshold": 6},
        "resources": resources(cpu=args.cpu, memory=args.memory, cpu_limit="4"),
        "securityContext": container_security_context(),
        "volumeMounts": [
            {"name": "data", "mountPath": _VOLUME_DIRECTORY},
            {"name": "accounts", "mountPath": accounts},
            {"name": "scripts", "mountPath": _SCRIPTS_DIRECTORY, "readOnly": True},
            {"name": "keys", "mountPath": _KEYS_DIRECTORY, "readOnly": True},
        ],
    }


def setup_pod(args: BundledObjectStoreArgs, connection: ObjectStoreConnection) -> dict[str, Any]:
    """The pod that makes the bucket and sets what jobs may do in it."""
    policy = job_policy(
        bucket=connection.bucket,
        prefix=connection.prefix,
        principal=connection.job.access_key_id,
        weights_prefix=args.weights_prefix,
    )
    environment = {
        "ENDPOINT_URL": connection.endpoint_url,
        "REGION": connection.region,
        "BUCKET": connection.bucket,
        "POLICY": json.dumps(policy, sort_keys=True),
        "AWS_SHARED_CREDENTIALS_FILE": f"{_KEYS_DIRECTORY}/aws",
        "AWS_EC2_METADATA_DISABLED": "true",
    }
    container = {
        "name": "setup",
        "image": str(args.service_image),
        "command": ["python", f"{_SCRIPTS_DIRECTORY}/{_SETUP}"],
        "env": [{"name": name, "value": value} for name, value in environment.items()],
        "resources": resources(cpu="100m", memory="256Mi", cpu_limit="1"),
        "securityContext": container_security_context(),
        "volumeMounts": [
            {"name": "scripts", "mountPath": _SCRIPTS_DIRECTORY, "readOnly": True},
            {"name": "keys", "mountPath": _KEYS_DIRECTORY, "readOnly": True},
        ],
    }
    volumes = [
        {"name": "scripts", "configMap": {"name": _SCRIPTS, "defaultMode": 0o444}},
        secret_volume("keys", secret=_KEYS, items={"aws": "aws"}),
    ]
    return {**_pod(args, container, volumes), "restartPolicy": "OnFailure"}


def _pod(args: BundledObjectStoreArgs, container: dict[str, Any], volumes: list[dict[str, Any]]) -> dict[str, Any]:
    return {
        **args.placement,
        "automountServiceAccountToken": False,
        "enableServiceLinks": False,
        **({"imagePullSecrets": [{"name": args.pull_secret}]} if args.pull_secret else {}),
        "securityContext": pod_security_context(uid=UID),
        "containers": [container],
        "volumes": volumes,
    }


def _metadata(names: StackNames, name: str) -> meta.v1.ObjectMetaArgs:
    return meta.v1.ObjectMetaArgs(name=name, namespace=names.service_namespace, labels=names.labels(COMPONENT))
