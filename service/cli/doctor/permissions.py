"""Whether the user of a kubeconfig may do what `pulumi up` does."""

from collections import defaultdict
from collections.abc import Iterator, Sequence
from typing import Final

from service.cli.doctor.cluster_api import ClusterApi
from service.cli.doctor.findings import Finding, RefusedError, failed, not_checked, ok

_READING: Final = ("get", "list", "watch")
_PATCHING: Final = ("get", "patch")
_VERBS: Final = (*_READING, "create", "patch", "delete")

EVERYWHERE: Final = ("namespaces", "priorityclasses.scheduling.k8s.io")
"""What every stack makes that belongs to no namespace."""

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
    "ingresses.networking.k8s.io",
    "networkpolicies.networking.k8s.io",
    "poddisruptionbudgets.policy",
    "rolebindings.rbac.authorization.k8s.io",
    "roles.rbac.authorization.k8s.io",
    # Nobody can give away what he has not: the launcher's role.
    "rayjobs.ray.io",
)
"""What stacks make in their namespaces."""

SEEN: Final = ("pods", "events", "replicasets.apps")
"""What Pulumi reads while it waits for a rollout."""

ONCE_A_CLUSTER: Final = {
    "nodes": "`node_pools.manage_nodes`",
    "daemonsets.apps": "`device_plugin.install`",
    "customresourcedefinitions.apiextensions.k8s.io": "`kuberay.install: helm`",
    "clusterroles.rbac.authorization.k8s.io": "`kuberay.install: helm`",
    "clusterrolebindings.rbac.authorization.k8s.io": "`kuberay.install: helm`",
    "clusters.postgresql.cnpg.io": "`database.kind: cloudnative_pg`",
    "imagecatalogs.postgresql.cnpg.io": "`database.kind: cloudnative_pg`",
    "scheduledbackups.postgresql.cnpg.io": "`database.backup`",
    "objectstores.barmancloud.cnpg.io": "`database.backup`",
}
"""What only some stacks make, and what a stack file says then."""


def permissions(api: ClusterApi, namespaces: Sequence[str]) -> Iterator[Finding]:
    """Asks for everything that the program makes.

    Args:
        api: the cluster, as the user who runs `pulumi up`.
        namespaces: those of the stack; none: it is asked for all namespaces of the cluster.
    """
    try:
        denied = _denied(api, EVERYWHERE, "", _VERBS)
    except RefusedError as error:
        # Kubernetes lets every user ask what he may do, but for one that it takes for nobody.
        yield failed(
            "login",
            f"the API server does not know this user: log in, and see that the program which the kubeconfig's user "
            f"names (exec) is on PATH and works. {error}",
        )
        return
    for namespace in namespaces or ("",):
        denied += _denied(api, IN_NAMESPACES, namespace, _VERBS) + _denied(api, SEEN, namespace, _READING)
    where = " and ".join(namespaces) or "any namespace"
    if denied:
        yield failed(
            "permissions",
            f"`pulumi up` needs, and this user may not: {'; '.join(denied)}. Give it a role with these, or take a "
            "context whose user has one",
        )
    else:
        yield ok("permissions", f"this user may make all that a stack makes in {where}")
    check = "permissions for parts that not every stack makes"
    lacking = {
        resource: key
        for resource, key in ONCE_A_CLUSTER.items()
        if _denied(api, (resource,), "", _PATCHING if resource == "nodes" else _VERBS)
    }
    if lacking:
        needs = ", ".join(f"{resource} ({key})" for resource, key in lacking.items())
        yield not_checked(check, f"whether this stack makes them stands in its stack file. This user may not: {needs}")
    else:
        yield ok(check, "this user may make them")


def _denied(api: ClusterApi, resources: Sequence[str], namespace: str, verbs: Sequence[str]) -> list[str]:
    """What is refused, the resources with the same verbs together."""
    by_verbs: dict[str, list[str]] = defaultdict(list)
    for resource in resources:
        if not api.may("*", resource, namespace):
            by_verbs[", ".join(verb for verb in verbs if not api.may(verb, resource, namespace))].append(resource)
    where = f" in {namespace}" if namespace else ""
    return [f"{refused} of {', '.join(found)}{where}" for refused, found in by_verbs.items() if refused]
