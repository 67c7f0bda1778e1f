"""The serve engine: a Ray Serve LLM deployment that keeps running after the job, so that the next job starts warm.

On a cluster, the Ray cluster of a job ends with it, and the deployment too.

Rows reach it through ``ray.data.llm``'s serve processor. Requests and responses carry their body as text. As separate
columns, the fields of one line would appear as nulls in all other lines.
"""

import hashlib
import json
from typing import TYPE_CHECKING, Final

from ray_job.contract.job_spec import ModelSpec
from ray_job.engines.engine_args import server_args
from ray_job.engines.llm_stages import engine_actor, response_row, use_few_actors
from ray_job.errors import EngineUnavailableError

if TYPE_CHECKING:
    from ray.data import Dataset

DEPLOYMENT_PREFIX: Final = "engine:"


def serve_engine(model: ModelSpec, requests: "Dataset") -> "Dataset":
    """Deploy the model unless it is running, and add the stage that sends rows to it."""
    from ray.data.llm import ServeDeploymentProcessorConfig, build_processor

    name = deploy(model)
    config = ServeDeploymentProcessorConfig(
        deployment_name=DEPLOYMENT_PREFIX + name,
        app_name=name,
        batch_size=model.call_rows,
    )
    stage, timeout_s = {"num_cpus": model.stage_num_cpus}, model.request_timeout_s
    processor = build_processor(
        config,
        preprocess=lambda row: {
            "method": "answer",
            "request_kwargs": {
                "path": row["url"],
                "body": row["body"].decode(),
                "timeout_s": timeout_s,
                "tokens": row["tokens"],
            },
        },
        postprocess=lambda row: response_row(row, row["status_code"], row["response_body"]),
        preprocess_map_kwargs=stage,
        postprocess_map_kwargs=stage,
    )
    use_few_actors(processor.get_stage_by_name("ServeDeploymentStage"), model)
    return processor(requests)


def deploy(model: ModelSpec) -> str:
    """Start the application of a model unless it is running.

    Returns:
        The name of the application. Models that can share an engine have the same name. A different engine argument
        makes a different name.

    Raises:
        EngineUnavailableError: the application did not start.
    """
    from ray import serve
    from ray.serve.llm import LLMConfig, build_llm_deployment
    from ray.serve.schema import ApplicationStatus

    from ray_job.engines.serve_deployment import EngineDeployment

    arguments = server_args(model)
    shared = json.dumps([arguments, model.accelerator, model.concurrency], sort_keys=True)
    name = f"cloister-{hashlib.sha256(shared.encode()).hexdigest()[:16]}"
    running = serve.status().applications.get(name)
    if running is not None and running.status == ApplicationStatus.RUNNING:
        return name
    del arguments["model"], arguments["served_model_name"]
    config = LLMConfig(
        model_loading_config={"model_id": model.id, "model_source": model.source},
        engine_kwargs=arguments,
        deployment_config={
            "name": name,
            "num_replicas": model.concurrency,
            "max_ongoing_requests": 2 * model.call_rows * model.max_concurrent_batches,
            # The placement group reserves the engine's share. The replica would reserve one CPU more, and on a Ray
            # with two CPUs the other stages would wait forever.
            "ray_actor_options": {"num_cpus": 0},
        },
        log_engine_metrics=False,
        # Without it the deployment of an engine on a CPU waits for a GPU forever.
        **({"accelerator_config": {"kind": "cpu"}} if model.accelerator == "cpu" else {}),
        **engine_actor(model),
    )
    application = build_llm_deployment(config, name_prefix=DEPLOYMENT_PREFIX, deployment_cls=EngineDeployment)
    # Only this job uses the engine, through its handle. Serve's HTTP proxy would take port 8000 of every node.
    serve.start(proxy_location="Disabled")
    try:
        serve.run(application, name=name, route_prefix=None)
    except RuntimeError as error:
        raise EngineUnavailableError(
            f"the deployment {name} did not start; check the model's source and engine_args: {error}"
        ) from error
    return name
