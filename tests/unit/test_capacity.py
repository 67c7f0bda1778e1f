"""Slots, GPUs and the expected start of a batch."""

import dataclasses
from typing import Any

import pytest

from ray_job.contract.job_spec import ModelSpec
from service.backends import Slots
from service.capacity import (
    AcceleratorCapacity,
    ModelCapacity,
    accelerator_capacities,
    expected_start_s,
    model_capacity,
)
from service.db.rows import ModelJobsRow, ModelQueueRow
from service.estimates import Rates
from service.model_catalogue import CatalogueModel

SMALL = CatalogueModel(spec=ModelSpec(id="small", source="x", accelerator="a10g", concurrency=2))
LARGE = CatalogueModel(spec=ModelSpec(id="large", source="x", accelerator="a10g", tensor_parallel_size=4))
RATES = Rates(row_s=0.1, input_token_s=0.001, output_token_s=0.01, other_s=60.0)
QUEUE = ModelQueueRow(model="small", batches=2, rows=100, input_tokens=20_000, output_tokens=5_000, unknown_batches=0)


def jobs(model: str = "small", **changes: Any) -> ModelJobsRow:
    values = {"accelerator": "a10g", "running": 1, "queued": 0, "gpus": 2, "engines": 2}
    return ModelJobsRow(model=model, **{**values, **changes})


def test_gpus_of_an_accelerator_are_those_of_its_largest_job_for_each_slot() -> None:
    catalogue = {model.id: model for model in (SMALL, LARGE)}
    found = accelerator_capacities(
        catalogue, [jobs(), jobs("gone", accelerator="l4", gpus=1)], Slots(default=2, by_accelerator={"a10g": 3})
    )
    assert list(found) == ["a10g", "l4"]
    assert (found["a10g"].gpus, found["a10g"].gpus_used, found["a10g"].gpus_free) == (12, 2, 10)
    assert (found["a10g"].slots, found["a10g"].slots_free, found["l4"].slots) == (3, 2, 2)


def test_work_of_a_queue_follows_from_the_measured_rates() -> None:
    found = model_capacity(SMALL, RATES, QUEUE, [jobs(), jobs("large")])
    assert (found.work_s, found.tokens, found.running, found.engines) == ((10 + 20 + 50) / 2, 25_000, 1, 2)


@pytest.mark.parametrize(
    ("rates", "unknown", "rows", "work_s"), [(Rates(), 0, 100, None), (RATES, 1, 100, None), (Rates(), 0, 0, 0.0)]
)
def test_work_without_a_measurement_is_unknown(rates: Rates, unknown: int, rows: int, work_s: float | None) -> None:
    queue = dataclasses.replace(QUEUE, rows=rows, unknown_batches=unknown)
    assert model_capacity(SMALL, rates, queue, []).work_s == work_s


OWN = ModelCapacity(
    model="small", accelerator="a10g", running=0, engines=0, batches=1, rows=1, tokens=1, work_s=40.0, other_s=60.0
)
OTHER = dataclasses.replace(OWN, model="large", work_s=100.0)
FULL = AcceleratorCapacity(accelerator="a10g", slots=2, running=2, queued=1, gpus=8, gpus_used=8)


@pytest.mark.parametrize(
    ("own", "other", "accelerator", "start_s"),
    [
        ({"engines": 1}, {}, {}, 40.0),
        ({"running": 1}, {}, {}, 100.0),
        ({}, {}, {"running": 1}, 100.0),
        ({}, {}, {}, 60 + (40 + 100) / 2),
        ({}, {"accelerator": "l4"}, {}, 60 + 40 / 2),
        ({}, {"work_s": None}, {}, None),
        ({}, {}, {"slots": 0}, None),
        ({"work_s": None}, {}, {}, None),
        ({"other_s": None}, {}, {}, None),
    ],
)
def test_expected_start_depends_on_what_waits(
    own: dict[str, Any], other: dict[str, Any], accelerator: dict[str, Any], start_s: float | None
) -> None:
    models = [dataclasses.replace(OWN, **own), dataclasses.replace(OTHER, **other)]
    assert expected_start_s(models[0], models, dataclasses.replace(FULL, **accelerator)) == start_s
