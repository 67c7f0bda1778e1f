"""``python -m ray_job``: serve one model, as the job spec in the environment describes it."""

import asyncio
import logging
import os
import sys

from ray_job.contract.exit_codes import EXIT_FAILED
from ray_job.contract.job_spec import ENVIRONMENT_VARIABLE, JobSpec, JobSpecError
from ray_job.contract.ray_environment import RAY_ENVIRONMENT
from ray_job.coordinator import WITHOUT_TOKEN, HttpCoordinator, take_token
from ray_job.core_dumps import WORKER_SETUP, disable_core_dumps
from ray_job.errors import CoordinatorError, JobEndedError, JobError, describe_unexpected_error, find_job_error
from ray_job.rounds import RoundsJob
from ray_job.serving import DirectJob
from ray_job.weights import require_model, verify_model

logger = logging.getLogger("ray_job")


def main() -> int:
    """Run the job. If it fails, the last line of its output is the reason, which the batch's owner can read."""
    disable_core_dumps()
    logging.basicConfig(level=logging.INFO, format="%(levelname)s %(name)s %(message)s", stream=sys.stdout)
    try:
        spec = JobSpec.from_json(os.environ.get(ENVIRONMENT_VARIABLE, ""))
        # Before Ray starts, so that no worker inherits it.
        token = take_token(os.environ)
    except (JobSpecError, CoordinatorError) as error:
        logger.error("%s", error)  # noqa: TRY400 - the message is complete without a traceback
        return EXIT_FAILED
    try:
        # The last lets the driver override the environment that Ray Jobs give to all workers.
        settings = {"RAY_USAGE_STATS_ENABLED": "0", **RAY_ENVIRONMENT, "RAY_OVERRIDE_JOB_RUNTIME_ENV": "1"}
        for name, value in settings.items():
            os.environ.setdefault(name, value)
        import ray

        # Join the Ray cluster of this job, or start Ray here. The workers' output stays out of the job's log.
        ray.init(
            log_to_driver=False,
            logging_level=logging.WARNING,
            configure_logging=False,
            include_dashboard=False,
            runtime_env={**WITHOUT_TOKEN, "worker_process_setup_hook": WORKER_SETUP},
        )
        asyncio.run(_serve(spec, token))
    except Exception as error:  # noqa: BLE001 - reported below
        known = find_job_error(error)
        if isinstance(known, JobEndedError):
            logger.info("%s", known)
            return known.exit_code
        # No traceback: its messages may quote a prompt.
        reason = known or f"the job failed with an unexpected error: {describe_unexpected_error(error)}"
        logger.error("%s", reason)  # noqa: TRY400
        return known.exit_code if isinstance(known, JobError) else EXIT_FAILED
    logger.info("the job has no more work")
    return 0


async def _serve(spec: JobSpec, token: str) -> None:
    """Serve the model until there has been no work for a while."""
    require_model(spec.model.source)
    if spec.model.engine != "direct":  # whose engines check what they load themselves
        verify_model(spec.model)
    async with HttpCoordinator(spec.coordinator_url, token) as coordinator:
        job = DirectJob(spec, coordinator) if spec.model.engine == "direct" else RoundsJob(spec, coordinator)
        await job.run()


if __name__ == "__main__":
    sys.exit(main())
