"""``python -m ray_job``: one run over one batch, told by the job spec in the environment."""

import logging
import os
import re
import sys
from typing import Final

from ray_job.contract.exit_codes import EXIT_FAILED, EXIT_NO_MODEL, EXIT_SUPERSEDED
from ray_job.contract.job_spec import ENVIRONMENT_VARIABLE, JobSpec, JobSpecError
from ray_job.contract.parts import PartError
from ray_job.errors import JobError, NoModelError, SupersededError
from ray_job.progress import ProgressReporter

logger = logging.getLogger("ray_job")

# How an error of ours stands in the traceback of another process.
_OURS: Final = re.compile(r"^ray_job\.errors\.(\w+): (.*?)(?:\n\n|\Z)", re.DOTALL | re.MULTILINE)


def connect_to_ray() -> None:
    """Joins the Ray cluster of this job; the workers' output stays out of the job's log."""
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    import ray

    ray.init(log_to_driver=False, logging_level=logging.WARNING, configure_logging=False)
    context = ray.data.DataContext.get_current()
    context.enable_progress_bars = False
    context.print_on_execution_start = False
    logging.getLogger("ray.data").setLevel(logging.WARNING)


def job_error_in(error: BaseException) -> JobError | PartError | None:
    """The error of ours at the bottom of what Ray wrapped around it, if there is one."""
    seen: set[int] = set()
    found: BaseException | None = error
    while found is not None and id(found) not in seen:
        seen.add(id(found))
        if isinstance(found, JobError | PartError):
            return found
        found = getattr(found, "cause", None) or found.__cause__ or found.__context__
    # Of an error in a worker Ray brings home what it was caused by as text only.
    told = _OURS.findall(str(error))
    if not told:
        return None
    name, message = told[-1]
    return (NoModelError if name == NoModelError.__name__ else JobError)(message.strip())


def exit_code(error: BaseException | None) -> int:
    """What the process ends with after an error; None is one that is not ours."""
    if isinstance(error, SupersededError):
        return EXIT_SUPERSEDED
    return EXIT_NO_MODEL if isinstance(error, NoModelError) else EXIT_FAILED


def main() -> int:
    """Runs the job; the last line of its output says why it failed."""
    logging.basicConfig(level=logging.INFO, format="%(levelname)s %(name)s %(message)s", stream=sys.stdout)
    try:
        spec = JobSpec.from_json(os.environ.get(ENVIRONMENT_VARIABLE, ""))
    except JobSpecError as error:
        logger.error("%s", error)  # noqa: TRY400 - the message is all there is to know
        return EXIT_FAILED
    progress = ProgressReporter(spec)
    try:
        connect_to_ray()
        from ray_job.pipeline import run

        totals = run(spec, progress)
    except Exception as error:
        known = job_error_in(error)
        if known is None:
            logger.exception("the job failed")
        else:
            logger.error("%s", known)  # noqa: TRY400 - a known error's traceback helps nobody
        return exit_code(known)
    finally:
        progress.close()
    logger.info("%s completed and %s failed rows are committed", totals.completed, totals.failed)
    return 0


if __name__ == "__main__":
    sys.exit(main())
