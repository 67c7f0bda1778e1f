"""Engine arguments of a model, and vLLM's command line."""

import pytest

from ray_job.contract.job_spec import ModelSpec
from ray_job.engines.engine_args import effective_engine_args, engine_flags, server_args


def test_gpu_gets_prefix_caching_and_vllms_default_for_chunked_prefill() -> None:
    args = effective_engine_args(ModelSpec(id="m", source="s", accelerator="a10g", tensor_parallel_size=2))
    assert args["enable_prefix_caching"] is True
    assert args["tensor_parallel_size"] == 2
    assert "enable_chunked_prefill" not in args


def test_cpu_prefills_a_whole_prompt_in_one_step() -> None:
    args = effective_engine_args(ModelSpec(id="m", source="s", engine_args={"max_model_len": 32_768}))
    assert args["enable_chunked_prefill"] is False
    assert args["max_num_batched_tokens"] == 32_768


def test_engine_args_of_the_catalogue_override_defaults() -> None:
    args = effective_engine_args(ModelSpec(id="m", source="s", engine_args={"enable_prefix_caching": False}))
    assert args["enable_prefix_caching"] is False


def test_engine_serves_the_model_under_its_catalogue_id() -> None:
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
def test_engine_arguments_are_converted_to_command_line_options(args: dict[str, object], flags: list[str]) -> None:
    assert engine_flags(args) == flags


def test_server_reports_cached_tokens_unless_the_model_says_otherwise() -> None:
    model = ModelSpec(id="m", source="s")
    assert server_args(model) == {**effective_engine_args(model), "enable_prompt_tokens_details": True}
    quiet = ModelSpec(id="m", source="s", engine_args={"enable_prompt_tokens_details": False})
    assert server_args(quiet)["enable_prompt_tokens_details"] is False
