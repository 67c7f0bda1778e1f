"""Findings of the doctor on what a cluster returned."""

import json
from collections.abc import Sequence
from typing import Any

import pytest

from service.doctor.cluster_api import JsonObject
from service.doctor.findings import Finding, Result
from service.doctor.kuberay import Operator, check_kuberay
from service.doctor.nodes import check_node_pools
from service.doctor.workloads import check_model_volumes, check_pods, check_workloads

SERVICE = "cloister-acme-dev"
JOBS = "cloister-acme-dev-jobs"


class Cluster:
    """Lists of a Kubernetes API by the last part of their path, the job templates of a stack, and KubeRay's RayJob."""

    def __init__(
        self, template: JsonObject | None = None, definition: JsonObject | None = None, **lists: Sequence[JsonObject]
    ) -> None:
        self._lists = lists
        self._objects = {
            f"/api/v1/namespaces/{SERVICE}/configmaps/ray-job-templates": {
                "data": {"demo.json": json.dumps(template)} if template else {}
            },
            "/apis/apiextensions.k8s.io/v1/customresourcedefinitions/rayjobs.ray.io": definition,
        }

    def items(self, path: str, **_selector: str) -> Sequence[JsonObject]:
        return self._lists[path.rpartition("/")[2]]

    def find(self, path: str) -> JsonObject | None:
        return self._objects.get(path)


def node(name: str, pool: str = "", *, taint: bool = True, ready: str = "True", **allocatable: Any) -> JsonObject:
    is_gpu = pool not in {"", "system", "cpu"}
    return {
        "metadata": {"name": name, "labels": {"cloister.dev/pool": pool} if pool else {}},
        "spec": {"taints": [{"key": "nvidia.com/gpu", "effect": "NoSchedule"}] if is_gpu and taint else []},
        "status": {"conditions": [{"type": "Ready", "status": ready}], "allocatable": {"cpu": "8"} | allocatable},
    }


GPUS: dict[str, Any] = {"nvidia.com/gpu": "4"}
BASE = [node("sys-1", "system"), node("cpu-1", "cpu")]
SYSTEM: JsonObject = {"nodeSelector": {"cloister.dev/pool": "system"}}


def template(pool: str, **requests: str) -> JsonObject:
    def group(pool: str, **requests: str) -> JsonObject:
        container = {"resources": {"requests": requests}}
        return {"template": {"spec": {"nodeSelector": {"cloister.dev/pool": pool}, "containers": [container]}}}

    workers = [{"groupName": "engine", **group(pool, **requests)}]
    return {"spec": {"rayClusterSpec": {"headGroupSpec": group("cpu", cpu="1"), "workerGroupSpecs": workers}}}


def pools(
    *nodes: JsonObject, template: JsonObject | None = None, namespace: str = SERVICE, service: JsonObject = SYSTEM
) -> dict[str, str]:
    api = {"spec": {"template": {"spec": service}}}
    cluster: Any = Cluster(template, nodes=nodes, deployments=[api])
    found = check_node_pools(cluster, namespace)
    return {each.check.removeprefix("node pool "): f"{each.result}: {each.message}" for each in found}


def test_nodes_are_listed_with_their_gpus() -> None:
    wanted = template("v100", **{"nvidia.com/gpu": "4", "cpu": "8000m"})
    found = pools(*BASE, node("v-1", "v100", **GPUS), template=wanted)
    assert found == {"system": "ok: sys-1", "cpu": "ok: cpu-1", "v100": "ok: v-1 with 4 x GPU"}


def test_pool_of_mig_slices_is_checked_for_their_resource() -> None:
    wanted = template("h100-1g-10gb", **{"nvidia.com/mig-1g.10gb": "1"})
    slices = node("m-1", "h100-1g-10gb", **{"nvidia.com/mig-1g.10gb": "7"})
    assert pools(*BASE, slices, template=wanted)["h100-1g-10gb"].startswith("ok: m-1")
    whole = node("m-1", "h100-1g-10gb", **GPUS)
    assert "no nvidia.com/mig-1g.10gb in its Allocatable" in pools(*BASE, whole, template=wanted)["h100-1g-10gb"]


@pytest.mark.parametrize(
    ("unusable", "expected"),
    [
        (node("v-1", "v100"), "device plugin"),
        (node("v-1", "v100", taint=False, **GPUS), "kubectl taint node"),
        (node("v-1", "v100", ready="Unknown", **GPUS), "(not ready): none of its nodes takes pods"),
        (node("v-1", "v100", **GPUS) | {"spec": {"unschedulable": True}}, "kubectl uncordon"),
    ],
)
def test_unusable_node_is_a_failure(unusable: JsonObject, expected: str) -> None:
    found = pools(*BASE, unusable)["v100"]
    assert found.startswith("failed: v-1")
    assert expected in found


def test_cordoned_node_is_no_problem_beside_another() -> None:
    cordoned = node("cpu-2", "cpu") | {"spec": {"unschedulable": True}}
    assert pools(*BASE, cordoned)["cpu"] == "ok: cpu-1, cpu-2 (cordoned)"


@pytest.mark.parametrize(
    ("requests", "expected"),
    [
        ({"cpu": "9"}, "cpu 9 (largest node: 8)"),
        ({"memory": "64Gi"}, "memory 64.0 GiB (largest node: 32.0 GiB)"),
        ({"nvidia.com/gpu": "8"}, "nvidia.com/gpu 8 (largest node: 4)"),
    ],
)
def test_pod_that_fits_on_no_node_is_a_failure(requests: dict[str, str], expected: str) -> None:
    largest = node("v-1", "v100", memory="32Gi", **GPUS)
    found = pools(*BASE, largest, template=template("v100", **requests))["v100"]
    assert f"pod 'engine' of demo.json, which requests {expected}" in found


def test_empty_pool_is_a_failure_unless_it_has_gpus_that_an_autoscaler_may_add() -> None:
    found = pools(node("a"), template=template("a10g", **{"nvidia.com/gpu": "1"}))
    assert found["system"].startswith("failed: no node has the label cloister.dev/pool=system")
    assert found["cpu"].startswith("failed: no node has the label cloister.dev/pool=cpu")
    assert found["a10g"].startswith("not_checked: it has no node now")


def test_pods_of_a_stack_without_cpu_nodes_run_beside_gpus() -> None:
    terms = [
        {"matchExpressions": [{"key": key, "operator": "In", "values": [value]}]}
        for key, value in {"cloister.dev/pool": "v100", "acme.example/gpu": "a10g"}.items()
    ]
    spare: JsonObject = {
        "affinity": {"nodeAffinity": {"requiredDuringSchedulingIgnoredDuringExecution": {"nodeSelectorTerms": terms}}}
    }
    wanted = template("v100", **{"nvidia.com/gpu": "4"})
    wanted["spec"]["rayClusterSpec"]["headGroupSpec"]["template"]["spec"] = {**spare, "containers": []}
    a10g = node("a-1", "a10g", **GPUS)
    a10g["metadata"]["labels"] = {"acme.example/gpu": "a10g"}
    found = pools(node("v-1", "v100", **GPUS), a10g, template=wanted, service=spare)
    assert found == {"v100": "ok: v-1 with 4 x GPU", "acme.example/gpu=a10g": "ok: a-1 with 4 x GPU"}


def test_nodes_need_no_label_before_the_first_stack() -> None:
    assert pools(node("a"), namespace="")["node pools"].startswith("not_checked")


def deployment(
    *arguments: str, version: str = "1.6.1", available: int = 1, name: str = "kuberay-operator"
) -> JsonObject:
    container = {"image": "registry/operator@sha256:11", "command": ["/manager"], "args": list(arguments)}
    return {
        "metadata": {"namespace": "kuberay", "name": name, "labels": {"helm.sh/chart": f"kuberay-operator-{version}"}},
        "spec": {"template": {"spec": {"containers": [container]}}},
        "status": {"availableReplicas": available},
    }


FIELDS = ("preRunningDeadlineSeconds", "deletionStrategy")


def crd(*fields: str, version: str = "v1") -> JsonObject:
    spec: JsonObject = {"properties": {"spec": {"properties": {name: {} for name in fields}}}}
    return {"spec": {"versions": [{"name": version, "served": True, "schema": {"openAPIV3Schema": spec}}]}}


def operators(deployments: Sequence[JsonObject], namespace: str) -> list[Finding]:
    cluster: Any = Cluster(definition=crd(*FIELDS), deployments=deployments)
    definition, *found = check_kuberay(cluster, namespace, is_deployed=True)
    assert definition.result == Result.OK
    return found


@pytest.mark.parametrize(
    ("deployments", "expected"),
    [
        ([], "kuberay.install: helm"),
        ([deployment(version="1.5.1")], "older than 1.6"),
        ([deployment(available=0)], "none of its pods is available"),
        ([deployment("--feature-gates=RayJobDeletionPolicy=false")], "would never be deleted"),
        ([deployment("--watch-namespace", "other")], f"Add {JOBS}"),
        ([deployment("--watch-namespace=other,more")], f"Add {JOBS}"),
        ([deployment(), deployment(name="second")], "undo each other's work"),
    ],
)
def test_operator_that_cannot_run_the_jobs_is_a_failure(deployments: list[JsonObject], expected: str) -> None:
    failures = [each.message for each in operators(deployments, JOBS) if each.result == Result.FAILED]
    assert any(expected in message for message in failures), failures


def test_operator_of_other_namespaces_is_ignored() -> None:
    both = [deployment("--watch-namespace", f"{JOBS},x"), deployment("--watch-namespace=other", name="second")]
    assert [each.result for each in operators(both, JOBS)] == [Result.OK]


@pytest.mark.parametrize(
    ("watched", "result"),
    [(("a,b", "c"), Result.NOT_CHECKED), (("a,b", "b"), Result.FAILED), (("a", ""), Result.FAILED)],
)
def test_without_a_namespace_only_overlapping_operators_are_a_failure(watched: tuple[str, str], result: Result) -> None:
    both = [deployment(*(["--watch-namespace", each] if each else []), name=each or "all") for each in watched]
    assert [each.result for each in operators(both, "")] == [result, Result.OK, Result.OK]


def test_operator_version_falls_back_to_the_image_tag() -> None:
    unlabelled = deployment(version="x")
    assert Operator.parse(unlabelled).version == ""
    unlabelled["spec"]["template"]["spec"]["containers"][0]["image"] = "registry:5000/kuberay/operator:v1.6.2"
    assert Operator.parse(unlabelled).version == "1.6.2"


def definitions(definition: JsonObject | None) -> Finding:
    cluster: Any = Cluster(definition=definition, deployments=[])
    found, _ = check_kuberay(cluster, JOBS, is_deployed=True)
    return found


@pytest.mark.parametrize(
    ("definition", "expected"),
    [
        (None, "no kind RayJob"),
        (crd(version="v1alpha1"), "only as v1alpha1"),
        (crd("deletionStrategy"), "RayJob has no preRunningDeadlineSeconds"),
    ],
)
def test_old_definition_is_a_failure(definition: JsonObject | None, expected: str) -> None:
    found = definitions(definition)
    assert found.result == Result.FAILED
    assert expected in found.message


def test_definition_with_all_fields_is_ok() -> None:
    assert definitions(crd(*FIELDS)).result == Result.OK


def pods(*, may_wait: bool = False, **status: Any) -> Finding:
    cluster: Any = Cluster(pods=[{"metadata": {"name": "api-1"}, "status": status}])
    (found,) = check_pods(cluster, SERVICE, may_wait=may_wait)
    return found


WAITING = {"name": "api", "state": {"waiting": {"reason": "ImagePullBackOff", "message": 'Back-off pulling "x"'}}}
UNSCHEDULABLE = {"type": "PodScheduled", "reason": "Unschedulable", "message": "0/2 nodes are available"}


def test_missing_image_is_reported_with_advice() -> None:
    found = pods(initContainerStatuses=[WAITING], may_wait=True)
    assert found.result == Result.FAILED
    assert "pull secret" in found.message
    assert 'Back-off pulling "x"' in found.message


def test_unschedulable_pod_is_a_failure_unless_it_belongs_to_a_job() -> None:
    assert pods(conditions=[UNSCHEDULABLE]).message == "api-1 fits on no node: 0/2 nodes are available"
    assert pods(conditions=[UNSCHEDULABLE], may_wait=True).result == Result.OK


def workload(replicas: int = 2, *, ready: int = 2, updated: int = 2, observed: int = 3) -> JsonObject:
    status = {"readyReplicas": ready, "updatedReplicas": updated, "observedGeneration": observed}
    return {"metadata": {"name": "api", "generation": 3}, "spec": {"replicas": replicas}, "status": status}


def workloads(*deployments: JsonObject, stateful_set: JsonObject | None = None) -> dict[str, Finding]:
    cluster: Any = Cluster(deployments=deployments, statefulsets=[stateful_set] if stateful_set else [])
    return {each.check: each for each in check_workloads(cluster, SERVICE)}


def test_workload_is_ok_if_all_pods_are_ready_and_new() -> None:
    found = workloads(workload(), stateful_set=workload(0, ready=0, updated=0))
    assert found["Deployment api"].result == Result.OK
    assert found["StatefulSet api"].result == Result.OK


@pytest.mark.parametrize(
    ("body", "expected"),
    [
        (workload(ready=1), "1 of 2 pods are ready"),
        (workload(updated=0), "its rollout is incomplete: 0 of 2 pods"),
        (workload(observed=2), "its rollout is incomplete"),
        (workload(0, ready=0, updated=0), "scaled to 0 pods"),
        (workload() | {"status": {}}, "0 of 2 pods are ready"),
    ],
)
def test_incomplete_workload_is_a_failure(body: JsonObject, expected: str) -> None:
    found = workloads(body)["Deployment api"]
    assert found.result == Result.FAILED
    assert expected in found.message


@pytest.mark.parametrize(
    ("phase", "result"),
    [
        ("Bound", Result.OK),
        ("Pending", Result.NOT_CHECKED),  # some storage classes bind a volume with its first pod
        ("Lost", Result.FAILED),
        (None, Result.FAILED),
    ],
)
def test_volume_of_models(phase: str | None, result: Result) -> None:
    volumes = [{"name": "weights", "persistentVolumeClaim": {"claimName": "models"}}, {"name": "shm"}]
    head = {"template": {"spec": {"containers": [], "volumes": volumes}}}
    claims = [{"metadata": {"name": "models"}, "status": {"phase": phase}}] if phase else []
    cluster: Any = Cluster({"spec": {"rayClusterSpec": {"headGroupSpec": head}}}, persistentvolumeclaims=claims)
    assert [each.result for each in check_model_volumes(cluster, SERVICE)] == [result]
