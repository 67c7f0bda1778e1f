"""What the doctor makes of what it sees; seeing is tried on real servers elsewhere."""

import json
from typing import Any

import pytest

from service.cli.doctor.api import judge_readiness
from service.cli.doctor.findings import Result
from service.cli.doctor.network import Shut, Way, judge, shut
from service.cli.doctor.nodes import groups, judge_nodes
from service.cli.doctor.requirements import judge_definition, judge_operators, judge_version, operator_version
from service.cli.doctor.workloads import judge_claims, judge_workload, pod_problems

JOBS = "cloister-acme-dev-jobs"


def node(name: str, pool: str = "", *, taint: bool = True, ready: str = "True", **allocatable: Any) -> dict[str, Any]:
    is_gpu = pool in {"v100", "a10g"}
    return {
        "metadata": {"name": name, "labels": {"cloister.dev/pool": pool} if pool else {}},
        "spec": {"taints": [{"key": "nvidia.com/gpu", "effect": "NoSchedule"}] if is_gpu and taint else []},
        "status": {"conditions": [{"type": "Ready", "status": ready}], "allocatable": {"cpu": "8"} | allocatable},
    }


GPUS: dict[str, Any] = {"nvidia.com/gpu": "4"}
BASE = [node("sys-1", "system"), node("cpu-1", "cpu")]


def template(pool: str, **requests: str) -> dict[str, Any]:
    def group(pool: str, **requests: str) -> dict[str, Any]:
        container = {"resources": {"requests": requests}}
        return {"template": {"spec": {"nodeSelector": {"cloister.dev/pool": pool}, "containers": [container]}}}

    workers = [{"groupName": "engine", **group(pool, **requests)}]
    return {"spec": {"rayClusterSpec": {"headGroupSpec": group("cpu", cpu="1"), "workerGroupSpecs": workers}}}


def pools(*nodes: dict[str, Any], rayjob: dict[str, Any] | None = None, is_deployed: bool = True) -> dict[str, str]:
    wanted = list(groups({"demo.json": rayjob} if rayjob else {}))
    found = list(judge_nodes(nodes, wanted, is_deployed=is_deployed))
    return {each.check.removeprefix("node pool "): f"{each.result}: {each.message}" for each in found}


def test_nodes_that_are_right_are_told_with_their_gpus() -> None:
    found = pools(
        *BASE, node("v-1", "v100", **GPUS), rayjob=template("v100", **{"nvidia.com/gpu": "4", "cpu": "8000m"})
    )
    assert found == {"system": "ok: sys-1", "cpu": "ok: cpu-1", "v100": "ok: v-1 with 4 x GPU"}


@pytest.mark.parametrize(
    ("bad", "told_of"),
    [
        (node("v-1", "v100"), "device plugin"),
        (node("v-1", "v100", taint=False, **GPUS), "kubectl taint node"),
        (node("v-1", "v100", ready="Unknown", **GPUS), "(not ready): no node of it takes pods"),
        (node("v-1", "v100", **GPUS) | {"spec": {"unschedulable": True}}, "kubectl uncordon"),
    ],
)
def test_a_node_that_no_pod_can_use_is_told(bad: dict[str, Any], told_of: str) -> None:
    found = pools(*BASE, bad)["v100"]
    assert found.startswith("failed: v-1")
    assert told_of in found


def test_a_node_that_is_away_is_no_problem_while_another_is_there() -> None:
    cordoned = node("cpu-2", "cpu") | {"spec": {"unschedulable": True}}
    assert pools(*BASE, cordoned)["cpu"] == "ok: cpu-1, cpu-2 (cordoned)"


@pytest.mark.parametrize(
    ("requests", "lacking"),
    [
        ({"cpu": "9"}, "cpu 9 (the most is 8)"),
        ({"memory": "64Gi"}, "memory 64.0 GiB (the most is 32.0 GiB)"),
        ({"nvidia.com/gpu": "8"}, "nvidia.com/gpu 8 (the most is 4)"),
    ],
)
def test_a_pod_that_no_node_of_its_pool_holds_is_told(requests: dict[str, str], lacking: str) -> None:
    held = node("v-1", "v100", memory="32Gi", **GPUS)
    assert (
        f"pod 'engine' of demo.json, which asks for {lacking}"
        in pools(*BASE, held, rayjob=template("v100", **requests))["v100"]
    )


def test_a_pool_without_nodes_fails_but_where_an_autoscaler_may_make_them() -> None:
    found = pools(BASE[0], rayjob=template("a10g", cpu="1"))
    assert found["cpu"].startswith("failed: no node has the label cloister.dev/pool=cpu")
    assert found["a10g"].startswith("not_checked: it has no node now")


def test_before_the_first_stack_no_node_needs_a_label() -> None:
    assert pools(node("a"), is_deployed=False)["node pools"].startswith("not_checked")


@pytest.mark.parametrize(
    ("version", "result"),
    [
        ("v1.30.0", Result.OK),
        ("v1.35.3+k3s1", Result.OK),
        ("v1.29.9", Result.FAILED),
        ("v0.0.0-master", Result.NOT_CHECKED),
    ],
)
def test_the_version_of_kubernetes_is_judged(version: str, result: Result) -> None:
    assert judge_version(version, "https://10.0.0.1").result == result


def operator(
    *arguments: str, version: str = "1.6.1", available: int = 1, name: str = "kuberay-operator"
) -> dict[str, Any]:
    container = {"image": "registry/operator@sha256:11", "command": ["/manager"], "args": list(arguments)}
    return {
        "metadata": {"namespace": "kuberay", "name": name, "labels": {"helm.sh/chart": f"kuberay-operator-{version}"}},
        "spec": {"template": {"spec": {"containers": [container]}}},
        "status": {"availableReplicas": available},
    }


@pytest.mark.parametrize(
    ("operators", "told_of"),
    [
        ([], "kuberay.install: helm"),
        ([operator(version="1.5.1")], "older than 1.6"),
        ([operator(available=0)], "no pod of it is available"),
        ([operator("--feature-gates=RayJobDeletionPolicy=false")], "would ever be deleted"),
        ([operator("--watch-namespace", "other")], f"add {JOBS}"),
        ([operator("--watch-namespace=other,more")], f"add {JOBS}"),
        ([operator(), operator(name="second")], "undo each other's work"),
    ],
)
def test_an_operator_that_cannot_run_the_jobs_is_told(operators: list[dict[str, Any]], told_of: str) -> None:
    found = [each.message for each in judge_operators(operators, JOBS) if each.result == Result.FAILED]
    assert any(told_of in message for message in found), found


def test_an_operator_for_this_namespace_beside_one_for_others_is_right() -> None:
    both = [operator("--watch-namespace", f"{JOBS},x"), operator("--watch-namespace=other", name="second")]
    assert [each.result for each in judge_operators(both, JOBS)] == [Result.OK]


@pytest.mark.parametrize(
    ("watched", "result"),
    [(("a,b", "c"), Result.NOT_CHECKED), (("a,b", "b"), Result.FAILED), (("a", ""), Result.FAILED)],
)
def test_where_no_namespace_is_named_operators_undo_each_other_only_in_the_same_ones(
    watched: tuple[str, str], result: Result
) -> None:
    both = [operator(*(["--watch-namespace", each] if each else []), name=each or "all") for each in watched]
    assert [each.result for each in judge_operators(both, "")] == [result, Result.OK, Result.OK]


def test_the_version_of_an_operator_without_a_chart_is_its_images() -> None:
    plain = operator(version="x")
    assert operator_version(plain) == ""
    plain["spec"]["template"]["spec"]["containers"][0]["image"] = "registry:5000/kuberay/operator:v1.6.2"
    assert operator_version(plain) == "1.6.2"


def crd(*fields: str, version: str = "v1") -> dict[str, Any]:
    spec: dict[str, Any] = {"properties": {"spec": {"properties": {name: {} for name in fields}}}}
    return {"spec": {"versions": [{"name": version, "served": True, "schema": {"openAPIV3Schema": spec}}]}}


@pytest.mark.parametrize(
    ("definition", "told_of"),
    [
        (None, "no kind RayJob"),
        (crd(version="v1alpha1"), "only as v1alpha1"),
        (crd("deletionStrategy"), "RayJob has no preRunningDeadlineSeconds"),
    ],
)
def test_definitions_that_are_too_old_are_told(definition: dict[str, Any] | None, told_of: str) -> None:
    found = judge_definition(definition)
    assert found.result == Result.FAILED
    assert told_of in found.message


def test_definitions_of_the_right_version_are_right() -> None:
    assert judge_definition(crd("preRunningDeadlineSeconds", "deletionStrategy")).result == Result.OK


def pod(**status: Any) -> dict[str, Any]:
    return {"metadata": {"name": "api-1"}, "status": status}


WAITING = {"name": "api", "state": {"waiting": {"reason": "ImagePullBackOff", "message": 'Back-off pulling "x"'}}}
UNSCHEDULABLE = {"type": "PodScheduled", "reason": "Unschedulable", "message": "0/2 nodes are available"}


def test_an_image_that_cannot_be_pulled_is_told_with_what_to_look_at() -> None:
    (problem,) = pod_problems(pod(initContainerStatuses=[WAITING]), may_wait=True)
    assert "pull secret" in problem
    assert 'Back-off pulling "x"' in problem


def test_a_pod_that_waits_for_room_is_a_problem_where_it_is_no_job() -> None:
    waiting = pod(conditions=[UNSCHEDULABLE])
    assert list(pod_problems(waiting, may_wait=False)) == ["api-1 finds no node: 0/2 nodes are available"]
    assert list(pod_problems(waiting, may_wait=True)) == []


def workload(replicas: int = 2, *, ready: int = 2, updated: int = 2, observed: int = 3) -> dict[str, Any]:
    status = {"readyReplicas": ready, "updatedReplicas": updated, "observedGeneration": observed}
    return {"metadata": {"name": "api", "generation": 3}, "spec": {"replicas": replicas}, "status": status}


def test_a_workload_is_right_once_all_its_pods_are_ready_and_new() -> None:
    assert judge_workload("Deployment", workload()).result == Result.OK
    assert judge_workload("StatefulSet", workload(0, ready=0, updated=0)).result == Result.OK


@pytest.mark.parametrize(
    ("body", "told_of"),
    [
        (workload(ready=1), "1 of 2 pods are ready"),
        (workload(updated=0), "its rollout is not through: 0 of 2 pods"),
        (workload(observed=2), "its rollout is not through"),
        (workload(0, ready=0, updated=0), "scaled it to 0 pods"),
        (workload() | {"status": {}}, "0 of 2 pods are ready"),
    ],
)
def test_a_workload_that_is_not_through_is_told(body: dict[str, Any], told_of: str) -> None:
    found = judge_workload("Deployment", body)
    assert found.result == Result.FAILED
    assert told_of in found.message


@pytest.mark.parametrize(
    ("phase", "result"),
    [
        ("Bound", Result.OK),
        ("Pending", Result.NOT_CHECKED),  # with some storage classes until a pod mounts it
        ("Lost", Result.FAILED),
        (None, Result.FAILED),
    ],
)
def test_a_claim_of_models_must_be_there(phase: str | None, result: Result) -> None:
    there = [{"metadata": {"name": "models"}, "status": {"phase": phase}}] if phase else []
    assert judge_claims(["models"], there, JOBS).result == result


POD = {"KUBERNETES_SERVICE_HOST": "10.96.0.1", "KUBERNETES_SERVICE_PORT": "443"}


def test_the_api_is_kept_from_kubernetes_and_the_reconciler_from_the_api() -> None:
    assert [(each.host, each.port) for each in shut(POD)] == [("10.96.0.1", 443), ("169.254.169.254", 80)]
    launching = POD | {"CLOISTER_LAUNCHER": "kuberay"}
    assert [(each.host, each.port) for each in shut(launching)] == [("api", 80), ("169.254.169.254", 80)]
    assert shut({}) == []


ALWAYS = Shut(name="the Kubernetes API", host="10.96.0.1", port=443)
SOMETIMES = Shut(name="the Service api", host="api", port=80, if_shut="no pod of it is ready")


@pytest.mark.parametrize(
    ("target", "way", "result"),
    [
        (ALWAYS, Way.OPEN, Result.FAILED),
        (ALWAYS, Way.SILENT, Result.OK),
        (ALWAYS, Way.REFUSED, Result.OK),
        (SOMETIMES, Way.OPEN, Result.FAILED),
        (SOMETIMES, Way.SILENT, Result.OK),
        (SOMETIMES, Way.REFUSED, Result.NOT_CHECKED),
        (SOMETIMES, Way.NO_NAME, Result.NOT_CHECKED),
    ],
)
def test_only_an_open_way_says_that_policies_are_not_enforced(target: Shut, way: Way, result: Result) -> None:
    found = judge(target, way)
    assert found.result == result
    assert ("not enforced" in found.message) == (way == Way.OPEN)


@pytest.mark.parametrize(
    ("status", "body", "result", "told_of"),
    [
        (200, {"checks": {"database": {"status": "ok"}}}, Result.OK, "database"),
        (
            200,
            {"checks": {"reconciler": {"status": "degraded", "message": "None leads."}}},
            Result.FAILED,
            "None leads.",
        ),
        (
            503,
            {"error": {}, "checks": {"schema": {"status": "failed", "message": "Old."}}},
            Result.FAILED,
            "schema: Old.",
        ),
        (404, {"error": {"message": "no"}}, Result.NOT_CHECKED, "ingress"),
        (200, {"checks": None}, Result.NOT_CHECKED, "a page to log in"),
        (502, "<html>Bad Gateway</html>", Result.FAILED, "answers 502"),
    ],
)
def test_what_readiness_says_is_told(status: int, body: object, result: Result, told_of: str) -> None:
    found = judge_readiness("https://batch.acme.example/readyz", status, json.dumps(body))
    assert found.result == result
    assert told_of in found.message
