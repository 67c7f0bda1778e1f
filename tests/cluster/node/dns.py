"""CoreDNS for the cluster's names only: pods cannot resolve names outside of the cluster."""

from typing import Any, Final

from tests.cluster.api import JsonObject
from tests.cluster.node.layout import CLUSTER_DNS, CLUSTER_DOMAIN, NodeLayout
from tests.cluster.node.restricted import CONTAINER_SECURITY, POD_SECURITY

NAMESPACE: Final = "kube-system"
NAME: Final = "coredns"
_PORT: Final = 1053
_READY_PORT: Final = 8181
_COREFILE: Final = f"""
.:{_PORT} {{
    errors
    health :8080
    ready :{_READY_PORT}
    kubernetes {CLUSTER_DOMAIN} in-addr.arpa
}}
"""
_READS: Final = (
    ("", ("endpoints", "services", "pods", "namespaces")),
    ("discovery.k8s.io", ("endpointslices",)),
)


def dns_manifests(node: NodeLayout, image: str) -> list[JsonObject]:
    """Return the objects of CoreDNS, in the order in which to create them.

    Args:
        node: node that it runs on.
        image: image with the program ``coredns`` on the default PATH.
    """
    metadata = {"name": NAME, "namespace": NAMESPACE}
    rules = [{"apiGroups": [group], "resources": [*kinds], "verbs": ["list", "watch"]} for group, kinds in _READS]
    rbac = "rbac.authorization.k8s.io"
    account = {"kind": "ServiceAccount", **metadata}
    role = {"apiGroup": rbac, "kind": "ClusterRole", "name": NAME}
    ports = [
        {"name": protocol.lower(), "port": 53, "targetPort": _PORT, "protocol": protocol} for protocol in ("UDP", "TCP")
    ]
    service = {"clusterIP": CLUSTER_DNS, "selector": {"app": NAME}, "ports": ports}
    return [
        {"apiVersion": "v1", "kind": "ServiceAccount", "metadata": metadata},
        {"apiVersion": f"{rbac}/v1", "kind": "ClusterRole", "metadata": {"name": NAME}, "rules": rules},
        {
            "apiVersion": f"{rbac}/v1",
            "kind": "ClusterRoleBinding",
            "metadata": {"name": NAME},
            "roleRef": role,
            "subjects": [account],
        },
        {"apiVersion": "v1", "kind": "ConfigMap", "metadata": metadata, "data": {"Corefile": _COREFILE}},
        {"apiVersion": "v1", "kind": "Service", "metadata": metadata, "spec": service},
        {"apiVersion": "apps/v1", "kind": "Deployment", "metadata": metadata, "spec": _deployment(node, image)},
    ]


def _deployment(node: NodeLayout, image: str) -> dict[str, Any]:
    container = {
        "name": NAME,
        "image": image,
        "command": ["coredns", "-conf", "/etc/coredns/Corefile"],
        "securityContext": CONTAINER_SECURITY,
        "resources": {"requests": {"cpu": "25m", "memory": "64Mi"}, "limits": {"memory": "256Mi"}},
        "readinessProbe": {"httpGet": {"path": "/ready", "port": _READY_PORT}, "periodSeconds": 1},
        "volumeMounts": [{"name": "config", "mountPath": "/etc/coredns", "readOnly": True}],
    }
    pod = {
        "serviceAccountName": NAME,
        "priorityClassName": "system-cluster-critical",
        "nodeSelector": {"kubernetes.io/hostname": node.name},
        "tolerations": [{"operator": "Exists"}],
        "dnsPolicy": "Default",
        "securityContext": POD_SECURITY,
        "containers": [container],
        "volumes": [{"name": "config", "configMap": {"name": NAME}}],
    }
    labels = {"app": NAME}
    return {
        "selector": {"matchLabels": labels},
        "template": {"metadata": {"labels": labels}, "spec": pod},
    }
