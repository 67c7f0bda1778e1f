"""``cloister doctor`` on a running stack: cluster, pods and a batch, in one command."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from service.doctor.findings import Result
from tests.cluster.deployed import MODEL, SERVICE
from tests.cluster.running_batches import RunningBatches
from tests.cluster.whole_stack import WholeStack

pytestmark = pytest.mark.cluster

# The test machine has no metrics-server and enforces no network policies.
MISSING_HERE = {"metrics", "network policies"}


def test_only_the_limits_of_the_test_machine_are_failures(
    whole_stack: WholeStack, programs: Path, batches: RunningBatches
) -> None:
    # Another batch runs at the same time, and both complete.
    batches.begin()
    environment = {
        **os.environ,
        "PATH": f"{programs / 'bin'}:{os.environ['PATH']}",  # kubectl
        "CLOISTER_BASE_URL": whole_stack.base_url,
        "CLOISTER_API_KEY": whole_stack.api_key,
    }
    kubeconfig = str(whole_stack.cluster.control_plane.kubeconfig)
    command = [
        sys.executable,
        "-m",
        "service.cli",
        "doctor",
        "--kubeconfig",
        kubeconfig,
        "--namespace",
        SERVICE,
        "--json",
    ]
    done = subprocess.run(command, env=environment, stdout=subprocess.PIPE, text=True, check=False)
    *found, counts = [json.loads(line) for line in done.stdout.splitlines()]
    assert counts["done"]
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
