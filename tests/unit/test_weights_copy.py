"""The variable that describes a model to copy."""

import dataclasses
import json

import pytest

from ray_job.contract.job_spec import JobSpecError, ObjectStoreLocation
from ray_job.contract.weights import WeightsCopy

COPY = WeightsCopy(
    object_store=ObjectStoreLocation(kind="s3", bucket="b"),
    prefix="models/demo/",
    directory="/models/demo",
    whole=True,
    volume_gib=18,
    engine_volume_gib=20,
    load_format="auto",
)


def test_copy_is_read_from_json() -> None:
    assert WeightsCopy.from_json(json.dumps(dataclasses.asdict(COPY))) == COPY


@pytest.mark.parametrize(
    "text", ["", "[]", "{}", '{"object_store": {"kind": "s3"}}', '{"object_store": {"colour": 1}}']
)
def test_invalid_copy_is_rejected(text: str) -> None:
    with pytest.raises(JobSpecError, match="cannot read CLOISTER_WEIGHTS"):
        WeightsCopy.from_json(text)
