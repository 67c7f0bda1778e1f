"""Checks of single objects other than pods."""

import re
from typing import Any, Final

from infra.policy.pod_checks import Problems, pods
from infra.rendering.manifests import Manifest
from infra.rendering.recording import leaves

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
    "NodeClass",
    "NodePool",
)
_RBAC_ROLES: Final = ("Role", "ClusterRole")
_WIDE_ENTITIES: Final = frozenset({"all", "world", "world-ipv4", "world-ipv6", "cluster", "cluster-mesh"})
_CLUSTER_WIDE_POLICIES: Final = ("CiliumClusterwideNetworkPolicy", "GlobalNetworkPolicy")
_API_PATH: Final = re.compile(r"/v1(/.*)?")
_ADMISSION: Final = "pod-security.kubernetes.io/enforce"
_DIGESTS: Final = "cloister.dev/"
"""Prefix of annotations with digests of a pod's configuration; the digest of a secret is a secret for Pulumi."""


def metadata_problems(manifest: Manifest) -> Problems:
    """Check the labels of an object and of its pods, its name and its namespace."""
    if not manifest.patch and manifest.body.get("apiVersion") != "helm.sh":
        of_pods = [("pods", labels) for labels, _ in pods(manifest) if labels is not None]
        for owner, labels in [("the object", manifest.labels), *of_pods]:
            if missing := [label for label in _OWNER_LABELS if not labels.get(label)]:
                yield "owner_labels", f"{owner} without the labels {', '.join(missing)}"
    if manifest.template_of:
        return  # the service sets name and namespace
    if not manifest.name:
        yield "explicit_names", "no metadata.name: Pulumi would generate one"
    if manifest.kind not in _CLUSTER_SCOPED and manifest.namespace in {"", "default"}:
        yield "explicit_names", "no metadata.namespace of the stack"


def right_problems(manifest: Manifest) -> Problems:
    """Check the rights of a role, and the role of a binding."""
    if manifest.kind in _RBAC_ROLES:
        for rule in manifest.body.get("rules") or ():
            for name in ("apiGroups", "resources", "verbs", "nonResourceURLs"):
                if any("*" in value for value in rule.get(name) or ()):
                    yield "no_wildcard_rights", f"the role has * among its {name}"
            if {"escalate", "bind", "impersonate"} & set(rule.get("verbs") or ()):
                yield "no_escalation", "the role may grant itself more rights"
            if "secrets" in (rule.get("resources") or ()) and set(rule.get("verbs") or ()) & {"get", "list", "watch"}:
                yield "no_reading_of_secrets", "the role may read Secrets"
    role = (manifest.body.get("roleRef") or {}).get("name")
    if role in {"cluster-admin", "admin", "edit"}:
        yield "no_administrators", f"it binds {role}"


def admission_problems(manifest: Manifest) -> Problems:
    """Check that a binding of an admission policy refuses, and not only warns."""
    if manifest.kind == "ValidatingAdmissionPolicyBinding":
        actions = (manifest.body.get("spec") or {}).get("validationActions")
        if actions != ["Deny"]:
            yield "admission_policies_deny", f"its actions are {actions}"


def operator_problems(manifest: Manifest) -> Problems:
    """Check the rights of KubeRay's operator in the values of its chart.

    Source: https://github.com/ray-project/kuberay/tree/v1.6.1/helm-chart/kuberay-operator/templates
    """
    if manifest.body.get("apiVersion") != "helm.sh" or "kuberay-operator" not in str(
        manifest.body["spec"].get("chart")
    ):
        return
    values = manifest.body["spec"].get("values") or {}
    for name in ("singleNamespaceInstall", "rbacEnable", "crNamespacedRbacEnable"):
        if values.get(name) is not True:
            yield "operator_in_named_namespaces", f"{name} is not true"
    if not values.get("watchNamespace"):
        yield "operator_in_named_namespaces", "watchNamespace names no namespace"


def data_problems(manifest: Manifest) -> Problems:
    """Check that secret values are in Secrets only, and that data outlives a mistake."""
    if manifest.kind == "Secret":
        for field in ("data", "stringData"):
            for path, _ in leaves(manifest.body.get(field) or {}, (field,)):
                if not any(path[: len(secret)] == secret for secret in manifest.secrets):
                    yield "secrets_encrypted_in_state", f"{'.'.join(map(str, path))} is in plain text in Pulumi's state"
    else:
        for path in sorted(manifest.secrets, key=str):
            if not (len(path) > 1 and path[-2] == "annotations" and str(path[-1]).startswith(_DIGESTS)):
                yield "secrets_only_in_secrets", f"{'.'.join(map(str, path))} is a secret"
    holds_data = manifest.kind == "PersistentVolumeClaim" or (
        manifest.kind == "Cluster" and str(manifest.body.get("apiVersion", "")).startswith("postgresql.cnpg.io/")
    )
    spec: dict[str, Any] = manifest.body.get("spec") or {}
    if (holds_data or spec.get("volumeClaimTemplates")) and not (manifest.protected and manifest.kept):
        yield "data_is_kept", "it holds data, and Pulumi would delete it"


def network_problems(manifest: Manifest) -> Problems:
    """Check the peers of a network policy."""
    spec: dict[str, Any] = manifest.body.get("spec") or {}
    if manifest.kind in _CLUSTER_WIDE_POLICIES:
        yield "no_open_flows", "it applies to all namespaces"
    elif manifest.kind == "CiliumNetworkPolicy":
        yield from _cilium_problems(manifest.body)
    elif manifest.kind == "NetworkPolicy" and manifest.body.get("apiVersion") == "projectcalico.org/v3":
        for direction in ("ingress", "egress"):
            for rule in spec.get(direction) or ():
                peer = rule.get("source" if direction == "ingress" else "destination") or {}
                if rule.get("action") == "Allow" and not (peer.get("services") or {}).get("name"):
                    yield "no_open_flows", f"its {direction} is open to more than one Service"
    elif manifest.kind == "NetworkPolicy":
        for direction, side in (("ingress", "from"), ("egress", "to")):
            for rule in spec.get(direction) or ():
                peers = rule.get(side) or ()
                if not peers or any(
                    peer.get("namespaceSelector") == {} and not peer.get("podSelector") for peer in peers
                ):
                    yield "no_open_flows", f"its {direction} is open to every pod"
                for peer in peers:
                    if str((peer.get("ipBlock") or {}).get("cidr", "")).endswith("/0"):
                        yield "no_open_flows", f"its {direction} is open to every address"


def exposure_problems(manifest: Manifest) -> Problems:
    """Check the type of a Service, hosts and paths of an Ingress or HTTPRoute, and the pods of a Namespace."""
    spec: dict[str, Any] = manifest.body.get("spec") or {}
    if manifest.kind == "Service":
        kind = spec.get("type", "ClusterIP")
        if kind != "ClusterIP" or spec.get("externalIPs"):
            yield "services_stay_inside", f"the Service is of type {kind}"
    if manifest.kind == "Ingress":
        tls_hosts = {host for tls in spec.get("tls") or () for host in tls.get("hosts") or ()}
        for rule in spec.get("rules") or ():
            if rule.get("host") not in tls_hosts:
                yield "ingress_tls", f"the host {rule.get('host')!r} has no TLS"
            for path in (rule.get("http") or {}).get("paths") or ():
                service = (path.get("backend") or {}).get("service") or {}
                if service.get("name") != "api" or not _API_PATH.fullmatch(str(path.get("path", ""))):
                    yield "only_the_api_is_exposed", f"it leads to {service.get('name')} below {path.get('path')!r}"
        if spec.get("defaultBackend"):
            yield "only_the_api_is_exposed", "it has a default backend"
    if manifest.kind == "HTTPRoute":
        if not spec.get("hostnames"):
            yield "ingress_tls", "the HTTPRoute accepts every host"
        gateways: list[dict[str, Any]] = spec.get("parentRefs") or [{}]
        if not all(gateway.get("sectionName") for gateway in gateways):
            yield "ingress_tls", "the HTTPRoute uses all listeners, also those without TLS"
        for rule in spec.get("rules") or ():
            paths = [str((match.get("path") or {}).get("value", "/")) for match in rule.get("matches") or [{}]]
            backends = {str(backend.get("name")) for backend in rule.get("backendRefs") or ()}
            if not all(map(_API_PATH.fullmatch, paths)) or backends - {"api"}:
                leads = ", ".join(sorted(backends))
                yield "only_the_api_is_exposed", f"it leads to {leads} below {', '.join(paths)}"
    if manifest.kind == "Namespace" and manifest.labels.get(_ADMISSION) != "restricted":
        component = manifest.labels.get("app.kubernetes.io/component")
        yield "restricted_namespaces", f"pod security of the component {component} is {manifest.labels.get(_ADMISSION)}"


def _cilium_problems(body: dict[str, Any]) -> Problems:
    """Check the rules of a CiliumNetworkPolicy: each names narrow peers, and its ports."""
    specs = [body.get("spec") or {}, *(body.get("specs") or ())]
    for direction, side in (("ingress", "from"), ("egress", "to")):
        for rule in (rule for spec in specs for rule in spec.get(direction) or ()):
            peers = {key: value for key, value in rule.items() if key.startswith(side) and key != "toPorts"}
            if not peers or not all(peers.values()):
                yield "no_open_flows", f"its {direction} has a rule without peers"
            if not rule.get("toPorts"):
                yield "no_open_flows", f"its {direction} is open on every port"
            if wide := sorted(set(peers.get(f"{side}Entities") or ()) & _WIDE_ENTITIES):
                yield "no_open_flows", f"its {direction} is open to {', '.join(wide)}"
            if any(not endpoint.get("matchLabels") for endpoint in peers.get(f"{side}Endpoints") or ()):
                yield "no_open_flows", f"its {direction} is open to every pod"
            if any("*" in name.get("matchPattern", "") for name in peers.get("toFQDNs") or ()):
                yield "no_open_flows", f"its {direction} is open to every host name of a pattern"
            cidrs = [*(peers.get(f"{side}CIDR") or ()), *(each["cidr"] for each in peers.get(f"{side}CIDRSet") or ())]
            if any(str(cidr).endswith("/0") for cidr in cidrs):
                yield "no_open_flows", f"its {direction} is open to every address"
