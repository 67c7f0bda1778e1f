"""``python -m ray_job``: run one batch, as the job spec in the environment describes it."""

import logging
import os
import sys

from ray_job.contract.exit_codes import EXIT_FAILED
from ray_job.contract.job_spec import ENVIRONMENT_VARIABLE, JobSpec, JobSpecError
from ray_job.contract.ray_environment import RAY_ENVIRONMENT
from ray_job.errors import JobError, describe_unexpected_error, find_job_error
from ray_job.progress import ProgressReporter

logger = logging.getLogger("ray_job")


def main() -> int:
    """Run the job. If it fails, the last line of its output is the reason, which the batch's owner can read."""
    logging.basicConfig(level=logging.INFO, format="%(levelname)s %(name)s %(message)s", stream=sys.stdout)
    try:
        spec = JobSpec.from_json(os.environ.get(ENVIRONMENT_VARIABLE, ""))
    except JobSpecError as error:
        logger.error("%s", error)  # noqa: TRY400 - the message is complete without a traceback
        return EXIT_FAILED
    progress = ProgressReporter(spec)
    try:
        for name, value in {"RAY_USAGE_STATS_ENABLED": "0", **RAY_ENVIRONMENT}.items():
            os.environ.setdefault(name, value)
        import ray

        from ray_job.pipeline import run

        # Join the Ray cluster of this job, or start Ray here. The workers' output stays out of the job's log.
        ray.init(log_to_driver=False, logging_level=logging.WARNING, configure_logging=False, include_dashboard=False)
        totals = run(spec, progress)
    except Exception as error:  # noqa: BLE001 - reported below
        known = find_job_error(error)
        # No traceback: its messages may quote a prompt.
        reason = known or f"the job failed with an unexpected error: {describe_unexpected_error(error)}"
        logger.error("%s", reason)  # noqa: TRY400
        return known.exit_code if isinstance(known, JobError) else EXIT_FAILED
    finally:
        progress.close()
    logger.info("%s completed and %s failed rows are committed", totals.completed, totals.failed)
    return 0


if __name__ == "__main__":
    sys.exit(main())
