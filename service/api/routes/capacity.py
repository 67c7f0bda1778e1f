"""``GET /v1/capacity``: slots, GPUs and queues of the whole stack, for its operators."""

from typing import Literal, Self

from fastapi import APIRouter

from service.api.dependencies import BackendsDependency, OperatorAccess
from service.api.openapi import WITH_KEY
from service.api.schemas import Answer
from service.capacity import AcceleratorCapacity, Capacity, ModelCapacity, read_capacity

router = APIRouter(prefix="/v1/capacity", tags=["Usage"], responses=WITH_KEY)


class JobSlots(Answer):
    """Jobs of an accelerator."""

    slots: int
    """The most jobs that run at the same time."""
    running: int
    """Jobs that hold a slot, also those that start or end."""
    queued: int
    """Jobs that wait for a slot."""
    free: int
    """Jobs that could start now."""


class Gpus(Answer):
    """GPUs of an accelerator, counted by what jobs reserve."""

    total: int
    """The most that jobs can reserve: the GPUs of the largest job of its models, for each slot."""
    used: int
    """Reserved by jobs that hold a slot."""
    free: int


class CapacityOfAccelerator(Answer):
    """Slots and GPUs of an accelerator."""

    accelerator: str
    jobs: JobSlots
    gpus: Gpus

    @classmethod
    def of(cls, found: AcceleratorCapacity) -> Self:
        """Return the capacity of an accelerator as clients see it."""
        jobs = JobSlots(slots=found.slots, running=found.running, queued=found.queued, free=found.slots_free)
        gpus = Gpus(total=found.gpus, used=found.gpus_used, free=found.gpus_free)
        return cls(accelerator=found.accelerator, jobs=jobs, gpus=gpus)


class CapacityOfModel(Answer):
    """Jobs and queue of a model."""

    model: str
    """The `id` of the model."""
    accelerator: str
    running_jobs: int
    """Jobs that hold a slot."""
    engines: int
    """Ready engines of jobs that take work."""
    queued_batches: int
    """Batches that have rows without a result and are not paused."""
    queued_rows: int
    """Rows of these batches without a result."""
    queued_tokens: int
    """Estimated tokens of these rows; only those of prompts where nothing is known about the answers."""
    expected_start_seconds: float | None
    """Seconds until a batch that is created now starts, at the measured rates, if all work that waits goes first; null
    before the rates are measured."""

    @classmethod
    def of(cls, found: ModelCapacity) -> Self:
        """Return the capacity of a model as clients see it."""
        start_s = found.expected_start_s
        return cls(
            model=found.model,
            accelerator=found.accelerator,
            running_jobs=found.running,
            engines=found.engines,
            queued_batches=found.batches,
            queued_rows=found.rows,
            queued_tokens=found.tokens,
            expected_start_seconds=None if start_s is None else round(start_s, 1),
        )


class CapacityObject(Answer):
    """Slots, GPUs and queues of the stack."""

    object: Literal["capacity"] = "capacity"
    accelerators: list[CapacityOfAccelerator]
    models: list[CapacityOfModel]


@router.get(
    "",
    operation_id="retrieveCapacity",
    summary="Retrieve the capacity of the stack",
    description="Return slots and GPUs by accelerator, and the queue of each model over all projects. Needs a key with "
    "the scope `operator`.",
)
def retrieve_capacity(backends: BackendsDependency, _access: OperatorAccess) -> CapacityObject:
    """Return slots, GPUs and queues of the whole stack."""
    found: Capacity = read_capacity(backends)
    return CapacityObject(
        accelerators=[CapacityOfAccelerator.of(each) for each in found.accelerators],
        models=[CapacityOfModel.of(each) for each in found.models],
    )
