"""Templates and specs of the jobs in the tests of the KubeRay launcher."""

import copy
import time
from collections.abc import Callable
from typing import Any

from ray_job.contract.job_spec import JobSpec, ModelSpec

TOKEN = "token-of-a-job"
TEMPLATE: dict[str, Any] = {
    "metadata": {"namespace": "jobs"},
    "spec": {
        "entrypoint": "sleep 600",
        "preRunningDeadlineSeconds": 900,
        "deletionStrategy": {"deletionRules": [{"policy": "DeleteSelf", "condition": {"ttlSeconds": 600}}]},
        "rayClusterSpec": {
            "headGroupSpec": {
                "template": {
                    "spec": {
                        "containers": [{"env": []}],
                        "volumes": [{"name": "job-token", "secret": {"secretName": "set-by-the-launcher"}}],
                    }
                }
            }
        },
    },
}
GPU_TEMPLATE = copy.deepcopy(TEMPLATE)
GPU_TEMPLATE["spec"]["rayClusterSpec"]["workerGroupSpecs"] = [
    {
        "groupName": "v100",
        "template": {"spec": {"containers": [{"name": "ray", "resources": {"limits": {"nvidia.com/gpu": "1"}}}]}},
    }
]
TEMPLATES = {"demo": TEMPLATE, "large": GPU_TEMPLATE}


def spec(number: int = 1, *, model: str = "demo") -> JobSpec:
    return JobSpec(
        job_id=f"job_{number:032x}",
        coordinator_url="http://coordinator.secret-name:8100",
        model=ModelSpec(id=model, source="x"),
    )


def until(done: Callable[[], bool], *, within_s: float = 10) -> None:
    end = time.monotonic() + within_s
    while not done():
        assert time.monotonic() < end
        time.sleep(0.01)
