"""Small batches on warm engines of a whole stack, and the end of their pods."""

import sys
import time

import pytest

from ray_job.contract.rayjobs import rayjob_name
from tests.cluster.api import KubernetesApi
from tests.cluster.batches import chat_lines, events, job_of, submit, wait, wait_for_end
from tests.cluster.deployed import JOBS
from tests.cluster.whole_stack import KEEP_WARM_S, WARM, WholeStack

pytestmark = [
    pytest.mark.cluster,
    pytest.mark.timeout(900),
    pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning"),
]

LINES = 10
WARM_BATCH_S = 8
# KubeRay removes the pods, and the kubelet ends them.
GONE_AFTER_S = KEEP_WARM_S + 30


def lines(name: str) -> list[str]:
    return [text.replace('"model": "demo"', f'"model": "{WARM}"') for text in chat_lines(LINES, tokens=16, name=name)]


def test_second_batch_runs_on_warm_engines_and_pods_go_after_the_last(
    whole_stack: WholeStack, node_api: KubernetesApi, capsys: pytest.CaptureFixture[str]
) -> None:
    cold = submit(whole_stack, lines("cold"))
    wait(whole_stack, cold, lambda _: job_of(whole_stack, cold) is not None, within_s=60, what="a job")
    job_id = job_of(whole_stack, cold)
    assert job_id is not None
    assert wait_for_end(whole_stack, cold, within_s=300).status == "completed"
    began = time.monotonic()
    warm = submit(whole_stack, lines("warm"))
    assert wait_for_end(whole_stack, warm, within_s=120).status == "completed"
    ended = time.monotonic()
    for each in (cold, warm):
        assert {event.data.get("job_id") for event in events(whole_stack, each)} - {None} == {job_id}
    prefix = rayjob_name(job_id)
    while any(pod["metadata"]["name"].startswith(prefix) for pod in node_api.list("v1", "Pod", JOBS)):
        assert time.monotonic() - ended < GONE_AFTER_S + 60, "the pods of the job are still there"
        time.sleep(0.5)
    gone = time.monotonic()
    with capsys.disabled():
        sys.stdout.write(f"\nwarm batch: {ended - began:.1f} s; its pods were gone {gone - ended:.1f} s later\n")
    assert ended - began <= WARM_BATCH_S
    assert KEEP_WARM_S - 5 <= gone - ended <= GONE_AFTER_S
