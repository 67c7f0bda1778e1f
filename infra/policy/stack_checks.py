"""Checks that need all manifests of a stack."""

from collections.abc import Iterator, Sequence
from typing import Final

from infra.policy.pod_checks import pods
from infra.rendering.manifests import Manifest

StackProblems = Iterator[tuple[str, Manifest, str]]
"""Names of the policies that a stack breaks, each with the manifest and the problem."""

_WRITING: Final = frozenset({"create", "update", "patch"})
_BINDINGS: Final = ("RoleBinding", "ClusterRoleBinding")


def default_deny(manifests: Sequence[Manifest]) -> StackProblems:
    """Find namespaces without a policy that denies everything."""
    denied = set()
    for manifest in manifests:
        spec = manifest.body.get("spec") or {}
        # A policy of Calico has the same kind, but other fields.
        is_plain = manifest.kind == "NetworkPolicy" and manifest.body.get("apiVersion") == "networking.k8s.io/v1"
        selects_all = is_plain and not spec.get("podSelector")
        both_directions = set(spec.get("policyTypes") or ()) == {"Ingress", "Egress"}
        if selects_all and both_directions and not spec.get("ingress") and not spec.get("egress"):
            denied.add(manifest.namespace)
    for manifest in manifests:
        if manifest.kind == "Namespace" and manifest.name not in denied:
            yield "default_deny", manifest, "no NetworkPolicy denies everything by default"


def tokens_only_with_rights(manifests: Sequence[Manifest]) -> StackProblems:
    """Find pods with a token of the Kubernetes API whose service account is bound to no role."""
    bound = {
        (subject.get("namespace"), subject.get("name"))
        for manifest in manifests
        if manifest.kind in _BINDINGS
        for subject in manifest.body.get("subjects") or ()
        if subject.get("kind") == "ServiceAccount"
    }
    namespaces = {name: namespace for namespace, name in bound}
    for manifest in manifests:
        for _, spec in pods(manifest):
            if spec.get("automountServiceAccountToken") is False:
                continue
            account = spec.get("serviceAccountName", "default")
            # The service sets the namespace of a template.
            namespace = manifest.namespace or namespaces.get(account, "")
            if (namespace, account) not in bound:
                yield "tokens_only_with_rights", manifest, f"a pod has a token of {account}, which is bound to no role"


def limited_network_policies(manifests: Sequence[Manifest]) -> StackProblems:
    """Find roles that may write network policies in a namespace without an admission policy that limits them."""
    limited = set()
    policies = {manifest.name for manifest in manifests if manifest.kind == "ValidatingAdmissionPolicy"}
    for manifest in manifests:
        if manifest.kind == "ValidatingAdmissionPolicyBinding":
            spec = manifest.body["spec"]
            selector = (spec.get("matchResources") or {}).get("namespaceSelector") or {}
            if spec.get("policyName") in policies:
                limited.add((selector.get("matchLabels") or {}).get("kubernetes.io/metadata.name"))
    for manifest in manifests:
        rules = manifest.body.get("rules") or () if manifest.kind in {"Role", "ClusterRole"} else ()
        written = {
            resource
            for rule in rules
            if set(rule["verbs"]) & _WRITING
            for resource in rule.get("resources") or ()
            if resource.endswith("networkpolicies")
        }
        # The admission policy limits plain NetworkPolicies only.
        if written and (manifest.namespace not in limited or written != {"networkpolicies"}):
            yield "limited_network_policies", manifest, "it may open any connection: no admission policy limits it"


def disruption_budgets(manifests: Sequence[Manifest]) -> StackProblems:
    """Find workloads that a drain of nodes would stop, and budgets that would stop the drain."""
    budgets = [manifest for manifest in manifests if manifest.kind == "PodDisruptionBudget"]
    max_replicas: dict[tuple[str, str, str], int] = {}
    for manifest in manifests:
        if manifest.kind == "HorizontalPodAutoscaler":
            target = manifest.body["spec"]["scaleTargetRef"]
            workload = (manifest.namespace, str(target.get("kind")), str(target.get("name")))
            max_replicas[workload] = int(manifest.body["spec"].get("maxReplicas", 1))
    for manifest in manifests:
        workload = (manifest.namespace, manifest.kind, manifest.name)
        replicas = max((manifest.body.get("spec") or {}).get("replicas", 1), max_replicas.get(workload, 0))
        if manifest.kind not in {"Deployment", "StatefulSet"} or replicas <= 1:
            continue
        labels = next((labels for labels, _ in pods(manifest) if labels is not None), {})
        selectors = [
            (budget.body["spec"].get("selector") or {}).get("matchLabels") or {}
            for budget in budgets
            if budget.namespace == manifest.namespace
        ]
        if not any(selector and selector.items() <= labels.items() for selector in selectors):
            yield "disruption_budgets", manifest, "no PodDisruptionBudget"
    for budget in budgets:
        spec = budget.body["spec"]
        if spec.get("maxUnavailable") in (0, "0%") or spec.get("minAvailable") == "100%":
            yield "disruption_budgets", budget, "nodes with one of its pods can never be drained"


def unique_objects(manifests: Sequence[Manifest]) -> StackProblems:
    """Find objects that the program creates twice."""
    seen: set[tuple[str, str, str, str]] = set()
    for manifest in manifests:
        identity = (str(manifest.body.get("apiVersion")), manifest.kind, manifest.namespace, manifest.name)
        if identity in seen and not manifest.template_of:
            yield "unique_objects", manifest, "the program creates it twice"
        seen.add(identity)
