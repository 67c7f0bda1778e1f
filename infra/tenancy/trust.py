"""Private certificate authorities of a stack, in a ConfigMap that the pods of service and jobs mount.

Certificates are public, so this is no Secret. Python's ``ssl`` module and PyArrow read the file in SSL_CERT_FILE, and
besides it the directory of the system's authorities. boto3 reads the file in AWS_CA_BUNDLE only. Sources:
https://docs.openssl.org/3.0/man3/SSL_CTX_load_verify_locations/ and
https://docs.aws.amazon.com/boto3/latest/guide/configuration.html.
"""

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


class CaBundle(pulumi.ComponentResource):
    """The ConfigMaps of the service's and of the jobs' namespace.

    Args:
        name: logical name of the component.
        names: names of the stack.
        pem: the certificates in PEM.
        opts: options of the component.
    """

    resources: tuple[pulumi.Resource, ...]

    def __init__(self, name: str, names: StackNames, pem: str, opts: pulumi.ResourceOptions | None = None) -> None:
        super().__init__("cloister:trust:CaBundle", name, None, opts)
        self.resources = tuple(
            core.v1.ConfigMap(
                f"{namespace}-{CA_BUNDLE}",
                metadata=meta.v1.ObjectMetaArgs(name=CA_BUNDLE, namespace=namespace, labels=names.labels("trust")),
                data={PurePosixPath(CA_BUNDLE_FILE).name: pem},
                opts=pulumi.ResourceOptions(parent=self),
            )
            for namespace in (names.service_namespace, names.jobs_namespace)
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
