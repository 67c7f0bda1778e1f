"""Certificate authorities of a stack, in ConfigMaps that its pods mount.

Certificates are public, so this is no Secret. Python's ``ssl`` module and PyArrow read the file in SSL_CERT_FILE, and
besides it the directory of the system's authorities. boto3 reads the file in AWS_CA_BUNDLE only. Sources:
https://docs.openssl.org/3.0/man3/SSL_CTX_load_verify_locations/ and
https://docs.aws.amazon.com/boto3/latest/guide/configuration.html.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import PurePosixPath
from typing import Any, Final

import pulumi
from pulumi_kubernetes import core, meta

from infra.kubernetes.naming import StackNames

CA_BUNDLE: Final = "ca-bundle"
"""ConfigMap with the certificates, in both namespaces."""
CA_BUNDLE_FILE: Final = "/etc/cloister/ca-bundle/ca.crt"
"""Path of the certificates in pods."""
VOLUME: Final = {"name": CA_BUNDLE, "configMap": {"name": CA_BUNDLE, "defaultMode": 0o444}}
VOLUME_MOUNT: Final = {
    "name": CA_BUNDLE,
    "mountPath": str(PurePosixPath(CA_BUNDLE_FILE).parent),
    "readOnly": True,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class CaBundleArgs:
    """Certificates, and where pods find them.

    Attributes:
        names: names of the stack.
        pem: the certificates in PEM.
        config_map: name of the ConfigMaps, which hold them as ``ca.crt``.
        component: the component in their labels.
        namespaces: namespaces of the pods that mount them.
    """

    names: StackNames
    pem: str
    config_map: str
    component: str
    namespaces: Sequence[str]


class CaBundle(pulumi.ComponentResource):
    """Certificates of authorities, in a ConfigMap of each namespace that trusts them.

    Args:
        name: logical name of the component.
        args: the certificates.
        opts: options of the component.
    """

    resources: tuple[pulumi.Resource, ...]

    def __init__(self, name: str, args: CaBundleArgs, opts: pulumi.ResourceOptions | None = None) -> None:
        # The database's certificates were a component of another type, whose ConfigMaps must not be created again.
        earlier = pulumi.ResourceOptions(aliases=[pulumi.Alias(type_="cloister:database_ca:DatabaseCa")])
        super().__init__("cloister:trust:CaBundle", name, None, pulumi.ResourceOptions.merge(opts, earlier))
        labels = args.names.labels(args.component)
        self.resources = tuple(
            core.v1.ConfigMap(
                f"{namespace}-{args.config_map}",
                metadata=meta.v1.ObjectMetaArgs(name=args.config_map, namespace=namespace, labels=labels),
                data={"ca.crt": args.pem},
                opts=pulumi.ResourceOptions(parent=self),
            )
            for namespace in args.namespaces
        )
        self.register_outputs({})


def with_ca_bundle(spec: dict[str, Any]) -> dict[str, Any]:
    """Return the spec of a job's pod in which every container trusts the private authorities too."""
    variable = {"name": "SSL_CERT_FILE", "value": CA_BUNDLE_FILE}
    containers = {
        kind: [
            {
                **container,
                "env": [*container["env"], variable],
                "volumeMounts": [*container["volumeMounts"], VOLUME_MOUNT],
            }
            for container in spec[kind]
        ]
        for kind in ("initContainers", "containers")
    }
    return {**spec, **containers, "volumes": [*spec["volumes"], VOLUME]}
