"""How an error of the engine gets from a worker's log to the last line of the job's."""

import pytest

from ray_job.__main__ import exit_code, job_error_in
from ray_job.contract.exit_codes import EXIT_FAILED, EXIT_NO_MODEL, EXIT_SUPERSEDED
from ray_job.engines.engine_process import core_error
from ray_job.errors import EngineStartError, JobError, NoModelError, SupersededError

TRACEBACK = """ray::MapWorker(MapBatches(DirectEngine)).submit() (pid=151, ip=10.0.0.3)
  File "/x/ray_job/engines/engine_process.py", line 57, in wait_ready
    raise EngineStartError(
ray_job.errors.EngineStartError: the last lines of the engine's log:
RuntimeError: Engine core initialization failed.
The engine ended with exit code 1 before it was ready

The above exception was the direct cause of the following exception:

ray.exceptions.UserCodeException: UDF failed to process a data block.
"""


def test_an_error_of_a_worker_is_found_in_its_traceback() -> None:
    found = job_error_in(RuntimeError(TRACEBACK))
    assert isinstance(found, JobError)
    assert str(found).splitlines()[-1] == "The engine ended with exit code 1 before it was ready"


def test_an_error_of_the_job_itself_is_found_below_what_it_caused() -> None:
    known = SupersededError("attempt 1 is not the current one any more")
    wrapped = RuntimeError("execution failed")
    wrapped.__cause__ = known
    assert job_error_in(wrapped) is known


def test_a_model_that_no_attempt_can_have_is_told_from_an_engine_that_did_not_start() -> None:
    told = TRACEBACK.replace("EngineStartError: the last", "NoModelError: models/a/ holds no config.json: the last")
    assert type(job_error_in(RuntimeError(told))) is NoModelError
    assert type(job_error_in(RuntimeError(TRACEBACK))) is not NoModelError


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (None, EXIT_FAILED),
        (EngineStartError("out of memory"), EXIT_FAILED),
        (NoModelError("upload it"), EXIT_NO_MODEL),
        (SupersededError("attempt 2 has begun"), EXIT_SUPERSEDED),
    ],
)
def test_the_exit_code_says_whether_another_attempt_is_worth_it(error: Exception | None, code: int) -> None:
    assert exit_code(error) == code


def test_any_other_error_is_not_one_of_ours() -> None:
    assert job_error_in(RuntimeError("ray_job.errors is a module")) is None


def test_what_the_engine_core_died_of_is_told() -> None:
    log = [
        "(EngineCore pid=628) INFO 11-21 17:50:34 [core.py:133] Initializing a V1 LLM engine",
        "(EngineCore pid=628) ERROR 11-21 17:50:36 [core.py:1510] Traceback (most recent call last):",
        "(EngineCore pid=628) ERROR 11-21 17:50:36 [core.py:1510] AttributeError: no attribute 'init_cpu_memory_env'",
        "RuntimeError: Engine core initialization failed. See root cause above.",
    ]
    assert core_error(log) == ": AttributeError: no attribute 'init_cpu_memory_env'"
    assert core_error(log[-1:]) == ""
