"""The certificate of the database's authority, where pods check the server's: in both namespaces of a stack."""

from dataclasses import dataclass
from pathlib import PurePosixPath

import pulumi
from pulumi_kubernetes import core, meta

from infra.database import CA_FILE
from infra.naming import StackNames
from infra.service_pods import DATABASE_CA


@dataclass(frozen=True, slots=True, kw_only=True)
class DatabaseCaArgs:
    """The stack, and the certificate in PEM."""

    names: StackNames
    pem: str


class DatabaseCa(pulumi.ComponentResource):
    """A ConfigMap in each namespace: a certificate is no secret."""

    made: tuple[pulumi.Resource, ...]

    def __init__(self, name: str, args: DatabaseCaArgs, opts: pulumi.ResourceOptions | None = None) -> None:
        super().__init__("cloister:database_ca:DatabaseCa", name, None, opts)
        names = args.names
        self.made = tuple(
            core.v1.ConfigMap(
                f"{namespace}-{DATABASE_CA}",
                metadata=meta.v1.ObjectMetaArgs(name=DATABASE_CA, namespace=namespace, labels=names.labels("database")),
                data={PurePosixPath(CA_FILE).name: args.pem},
                opts=pulumi.ResourceOptions(parent=self),
            )
            for namespace in (names.service_namespace, names.jobs_namespace)
        )
        self.register_outputs({})
