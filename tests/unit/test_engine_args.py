"""Engine arguments of a model, and vLLM's command line."""

import pytest

from ray_job.contract.job_spec import ModelSpec
from ray_job.engines.engine_args import effective_engine_args, engine_flags


def test_prefix_caching_is_on_and_chunked_prefill_is_left_to_vllm_on_a_gpu() -> None:
    args = effective_engine_args(ModelSpec(id="m", source="s", accelerator="a10g", tensor_parallel_size=2))
    assert args["enable_prefix_caching"] is True
    assert args["tensor_parallel_size"] == 2
    assert "enable_chunked_prefill" not in args


def test_chunked_prefill_is_off_on_a_cpu_and_a_whole_prompt_fits_one_step() -> None:
    args = effective_engine_args(ModelSpec(id="m", source="s", engine_args={"max_model_len": 32_768}))
    assert args["enable_chunked_prefill"] is False
    assert args["max_num_batched_tokens"] == 32_768


def test_what_the_catalogue_says_wins_over_the_defaults() -> None:
    args = effective_engine_args(ModelSpec(id="m", source="s", engine_args={"enable_prefix_caching": False}))
    assert args["enable_prefix_caching"] is False


def test_the_engine_serves_the_model_by_its_catalogue_id() -> None:
    args = effective_engine_args(ModelSpec(id="m", source="/models/m", engine_args={"served_model_name": "x"}))
    assert (args["model"], args["served_model_name"]) == ("/models/m", "m")


@pytest.mark.parametrize(
    ("args", "flags"),
    [
        ({"max_model_len": 8}, ["--max-model-len", "8"]),
        ({"enforce_eager": True}, ["--enforce-eager"]),
        ({"enable_chunked_prefill": False}, ["--no-enable-chunked-prefill"]),
        ({"quantization": None}, []),
        ({"speculative_config": {"a": 1}}, ["--speculative-config", '{"a": 1}']),
        ({"middleware": ["a", "b"]}, ["--middleware", "a", "b"]),
    ],
)
def test_engine_arguments_become_options_of_vllm(args: dict[str, object], flags: list[str]) -> None:
    assert engine_flags(args) == flags
