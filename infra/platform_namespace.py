"""A namespace for a part of the platform: closed both ways, with a profile for its pods and a login to the registry."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import pulumi
from pulumi_kubernetes import core, meta, networking

from infra.images import PULL_SECRET
from infra.naming import StackNames


@dataclass(frozen=True, slots=True, kw_only=True)
class PlatformNamespace:
    """What such a namespace is.

    Attributes:
        names: the stack that looks after it.
        name: of the namespace.
        component: in labels.
        profile: of Kubernetes' pod security standards.
        docker_config: of a registry that asks for a login; None for none.
        egress: rules of a NetworkPolicy for what its pods may reach; nobody reaches them.
    """

    names: StackNames
    name: str
    component: str
    profile: Literal["restricted", "privileged"]
    docker_config: pulumi.Input[str] | None
    egress: Sequence[dict[str, Any]] = ()

    def make(self, parent: pulumi.Resource) -> list[pulumi.Resource]:
        """Makes the namespace and what is in it before any pod."""
        labels = self.names.labels(self.component)
        modes = {f"pod-security.kubernetes.io/{mode}": self.profile for mode in ("enforce", "audit", "warn")}
        namespace = core.v1.Namespace(
            self.name,
            metadata=meta.v1.ObjectMetaArgs(name=self.name, labels={**labels, **modes}),
            opts=pulumi.ResourceOptions(parent=parent),
        )
        inside = pulumi.ResourceOptions(parent=parent, depends_on=[namespace])
        made: list[pulumi.Resource] = [namespace, self._policy("default-deny", (), inside)]
        if self.egress:
            made.append(self._policy(self.component, self.egress, inside))
        if self.docker_config is not None:
            made.append(
                core.v1.Secret(
                    f"{self.name}-{PULL_SECRET}",
                    metadata=meta.v1.ObjectMetaArgs(name=PULL_SECRET, namespace=self.name, labels=labels),
                    type="kubernetes.io/dockerconfigjson",
                    string_data={".dockerconfigjson": pulumi.Output.secret(self.docker_config)},
                    opts=inside,
                )
            )
        return made

    def _policy(
        self, name: str, egress: Sequence[dict[str, Any]], opts: pulumi.ResourceOptions
    ) -> networking.v1.NetworkPolicy:
        labels = self.names.labels(self.component)
        spec: Any = {"podSelector": {}, "policyTypes": ["Ingress", "Egress"], "ingress": [], "egress": list(egress)}
        return networking.v1.NetworkPolicy(
            f"{self.name}-{name}",
            metadata=meta.v1.ObjectMetaArgs(name=name, namespace=self.name, labels=labels),
            spec=spec,
            opts=opts,
        )
