"""KubeRay's operator as a Deployment in the cluster, with the rights that its module defines.

Users install its Helm chart. These tests create it without Helm, with the values of ``infra.shared_platform.kuberay``.
"""

from typing import Any, Final

import yaml

from tests.cluster.api import JsonObject, KubernetesApi
from tests.cluster.kuberay import GATES, module_files, version
from tests.cluster.node.restricted import CONTAINER_SECURITY, POD_SECURITY
from tests.cluster.node.waiting import wait_until_available

NAMESPACE: Final = "kuberay-system"
NAME: Final = "kuberay-operator"
_METRICS_PORT: Final = 8080
_PROBE_PORT: Final = 8082
_RBAC: Final = "rbac.authorization.k8s.io"


def deploy_operator(api: KubernetesApi, image: str) -> None:
    """Create the operator, and return when it is available; the definitions must exist.

    Args:
        api: API server of the cluster.
        image: image with the program ``ray-operator``.
    """
    (role_file,) = (path for path in module_files("rbac") if path.name == "role.yaml")
    # The file also contains a namespaced Role of the same name; the chart creates the ClusterRole.
    roles = [body for body in yaml.safe_load_all(role_file.read_text()) if body and body["kind"] == "ClusterRole"]
    for body in (*roles, *_bindings(), _deployment(image)):
        api.create(body)
    wait_until_available(api, NAME, NAMESPACE)


def _bindings() -> list[JsonObject]:
    metadata = {"name": NAME, "namespace": NAMESPACE}
    labels = {"pod-security.kubernetes.io/enforce": "restricted"}
    leases: dict[str, Any] = {"apiGroups": ["coordination.k8s.io"], "resources": ["leases"], "verbs": ["*"]}
    return [
        {"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": NAMESPACE, "labels": labels}},
        {"apiVersion": "v1", "kind": "ServiceAccount", "metadata": metadata},
        {"apiVersion": f"{_RBAC}/v1", "kind": "Role", "metadata": metadata, "rules": [leases]},
        *(
            {
                "apiVersion": f"{_RBAC}/v1",
                "kind": f"{kind}Binding",
                "metadata": metadata if kind == "Role" else {"name": NAME},
                "roleRef": {"apiGroup": _RBAC, "kind": kind, "name": NAME},
                "subjects": [{"kind": "ServiceAccount", **metadata}],
            }
            for kind in ("ClusterRole", "Role")
        ),
    ]


def _deployment(image: str) -> JsonObject:
    container = {
        "name": NAME,
        "image": image,
        "command": ["ray-operator"],
        "args": [
            f"--metrics-addr=:{_METRICS_PORT}",
            f"--health-probe-bind-address=:{_PROBE_PORT}",
            f"--leader-election-namespace={NAMESPACE}",
            f"--feature-gates={GATES}",
        ],
        "securityContext": CONTAINER_SECURITY,
        "resources": {"requests": {"cpu": "100m", "memory": "256Mi"}, "limits": {"memory": "1Gi"}},
        "readinessProbe": {"httpGet": {"path": "/readyz", "port": _PROBE_PORT}, "periodSeconds": 1},
    }
    labels = {"app.kubernetes.io/name": NAME}
    pod = {
        # The node of the pool `system`; the stack labels it later.
        "nodeSelector": {"kubernetes.io/hostname": "node-1"},
        "serviceAccountName": NAME,
        "securityContext": POD_SECURITY,
        "containers": [container],
    }
    return {
        "apiVersion": "apps/v1",
        "kind": "Deployment",
        "metadata": {
            "name": NAME,
            "namespace": NAMESPACE,
            "labels": {**labels, "app.kubernetes.io/version": version()},
        },
        "spec": {"selector": {"matchLabels": labels}, "template": {"metadata": {"labels": labels}, "spec": pod}},
    }
