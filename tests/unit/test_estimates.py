"""Estimates of batches from measurements of earlier ones."""

import dataclasses
from dataclasses import replace

import pytest

from ray_job.contract.job_spec import ModelSpec
from ray_job.contract.measurement import Measurement, MeasurementError
from service.estimates import Estimate, MeasurementRow, estimate_batch, fit_rates, model_key
from service.prompts import TokenCount

MODEL = ModelSpec(id="m", source="/m", accelerator="a10g", tensor_parallel_size=2)
TOKENS = TokenCount(input_tokens=80_000, most_output=50_000, lines=1_000)
FIRST = MeasurementRow(
    rows=1_000,
    input_tokens=80_000,
    output_tokens=25_000,
    engines=1,
    engine_s=40.0,
    busy_s=40.0,
    other_s=30.0,
    job_other_s=20.0,
    output_share=0.5,
)


def measured(rows: int, prompt: int, answer: int, *, works: tuple[float, float, float]) -> MeasurementRow:
    """A measurement of engines that take so many seconds for a row and for a token of either kind."""
    tokens = (rows, rows * prompt, rows * answer)
    engine_s = sum(unit * work for unit, work in zip(tokens, works, strict=True))
    return replace(
        FIRST, rows=rows, input_tokens=tokens[1], output_tokens=tokens[2], engine_s=engine_s, busy_s=engine_s
    )


def test_the_same_batch_again_takes_the_same() -> None:
    assert estimate_batch(MODEL, 1_000, TOKENS, fit_rates([FIRST])) == Estimate(
        input_tokens=80_000,
        output_tokens=25_000,
        most_output=50_000,
        duration_s=pytest.approx(70.0),
        gpu_seconds=pytest.approx(120.0),
        sampled_lines=1_000,
    )


@pytest.mark.parametrize(("rows", "prompt", "answer"), [(4_000, 50, 20), (1_500, 900, 10), (800, 20, 400)])
def test_batches_of_other_shapes_follow_the_measured_rates(rows: int, prompt: int, answer: int) -> None:
    works = (0.002, 0.00002, 0.0004)
    known = [measured(*shape, works=works) for shape in ((1_000, 80, 25), (500, 2_000, 5), (2_000, 10, 300))]
    tokens = TokenCount(input_tokens=rows * prompt, most_output=rows * answer * 2, lines=rows)
    truth = measured(rows, prompt, answer, works=works)
    found = estimate_batch(MODEL, rows, tokens, fit_rates(known))
    assert found.duration_s == pytest.approx(FIRST.other_s + truth.engine_s, rel=0.1)


def test_more_engines_share_the_work_and_hold_all_of_their_gpus() -> None:
    model = replace(MODEL, concurrency=4)
    tokens = replace(TOKENS, input_tokens=160_000, most_output=100_000)
    found = estimate_batch(model, 2_000, tokens, fit_rates([FIRST]))
    assert (found.duration_s, found.gpu_seconds) == (pytest.approx(30 + 20), pytest.approx(8 * (20 + 20)))
    assert estimate_batch(replace(model, accelerator="cpu"), 2_000, tokens, fit_rates([FIRST])).gpu_seconds == 0
    assert model_key(model) == model_key(MODEL) != model_key(replace(MODEL, source="/other"))


def test_tokens_are_known_before_the_first_measurement_and_nothing_without_a_tokenizer() -> None:
    unmeasured = Estimate(input_tokens=80_000, most_output=50_000, sampled_lines=1_000)
    assert estimate_batch(MODEL, 1_000, TOKENS, fit_rates([])) == unmeasured
    assert estimate_batch(MODEL, 1_000, None, fit_rates([FIRST])) == Estimate()
    embeddings = replace(TOKENS, most_output=0)
    assert estimate_batch(MODEL, 1_000, embeddings, fit_rates([replace(FIRST, output_share=None)])).output_tokens == 0


def test_measurements_are_read_as_written() -> None:
    measurement = Measurement(engines=2, engine_s=3.5, busy_s=2.0, rows=7, input_tokens=9, output_tokens=0)
    assert Measurement.from_json(measurement.to_json()) == measurement


@pytest.mark.parametrize("figure", [b"-1", b"NaN", b"Infinity", b'"x"', b"1e300", b"[]"])
def test_figures_that_cannot_be_are_refused(figure: bytes) -> None:
    measurement = Measurement(engines=2, engine_s=3.5, busy_s=2.0, rows=7, input_tokens=9, output_tokens=0)
    for name in dataclasses.asdict(measurement):
        text = measurement.to_json().replace(f'"{name}": '.encode(), f'"{name}": '.encode() + figure + b', "x": ')
        with pytest.raises(MeasurementError):
            Measurement.from_json(text.replace(b', "x": 3.5', b"").replace(b', "x": 2.0', b""))
