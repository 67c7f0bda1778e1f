"""Estimates of a batch from its tokens and from what earlier batches of its model measured. Pure."""

import dataclasses
import hashlib
import json
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from ray_job.contract.job_spec import ModelSpec
from service.prompts import TokenCount

KEPT_MEASUREMENTS: Final = 20
"""Measurements that are kept of each model."""
# Settings that change neither an engine's speed nor its tokens.
_OTHER_SETTINGS: Final = (
    "digest",  # the source of a pushed model names it
    "concurrency",
    "batch_size",
    "max_concurrent_batches",
    "stage_num_cpus",
    "sharing",
    "keep_warm_s",
)
# Work of a row, of a token of its prompt, and of a generated token, in proportion, where measurements do not tell them
# apart. Prompts are processed in parallel, tokens are generated one by one.
_USUAL_WORK: Final = (10.0, 1.0, 10.0)
# How much an estimate prefers the usual proportions to a better fit of the measurements.
_PREFERENCE: Final = 1e-3
_FIT_ROUNDS: Final = 300
# The time of a start changes with nodes and images, so only the newest measurements count for it. Of two, the shorter
# one does: the first start on a machine also fills its caches.
_NEWEST: Final = 5


@dataclass(frozen=True, slots=True, kw_only=True)
class MeasurementRow:
    """A row of ``measurements``; see the migration that creates it."""

    rows: int
    input_tokens: int
    output_tokens: int
    engines: int
    engine_s: float
    busy_s: float
    other_s: float
    job_other_s: float
    output_share: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Rates:
    """Needs of the batches of a model, without the figures of any single batch.

    Attributes:
        row_s: seconds of an engine for a row.
        input_token_s: seconds of an engine for a token of a prompt.
        output_token_s: seconds of an engine for a generated token.
        other_s: the rest of the time from creation to completion; None before the first measurement.
        job_other_s: the rest of the time that the job holds GPUs.
        output_share: generated tokens of those that the requests allowed; None if it is unknown.
    """

    row_s: float = 0.0
    input_token_s: float = 0.0
    output_token_s: float = 0.0
    other_s: float | None = None
    job_other_s: float = 0.0
    output_share: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Estimate:
    """Needs of a batch. None is unknown.

    Attributes:
        input_tokens: tokens of all prompts.
        output_tokens: tokens that will be generated: what the requests allow, times the share that earlier batches of
            the model generated of what they were allowed.
        most_output: tokens that the requests allow.
        duration_s: from the creation of the batch to its completion if no other batch is ahead of it.
        gpu_seconds: GPUs times the seconds that its job holds them; 0 for a model on CPUs.
        sampled_lines: lines whose tokens were counted.
    """

    input_tokens: int | None = None
    output_tokens: int | None = None
    most_output: int | None = None
    duration_s: float | None = None
    gpu_seconds: float | None = None
    sampled_lines: int = 0


def model_key(model: ModelSpec) -> str:
    """Return a digest of the settings on which a model's tokens and speed depend."""
    settings = dataclasses.asdict(model)
    for name in _OTHER_SETTINGS:
        del settings[name]
    return hashlib.sha256(json.dumps(settings, sort_keys=True, default=str).encode()).hexdigest()


def fit_rates(measurements: Sequence[MeasurementRow]) -> Rates:
    """Return the rates that fit the measurements of a model, the newest first.

    Least squares of the relative errors. One measurement, or several batches of the same shape, cannot tell the three
    kinds of work apart: their proportions are the usual ones then, which fit every batch of that shape.
    """
    shares = [(each.output_share, each.rows) for each in measurements if each.output_share is not None]
    weight = sum(rows for _, rows in shares)
    output_share = min(1.0, sum(share * rows for share, rows in shares) / weight) if weight else None
    usable = [each for each in measurements if each.rows > 0 and each.engine_s > 0]
    if not usable:
        return Rates(output_share=output_share)
    units = [(each.rows, each.input_tokens, each.output_tokens) for each in usable]
    seconds = [each.engine_s for each in usable]
    usual = [sum(unit * work for unit, work in zip(each, _USUAL_WORK, strict=True)) for each in units]
    scale = statistics.median(each / work for each, work in zip(seconds, usual, strict=True))
    start = [scale * work for work in _USUAL_WORK]
    # The share of each measurement's seconds that each kind of work explains.
    parts = [
        [unit * work / took for unit, work in zip(each, start, strict=True)]
        for each, took in zip(units, seconds, strict=True)
    ]
    factors = [1.0] * len(start)
    # Coordinate descent, which ends at the best fit: the problem is convex.
    for _ in range(_FIT_ROUNDS):
        for kind in range(len(factors)):
            others = [*factors[:kind], 0.0, *factors[kind + 1 :]]
            missing = [1 - sum(f * part for f, part in zip(others, row, strict=True)) for row in parts]
            gain = sum(row[kind] * rest for row, rest in zip(parts, missing, strict=True)) + _PREFERENCE
            factors[kind] = max(0.0, gain / (sum(row[kind] ** 2 for row in parts) + _PREFERENCE))
    row_s, input_token_s, output_token_s = (factor * work for factor, work in zip(factors, start, strict=True))
    return Rates(
        row_s=row_s,
        input_token_s=input_token_s,
        output_token_s=output_token_s,
        other_s=statistics.median_low(each.other_s for each in usable[:_NEWEST]),
        job_other_s=statistics.median_low(each.job_other_s for each in usable[:_NEWEST]),
        output_share=output_share,
    )


def estimate_batch(model: ModelSpec, rows: int, tokens: TokenCount | None, rates: Rates) -> Estimate:
    """Estimate a batch.

    Args:
        model: its model.
        rows: its lines.
        tokens: its tokens, or None if they are unknown.
        rates: of its model.
    """
    if tokens is None:
        return Estimate()
    output_tokens = None if rates.output_share is None else round(tokens.most_output * rates.output_share)
    if tokens.most_output == 0:
        output_tokens = 0
    counted = Estimate(
        input_tokens=tokens.input_tokens,
        output_tokens=output_tokens,
        most_output=tokens.most_output,
        sampled_lines=tokens.lines,
    )
    if output_tokens is None or rates.other_s is None:
        return counted
    work_s = rows * rates.row_s + tokens.input_tokens * rates.input_token_s + output_tokens * rates.output_token_s
    busy_s = work_s / model.engines_for(rows)
    return dataclasses.replace(
        counted,
        duration_s=round(rates.other_s + busy_s, 1),
        gpu_seconds=round(model.num_gpus * model.concurrency * (rates.job_other_s + busy_s), 1),
    )
