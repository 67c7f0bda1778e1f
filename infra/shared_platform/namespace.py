"""Namespace of a platform component, which denies all connections by default."""

from collections.abc import Iterable, Sequence
from typing import Any, Literal

import pulumi
from pulumi_kubernetes import core, meta, networking

from infra.kubernetes.images import PULL_SECRET
from infra.kubernetes.naming import StackNames
from infra.tenancy.namespaces import pod_security_labels
from infra.tenancy.network import Flow, Pods
from infra.tenancy.network_policies import plugin_policies, policy_resource
from ray_job.contract.cluster import DEFAULT_DENY


def platform_namespace(
    name: str,
    *,
    names: StackNames,
    component: str,
    profile: Literal["restricted", "privileged"],
    docker_config: pulumi.Input[str] | None,
    egress: Sequence[dict[str, Any]] = (),
    plugin_egress: Iterable[Flow] = (),
    parent: pulumi.Resource,
) -> list[pulumi.Resource]:
    """Create a namespace with its network policies and pull secret.

    Args:
        name: name of the namespace.
        names: names of the stack that deploys the platform.
        component: the component, for labels.
        profile: profile of Kubernetes' pod security standards.
        docker_config: content of the pull secret; None if the registry requires no login.
        egress: rules of a NetworkPolicy for its pods. No connection to its pods is allowed.
        plugin_egress: flows from its pods that only a policy of the network plugin can express.
        parent: the component's resource.

    Returns:
        The resources to create before any pod of the namespace.
    """
    labels = names.labels(component)
    namespace = core.v1.Namespace(
        name,
        metadata=meta.v1.ObjectMetaArgs(name=name, labels=labels | pod_security_labels(profile)),
        opts=pulumi.ResourceOptions(parent=parent),
    )
    inside = pulumi.ResourceOptions(parent=parent, depends_on=[namespace])
    resources: list[pulumi.Resource] = [namespace]
    for policy, rules in ((DEFAULT_DENY, ()), *([(component, egress)] if egress else [])):
        spec: Any = {"podSelector": {}, "policyTypes": ["Ingress", "Egress"], "ingress": [], "egress": list(rules)}
        resources.append(
            networking.v1.NetworkPolicy(
                f"{name}-{policy}",
                metadata=meta.v1.ObjectMetaArgs(name=policy, namespace=name, labels=labels),
                spec=spec,
                opts=inside,
            )
        )
    of_plugin = plugin_policies(Pods(name=component, namespace=name), plugin_egress, labels)
    resources += [policy_resource(manifest, inside) for manifest in of_plugin]
    if docker_config is not None:
        resources.append(
            core.v1.Secret(
                f"{name}-{PULL_SECRET}",
                metadata=meta.v1.ObjectMetaArgs(name=PULL_SECRET, namespace=name, labels=labels),
                type="kubernetes.io/dockerconfigjson",
                string_data={".dockerconfigjson": pulumi.Output.secret(docker_config)},
                opts=inside,
            )
        )
    return resources
