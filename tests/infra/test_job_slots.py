"""Jobs that may run at the same time where an engine takes several nodes."""

from dataclasses import replace
from typing import Any

import pytest

from infra.capacity.job_sizes import job_slots
from ray_job.contract.job_spec import ModelSpec
from tests.infra.ray_job_args import POOLS, model


def spec(**changes: Any) -> ModelSpec:
    return model(accelerator="v100", weights_gib=15, **changes).spec


ONE_NODE = spec(tensor_parallel_size=4)
TWO_NODES = spec(tensor_parallel_size=4, pipeline_parallel_size=2, engine="processor")


def slots(*models: ModelSpec, nodes: int = 5, most: int = 8) -> dict[str, int]:
    pool = replace(POOLS["v100"], nodes=tuple(f"v-{number}" for number in range(nodes)))
    return job_slots(models, {**POOLS, "v100": pool}, most=most)


def test_engines_on_one_node_need_no_limit() -> None:
    assert slots(ONE_NODE) == {}


@pytest.mark.parametrize(("nodes", "jobs"), [(2, 1), (3, 1), (4, 2), (5, 2), (64, 8)])
def test_all_engines_of_all_jobs_have_room(nodes: int, jobs: int) -> None:
    assert slots(ONE_NODE, TWO_NODES, nodes=nodes) == {"v100": jobs}


def test_the_largest_job_counts() -> None:
    assert slots(TWO_NODES, replace(TWO_NODES, concurrency=2)) == {"v100": 1}
