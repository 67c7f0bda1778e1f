"""The kubelet of one node: https://kubernetes.io/docs/reference/config-api/kubelet-config.v1beta1/."""

import json
from typing import Any, Final

from tests.cluster.access import kubelet_user
from tests.cluster.control_plane import ControlPlane
from tests.cluster.node.layout import CLUSTER_DNS, CLUSTER_DOMAIN, PATH, NodeLayout
from tests.cluster.node.namespaces import inside
from tests.cluster.ports import answers
from tests.cluster.processes import Process

PORT: Final = 10250
_HEALTH_PORT: Final = 10248


def kubelet(cluster: ControlPlane, node: NodeLayout, namespaces: Process) -> Process:
    """Return the kubelet as a process; containerd must be running."""
    user = kubelet_user(node.name)
    kubeconfig = cluster.access.kubeconfig(cluster.server, cluster.ca_file, user=user)
    file = node.state / "kubelet.json"
    file.write_text(json.dumps(_settings(cluster, node)))
    command = [
        str(cluster.bin / "kubelet"),
        f"--config={file}",
        f"--kubeconfig={kubeconfig}",
        f"--hostname-override={node.name}",
        f"--node-ip={node.address}",
    ]
    return Process(
        inside(namespaces, command),
        log=node.state / "kubelet.log",
        environment={"PATH": PATH},
        is_ready=answers(f"http://{node.address}:{_HEALTH_PORT}/healthz"),
        detached=True,
    )


def _settings(cluster: ControlPlane, node: NodeLayout) -> dict[str, Any]:
    return {
        "apiVersion": "kubelet.config.k8s.io/v1beta1",
        "kind": "KubeletConfiguration",
        "address": node.address,
        "port": PORT,
        "healthzBindAddress": node.address,
        "healthzPort": _HEALTH_PORT,
        "authentication": {
            "anonymous": {"enabled": False},
            "webhook": {"enabled": True},
            "x509": {"clientCAFile": str(cluster.access.kubelet_client_certificate)},
        },
        "authorization": {"mode": "Webhook"},
        "containerRuntimeEndpoint": f"unix://{node.socket}",
        "clusterDNS": [CLUSTER_DNS],
        "clusterDomain": CLUSTER_DOMAIN,
        # Pods use the cluster's name server only.
        "resolvConf": "",
        "cgroupDriver": "cgroupfs",
        "cgroupRoot": f"/{node.cgroup}",
        "failCgroupV1": False,
        # It continues where it may not change kernel settings, as root in a container.
        "featureGates": {"KubeletInUserNamespace": True},
        "enforceNodeAllocatable": [],
        # Both nodes share the processors, so that neither is throttled while the other is idle.
        "cpuCFSQuota": False,
        # A removed image could not be pulled again.
        "imageGCHighThresholdPercent": 100,
        "evictionHard": {"memory.available": "200Mi", "nodefs.available": "1Gi", "imagefs.available": "1Gi"},
        # A dead node is detected by its lease, which is renewed four times in this period.
        "nodeLeaseDurationSeconds": 16,
        "syncFrequency": "10s",
        "registryPullQPS": 0,
    }
