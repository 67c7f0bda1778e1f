"""Resources of a stage of ``ray.data.llm`` that only waits for answers from elsewhere."""

from typing import Any

from ray_job.contract.job_spec import ModelSpec


def wait_in_few_actors(stage: Any, model: ModelSpec) -> None:
    """Lets one actor for each engine keep ``max_concurrent_batches`` batches in flight.

    Left alone the stage takes one batch at a time for each actor. More actors would not help a small
    machine: each imports the whole of ``ray.data.llm``, and reserves a CPU to wait with.
    """
    from ray.data import ActorPoolStrategy

    stage.map_batches_kwargs.update(
        compute=ActorPoolStrategy(
            size=model.concurrency, max_tasks_in_flight_per_actor=model.max_concurrent_batches + 1
        ),
        max_concurrency=model.max_concurrent_batches,
        num_cpus=model.stage_num_cpus,
    )
