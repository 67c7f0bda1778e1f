"""Invariants of single objects that are no pods, one manifest at a time."""

from collections.abc import Iterator
from typing import Any, Final

from infra.manifests import Manifest
from infra.policy.pods import pod_labels
from infra.recording import leaves

_OWNER_LABELS: Final = (
    "app.kubernetes.io/name",
    "app.kubernetes.io/instance",
    "app.kubernetes.io/component",
    "app.kubernetes.io/part-of",
    "app.kubernetes.io/managed-by",
    "cloister.dev/customer",
    "cloister.dev/environment",
)
_CLUSTER_SCOPED: Final = (
    "Namespace",
    "ClusterRole",
    "ClusterRoleBinding",
    "PriorityClass",
    "StorageClass",
    "CustomResourceDefinition",
    "Node",
    "RuntimeClass",
    "ValidatingAdmissionPolicy",
    "ValidatingAdmissionPolicyBinding",
)
_RBAC_ROLES: Final = ("Role", "ClusterRole")
_DIGESTS: Final = "cloister.dev/"
"""Annotations below this are digests of what a pod is configured with; of a secret, they are secrets too."""


def owner_labels(manifest: Manifest) -> Iterator[str]:
    """Every object and every pod says which stack it belongs to, and to which part of it."""
    if manifest.patch or manifest.body.get("apiVersion") == "helm.sh":
        return
    labelled: list[tuple[str, dict[str, str]]] = [("pods", labels) for _, labels in pod_labels(manifest)]
    for whose, labels in [("the object", manifest.labels), *labelled]:
        if missing := [label for label in _OWNER_LABELS if not labels.get(label)]:
            yield f"{whose} without the labels {', '.join(missing)}"


def explicit_names(manifest: Manifest) -> Iterator[str]:
    """Every object has a name and, where it lives in one, a namespace that is not ``default``."""
    if manifest.template_of:
        return  # the service gives it both
    if not manifest.name:
        yield "no metadata.name: Pulumi would make one up"
    if manifest.kind not in _CLUSTER_SCOPED and manifest.namespace in {"", "default"}:
        yield "no metadata.namespace of the stack"


def no_wildcard_rights(manifest: Manifest) -> Iterator[str]:
    """A role names what it may do, and nobody is the cluster's administrator."""
    if manifest.kind in _RBAC_ROLES:
        for rule in manifest.body.get("rules") or ():
            for name in ("apiGroups", "resources", "verbs", "nonResourceURLs"):
                if any("*" in value for value in rule.get(name) or ()):
                    yield f"the role has * among its {name}"
            if {"escalate", "bind", "impersonate"} & set(rule.get("verbs") or ()):
                yield "the role may give itself more rights"
    role = (manifest.body.get("roleRef") or {}).get("name")
    if role in {"cluster-admin", "admin", "edit"}:
        yield f"it binds {role}"


def secrets_only_in_secrets(manifest: Manifest) -> Iterator[str]:
    """A secret value stands in a Secret and nowhere else; there, Pulumi knows that it is one."""
    if manifest.kind == "Secret":
        known = manifest.secrets
        for field in ("data", "stringData"):
            for path, _ in leaves(manifest.body.get(field) or {}, (field,)):
                if not any(path[: len(secret)] == secret for secret in known):
                    yield f"{'.'.join(map(str, path))} is in clear in Pulumi's state"
        return
    for path in sorted(manifest.secrets, key=str):
        if not (len(path) > 1 and path[-2] == "annotations" and str(path[-1]).startswith(_DIGESTS)):
            yield f"{'.'.join(map(str, path))} is a secret"


def data_is_kept(manifest: Manifest) -> Iterator[str]:
    """What holds data is protected from deletion, and stays in the cluster when Pulumi forgets it."""
    holds = manifest.kind == "PersistentVolumeClaim" or (
        manifest.kind == "Cluster" and str(manifest.body.get("apiVersion", "")).startswith("postgresql.cnpg.io/")
    )
    spec: dict[str, Any] = manifest.body.get("spec") or {}
    if (holds or spec.get("volumeClaimTemplates")) and not (manifest.protected and manifest.kept):
        yield "it holds data, and Pulumi would delete it"


def no_open_flows(manifest: Manifest) -> Iterator[str]:
    """A NetworkPolicy that allows something says with whom, and never with everybody."""
    if manifest.kind != "NetworkPolicy":
        return
    for direction, side in (("ingress", "from"), ("egress", "to")):
        for rule in manifest.body["spec"].get(direction) or ():
            peers = rule.get(side)
            if not peers or any(peer.get("namespaceSelector") == {} and not peer.get("podSelector") for peer in peers):
                yield f"its {direction} is open to every pod"
            for peer in peers or ():
                if str((peer.get("ipBlock") or {}).get("cidr", "")).endswith("/0"):
                    yield f"its {direction} is open to every address"


def reached_by_ingress_only(manifest: Manifest) -> Iterator[str]:
    """No Service opens a port to the outside by itself, and an Ingress speaks TLS for each of its hosts."""
    spec: dict[str, Any] = manifest.body.get("spec") or {}
    if manifest.kind == "Service":
        kind = spec.get("type", "ClusterIP")
        if kind != "ClusterIP" or spec.get("externalIPs"):
            yield f"the Service is of type {kind}"
    if manifest.kind == "Ingress":
        safe = {host for tls in spec.get("tls") or () for host in tls.get("hosts") or ()}
        for rule in spec.get("rules") or ():
            if rule.get("host") not in safe:
                yield f"the host {rule.get('host')!r} has no TLS"
