"""Two real kubelets: pods run and reach each other, Services have names, and kubelets refuse strangers."""

import ipaddress
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import pytest

from tests.cluster.access import kubelet_user
from tests.cluster.api import ApiError, KubernetesApi
from tests.cluster.images.image import Image
from tests.cluster.kubectl import kubectl
from tests.cluster.node.kubelet import PORT
from tests.cluster.node.layout import NODES
from tests.cluster.node.real_cluster import RealCluster
from tests.cluster.node.restricted import CONTAINER_SECURITY, POD_SECURITY
from tests.cluster.node.waiting import wait_until
from tests.cluster.readiness import pod_problem

pytestmark = pytest.mark.cluster

NAMESPACE = "real-nodes"
# Image with Python by node.
IMAGES = {"node-1": "service", "node-2": "ray-cpu"}
SERVES_ITS_NAME = "echo serving; echo $NODE > /served/index.html; exec python3 -m http.server --directory /served 8000"
READS = "import sys, urllib.request as r; print(r.urlopen(sys.argv[1], timeout=10).read().decode().strip())"
STATUS = """
import ssl, sys, urllib.error, urllib.request
request = urllib.request.Request(sys.argv[1], headers=dict([sys.argv[2:]] if sys.argv[2:] else []))
try:
    print(urllib.request.urlopen(request, timeout=10, context=ssl._create_unverified_context()).status)
except urllib.error.HTTPError as error:
    print(error.code)
"""
VERIFIED = """
import ssl, urllib.request
context = ssl.create_default_context(cafile="/var/run/secrets/kubernetes.io/serviceaccount/ca.crt")
print(urllib.request.urlopen("https://kubernetes.default.svc/version", timeout=10, context=context).status)
"""


@pytest.fixture(scope="module")
def pods(node_api: KubernetesApi, images: Mapping[str, Image]) -> Iterator[Callable[[str], dict[str, Any]]]:
    """A pod on each node, named after it, with a Service."""
    labels = {"pod-security.kubernetes.io/enforce": "restricted"}
    node_api.create({"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": NAMESPACE, "labels": labels}})
    for node, image in IMAGES.items():
        node_api.create(pod(node, node, images[image].reference))
        service = {"selector": {"app": node}, "ports": [{"port": 80, "targetPort": 8000}]}
        # Not the pod's own name, which is in its hosts file.
        metadata = {"name": f"service-{node}", "namespace": NAMESPACE}
        node_api.create({"apiVersion": "v1", "kind": "Service", "metadata": metadata, "spec": service})
    for node in IMAGES:
        wait_until_pod_ready(node_api, node)
    yield lambda name: node_api.find("v1", "Pod", name, NAMESPACE) or {}
    node_api.delete("v1", "Namespace", NAMESPACE)


def pod(name: str, node: str, image: str, *, command: str = SERVES_ITS_NAME, **spec: Any) -> dict[str, Any]:
    container = {
        "name": "main",
        "image": image,
        "command": ["sh", "-ec", command],
        "env": [{"name": "NODE", "value": node}],
        "securityContext": CONTAINER_SECURITY,
        "readinessProbe": {"tcpSocket": {"port": 8000}, "periodSeconds": 1},
        "volumeMounts": [{"name": "served", "mountPath": "/served"}],
    }
    volumes = [{"name": "served", "emptyDir": {}}]
    common = {"nodeSelector": {"kubernetes.io/hostname": node}, "terminationGracePeriodSeconds": 1}
    body = {**common, "securityContext": POD_SECURITY, "containers": [container], "volumes": volumes, **spec}
    metadata = {"name": name, "namespace": NAMESPACE, "labels": {"app": name}}
    return {"apiVersion": "v1", "kind": "Pod", "metadata": metadata, "spec": body}


def wait_until_pod_ready(api: KubernetesApi, name: str) -> None:
    def problem() -> str:
        return pod_problem(api.find("v1", "Pod", name, NAMESPACE) or {})

    wait_until(lambda: not problem(), f"pod {name} ready", problem, within_s=60)


def python(cluster: RealCluster, name: str, code: str, *arguments: str) -> str:
    """Return the output of Python code in a pod."""
    command = ["exec", f"--namespace={NAMESPACE}", name, "--", "python3", "-c", code, *arguments]
    return kubectl(cluster.control_plane, *command).strip()


@pytest.mark.parametrize("node", NODES, ids=lambda node: node.name)
def test_each_node_runs_a_restricted_pod_in_its_own_network(pods: Callable[[str], dict[str, Any]], node: Any) -> None:
    found = pods(node.name)
    assert found["spec"]["nodeName"] == node.name
    assert found["status"]["hostIP"] == node.address
    assert ipaddress.ip_address(found["status"]["podIP"]) in ipaddress.ip_network(node.pod_network)


@pytest.mark.usefixtures("pods")
@pytest.mark.parametrize("client", IMAGES)
@pytest.mark.parametrize("server", IMAGES)
def test_service_answers_by_name_on_both_nodes(whole_cluster: RealCluster, client: str, server: str) -> None:
    assert python(whole_cluster, client, READS, f"http://service-{server}.{NAMESPACE}.svc.cluster.local/") == server
    assert python(whole_cluster, client, READS, f"http://service-{server}/") == server


@pytest.mark.usefixtures("pods")
@pytest.mark.parametrize("node", IMAGES)
def test_pod_reaches_and_verifies_the_api_server(whole_cluster: RealCluster, node: str) -> None:
    assert python(whole_cluster, node, VERIFIED) == "200"


@pytest.mark.usefixtures("pods")
@pytest.mark.parametrize("node", IMAGES)
def test_pod_output_is_in_its_log(whole_cluster: RealCluster, node: str) -> None:
    assert kubectl(whole_cluster.control_plane, "logs", f"--namespace={NAMESPACE}", node).startswith("serving")


@pytest.mark.usefixtures("pods")
@pytest.mark.parametrize("node", NODES, ids=lambda node: node.name)
def test_kubelet_refuses_requests_of_pods(whole_cluster: RealCluster, node: Any) -> None:
    kubelet = f"https://{node.address}:{PORT}/pods"
    assert python(whole_cluster, "node-1", STATUS, kubelet) == "401"
    token = python(whole_cluster, "node-1", "print(open('/var/run/secrets/kubernetes.io/serviceaccount/token').read())")
    assert python(whole_cluster, "node-1", STATUS, kubelet, "Authorization", f"Bearer {token}") == "403"


@pytest.mark.usefixtures("pods")
def test_kubelet_cannot_read_secrets_of_other_nodes(whole_cluster: RealCluster, node_api: KubernetesApi) -> None:
    metadata = {"name": "of-nobody", "namespace": NAMESPACE}
    node_api.create({"apiVersion": "v1", "kind": "Secret", "metadata": metadata, "stringData": {"key": "value"}})
    plane = whole_cluster.control_plane
    kubeconfig = plane.access.kubeconfig(plane.server, plane.ca_file, user=kubelet_user("node-1"))
    with KubernetesApi(kubeconfig) as kubelet, pytest.raises(ApiError) as refused:
        kubelet.find("v1", "Secret", "of-nobody", NAMESPACE)
    assert refused.value.status == 403


def test_pods_outlive_a_restart_of_their_kubelet(
    whole_cluster: RealCluster,
    node_api: KubernetesApi,
    images: Mapping[str, Image],
    pods: Callable[[str], dict[str, Any]],
) -> None:
    (before,) = pods("node-2")["status"]["containerStatuses"]
    whole_cluster.nodes["node-2"].restart_kubelet(node_api)
    # A new pod that runs shows that the kubelet has checked all its pods since.
    node_api.create(pod("since-then", "node-2", images[IMAGES["node-2"]].reference))
    wait_until_pod_ready(node_api, "since-then")
    (after,) = pods("node-2")["status"]["containerStatuses"]
    assert (after["containerID"], after["restartCount"]) == (before["containerID"], 0)

    def problem() -> str:
        try:
            answer = python(whole_cluster, "node-1", READS, "http://service-node-2/")
        except AssertionError as error:
            return str(error)
        return "" if answer == "node-2" else f"the answer is {answer!r}"

    # A new kubelet probes its pods again. Until then they are not ready, and their Services reject connections.
    wait_until(lambda: not problem(), "the Service answers again", problem, within_s=30)


@pytest.mark.usefixtures("pods")
@pytest.mark.parametrize("user", [999, 10_001])
def test_volume_belongs_to_the_pods_group(
    whole_cluster: RealCluster, node_api: KubernetesApi, images: Mapping[str, Image], user: int
) -> None:
    name = f"writer-{user}"
    claim = {"accessModes": ["ReadWriteOnce"], "resources": {"requests": {"storage": "100Gi"}}}
    metadata = {"name": name, "namespace": NAMESPACE}
    node_api.create({"apiVersion": "v1", "kind": "PersistentVolumeClaim", "metadata": metadata, "spec": claim})
    security = {**POD_SECURITY, "runAsUser": user, "runAsGroup": 12345, "fsGroup": user}
    volumes = [{"name": "served", "persistentVolumeClaim": {"claimName": name}}]
    image = images[IMAGES["node-1"]].reference
    node_api.create(pod(name, "node-1", image, securityContext=security, volumes=volumes))
    wait_until_pod_ready(node_api, name)
    assert python(whole_cluster, name, "import os; print(os.stat('/served/index.html').st_gid)") == str(user)
