"""Batches as RayJobs: the reconciler's own process, real Postgres, and the stand-in for Kubernetes and KubeRay."""

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from ray_job.contract.job_spec import ModelSpec
from ray_job.contract.rayjobs import TOKEN_KEY, model_fingerprint, template_key
from tests.contract.kubernetes_stand_in import ApiServer, kubeconfig, kubernetes_stand_in
from tests.integration.reconciler_harness import Stack, line

pytestmark = pytest.mark.slow

TOKEN = "b81c"
ROOT = Path(__file__).parents[2]
# Finds its id by its token, answers all lines of its domain, and writes its id to a file.
JOB = """
import os, pathlib, types
from ray_job.contract.job_spec import JobSpec
from service.adapters.directory_object_store import DirectoryObjectStore
from service.coordinator.leasing import authenticate
from service.db import open_pool
from service.traces import OFF
from tests.integration.reconciler_harness import Job
spec = JobSpec.from_json(os.environ["CLOISTER_JOB_SPEC"])
with open_pool(os.environ["DATABASE"]) as pool:
    token = pathlib.Path(os.environ["TOKEN"]).read_text()
    assert authenticate(pool, token).id == spec.job_id
    store = DirectoryObjectStore(pathlib.Path(os.environ["OBJECTS"]))
    backends = types.SimpleNamespace(traces=OFF)
    Job(types.SimpleNamespace(pool=pool, store=store, backends=backends), spec.job_id).serve()
with open(os.environ["RUNS"], "a") as file:
    file.write(spec.job_id + "\\n")
"""


@pytest.fixture
def server() -> Iterator[ApiServer]:
    with kubernetes_stand_in(TOKEN) as opened:
        yield opened


@pytest.fixture
def environment(server: ApiServer, database_url: str, tmp_path: Path, receipt_key_file: str) -> dict[str, str]:
    (tmp_path / "job.py").write_text(JOB)
    (tmp_path / "models.yaml").write_text("models: [{id: demo, source: /models/demo}]")
    (tmp_path / "kubeconfig").write_text(kubeconfig(server, TOKEN))
    variables = {
        "RUNS": str(tmp_path / "runs"),
        "PYTHONPATH": str(ROOT),
        "DATABASE": database_url,
        "OBJECTS": str(tmp_path / "objects"),
        "TOKEN": str(tmp_path / "token" / TOKEN_KEY),
    }
    head: dict[str, Any] = {"name": "ray", "env": [{"name": name, "value": value} for name, value in variables.items()]}
    head["volumeMounts"] = [{"name": "job-token", "mountPath": str(tmp_path / "token")}]
    token = {"name": "job-token", "secret": {"secretName": "set-by-the-launcher"}}
    fingerprint = model_fingerprint(ModelSpec(id="demo", source="/models/demo"))
    template = {
        "apiVersion": "ray.io/v1",
        "kind": "RayJob",
        "metadata": {"namespace": "jobs", "annotations": {"cloister.dev/model-fingerprint": fingerprint}},
        "spec": {
            "entrypoint": f"{sys.executable} {tmp_path / 'job.py'}",
            "rayClusterSpec": {"headGroupSpec": {"template": {"spec": {"containers": [head], "volumes": [token]}}}},
        },
    }
    (tmp_path / template_key("demo")).write_text(json.dumps(template))
    return {
        **os.environ,
        "CLOISTER_DATABASE_URL": database_url,
        "CLOISTER_OBJECT_STORE": (tmp_path / "objects").as_uri(),
        "CLOISTER_MODELS": str(tmp_path / "models.yaml"),
        "CLOISTER_LAUNCHER": "kuberay",
        "CLOISTER_MAX_RUNNING_JOBS": "1",  # the stand-in has one directory for tokens
        "CLOISTER_KUBERNETES_NAMESPACE": "jobs",
        "CLOISTER_RAY_JOB_TEMPLATES": str(tmp_path),
        "CLOISTER_KUBECONFIG": str(tmp_path / "kubeconfig"),
        "CLOISTER_RECEIPT_KEY_FILE": receipt_key_file,
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
        stack.create(line(1), batch_id=batch_id, project=f"project of {batch_id}")
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
    assert died == [-9, -9]
    assert last == 0
    assert (tmp_path / "runs").read_text().split() == [job["id"] for job in stack.jobs()]
    assert len(stack.jobs()) == sum(kind == "ADDED" for _, kind, _ in server.cluster.history) == len(batches)
