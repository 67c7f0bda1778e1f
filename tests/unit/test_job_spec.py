"""The job spec crosses a process boundary unchanged; a wrong one is reported."""

import json

import pytest

from ray_job.contract.job_spec import JobSpec, JobSpecError, ModelSpec

SPEC = JobSpec(
    job_id="job_1",
    coordinator_url="http://coordinator:8100",
    model=ModelSpec(id="m", source="/models/m", engine_args={"max_model_len": 8}, accelerator="a10g"),
)


def test_spec_survives_json() -> None:
    assert JobSpec.from_json(SPEC.to_json()) == SPEC


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "cannot read the job spec in CLOISTER_JOB_SPEC"),
        ("[]", "cannot read the job spec"),
        (json.dumps({**json.loads(SPEC.to_json()), "version": 7}), "version 7, this image reads 2"),
        (json.dumps({**json.loads(SPEC.to_json()), "colour": 1}), "colour"),
    ],
)
def test_unreadable_spec_is_reported(text: str, message: str) -> None:
    with pytest.raises(JobSpecError, match=message):
        JobSpec.from_json(text)


def test_engine_takes_one_gpu_per_tensor_and_pipeline_rank() -> None:
    assert (
        ModelSpec(id="m", source="s", accelerator="a10g", tensor_parallel_size=2, pipeline_parallel_size=2).num_gpus
        == 4
    )
    assert ModelSpec(id="m", source="s", tensor_parallel_size=2).num_gpus == 0
