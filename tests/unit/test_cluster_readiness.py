"""What `pulumi up` takes for ready in the tests on a cluster, and which provider it uses there."""

import logging
from pathlib import Path
from typing import Any

import pytest

from tests.cluster.engine import Engine, has_real_provider
from tests.cluster.readiness import pod_problem, unready

NOBODY: Any = None  # no API server is asked


def workload(kind: str, **status: int) -> dict[str, Any]:
    seen = {"observedGeneration": 3, "replicas": 2, "updatedReplicas": 2, "availableReplicas": 2, "readyReplicas": 2}
    return {"kind": kind, "metadata": {"generation": 3}, "spec": {"replicas": 2}, "status": seen | status}


@pytest.mark.parametrize("kind", ["Deployment", "StatefulSet"])
@pytest.mark.parametrize(
    ("status", "expected"),
    [
        ({}, ""),
        ({"observedGeneration": 2}, "its controller has not looked at it yet"),
        ({"updatedReplicas": 1}, "updatedReplicas is 1 of 2"),
        ({"replicas": 3}, "1 old pods are still there"),
        ({"availableReplicas": 1, "readyReplicas": 1}, "Replicas is 1 of 2"),
    ],
)
def test_a_rollout_is_over_when_all_pods_are_new_and_ready(kind: str, status: dict[str, int], expected: str) -> None:
    found = unready(NOBODY, workload(kind, **status))
    assert expected in found
    assert bool(found) == bool(expected)


@pytest.mark.parametrize(
    ("live", "is_ready"),
    [
        ({}, False),
        ({"kind": "Job", "status": {"conditions": [{"type": "Complete", "status": "True"}]}}, True),
        ({"kind": "Job", "status": {"conditions": [{"type": "Failed", "status": "True"}]}}, False),
        ({"kind": "PersistentVolumeClaim", "status": {"phase": "Pending"}}, False),
        ({"kind": "PersistentVolumeClaim", "status": {"phase": "Bound"}}, True),
        ({"kind": "Service", "spec": {}}, True),
        ({"kind": "ConfigMap", "data": {}}, True),
    ],
)
def test_other_kinds_are_ready_in_their_own_way(live: dict[str, Any], *, is_ready: bool) -> None:
    assert (unready(NOBODY, live) == "") == is_ready


def test_why_a_pod_is_not_ready_is_told() -> None:
    waiting = {"name": "api", "state": {"waiting": {"reason": "ImagePullBackOff", "message": "no such image"}}}
    assert pod_problem({"status": {"phase": "Pending", "containerStatuses": [waiting]}}) == (
        "Pending, api waiting ImagePullBackOff no such image"
    )
    assert pod_problem({"status": {"conditions": [{"type": "Ready", "status": "True"}]}}) == ""


def test_the_real_provider_is_used_where_it_is_on_path(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    assert not has_real_provider(str(tmp_path))
    assert "the stand-in, because pulumi-resource-kubernetes is not on PATH" in caplog.text
    program = tmp_path / "pulumi-resource-kubernetes"
    program.touch(mode=0o755)
    assert has_real_provider(str(tmp_path))
    assert str(program) in caplog.text


@pytest.mark.parametrize(("port", "expected"), [(None, None), (4711, "kubernetes:4711")])
def test_only_a_stand_in_is_named_to_the_engine(port: int | None, expected: str | None, tmp_path: Path) -> None:
    options = Engine(directory=tmp_path, programs=Path("/nowhere"), provider_port=port).environment()
    assert options.get("PULUMI_DEBUG_PROVIDERS") == expected
