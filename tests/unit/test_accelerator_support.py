"""Features of accelerators by its compute capability."""

import pytest

from ray_job.contract.accelerators import ACCELERATORS, Capability, capability_text, variant_for
from ray_job.contract.job_spec import ModelSpec


@pytest.mark.parametrize(
    ("accelerator", "argument", "value", "missing"),
    [
        ("v100", "dtype", "bfloat16", (8, 0)),
        ("v100", "dtype", "BF16", (8, 0)),
        ("v100", "dtype", "half", None),
        ("v100", "quantization", "fp8", (7, 5)),
        ("v100", "kv_cache_dtype", "fp8_e4m3", (8, 0)),
        ("v100", "quantization", "unknown", None),
        ("t4", "quantization", "fp8", None),
        ("a10g", "dtype", "bfloat16", None),
        ("cpu", "dtype", "bfloat16", None),
    ],
)
def test_missing_capability_of_an_engine_argument(
    accelerator: str, argument: str, value: str, missing: Capability | None
) -> None:
    assert ACCELERATORS[accelerator].missing_capability(argument, value) == missing


def test_supported_values_need_no_missing_capability() -> None:
    assert "bfloat16" not in ACCELERATORS["v100"].dtypes
    assert "float16" in ACCELERATORS["v100"].dtypes
    assert "bfloat16" in ACCELERATORS["cpu"].dtypes
    assert "fp8" not in ACCELERATORS["v100"].quantizations
    assert "fp8" in ACCELERATORS["a10g"].quantizations


def test_mig_slices_are_recognized_by_their_resource() -> None:
    slices = {name for name, accelerator in ACCELERATORS.items() if accelerator.is_mig}
    assert slices
    assert all("mig" in ACCELERATORS[name].resource for name in slices)
    assert not {"cpu", "v100", "h100"} & slices


def test_image_variant_follows_the_capability() -> None:
    assert [variant_for(capability) for capability in ((7, 0), (7, 5), (8, 0), (12, 0))] == [
        "v100",
        "cuda13",
        "cuda13",
        "cuda13",
    ]
    assert capability_text((8, 6)) == "8.6"


def test_engine_needs_one_gpu_per_tensor_and_pipeline_rank() -> None:
    model = ModelSpec(id="m", source="s", accelerator="a10g", tensor_parallel_size=4, pipeline_parallel_size=2)
    assert model.num_gpus == 8
