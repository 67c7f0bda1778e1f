"""Contract of all launchers: the fake, the Ray Jobs API of a small real Ray, and KubeRay's RayJobs.

The last one talks to a stand-in for Kubernetes: see ``kubernetes_stand_in``.
"""

import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil
import pytest

from ray_job.contract.job_spec import JobSpec, ModelSpec
from service.adapters.kuberay_launcher import KubeRayLauncher
from service.adapters.memory_launcher import MemoryLauncher
from service.adapters.ray_jobs_launcher import RayJobsLauncher, last_words
from service.adapters.rayjobs_api import RayJobsApi, open_client
from service.errors import LauncherError
from service.local.ray_head import free_ports
from service.ports import JobState, JobStatus, Launcher
from tests.contract.kubernetes_stand_in import kubeconfig, kubernetes_stand_in

TOKEN = "5d2f0c9e8b7a4c61a3f0d4e5b6978812"
JOB_TOKEN = "token-of-a-job"

# A job that acts by the source of its model. Each run appends its token to the file in its coordinator's URL.
PROGRAM = """
import json, os, sys, time
spec = json.loads(os.environ["CLOISTER_JOB_SPEC"])
token = os.environ.get("CLOISTER_JOB_TOKEN") or open(os.environ["CLOISTER_JOB_TOKEN_FILE"]).read()
with open(spec["coordinator_url"], "a") as file:
    file.write(token + "\\n")
if spec["model"]["source"] == "runs":
    time.sleep(600)
if spec["model"]["source"] == "fails":
    sys.exit("\\x1b[31mEngineUnavailableError:\\x1b[0m no such model directory")
if spec["model"]["source"] == "has-no-model":
    print("NoModelError: no such model", flush=True)
    sys.exit(4)
"""


@contextmanager
def ray_head(directory: Path) -> Iterator[str]:
    port, gcs_port, agent_port, client_port = free_ports(4)
    options = {
        "port": gcs_port,
        "node-ip-address": "127.0.0.1",
        "temp-dir": directory,
        "dashboard-host": "127.0.0.1",
        "dashboard-port": port,
        "dashboard-agent-listen-port": agent_port,
        "ray-client-server-port": client_port,
        "num-cpus": 2,
        "object-store-memory": 80_000_000,
    }
    arguments = [f"--{name}={value}" for name, value in options.items()]
    command = [sys.executable, "-m", "ray.scripts.scripts", "start", "--head", "--block", "--disable-usage-stats"]
    token = directory / "token"
    token.write_text(TOKEN)
    environment = {name: value for name, value in os.environ.items() if not name.startswith("RAY_")}
    environment |= {
        "RAY_AUTH_MODE": "token",
        "RAY_AUTH_TOKEN_PATH": str(token),
        "RAY_JOB_STOP_WAIT_TIME_S": "1",
        "RAY_USAGE_STATS_ENABLED": "0",
    }
    with (directory / "head.log").open("wb") as log:
        head = subprocess.Popen([*command, *arguments], env=environment, stdout=log, stderr=log)
    try:
        wait_for_jobs_api(f"http://127.0.0.1:{port}", head, directory)
        yield f"http://127.0.0.1:{port}"
    finally:
        processes = [*psutil.Process(head.pid).children(recursive=True)]
        head.terminate()
        head.wait(30)
        for process in psutil.wait_procs(processes, timeout=10)[1]:
            process.kill()


def wait_for_jobs_api(address: str, head: subprocess.Popen[bytes], directory: Path) -> None:
    """Wait until a job is accepted: Ray's Jobs API answers before it has an agent that runs jobs."""
    end = time.monotonic() + 120
    with RayJobsLauncher(address, entrypoint="true", token=TOKEN) as launcher:
        while True:
            assert head.poll() is None, (directory / "head.log").read_text()
            try:
                launcher.launch(spec("first", directory / "runs"), JOB_TOKEN)
            except LauncherError:
                assert time.monotonic() < end
                time.sleep(0.3)
            else:
                return


@pytest.fixture(scope="module")
def ray_address() -> Iterator[str]:
    # Not tmp_path: Ray's socket paths must stay below 107 characters.
    directory = Path(tempfile.mkdtemp(prefix="ray", dir="/tmp"))
    try:
        with ray_head(directory) as address:
            yield address
    finally:
        shutil.rmtree(directory, ignore_errors=True)


@pytest.fixture(params=["memory", "kuberay", pytest.param("ray", marks=pytest.mark.ray)])
def launcher(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Launcher]:
    if request.param == "memory":
        memory = MemoryLauncher(lambda job: fake_work(job, memory.tokens[job.job_id]))
        yield memory
        return
    program = tmp_path / "program.py"
    program.write_text(PROGRAM)
    entrypoint = f"{sys.executable} {program}"
    if request.param == "kuberay":
        with kubernetes_stand_in(TOKEN) as server:
            path = tmp_path / "kubeconfig"
            path.write_text(kubeconfig(server, TOKEN))
            templates = {"demo": template(entrypoint, token_directory=tmp_path / "mounted")}
            with KubeRayLauncher(RayJobsApi(open_client(path), "jobs"), templates) as kuberay:
                yield kuberay
        return
    address = request.getfixturevalue("ray_address")
    with RayJobsLauncher(address, entrypoint=entrypoint, token=TOKEN) as opened:
        yield opened


def template(entrypoint: str, *, token_directory: Path) -> dict[str, Any]:
    """Return a RayJob template with the fields that the stand-in uses."""
    container = {
        "name": "ray-head",
        "env": [{"name": "CLOISTER_JOB_TOKEN_FILE", "value": str(token_directory / "token")}],
        "volumeMounts": [{"name": "job-token", "mountPath": str(token_directory)}],
    }
    volume = {"name": "job-token", "secret": {"secretName": "set-by-the-launcher"}}
    head = {"spec": {"containers": [container], "volumes": [volume]}}
    return {
        "apiVersion": "ray.io/v1",
        "kind": "RayJob",
        "metadata": {"namespace": "jobs"},
        "spec": {"entrypoint": entrypoint, "rayClusterSpec": {"headGroupSpec": {"template": head}}},
    }


def fake_work(spec: JobSpec, token: str) -> JobStatus:
    with Path(spec.coordinator_url).open("a") as file:
        file.write(f"{token}\n")
    if spec.model.source == "fails":
        return JobStatus(state=JobState.FAILED, message="EngineUnavailableError: no such model directory")
    if spec.model.source == "has-no-model":
        return JobStatus(state=JobState.FAILED, message="NoModelError: no such model", is_final=True)
    return JobStatus(state=JobState.RUNNING if spec.model.source == "runs" else JobState.SUCCEEDED)


@pytest.fixture
def runs(tmp_path: Path) -> Path:
    return tmp_path / "runs"


def spec(source: str, runs: Path) -> JobSpec:
    return JobSpec(
        job_id=f"{source}-{runs.parent.name}",  # the Ray of the fixture outlives the test
        coordinator_url=str(runs),
        model=ModelSpec(id="demo", source=source),
    )


def until(launcher: Launcher, job_id: str, *states: JobState) -> JobStatus:
    end = time.monotonic() + 60
    while (status := launcher.status(job_id)).state not in states:
        assert time.monotonic() < end, status
        time.sleep(0.2)
    return status


OVER = (JobState.SUCCEEDED, JobState.FAILED, JobState.STOPPED)


def test_job_receives_its_spec_and_token(launcher: Launcher, runs: Path) -> None:
    job = spec("works", runs)
    launcher.launch(job, JOB_TOKEN)
    assert until(launcher, job.job_id, *OVER) == JobStatus(state=JobState.SUCCEEDED)
    assert runs.read_text() == f"{JOB_TOKEN}\n"


def test_repeated_launch_has_no_effect(launcher: Launcher, runs: Path) -> None:
    job = spec("works", runs)
    launcher.launch(job, JOB_TOKEN)
    launcher.launch(job, JOB_TOKEN)
    until(launcher, job.job_id, *OVER)
    launcher.launch(job, JOB_TOKEN)
    assert launcher.status(job.job_id).state is JobState.SUCCEEDED
    assert runs.read_text() == f"{JOB_TOKEN}\n"


def test_launched_job_is_not_missing(launcher: Launcher, runs: Path) -> None:
    for number in range(3):
        job = replace(spec("works", runs), job_id=f"works-{runs.parent.name}-{number}")
        launcher.launch(job, JOB_TOKEN)
        assert launcher.status(job.job_id).state is not JobState.MISSING


def test_failed_job_has_the_end_of_its_log(launcher: Launcher, runs: Path) -> None:
    job = spec("fails", runs)
    launcher.launch(job, JOB_TOKEN)
    status = until(launcher, job.job_id, *OVER)
    assert status.state is JobState.FAILED
    assert "EngineUnavailableError: no such model directory" in status.message  # Ray writes to the same log
    assert not status.is_final


def test_job_without_its_model_fails_finally(launcher: Launcher, runs: Path) -> None:
    job = spec("has-no-model", runs)
    launcher.launch(job, JOB_TOKEN)
    status = until(launcher, job.job_id, *OVER)
    assert (status.state, status.is_final) == (JobState.FAILED, True)
    assert status.message.endswith("NoModelError: no such model")


def test_job_can_be_stopped_twice(launcher: Launcher, runs: Path) -> None:
    job = spec("runs", runs)
    launcher.launch(job, JOB_TOKEN)
    until(launcher, job.job_id, JobState.RUNNING)
    launcher.stop(job.job_id)
    # On Kubernetes a stopped job leaves nothing behind.
    ended = until(launcher, job.job_id, *OVER, JobState.MISSING)
    assert ended.state in (JobState.STOPPED, JobState.MISSING)
    launcher.stop(job.job_id)
    assert launcher.status(job.job_id) == ended


def test_stop_of_an_ended_job_has_no_effect(launcher: Launcher, runs: Path) -> None:
    job = spec("works", runs)
    launcher.launch(job, JOB_TOKEN)
    until(launcher, job.job_id, *OVER)
    launcher.stop(job.job_id)
    assert launcher.status(job.job_id).state is JobState.SUCCEEDED


def test_unknown_job_is_missing_and_can_be_stopped(launcher: Launcher) -> None:
    assert launcher.status("never-1") == JobStatus(state=JobState.MISSING)
    launcher.stop("never-1")


@pytest.mark.parametrize("call", ["launch", "status", "stop"])
def test_unreachable_ray_raises_launcher_error(call: str, tmp_path: Path) -> None:
    job = spec("works", tmp_path / "runs")
    with (
        RayJobsLauncher(f"http://127.0.0.1:{free_ports(1)[0]}", entrypoint="true") as launcher,
        pytest.raises(LauncherError, match="cannot reach Ray at http://127"),
    ):
        getattr(launcher, call)(*((job, JOB_TOKEN) if call == "launch" else (job.job_id,)))


@pytest.mark.ray
@pytest.mark.parametrize("call", ["launch", "status", "stop"])
def test_wrong_token_is_not_reported_as_a_missing_job(call: str, ray_address: str, tmp_path: Path) -> None:
    job = spec("works", tmp_path / "runs")
    with (
        RayJobsLauncher(ray_address, entrypoint="true", token="wrong") as launcher,
        pytest.raises(LauncherError, match=r"answered 40[13].*RAY_AUTH_TOKEN_PATH"),
    ):
        getattr(launcher, call)(*((job, JOB_TOKEN) if call == "launch" else (job.job_id,)))


def test_reason_logged_by_the_job_replaces_the_rest_of_the_log() -> None:
    assert (
        last_words("Ray logs a lot\nERROR ray_job no model is there:\n  upload it\n")
        == "no model is there:\n  upload it"
    )


def test_last_words_are_short_and_have_no_control_characters() -> None:
    log = "".join(f"line {number}\r\n\n" for number in range(100)) + "\x1b[1mthe\x07 end\x1b[0m\n"
    assert last_words(log).splitlines() == [*(f"line {number}" for number in range(86, 100)), "the end"]
    assert len(last_words("x" * 10_000)) == 2_000


def test_model_that_can_run_is_not_refused(launcher: Launcher) -> None:
    assert launcher.refusal(ModelSpec(id="demo", source="x")) == ""
