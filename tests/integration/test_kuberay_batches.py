"""Batches as RayJobs: the reconciler's own process, real Postgres, and the stand-in for Kubernetes and KubeRay."""

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from ray_job.contract.job_spec import ModelSpec
from ray_job.contract.rayjobs import model_fingerprint, template_key
from tests.contract.kubernetes_stand_in import ApiServer, kubeconfig, kubernetes_stand_in
from tests.integration.reconciler_harness import Stack, line

pytestmark = pytest.mark.slow

TOKEN = "b81c"
ROOT = Path(__file__).parents[2]
# Commits the only line of its batch, and writes its own name to a file.
JOB = """
import json, os, pathlib
from ray_job.contract.job_spec import JobSpec
from service.adapters.directory_object_store import DirectoryObjectStore
from tests.integration.reconciler_harness import commit
spec = JobSpec.from_json(os.environ["CLOISTER_JOB_SPEC"])
commit(DirectoryObjectStore(pathlib.Path(spec.object_store.root)), spec.batch_id, 1)
with open(os.environ["RUNS"], "a") as file:
    file.write(spec.job_id + "\\n")
"""


@pytest.fixture
def server() -> Iterator[ApiServer]:
    with kubernetes_stand_in(TOKEN) as opened:
        yield opened


@pytest.fixture
def environment(server: ApiServer, database_url: str, tmp_path: Path) -> dict[str, str]:
    (tmp_path / "job.py").write_text(JOB)
    (tmp_path / "models.yaml").write_text("models: [{id: demo, source: /models/demo}]")
    (tmp_path / "kubeconfig").write_text(kubeconfig(server, TOKEN))
    variables = {"RUNS": str(tmp_path / "runs"), "PYTHONPATH": str(ROOT)}
    head = {"name": "ray", "env": [{"name": name, "value": value} for name, value in variables.items()]}
    fingerprint = model_fingerprint(ModelSpec(id="demo", source="/models/demo"))
    template = {
        "apiVersion": "ray.io/v1",
        "kind": "RayJob",
        "metadata": {"namespace": "jobs", "annotations": {"cloister.dev/model-fingerprint": fingerprint}},
        "spec": {
            "entrypoint": f"{sys.executable} {tmp_path / 'job.py'}",
            "rayClusterSpec": {"headGroupSpec": {"template": {"spec": {"containers": [head]}}}},
        },
    }
    (tmp_path / template_key("demo")).write_text(json.dumps(template))
    return {
        **os.environ,
        "CLOISTER_DATABASE_URL": database_url,
        "CLOISTER_OBJECT_STORE": (tmp_path / "objects").as_uri(),
        "CLOISTER_MODELS": str(tmp_path / "models.yaml"),
        "CLOISTER_LAUNCHER": "kuberay",
        "CLOISTER_KUBERNETES_NAMESPACE": "jobs",
        "CLOISTER_RAY_JOB_TEMPLATES": str(tmp_path),
        "CLOISTER_KUBECONFIG": str(tmp_path / "kubeconfig"),
    }


def until(done: Callable[[], bool]) -> None:
    end = time.monotonic() + 60
    while not done():
        assert time.monotonic() < end
        time.sleep(0.02)


# The process starts three times, a second each.
def test_reconciler_killed_during_a_launch_leaves_no_second_job(
    server: ApiServer, environment: dict[str, str], stack: Stack, tmp_path: Path
) -> None:
    batches = [f"batch_{number:032x}" for number in range(2)]
    for batch_id in batches:
        stack.create(line(1), batch_id=batch_id)
    processes: list[subprocess.Popen[bytes]] = []
    # The RayJob exists, the request is not answered, and nothing is recorded yet.
    server.cluster.on_create = lambda _: processes[-1].kill()
    try:
        while not all(stack.batch(batch_id)["status"] == "completed" for batch_id in batches):
            processes.append(subprocess.Popen([sys.executable, "-m", "service.reconciler"], env=environment, cwd=ROOT))
            until(
                lambda: (
                    processes[-1].poll() is not None
                    or all(stack.batch(batch_id)["status"] == "completed" for batch_id in batches)
                )
            )
            assert processes[-1].poll() in (None, -9)
    finally:
        processes[-1].terminate()
        processes[-1].wait()
    *died, last = [process.returncode for process in processes]
    assert died in ([-9], [-9, -9])  # one kill may hit both launches
    assert last == 0
    assert sorted((tmp_path / "runs").read_text().split()) == [f"{batch_id}-1" for batch_id in batches]
    assert sum(kind == "ADDED" for _, kind, _ in server.cluster.history) == len(batches)
