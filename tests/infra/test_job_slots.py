"""Jobs that may run at the same time where an engine takes several nodes."""

from dataclasses import replace
from typing import Any

import pytest

from infra.capacity.job_sizes import job_slots
from service.model_catalogue import CatalogueModel
from tests.infra.ray_job_args import POOLS, model


def on_v100(**changes: Any) -> CatalogueModel:
    return model(accelerator="v100", weights_gib=15, **changes)


TWO_NODES: dict[str, Any] = {"tensor_parallel_size": 4, "pipeline_parallel_size": 2, "engine": "processor"}
ONE_NODE_MODEL = on_v100(tensor_parallel_size=4)
TWO_NODES_MODEL = on_v100(**TWO_NODES)


def slots(*models: CatalogueModel, nodes: int = 5, most: int = 8) -> dict[str, int]:
    pool = replace(POOLS["v100"], nodes=tuple(f"v-{number}" for number in range(nodes)))
    return job_slots(models, {**POOLS, "v100": pool}, most=most)


def test_engines_on_one_node_need_no_limit() -> None:
    assert slots(ONE_NODE_MODEL) == {}


@pytest.mark.parametrize(("nodes", "jobs"), [(2, 1), (3, 1), (4, 2), (5, 2), (64, 8)])
def test_all_engines_of_all_jobs_have_room(nodes: int, jobs: int) -> None:
    assert slots(ONE_NODE_MODEL, TWO_NODES_MODEL, nodes=nodes) == {"v100": jobs}


def test_the_largest_job_counts() -> None:
    assert slots(TWO_NODES_MODEL, on_v100(**TWO_NODES, concurrency=2)) == {"v100": 1}


def test_only_nodes_of_the_named_pool_count() -> None:
    few = replace(POOLS["v100"], name="few", nodes=("few-1", "few-2"))
    many = replace(POOLS["v100"], nodes=tuple(f"v-{number}" for number in range(8)))
    for pool, jobs in (("few", 1), ("v100", 4), (None, 5)):
        models = [on_v100(**TWO_NODES, node_pool=pool)]
        assert job_slots(models, {"v100": many, "few": few}, most=8) == {"v100": jobs}
