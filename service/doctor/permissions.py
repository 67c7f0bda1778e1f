"""Permissions of the user of a kubeconfig: everything that `pulumi up` does."""

from collections import defaultdict
from collections.abc import Iterator, Sequence
from typing import Final

from service.doctor.cluster_api import ClusterApi
from service.doctor.findings import ClusterError, Finding

_READ: Final = ("get", "list", "watch")
_PATCH: Final = ("get", "patch")
_ALL: Final = (*_READ, "create", "patch", "delete")

EVERYWHERE: Final = (
    "namespaces",
    "priorityclasses.scheduling.k8s.io",
    "validatingadmissionpolicies.admissionregistration.k8s.io",
    "validatingadmissionpolicybindings.admissionregistration.k8s.io",
)
"""Resources without a namespace that every stack creates."""

IN_NAMESPACES: Final = (
    "configmaps",
    "limitranges",
    "persistentvolumeclaims",
    "resourcequotas",
    "secrets",
    "serviceaccounts",
    "services",
    "deployments.apps",
    "statefulsets.apps",
    "horizontalpodautoscalers.autoscaling",
    "jobs.batch",
    "cronjobs.batch",
    "ingresses.networking.k8s.io",
    "networkpolicies.networking.k8s.io",
    "poddisruptionbudgets.policy",
    "rolebindings.rbac.authorization.k8s.io",
    "roles.rbac.authorization.k8s.io",
    # Kubernetes only lets a user grant permissions that the user has: those of the launcher's role.
    "rayjobs.ray.io",
)
"""Resources that stacks create in their namespaces."""

READ_ONLY: Final = ("pods", "events", "replicasets.apps")
"""Resources that Pulumi reads while it waits for a rollout."""

ONCE_A_CLUSTER: Final = {
    "nodes": "`node_pools.manage_nodes`",
    "daemonsets.apps": "`device_plugin.install`",
    "customresourcedefinitions.apiextensions.k8s.io": "`kuberay.install: helm`",
    "clusters.postgresql.cnpg.io": "`database.kind: cloudnative_pg`",
    "imagecatalogs.postgresql.cnpg.io": "`database.kind: cloudnative_pg`",
    "scheduledbackups.postgresql.cnpg.io": "`database.backup`",
    "objectstores.barmancloud.cnpg.io": "`database.backup`",
    "nodeclasses.eks.amazonaws.com": "`aws`",
    "nodepools.karpenter.sh": "`aws`",
    "podmonitors.monitoring.coreos.com": "`monitoring.prometheus: operator`",
    "prometheusrules.monitoring.coreos.com": "`monitoring.prometheus: operator`",
    "servicemonitors.monitoring.coreos.com": "`monitoring.prometheus: operator`",
    "ciliumnetworkpolicies.cilium.io": "`network.plugin: cilium`",
    "networkpolicies.projectcalico.org": "`network.plugin: calico`",
    "httproutes.gateway.networking.k8s.io": "`api.gateway`",
}
"""Resources that only some stacks create, with the key of the stack file that enables each."""


def check_permissions(api: ClusterApi, namespaces: Sequence[str]) -> Iterator[Finding]:
    """Ask for every permission that `pulumi up` needs.

    Args:
        api: the cluster, as the user of `pulumi up`.
        namespaces: the namespaces of the stack; empty to ask for all namespaces.
    """

    def find_denied(resources: Sequence[str], namespace: str, verbs: Sequence[str]) -> list[str]:
        """Return the denied permissions as text, with resources grouped by verbs."""
        by_verbs: dict[str, list[str]] = defaultdict(list)
        for resource in resources:
            if not api.may("*", resource, namespace):
                by_verbs[", ".join(verb for verb in verbs if not api.may(verb, resource, namespace))].append(resource)
        where = f" in {namespace}" if namespace else ""
        return [f"{refused} of {', '.join(found)}{where}" for refused, found in by_verbs.items() if refused]

    try:
        denied = find_denied(EVERYWHERE, "", _ALL)
    except ClusterError as error:
        if not error.is_forbidden:
            raise
        # Kubernetes lets every authenticated user ask for permissions.
        yield Finding.failed(
            "login",
            "the API server does not know this user: log in, and check that the program in the kubeconfig's user "
            f"(exec) is on PATH and works. {error}",
        )
        return
    for namespace in namespaces or ("",):
        denied += find_denied(IN_NAMESPACES, namespace, _ALL) + find_denied(READ_ONLY, namespace, _READ)
    if denied:
        yield Finding.failed(
            "permissions",
            f"`pulumi up` needs permissions that this user lacks: {'; '.join(denied)}. Grant them with a role, or "
            "use a context with another user",
        )
    else:
        where = " and ".join(namespaces) or "any namespace"
        yield Finding.ok("permissions", f"this user may create everything that a stack creates in {where}")
    check = "permissions for optional resources"
    missing = {
        resource: key
        for resource, key in ONCE_A_CLUSTER.items()
        if find_denied((resource,), "", _PATCH if resource == "nodes" else _ALL)
    }
    if missing:
        listed = ", ".join(f"{resource} ({key})" for resource, key in missing.items())
        yield Finding.not_checked(check, f"the stack file decides whether they are needed. This user lacks: {listed}")
    else:
        yield Finding.ok(check, "this user has them")
