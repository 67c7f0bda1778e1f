"""Batches through the whole stack: OpenAI's client, API, reconciler, RayJobs, vLLM, and back to the output file."""

import base64
import json
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from ray_job.contract.rayjobs import JOB_LABEL
from service.local.demo_lines import demo_lines
from tests.cluster.api import KubernetesApi
from tests.cluster.batches import (
    chat_lines,
    done,
    events,
    job_of,
    line,
    results,
    submit,
    wait,
    wait_for_end,
)
from tests.cluster.deployed import JOBS, SERVICE
from tests.cluster.dev_stack import SECRETS
from tests.cluster.whole_stack import WholeStack
from tests.ray.job_harness import Job, chat, new_job

pytestmark = [
    pytest.mark.cluster,
    pytest.mark.timeout(1800),
    # Pulumi's Automation API leaves the event loop of a failed program to the garbage collector.
    pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning"),
]

# The lines of `make demo`, ten of them with defects that only the engine detects, filled up to 500.
LINES = [*demo_lines("demo"), *(line(f"more-{n}", chat(f"What is {n}?", max_tokens=16)) for n in range(260))]
ABSENT = "localhost/cloister/ray-cpu@sha256:" + "9" * 64
# Many minutes of work.
CANCELLED = 3_000
STARTED_S = 500


@pytest.fixture(scope="module")
def local_run(demo_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[[], dict[str, Any]]]:
    """Answers to the same lines on this machine without a cluster; the run starts before they are needed."""
    bodies = [json.loads(text)["body"] for text in LINES]
    with (
        # Ray's sockets need a short path.
        tempfile.TemporaryDirectory(prefix="cl-") as temporary,
        new_job(tmp_path_factory.mktemp("local"), Path(temporary), demo_model, bodies) as usual,
    ):
        # The number of threads of an engine in its pod: sums of floats depend on it.
        job = replace(usual, environment={**usual.environment, "OMP_NUM_THREADS": "1"})
        with job.running() as process:
            yield lambda: answers_of(job, process)


def answers_of(job: Job, process: subprocess.Popen[str]) -> dict[str, Any]:
    output, _ = process.communicate(timeout=600)
    assert process.returncode == 0, output
    custom_ids = [json.loads(text)["custom_id"] for text in LINES]
    return {custom_ids[row.line - 1]: (row.status, plain(row.body)) for row in job.rows()}


def plain(body: dict[str, Any]) -> dict[str, Any]:
    """Remove what differs in each run, such as hits of the cache, and the fingerprint, which has the model's path."""
    same = {key: value for key, value in body.items() if key not in ("id", "created", "system_fingerprint")}
    if usage := body.get("usage"):
        same["usage"] = {key: value for key, value in usage.items() if key != "prompt_tokens_details"}
    return same


def rayjobs(api: KubernetesApi) -> dict[str, dict[str, Any]]:
    """Return the RayJobs by the ids of their jobs."""
    return {each["metadata"]["labels"][JOB_LABEL]: each for each in api.list("ray.io/v1", "RayJob", JOBS)}


def until(is_so: Callable[[], bool], what: str, *, within_s: float = 60) -> None:
    end = time.monotonic() + within_s
    while not is_so():
        assert time.monotonic() < end, f"not so after {within_s} s: {what}"
        time.sleep(0.5)


def test_all_pods_run_in_the_restricted_profile(whole_stack: WholeStack, node_api: KubernetesApi) -> None:
    assert whole_stack.deployment.stack.outputs()["service_namespace"].value == SERVICE
    for name in (SERVICE, JOBS):
        namespace = node_api.find("v1", "Namespace", name)
        assert namespace is not None
        assert namespace["metadata"]["labels"]["pod-security.kubernetes.io/enforce"] == "restricted"
    phases = {pod["metadata"]["name"]: pod["status"]["phase"] for pod in node_api.list("v1", "Pod", SERVICE)}
    assert set(phases.values()) <= {"Running", "Succeeded"}, phases
    assert refused_pods(node_api, SERVICE) == []


def refused_pods(api: KubernetesApi, namespace: str) -> list[str]:
    """Return reports of controllers about refused pods. Kubelets retry failed work by themselves."""
    return [each["message"] for each in api.list("v1", "Event", namespace) if each["reason"] == "FailedCreate"]


def test_preview_shows_no_change_while_everything_runs(whole_stack: WholeStack) -> None:
    assert whole_stack.deployment.planned(refresh=True) == {}


def test_refresh_detects_drift(whole_stack: WholeStack, node_api: KubernetesApi) -> None:
    node_api.delete("policy/v1", "PodDisruptionBudget", "api", SERVICE)
    assert whole_stack.deployment.planned() == {}
    assert whole_stack.deployment.planned(refresh=True) == {"create": 1}
    whole_stack.deployment.up(refresh=True)


def test_state_has_no_secret_in_clear_text(whole_stack: WholeStack) -> None:
    engine = whole_stack.deployment.engine
    files = [path for path in engine.directory.rglob("*") if path.is_file()]
    everything = b"\0".join(path.read_bytes() for path in files)
    assert b"database-credentials" in everything
    for secret in SECRETS.values():
        assert secret[:20].encode() not in everything
        assert base64.b64encode(secret.encode()).rstrip(b"=") not in everything


def test_one_batch_is_cancelled_and_another_completes_during_a_rollout(
    whole_stack: WholeStack, node_api: KubernetesApi
) -> None:
    first = submit(whole_stack, LINES)
    second = submit(whole_stack, chat_lines(CANCELLED, tokens=256, name="second"))
    # Engines take longer to start than the service to roll, however fast the machine is.
    until(
        lambda: {job_of(whole_stack, first), job_of(whole_stack, second)} <= rayjobs(node_api).keys(),
        "both are launched",
        within_s=120,
    )
    before = templates(node_api)
    use_ray_image(whole_stack, node_api, ABSENT, jobs={"stuck_limit_s": 10})
    changed = {name for name, template in templates(node_api).items() if template != before[name]}
    assert changed == {"api", "coordinator", "reconciler"}
    keeps_what_it_has(whole_stack, second)
    batch = wait_for_end(whole_stack, first, within_s=700)
    assert batch.status == "completed"
    until(lambda: node_api.list("ray.io/v1", "RayCluster", JOBS) == [], "the Ray clusters of both are gone")
    until(lambda: node_api.list("v1", "Pod", JOBS) == [], "the pods of both are gone")
    assert {each["status"]["jobStatus"] for each in rayjobs(node_api).values()} == {"SUCCEEDED"}


def keeps_what_it_has(stack: WholeStack, batch_id: str) -> None:
    """Cancel a batch while it is running."""
    wait(stack, batch_id, lambda batch: done(batch) > 0, within_s=STARTED_S, what="its first line")
    with stack.client() as client:
        client.batches.cancel(batch_id)
    batch = wait_for_end(stack, batch_id, within_s=240)
    assert batch.status == "cancelled"
    assert 0 < done(batch) < CANCELLED
    assert len({each["custom_id"] for each in results(stack, batch)}) == done(batch)
    assert [event.type for event in events(stack, batch_id)][-2:] == ["batch.cancelling", "batch.cancelled"]


def templates(api: KubernetesApi) -> dict[str, Any]:
    """Return the pod template of each Deployment and StatefulSet."""
    kinds = ("Deployment", "StatefulSet")
    return {
        each["metadata"]["name"]: each["spec"]["template"]
        for kind in kinds
        for each in api.list("apps/v1", kind, SERVICE)
    }


def use_ray_image(stack: WholeStack, api: KubernetesApi, reference: str, *, jobs: dict[str, Any]) -> None:
    """Change the image of Ray and the quota of jobs, and return when no process uses the old values."""
    images = stack.deployment.values["images"] | {"ray_cpu": {"image": reference}}
    stack.deployment.values |= {"images": images, "jobs": jobs}
    stack.deployment.up()
    # A reconciler leads until it has stopped, and launches jobs with the settings it has.
    until(lambda: not is_rolling(api), "the pods of before are gone", within_s=180)


def is_rolling(api: KubernetesApi) -> bool:
    return any("deletionTimestamp" in each["metadata"] for each in api.list("v1", "Pod", SERVICE))


def test_batch_with_missing_image_fails_within_minutes_with_the_reason(
    whole_stack: WholeStack, node_api: KubernetesApi, local_run: Callable[[], dict[str, Any]]
) -> None:
    # It uses the processors while this test only waits.
    del local_run
    # Running since the test before.
    assert whole_stack.deployment.values["images"]["ray_cpu"]["image"] == ABSENT
    before = rayjobs(node_api).keys()
    batch_id = submit(whole_stack, chat_lines(3, tokens=4, name="imageless"))
    try:
        batch = wait_for_end(whole_stack, batch_id, within_s=240)
    finally:
        use_ray_image(whole_stack, node_api, whole_stack.ray_image, jobs={})
    assert batch.status == "failed"
    (error,) = (batch.errors.data or []) if batch.errors else []
    assert error.message is not None
    assert "ErrImagePull" in error.message or "ImagePullBackOff" in error.message
    assert "check the image's reference" in error.message
    until(lambda: rayjobs(node_api).keys() <= before, "its RayJob is gone")


def test_answers_equal_those_of_a_local_run(whole_stack: WholeStack, local_run: Callable[[], dict[str, Any]]) -> None:
    with whole_stack.client() as client:
        (batch,) = [each for each in client.batches.list() if each.request_counts.total == len(LINES)]
    found = results(whole_stack, batch)
    answers = {each["custom_id"]: (each["response"]["status_code"], plain(each["response"]["body"])) for each in found}
    assert len(found) == len(answers) == len(LINES)
    assert answers == local_run()
