"""Object store of a stack: bundled with it, or the customer's S3.

Each kind results in an ``ObjectStoreConnection``: the bucket, a key for the service, and a key that reads weights.
Jobs read plans and write parts by URLs that the service signs.
"""

import hashlib
import hmac
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Final
from urllib.parse import urlencode

import pulumi
from pulumi_kubernetes import apps, batch, core, meta

from infra.data.database import script
from infra.kubernetes.images import ImageReference
from infra.kubernetes.kept_data import DataProtection, data_volume
from infra.kubernetes.naming import StackNames
from infra.kubernetes.pod_spec import (
    UID,
    container_security_context,
    digest,
    pod_security_context,
    resources,
    secret_digest,
    secret_volume,
)
from infra.tenancy.credentials import ObjectStoreLogin

COMPONENT: Final = "object-store"
SETUP_COMPONENT: Final = "object-store-setup"
"""The pod that creates the bucket; it connects to the object store only."""
PORT: Final = 7070
REGION: Final = "us-east-1"
"""Region in the signatures of requests to the bundled object store; it has no other meaning."""

_KEYS: Final = "object-store-keys"
_SCRIPTS: Final = "object-store-scripts"
_START: Final = "versitygw_start.sh"
_SETUP: Final = "object_store_bucket.py"
_SCRIPTS_DIRECTORY: Final = "/etc/cloister/scripts"
_KEYS_DIRECTORY: Final = "/etc/cloister/keys"
_VOLUME: Final = "object-store-data"
_VOLUME_DIRECTORY: Final = "/var/lib/cloister/object-store"


@dataclass(frozen=True, slots=True, kw_only=True)
class ObjectStoreConnection:
    """Connection of a stack to its object store.

    Attributes:
        bucket: the bucket; it exists after ``depends_on``.
        prefix: path of the stack's objects, without slashes around it; empty for the whole bucket.
        endpoint_url: http:// or https://, host and port; empty for that of AWS in the region.
        region: region in the signatures of requests.
        service: key with all rights below the prefix; None if pods reach the bucket by their identity.
        job: the key that copies weights to the pods of jobs; the same as ``service`` if the customer provides one key
            only, or None.
        pod_labels: labels of the server's pods, for network policies; empty outside the cluster.
        setup_labels: labels of the pod that creates the bucket, for network policies; empty for none.
        depends_on: resources to create before a client connects.
    """

    bucket: str
    prefix: str
    endpoint_url: str
    region: str
    service: ObjectStoreLogin | None
    job: ObjectStoreLogin | None
    pod_labels: Mapping[str, str] = field(default_factory=dict)
    setup_labels: Mapping[str, str] = field(default_factory=dict)
    depends_on: tuple[pulumi.Resource, ...] = ()

    @property
    def url(self) -> str:
        """The value of CLOISTER_OBJECT_STORE."""
        endpoint = {"endpoint_url": self.endpoint_url} if self.endpoint_url else {}
        options = urlencode({**endpoint, "region": self.region}, safe=":/")
        return f"s3://{'/'.join(segment for segment in (self.bucket, self.prefix) if segment)}?{options}"


def job_policy(*, bucket: str, prefix: str, principal: str, weights_prefix: str = "models") -> dict[str, Any]:
    """Return the bucket policy for the key of jobs: list and read the weights, and nothing else.

    Args:
        bucket: the bucket.
        prefix: prefix of the stack's objects in the bucket; may be empty.
        principal: subject of the policy; an access key id for versitygw, an ARN for AWS.
        weights_prefix: prefix of the models' directories, below ``prefix``.
    """
    root = f"arn:aws:s3:::{bucket}"
    weights = "/".join(segment for segment in (prefix.strip("/"), weights_prefix.strip("/"), "*") if segment)
    rights: tuple[dict[str, Any], ...] = (
        # versitygw ignores conditions; its bucket belongs to the stack alone.
        {
            "Action": ["s3:ListBucket"],
            "Resource": [root],
            "Condition": {"StringLike": {"s3:prefix": [weights]}},
        },
        {"Action": ["s3:GetObject"], "Resource": [f"{root}/{weights}"]},
    )
    return {
        "Version": "2012-10-17",
        "Statement": [{"Effect": "Allow", "Principal": {"AWS": [principal]}, **right} for right in rights],
    }


def derived_secret(secret: str, purpose: str) -> str:
    """Derive another secret from a secret: always the same one, and one-way.

    Args:
        secret: the secret to derive from.
        purpose: purpose of the derived secret; each purpose results in another one.

    Returns:
        40 hexadecimal digits.
    """
    return hmac.new(secret.encode(), purpose.encode(), hashlib.sha256).hexdigest()[:40]


@dataclass(frozen=True, slots=True, kw_only=True)
class BundledObjectStoreArgs:
    """Settings of the bundled object store.

    Attributes:
        names: names of the stack.
        image: versitygw 1.7 or newer with a shell, e.g. the official image.
        service_image: image of the service, whose S3 client creates the bucket.
        storage: size of the volume, a Kubernetes quantity.
        storage_class: empty for the cluster's default.
        protection: protection of the stack's data.
        secret_access_key: the service's secret key: letters, digits and hyphens. The jobs' key is derived from it.
        digest_key: key of the digests of secrets in annotations.
        weights_prefix: prefix of the models' directories below the stack's prefix; jobs may read there.
        cpu: requested CPUs, a Kubernetes quantity; the limit is four CPUs.
        memory: request and limit of memory, a Kubernetes quantity.
        pull_secret: name of the pull secret; empty for none.
        placement: ``nodeSelector`` or ``affinity``, ``tolerations`` and ``priorityClassName`` of the pods.
    """

    names: StackNames
    image: ImageReference
    service_image: ImageReference
    storage: str
    storage_class: str = ""
    protection: DataProtection
    secret_access_key: pulumi.Input[str]
    digest_key: pulumi.Input[str]
    weights_prefix: str = "models"
    cpu: str = "250m"
    memory: str = "1Gi"
    pull_secret: str = ""
    placement: Mapping[str, Any] = field(default_factory=dict)


class BundledObjectStore(pulumi.ComponentResource):
    """versitygw on one volume, with a Job that creates the bucket and lets the key of jobs read the weights in it.

    It speaks without TLS, so it must stay inside the cluster's network: the network policies name the pods that can
    reach it, and every request is signed. Snapshots of the volume are its backup.
    """

    connection: ObjectStoreConnection

    def __init__(self, name: str, args: BundledObjectStoreArgs, opts: pulumi.ResourceOptions | None = None) -> None:
        super().__init__("cloister:object_store:BundledObjectStore", name, None, opts)
        names = args.names
        child = pulumi.ResourceOptions(parent=self)

        def metadata(object_name: str) -> meta.v1.ObjectMetaArgs:
            return meta.v1.ObjectMetaArgs(
                name=object_name, namespace=names.service_namespace, labels=names.labels(COMPONENT)
            )

        secret = pulumi.Output.secret(args.secret_access_key)
        job_secret = secret.apply(lambda known: derived_secret(known, "object store key of jobs"))
        login = ObjectStoreLogin(access_key_id=names.service_namespace, secret_access_key=secret)
        connection = ObjectStoreConnection(
            bucket=names.bucket,
            prefix=names.object_prefix,
            endpoint_url=f"http://{COMPONENT}.{names.service_namespace}.svc:{PORT}",
            region=REGION,
            service=login,
            job=ObjectStoreLogin(access_key_id=names.jobs_namespace, secret_access_key=job_secret),
            pod_labels=names.selector(COMPONENT),
            setup_labels=names.selector(SETUP_COMPONENT),
        )
        keys = core.v1.Secret(
            _KEYS,
            metadata=metadata(_KEYS),
            string_data={
                "access_key_id": names.service_namespace,
                "secret_access_key": secret,
                "job_access_key_id": names.jobs_namespace,
                "job_secret_access_key": job_secret,
                "aws": login.aws_file(),
            },
            opts=child,
        )
        scripts = core.v1.ConfigMap(
            _SCRIPTS, metadata=metadata(_SCRIPTS), data={file: script(file) for file in (_START, _SETUP)}, opts=child
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
        port = {"name": "s3", "port": PORT, "targetPort": "s3"}
        service_spec: Any = {
            "ipFamilyPolicy": "PreferDualStack",
            "selector": names.selector(COMPONENT),
            "ports": [port],
        }
        service = core.v1.Service(COMPONENT, metadata=metadata(COMPONENT), spec=service_spec, opts=child)
        server = apps.v1.StatefulSet(
            COMPONENT,
            metadata=metadata(COMPONENT),
            spec=bundled_stateful_set(args),
            opts=pulumi.ResourceOptions(parent=self, depends_on=[keys, scripts, volume]),
        )
        setup = self._setup_job(args, connection, after=(service, server))
        self.connection = replace(connection, depends_on=(service, server, setup))
        self.register_outputs({})

    def _setup_job(
        self, args: BundledObjectStoreArgs, connection: ObjectStoreConnection, *, after: Sequence[pulumi.Resource]
    ) -> batch.v1.Job:
        """Create the Job that creates the bucket and sets the jobs' policy."""
        policy = job_policy(
            bucket=connection.bucket,
            prefix=connection.prefix,
            principal=args.names.jobs_namespace,
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
        pod = {**_pod(args, container, volumes), "restartPolicy": "OnFailure"}
        # A Job is immutable: a change creates another Job with another name.
        content = hashlib.sha256((json.dumps(pod, sort_keys=True) + script(_SETUP)).encode()).hexdigest()
        labels = args.names.labels(SETUP_COMPONENT)
        template = {"metadata": {"labels": labels}, "spec": pod}
        spec: Any = {"backoffLimit": 4, "activeDeadlineSeconds": 900, "template": template}
        return batch.v1.Job(
            SETUP_COMPONENT,
            metadata=meta.v1.ObjectMetaArgs(
                name=f"{SETUP_COMPONENT}-{content[:8]}", namespace=args.names.service_namespace, labels=labels
            ),
            spec=spec,
            opts=pulumi.ResourceOptions(parent=self, depends_on=list(after)),
        )


def bundled_stateful_set(args: BundledObjectStoreArgs) -> Any:
    """Return the spec of versitygw. A changed key or script replaces the pod."""
    probe = {"httpGet": {"path": "/health", "port": "s3"}, "periodSeconds": 10, "timeoutSeconds": 5}
    accounts = "/run/versitygw"
    environment = {"KEYS": _KEYS_DIRECTORY, "ACCOUNTS": accounts, "VOLUME": _VOLUME_DIRECTORY, "REGION": REGION}
    gateway = {
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
                    "cloister.dev/keys": secret_digest(args.digest_key, args.secret_access_key),
                    "cloister.dev/scripts": digest(script(_START)),
                },
            },
            "spec": _pod(args, gateway, volumes),
        },
    }


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
