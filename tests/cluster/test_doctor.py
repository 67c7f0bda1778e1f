"""Findings of ``cloister doctor`` on a real API server."""

import dataclasses
import json
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from infra.rendering.manifests import manifests
from infra.rendering.render import record_stack
from ray_job.contract.accelerators import ACCELERATORS
from ray_job.contract.rayjobs import template_key
from service.doctor.backends import check_launcher, check_rights
from service.doctor.cluster import check_cluster
from service.doctor.cluster_api import ClusterApi, open_kubeconfig
from service.doctor.findings import Finding, Result, run_check
from service.doctor.preflight.choices import Preflight
from service.doctor.preflight.gpus import check_pool_nodes
from service.doctor.preflight.images import check_pool_image
from service.doctor.preflight.network import stack_policies
from service.doctor.preflight.requirements import check_gateway, check_ingress, check_storage_binds
from service.doctor.preflight.run import check_with_pods
from service.doctor.preflight.stack_facts import Pool, StackFacts, read_stack_facts
from service.doctor.preflight.temporary_pods import Cluster as PodCluster
from service.doctor.preflight.temporary_pods import PodError, TestPod, check_leftovers, temporary_namespace
from service.model_catalogue import load_catalogue
from service.settings import read_settings
from tests.cluster.api import KubernetesApi
from tests.cluster.control_plane import ControlPlane
from tests.cluster.deployed import DEV, JOBS, MODEL, SERVICE, Deployed
from tests.cluster.nodes import add_node

pytestmark = pytest.mark.cluster

Look = Callable[[], dict[str, Finding]]
DENY = ("networking.k8s.io/v1", "NetworkPolicy", "default-deny")


@pytest.fixture
def look(cluster: ControlPlane) -> Look:
    """Return the findings of an administrator, by check."""
    doctor = ClusterApi(open_kubeconfig(cluster.kubeconfig, "admin"))
    return lambda: {each.check: each for each in check_cluster(doctor, namespace=SERVICE, storage_class="")}


@pytest.fixture
def made(api: KubernetesApi) -> Iterator[Callable[[dict[str, Any]], None]]:
    """Create objects, and delete them after the test."""
    bodies: list[dict[str, Any]] = []

    def make(body: dict[str, Any]) -> None:
        api.create(body)
        bodies.append(body)

    yield make
    for body in reversed(bodies):
        metadata = body["metadata"]
        api.delete(body["apiVersion"], body["kind"], metadata["name"], metadata.get("namespace", ""), now=True)


def label(api: KubernetesApi, kind: str, name: str, **labels: str | None) -> None:
    body = {"apiVersion": "v1", "kind": kind, "metadata": {"name": name, "labels": labels}}
    api.patch(body, field_manager="test")


def of_the_stack(kind: str, name: str) -> dict[str, Any]:
    (found,) = [each.body for each in manifests(record_stack(DEV)) if (each.kind, each.name) == (kind, name)]
    return found


def operator() -> dict[str, Any]:
    labels = {"app.kubernetes.io/name": "kuberay-operator"}
    container = {"name": "kuberay-operator", "image": "registry.acme.example/operator:v1.6.1"}
    template = {"metadata": {"labels": labels}, "spec": {"containers": [container]}}
    metadata = {"name": "kuberay-operator", "namespace": "default", "labels": labels}
    spec = {"selector": {"matchLabels": labels}, "template": template}
    return {"apiVersion": "apps/v1", "kind": "Deployment", "metadata": metadata, "spec": spec}


def test_cluster_is_checked_before_the_first_stack(look: Look) -> None:
    found = look()
    assert found["Kubernetes"].result in {Result.OK, Result.NOT_CHECKED}
    assert found["permissions"].result == Result.OK
    assert found["KubeRay's definitions"].result == Result.OK
    assert found["the stack"].message == f"there is no namespace {SERVICE}; `pulumi up` creates it"


def test_default_storage_class_is_required(
    look: Look, made: Callable[[dict[str, Any]], None], cluster: ControlPlane
) -> None:
    assert "The cluster has none" in look()["storage class"].message
    metadata = {"name": "fast", "annotations": {"storageclass.kubernetes.io/is-default-class": "true"}}
    made(
        {
            "apiVersion": "storage.k8s.io/v1",
            "kind": "StorageClass",
            "metadata": metadata,
            "provisioner": "example.com/a",
        }
    )
    assert look()["storage class"].message == "fast is the default, by example.com/a"
    doctor = ClusterApi(open_kubeconfig(cluster.kubeconfig, ""))
    found = {each.check: each for each in check_cluster(doctor, namespace="", storage_class="slow")}
    assert found["storage class"].message == "there is no slow. The cluster has: fast"


def test_missing_metrics_and_operator_are_reported_with_advice(
    look: Look, made: Callable[[dict[str, Any]], None]
) -> None:
    found = look()
    assert found["metrics"].message.endswith("Install metrics-server")
    assert "`kuberay.install: helm`" in found["KubeRay's operator"].message
    made(operator())
    assert look()["KubeRay's operator"].message.startswith(
        "default/kuberay-operator 1.6.1: none of its pods is available"
    )


@pytest.mark.usefixtures("deployed")
def test_namespaces_of_a_stack_are_restricted(look: Look) -> None:
    found = look()
    for namespace in (SERVICE, JOBS):
        assert found[f"pod security of {namespace}"].message == "restricted: a privileged pod is refused (dry run)"
        assert "including default-deny" in found[f"network policies of {namespace}"].message


@pytest.mark.usefixtures("deployed")
def test_relaxed_namespace_is_a_failure(look: Look, api: KubernetesApi) -> None:
    profile = "pod-security.kubernetes.io/enforce"
    policy = api.find(*DENY, JOBS)
    assert policy is not None
    label(api, "Namespace", SERVICE, **{profile: "baseline"})
    api.delete(*DENY, JOBS)
    try:
        found = look()
    finally:
        label(api, "Namespace", SERVICE, **{profile: "restricted"})
        metadata = {"name": "default-deny", "namespace": JOBS}
        api.create({"apiVersion": DENY[0], "kind": DENY[1], "metadata": metadata, "spec": policy["spec"]})
    assert "is baseline, not restricted" in found[f"pod security of {SERVICE}"].message
    assert found[f"network policies of {JOBS}"].result == Result.FAILED


@pytest.mark.usefixtures("deployed")
def test_deployment_without_ready_pods_is_a_failure(look: Look, made: Callable[[dict[str, Any]], None]) -> None:
    made(of_the_stack("Deployment", "reconciler"))
    found = look()
    assert found["Deployment reconciler"].message.startswith("0 of 2 pods are ready")


@pytest.mark.usefixtures("deployed")
def test_gpu_node_without_a_device_plugin_is_a_failure(look: Look, api: KubernetesApi) -> None:
    add_node(api, "gpu-1", {"cpu": "8", "memory": "32Gi"})
    try:
        label(api, "Node", "gpu-1", **{"cloister.dev/pool": "v100"})
        found = look()
    finally:
        api.delete("v1", "Node", "gpu-1")
    assert "no nvidia.com/gpu in its Allocatable" in found["node pool v100"].message


@pytest.fixture
def pods(cluster: ControlPlane) -> PodCluster:
    """Access for checks with temporary pods."""
    return PodCluster(api=ClusterApi(open_kubeconfig(cluster.kubeconfig, "admin")), kubectl=["kubectl"])


def facts(**changes: Any) -> StackFacts:
    return dataclasses.replace(read_stack_facts(DEV), **changes)


def gpu_pool(node: str, **changes: Any) -> Pool:
    found = Pool(name="a10g", nodes=(node,), labels={}, images=("i",), accelerator=ACCELERATORS["a10g"])
    return dataclasses.replace(found, **changes)


def test_temporary_pods_and_policies_are_admitted_and_removed_after_an_interrupt(
    pods: PodCluster, api: KubernetesApi
) -> None:
    gpu = TestPod(name="gpu", image="a", node="node-1", gpu_resource="nvidia.com/gpu")

    def interrupted() -> None:
        with temporary_namespace(pods.api, purpose="test", docker_config='{"auths": {}}') as namespace:
            made.append(namespace)
            for each in (TestPod(name="a", image="a"), gpu):
                pods.start(namespace, each)
            for body in stack_policies(facts()):
                pods.api.create(f"/apis/networking.k8s.io/v1/namespaces/{namespace}/networkpolicies", body)
            assert "fits on no node" in str(stuck(pods, namespace, "gpu"))
            (left,) = check_leftovers(pods.api, JOBS)
            assert f"kubectl delete namespace {namespace}" in left.message
            raise KeyboardInterrupt

    made: list[str] = []
    with pytest.raises(KeyboardInterrupt):
        interrupted()
    api.wait_until_gone("v1", "Namespace", made[0], within_s=60)
    assert list(check_leftovers(pods.api, JOBS)) == []


def stuck(pods: PodCluster, namespace: str, name: str) -> PodError:
    with pytest.raises(PodError) as raised:
        pods.wait_until_running(namespace, name, limit_s=2)
    return raised.value


def test_image_that_cannot_be_pulled_is_a_failure(pods: PodCluster, api: KubernetesApi) -> None:
    waiting = {"reason": "ErrImagePull", "message": "not found"}
    status = {"containerStatuses": [{"name": "main", "state": {"waiting": waiting}}]}

    def report_a_failed_pull(namespace: str) -> None:
        metadata = {"name": "image-a10g-1", "namespace": namespace}
        while api.find("v1", "Pod", "image-a10g-1", namespace) is None:
            time.sleep(0.1)
        body = {"apiVersion": "v1", "kind": "Pod", "metadata": metadata, "status": status}
        api.patch(body, field_manager="kubelet", subresource="status")

    with temporary_namespace(pods.api, purpose="test") as namespace, ThreadPoolExecutor() as threads:
        threads.submit(report_a_failed_pull, namespace)
        pool = gpu_pool("node-1")
        (found,) = check_pool_image(pods, facts(), pool, "r/ray@sha256:1", namespace=namespace, gpu=False, number=1)
    assert found.check == "image ray in a10g"
    assert "on node-1: pod image-a10g-1: ErrImagePull: not found. Check `images`" in found.message


def test_gpu_nodes_drivers_and_runtime_classes_are_checked_before_a_stack(
    pods: PodCluster, api: KubernetesApi, made: Callable[[dict[str, Any]], None]
) -> None:
    def look(*pools: Pool) -> dict[str, str]:
        return {each.check: each.message for each in check_pool_nodes(pods.api, facts(pools=pools))}

    node: dict[str, Any] = {"apiVersion": "v1", "kind": "Node", "metadata": {"name": "gpu-1"}}
    add_node(api, "gpu-1", {"cpu": "8", "memory": "32Gi"})
    try:
        label(api, "Node", "gpu-1", **{"nvidia.com/cuda.driver.major": "570"})
        api.patch({**node, "status": {"nodeInfo": node_info("v1.35.3+k3s1")}}, field_manager="k", subresource="status")
        found = look(gpu_pool("gpu-1"), gpu_pool("gpu-9", name="other", runtime_class="nvidia"))
        runtime = {"apiVersion": "node.k8s.io/v1", "kind": "RuntimeClass", "metadata": {"name": "gpus"}}
        made({**runtime, "handler": "nvidia"})
        assert "`node_pools.a10g.runtime_class: gpus`" in look(gpu_pool("gpu-1"))["runtime class of a10g"]
    finally:
        api.delete("v1", "Node", "gpu-1")
    assert "`device_plugin.install` is false: set it to true" in found["GPUs of gpu-1"]
    assert "570 is older than 580" in found["driver of gpu-1"]
    assert "runs v1.35.3+k3s1, whose default runtime gives containers no GPU" in found["runtime class of a10g"]
    assert found["nodes of other"] == "the cluster has no node gpu-9: correct `node_pools.other.nodes`"
    assert "there is no RuntimeClass nvidia (`node_pools.other.runtime_class`)" in found["runtime class of other"]


def node_info(version: str) -> dict[str, str]:
    unknown = ("machineID", "systemUUID", "bootID", "kernelVersion", "osImage", "containerRuntimeVersion")
    rest = dict.fromkeys((*unknown, "kubeProxyVersion", "operatingSystem", "architecture"), "")
    return {**rest, "kubeletVersion": version}


def test_missing_storage_and_ingress_classes_name_their_settings(pods: PodCluster) -> None:
    (storage,) = check_storage_binds(pods, facts(), "default")
    assert "no storage class is the default" in storage.message
    assert "`database.volume.storage_class`" in storage.message
    found = list(check_ingress(pods.api, facts(ingress_class="nginx", controller_namespace="ingress")))
    assert "there is no IngressClass nginx (`api.ingress.class_name`)" in found[0].message
    assert "no pod runs in ingress (`api.ingress.controller_namespace`)" in found[1].message


def test_gateway_must_exist_with_a_tls_listener_of_the_name(
    pods: PodCluster, made: Callable[[dict[str, Any]], None]
) -> None:
    def look(**changes: Any) -> str:
        (found,) = check_gateway(pods.api, facts(gateway="default/public", **changes))
        return f"{found.result}: {found.message}"

    assert look().startswith("failed: there is no Gateway default/public (`api.gateway.gateway`)")
    tls = {"certificateRefs": [{"name": "edge"}]}
    listeners = [
        {"name": "http", "port": 80, "protocol": "HTTP"},
        {"name": "https", "port": 443, "protocol": "HTTPS", "tls": tls},
    ]
    gateway = {"apiVersion": "gateway.networking.k8s.io/v1", "kind": "Gateway"}
    metadata = {"name": "public", "namespace": "default"}
    made({**gateway, "metadata": metadata, "spec": {"gatewayClassName": "any", "listeners": listeners}})
    assert look() == "ok: Gateway default/public, listener https"
    assert look(gateway_listener="tls").endswith("(`api.gateway.section_name`). It has: http, https")
    assert "is HTTP, without TLS" in look(gateway_listener="http")
    assert "no pod runs in edge (`api.gateway.controller_namespace`)" in look(controller_namespace="edge")


def test_temporary_pods_need_permissions(deployed: Deployed) -> None:
    api = ClusterApi(open_kubeconfig(deployed.reconciler, ""))
    found = list(run_check("preflight", check_with_pods, api, facts(), ["kubectl"], Preflight()))
    assert found[-1].result == Result.NOT_CHECKED
    assert "403" in found[-1].message


def test_missing_permissions_of_a_user_are_listed(deployed: Deployed) -> None:
    doctor = ClusterApi(open_kubeconfig(deployed.reconciler, ""))
    found = {each.check: each for each in check_cluster(doctor, namespace=SERVICE, storage_class="")}
    assert "create, patch, delete of configmaps, " in found["permissions"].message
    assert f"patch of rayjobs.ray.io in {JOBS}" in found["permissions"].message
    assert found["node pools"].result == Result.NOT_CHECKED
    assert "403" in found["node pools"].message


@pytest.fixture
def launching(deployed: Deployed, tmp_path: Path) -> dict[str, str]:
    """Settings of the reconciler that the launcher needs."""
    models, templates = tmp_path / "models.yaml", tmp_path / "templates"
    models.write_text(of_the_stack("ConfigMap", "models")["data"]["models.yaml"])
    templates.mkdir()
    (templates / template_key(MODEL)).write_text(json.dumps(deployed.templates[MODEL]))
    return {
        "CLOISTER_DATABASE_URL": "postgresql://nobody@nowhere/none",
        "CLOISTER_OBJECT_STORE": (tmp_path / "objects").as_uri(),
        "CLOISTER_MODELS": str(models),
        "CLOISTER_LAUNCHER": "kuberay",
        "CLOISTER_KUBERNETES_NAMESPACE": JOBS,
        "CLOISTER_RAY_JOB_TEMPLATES": str(templates),
        "CLOISTER_KUBECONFIG": str(deployed.reconciler),
    }


def test_launcher_has_its_permissions_and_its_rayjobs_are_accepted(
    launching: dict[str, str], api: KubernetesApi
) -> None:
    settings = read_settings(launching)
    found = list(check_launcher(settings, load_catalogue(settings.models_path), launching))
    assert [(each.check, each.result) for each in found] == [
        ("launcher's rights", Result.OK), (f"RayJob of the model {MODEL}", Result.OK)
    ]  # fmt: skip
    assert api.list("ray.io/v1", "RayJob", JOBS) == []


def test_account_with_missing_or_excess_permissions_is_a_failure(deployed: Deployed, cluster: ControlPlane) -> None:
    (few,) = check_rights(ClusterApi(open_kubeconfig(deployed.reconciler, "")), SERVICE)
    assert "may not create rayjobs.ray.io" in few.message
    (many,) = check_rights(ClusterApi(open_kubeconfig(cluster.kubeconfig, "")), JOBS)
    assert many.result == Result.FAILED
    assert "create pods/exec" in many.message
