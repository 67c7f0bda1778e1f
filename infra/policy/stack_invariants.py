"""Invariants that need all manifests of a stack at once."""

from collections.abc import Iterator, Sequence
from typing import Any, Final

from infra.manifests import Manifest
from infra.policy.pods import pod_labels, pod_specs

Found = Iterator[tuple[Manifest, str]]

_BINDINGS: Final = ("RoleBinding", "ClusterRoleBinding")


def default_deny(manifests: Sequence[Manifest]) -> Found:
    """In every namespace of the stack nothing may talk to anything, unless another policy allows it."""
    closed = {manifest.namespace for manifest in manifests if _denies_all(manifest)}
    for manifest in manifests:
        if manifest.kind == "Namespace" and manifest.name not in closed:
            yield manifest, "no NetworkPolicy denies everything by default"


def _denies_all(manifest: Manifest) -> bool:
    spec: dict[str, Any] = manifest.body.get("spec") or {}
    return (
        manifest.kind == "NetworkPolicy"
        and not spec.get("podSelector")
        and set(spec.get("policyTypes") or ()) == {"Ingress", "Egress"}
        and not spec.get("ingress")
        and not spec.get("egress")
    )


def tokens_only_with_rights(manifests: Sequence[Manifest]) -> Found:
    """A pod has a token of the cluster only where its service account is bound to a role of the stack."""
    bound = {
        (subject.get("namespace"), subject.get("name"))
        for manifest in manifests
        if manifest.kind in _BINDINGS
        for subject in manifest.body.get("subjects") or ()
        if subject.get("kind") == "ServiceAccount"
    }
    namespaces = {name: namespace for namespace, name in bound}
    for manifest in manifests:
        for _, spec in pod_specs(manifest):
            if spec.get("automountServiceAccountToken") is False:
                continue
            account = spec.get("serviceAccountName", "default")
            # A template has no namespace of its own yet.
            namespace = manifest.namespace or namespaces.get(account, "")
            if (namespace, account) not in bound:
                yield manifest, f"a pod has a token of {account}, which is bound to no role"


def disruption_budgets(manifests: Sequence[Manifest]) -> Found:
    """Whatever runs more than once keeps at least one pod when nodes are emptied, and lets nodes be emptied."""
    budgets = [manifest for manifest in manifests if manifest.kind == "PodDisruptionBudget"]
    for manifest in manifests:
        replicas = (manifest.body.get("spec") or {}).get("replicas", 1)
        if manifest.kind in {"Deployment", "StatefulSet"} and _replicas(manifest, manifests, replicas) > 1:
            labels = next((labels for _, labels in pod_labels(manifest)), {})
            if not any(_selects(budget, manifest.namespace, labels) for budget in budgets):
                yield manifest, "no PodDisruptionBudget"
    for budget in budgets:
        spec = budget.body["spec"]
        if spec.get("maxUnavailable") in (0, "0%") or spec.get("minAvailable") == "100%":
            yield budget, "no node with one of its pods can ever be emptied"


def _replicas(manifest: Manifest, manifests: Sequence[Manifest], replicas: int) -> int:
    for other in manifests:
        spec = other.body.get("spec") or {}
        target = spec.get("scaleTargetRef") or {}
        aimed_at = (other.namespace, target.get("kind"), target.get("name"))
        if other.kind == "HorizontalPodAutoscaler" and aimed_at == (manifest.namespace, manifest.kind, manifest.name):
            return max(replicas, int(spec.get("maxReplicas", 1)))
    return replicas


def _selects(budget: Manifest, namespace: str, labels: dict[str, str]) -> bool:
    wanted = (budget.body["spec"].get("selector") or {}).get("matchLabels") or {}
    return bool(wanted) and budget.namespace == namespace and wanted.items() <= labels.items()


def unique_objects(manifests: Sequence[Manifest]) -> Found:
    """No two resources of a program are the same object."""
    seen: set[tuple[str, str, str, str]] = set()
    for manifest in manifests:
        identity = (str(manifest.body.get("apiVersion")), manifest.kind, manifest.namespace, manifest.name)
        if identity in seen and not manifest.template_of:
            yield manifest, "the program makes it twice"
        seen.add(identity)
