"""Settings of the stages of ``ray.data.llm`` that the processor, serve and http engines share."""

from collections.abc import Mapping
from typing import Any, Final

from ray_job.contract.job_spec import ModelSpec
from ray_job.engines.engine_args import ENGINE_ENVIRONMENT

ROW_COLUMNS: Final = ("batch_id", "segment", "epoch", "row", "line", "custom_id", "twins")


def use_few_actors(stage: Any, model: ModelSpec) -> None:
    """Give a stage that waits for responses one actor per engine, with ``max_concurrent_batches`` batches in flight.

    By default each actor of such a stage takes one batch at a time. More actors would not help a small machine: each
    imports all of ``ray.data.llm`` and reserves a CPU while it waits.

    Args:
        stage: the stage of a processor of ``ray.data.llm``. It is changed.
        model: the model of the job.
    """
    from ray.data import ActorPoolStrategy

    stage.map_batches_kwargs.update(
        compute=ActorPoolStrategy(
            size=model.concurrency, max_tasks_in_flight_per_actor=model.max_concurrent_batches + 1
        ),
        max_concurrency=model.max_concurrent_batches,
        num_cpus=model.stage_num_cpus,
    )


def engine_actor(model: ModelSpec) -> dict[str, Any]:
    """Return the runtime environment and the placement group of an actor that holds an engine.

    On a CPU vLLM starts the only worker of the engine core as a second process, which imports vLLM again and competes
    for the same cores. The variable prevents it. The engine core still runs in a separate process. Without a placement
    group an engine on a CPU waits for a GPU forever, silently.
    """
    if model.accelerator != "cpu":
        return {"runtime_env": {"env_vars": dict(ENGINE_ENVIRONMENT)}}
    return {
        "runtime_env": {"env_vars": {**ENGINE_ENVIRONMENT, "VLLM_ENABLE_V1_MULTIPROCESSING": "0"}},
        "placement_group_config": {"bundle_per_worker": {"CPU": model.engine_num_cpus}},
    }


def response_row(row: Mapping[str, Any], status_code: int, response_body: str | bytes) -> dict[str, Any]:
    """Return the response to a request; see ``ray_job.engines`` for the columns."""
    return {
        **{name: row[name] for name in ROW_COLUMNS},
        "status_code": status_code,
        "response_body": response_body.encode() if isinstance(response_body, str) else response_body,
    }
