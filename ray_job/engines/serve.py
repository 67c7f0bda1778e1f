"""The serve lane: a Ray Serve LLM deployment that stays up after the job and serves the next one warm.

Rows reach it by ``ray.data.llm``'s serve processor. They carry the body as text, and so do the answers:
as columns of their own the fields of one line would appear, empty, in all the others.
"""

import hashlib
import json
from typing import TYPE_CHECKING, Any

from ray_job.contract.job_spec import JobSpec, ModelSpec
from ray_job.engines.engine_args import effective_engine_args
from ray_job.engines.processor import engine_runtime_env
from ray_job.engines.waiting_stage import wait_in_few_actors
from ray_job.errors import EngineStartError

if TYPE_CHECKING:
    from ray.data import Dataset

DEPLOYMENT_PREFIX = "engine:"


def serve_lane(spec: JobSpec, requests: "Dataset") -> "Dataset":
    """Deploys the model unless it is up, and adds the stage that asks it."""
    from ray.data.llm import ServeDeploymentProcessorConfig, build_processor

    model = spec.model
    config = ServeDeploymentProcessorConfig(
        deployment_name=DEPLOYMENT_PREFIX + deployment_name(model),
        app_name=deploy(model),
        batch_size=model.batch_size,
    )
    stage = {"num_cpus": model.stage_num_cpus}
    processor = build_processor(
        config,
        preprocess=to_call,
        postprocess=to_response,
        preprocess_map_kwargs=stage,
        postprocess_map_kwargs=stage,
    )
    wait_in_few_actors(processor.get_stage_by_name("ServeDeploymentStage"), model)
    return processor(requests)


def to_call(row: dict[str, Any]) -> dict[str, Any]:
    """The call of the deployment's method for a row."""
    return {"method": "answer", "request_kwargs": {"path": row["url"], "body": row["body"].decode()}}


def to_response(row: dict[str, Any]) -> dict[str, Any]:
    """The response row; see ``ray_job.engines`` for the columns."""
    return {
        "line": row["line"],
        "custom_id": row["custom_id"],
        "status_code": row["status_code"],
        "response_body": row["response_body"].encode(),
    }


def deployment_name(model: ModelSpec) -> str:
    """The same for jobs that can share an engine; another one as soon as an engine argument differs."""
    same = json.dumps([effective_engine_args(model), model.accelerator, model.concurrency], sort_keys=True)
    return f"cloister-{hashlib.sha256(same.encode()).hexdigest()[:16]}"


def deploy(model: ModelSpec) -> str:
    """Returns the name of a running application for the model, starting it if need be."""
    from ray import serve
    from ray.serve.llm import LLMConfig, build_llm_deployment
    from ray.serve.schema import ApplicationStatus

    from ray_job.engines.serve_deployment import EngineDeployment

    name = deployment_name(model)
    running = serve.status().applications.get(name)
    if running is not None and running.status == ApplicationStatus.RUNNING:
        return name
    arguments = effective_engine_args(model)
    del arguments["model"], arguments["served_model_name"]
    cpu: dict[str, Any] = {}
    if model.accelerator == "cpu":
        # Without the first the deployment waits for a GPU for ever.
        cpu["accelerator_config"] = {"kind": "cpu"}
        cpu["placement_group_config"] = {"bundle_per_worker": {"CPU": model.engine_num_cpus}}
    config = LLMConfig(
        model_loading_config={"model_id": model.id, "model_source": model.source},
        engine_kwargs=arguments,
        deployment_config={
            "name": name,
            "num_replicas": model.concurrency,
            "max_ongoing_requests": 2 * model.batch_size * model.max_concurrent_batches,
            # The engine's share is the placement below; the replica itself would reserve one CPU more, and
            # on a Ray of two CPUs none would be left for the other stages: a wait for ever.
            "ray_actor_options": {"num_cpus": 0},
        },
        log_engine_metrics=False,
        runtime_env=engine_runtime_env(model),
        **cpu,
    )
    application = build_llm_deployment(config, name_prefix=DEPLOYMENT_PREFIX, deployment_cls=EngineDeployment)
    # Only this job asks the engine, by its handle: Serve's HTTP proxy would take port 8000 of every node.
    serve.start(proxy_location="Disabled")
    try:
        serve.run(application, name=name, route_prefix=None)
    except RuntimeError as error:
        raise EngineStartError(
            f"the deployment {name} did not start; check the model's source and engine_args: {error}"
        ) from error
    return name
