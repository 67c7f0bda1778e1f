"""Capacity of a stack: slots and GPUs by accelerator, the queue of each model, and when a new batch would start."""

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from service.backends import Backends, Slots
from service.db.rows import ModelJobsRow, ModelQueueRow, fetch_all
from service.estimates import Rates
from service.model_catalogue import Catalogue, CatalogueModel
from service.model_reports import read_rates

_EMPTY: Final = ModelQueueRow(model="", batches=0, rows=0, input_tokens=0.0, output_tokens=0.0, unknown_batches=0)


@dataclass(frozen=True, slots=True, kw_only=True)
class AcceleratorCapacity:
    """Slots and GPUs of an accelerator.

    Attributes:
        accelerator: its name.
        slots: jobs that may run at the same time.
        running: jobs that hold a slot.
        queued: jobs that wait for one.
        gpus: GPUs that jobs may reserve: those of the largest job of its models, for each slot.
        gpus_used: GPUs that running jobs reserve.
    """

    accelerator: str
    slots: int
    running: int
    queued: int
    gpus: int
    gpus_used: int

    @property
    def slots_free(self) -> int:
        """Jobs that could start now."""
        return max(0, self.slots - self.running)

    @property
    def gpus_free(self) -> int:
        """GPUs that jobs could reserve now."""
        return max(0, self.gpus - self.gpus_used)


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelCapacity:
    """Jobs and queue of a model.

    Attributes:
        model: its id.
        accelerator: what its engines run on.
        running: jobs that hold a slot.
        engines: ready engines of jobs that take work.
        batches: open batches that are not paused.
        rows: their rows that are not committed.
        tokens: estimated tokens of these rows; only those of prompts where the answers are unknown.
        work_s: seconds for these rows on the engines of one job, at the measured rates; None if unknown.
        other_s: seconds from the creation of a batch to its end without the work of engines; None if unknown.
        expected_start_s: seconds until a batch that is created now starts; None if unknown.
    """

    model: str
    accelerator: str
    running: int
    engines: int
    batches: int
    rows: int
    tokens: int
    work_s: float | None
    other_s: float | None
    expected_start_s: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Capacity:
    """Accelerators by name, and models in the order of the catalogue."""

    accelerators: Sequence[AcceleratorCapacity]
    models: Sequence[ModelCapacity]


def read_capacity(backends: Backends) -> Capacity:
    """Return the capacity of the stack now."""
    with backends.pool.connection() as connection:
        jobs = fetch_all(connection, ModelJobsRow, "jobs_by_model", {})
        queues = {row.model: row for row in fetch_all(connection, ModelQueueRow, "queues_of_models", {})}
    accelerators = accelerator_capacities(backends.catalogue, jobs, backends.slots)
    models = [
        model_capacity(model, read_rates(backends.pool, model.spec), queues.get(model.id, _EMPTY), jobs)
        for model in backends.catalogue.values()
    ]
    started = [
        dataclasses.replace(model, expected_start_s=expected_start_s(model, models, accelerators[model.accelerator]))
        for model in models
    ]
    return Capacity(accelerators=list(accelerators.values()), models=started)


def accelerator_capacities(
    catalogue: Catalogue, jobs: Sequence[ModelJobsRow], slots: Slots
) -> Mapping[str, AcceleratorCapacity]:
    """Return slots and GPUs of each accelerator of a model or a job, by its name."""
    found = {}
    for name in sorted({model.spec.accelerator for model in catalogue.values()} | {job.accelerator for job in jobs}):
        sizes = [
            model.spec.num_gpus * model.spec.concurrency
            for model in catalogue.values()
            if model.spec.accelerator == name
        ]
        own = [job for job in jobs if job.accelerator == name]
        count = slots.by_accelerator.get(name, slots.default)
        found[name] = AcceleratorCapacity(
            accelerator=name,
            slots=count,
            running=sum(job.running for job in own),
            queued=sum(job.queued for job in own),
            gpus=count * max(sizes, default=0),
            gpus_used=sum(job.gpus for job in own),
        )
    return found


def model_capacity(
    model: CatalogueModel, rates: Rates, queue: ModelQueueRow, jobs: Sequence[ModelJobsRow]
) -> ModelCapacity:
    """Return jobs and queue of a model, without the expected start."""
    own = [job for job in jobs if job.model == model.id]
    work_s = None
    if not queue.rows:
        work_s = 0.0
    elif rates.other_s is not None and not queue.unknown_batches:
        token_s = queue.input_tokens * rates.input_token_s + queue.output_tokens * rates.output_token_s
        work_s = (queue.rows * rates.row_s + token_s) / model.spec.concurrency
    return ModelCapacity(
        model=model.id,
        accelerator=model.spec.accelerator,
        running=sum(job.running for job in own),
        engines=sum(job.engines for job in own),
        batches=queue.batches,
        rows=queue.rows,
        tokens=round(queue.input_tokens + queue.output_tokens),
        work_s=work_s,
        other_s=rates.other_s,
    )


def expected_start_s(
    model: ModelCapacity, models: Sequence[ModelCapacity], accelerator: AcceleratorCapacity
) -> float | None:
    """Return the seconds until a batch of a model that is created now starts, if all work that waits goes first.

    With a ready engine that is the work of the model's own queue. With a job that starts, or a free slot, it is this
    work and the start of the job. Else the batch also waits for the work of all models of the accelerator, spread over
    its slots.

    Returns:
        The seconds; None if a rate that they depend on was not measured yet.
    """
    if model.work_s is None or model.engines:
        return model.work_s
    if model.other_s is None or not accelerator.slots:
        return None
    if model.running or accelerator.slots_free:
        return model.other_s + model.work_s
    total_s = 0.0
    for each in models:
        if each.accelerator == accelerator.accelerator:
            if each.work_s is None:
                return None
            total_s += each.work_s
    return model.other_s + total_s / accelerator.slots
