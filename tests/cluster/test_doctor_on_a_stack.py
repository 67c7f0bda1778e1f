"""``cloister doctor`` on a running stack: cluster, pods and a batch, in one command."""

import json
import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from service.doctor.findings import Result
from tests.cluster.api import KubernetesApi
from tests.cluster.deployed import JOBS, MODEL, SERVICE
from tests.cluster.node.layout import NODES
from tests.cluster.running_batches import RunningBatches
from tests.cluster.whole_stack import WholeStack

pytestmark = pytest.mark.cluster

# The test machine has no metrics-server and enforces no network policies.
MISSING_HERE = {"metrics", "network policies"}


def doctor(
    stack: WholeStack, programs: Path, *arguments: str, **variables: str
) -> tuple[subprocess.CompletedProcess[str], list[dict[str, str]]]:
    """Run the command; return its result and its findings."""
    kubectl = {"PATH": f"{programs / 'bin'}:{os.environ['PATH']}"}
    kubeconfig = str(stack.cluster.control_plane.kubeconfig)
    command = [sys.executable, "-m", "service.cli", "doctor", "--kubeconfig", kubeconfig, "--json", *arguments]
    environment = {**os.environ, **kubectl, **variables}
    done = subprocess.run(command, env=environment, stdout=subprocess.PIPE, text=True, check=False)
    *found, counts = [json.loads(line) for line in done.stdout.splitlines()]
    assert counts["done"]
    return done, found


def test_only_the_limits_of_the_test_machine_are_failures(
    whole_stack: WholeStack, programs: Path, batches: RunningBatches
) -> None:
    # Another batch runs at the same time, and both complete.
    batches.begin()
    done, found = doctor(
        whole_stack,
        programs,
        "--namespace",
        SERVICE,
        CLOISTER_BASE_URL=whole_stack.base_url,
        CLOISTER_API_KEY=whole_stack.api_key,
    )
    assert {each["check"] for each in found if each["result"] == Result.FAILED} == MISSING_HERE, done.stdout
    right = {(each["from"], each["check"]) for each in found if each["result"] == Result.OK}
    assert {
        ("as the user of the kubeconfig", "KubeRay's operator"),
        ("in a pod of reconciler", "launcher's rights"),
        ("in a pod of reconciler", f"RayJob of the model {MODEL}"),
        ("in a pod of api", "object store"),
        ("as a client of the API", f"batch of one line, model {MODEL}"),
    } <= right
    not_enforced = {each["from"] for each in found if "policies are not enforced" in each["message"]}
    assert not_enforced == {"in a pod of reconciler", "in a pod of api"}
    assert done.returncode == 1


def test_injected_faults_are_found_with_the_settings_that_correct_them(
    whole_stack: WholeStack, programs: Path, node_api: KubernetesApi, tmp_path: Path
) -> None:
    # Nothing listens there, so no registry answers, and no traffic leaves the machine.
    missing = f"127.0.0.1:1/none@sha256:{'0' * 64}"
    values = whole_stack.deployment.values
    file = {
        **values,
        "images": {**values["images"], "ray_cuda13": {"image": missing}},
        "node_pools": {**values["node_pools"], "a10g": {"nodes": ["node-2"], "runtime_class": "nvidia"}},
        "database": {"kind": "bundled", "volume": {"storage_class": "absent"}},
        "api": {"ingress": {"host": "batch.acme.example", "controller": "nginx"}},
    }
    stack_file = tmp_path / "Pulumi.dev.yaml"
    stack_file.write_text(yaml.safe_dump({"config": {f"cloister:{key}": value for key, value in file.items()}}))
    # An address of this machine stands in for the internet.
    with socket.create_server((NODES[0].address, 0)) as internet:
        outside = f"{NODES[0].address}:{internet.getsockname()[1]}"
        report = tmp_path / "report"
        options = ["--only", "preflight", "--stack-file", str(stack_file)]
        done, records = doctor(whole_stack, programs, *options, "--report", str(report), "--external", outside)
    found = {each["check"]: f"{each['result']}: {each['message']}" for each in records}
    assert "`database.volume.storage_class`" in found["volumes of the stack"] + done.stdout
    assert "there is no RuntimeClass nvidia (`node_pools.a10g.runtime_class`)" in found["runtime class of a10g"]
    assert "no nvidia.com/gpu in Allocatable" in found["GPUs of node-2"]
    assert found["image none in a10g"].startswith("failed: on node-2: pod image-a10g-1: ErrImagePull")
    assert "there is no IngressClass nginx" in done.stdout
    assert "does not enforce them: egress and ingress of a pod with a Ray pod's labels" in found["network policies"]
    for check in ("DNS from a pod", "clock of node-1", "clock of node-2", "Kubernetes API under the policies"):
        assert found[check].startswith("ok: "), found[check]
    for source in ("api", "reconciler", "coordinator", "ray-head", "ray-worker"):
        assert f"it reaches outside of the cluster at {outside}" in done.stdout, source
    severities = [each["result"] for each in records]
    assert severities == sorted(severities, key=["failed", "warning", "not_checked", "ok"].index)
    (page,) = report.glob("*.md")
    rows = json.loads(page.with_suffix(".json").read_text())["rows"]
    assert {row["source"] for row in rows} == {"api", "reconciler", "coordinator", "ray-head", "ray-worker"}
    assert all(row["found"] == "open" for row in rows if row["expected"] == "open"), page.read_text()
    left = node_api.list("v1", "Namespace")
    assert [each for each in left if "doctor" in each["metadata"]["name"] and each["status"]["phase"] == "Active"] == []
    assert [each for each in node_api.list("v1", "Pod", JOBS) if "doctor" in each["metadata"]["name"]] == []
