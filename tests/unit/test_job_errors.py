"""Errors of a job, from a worker's traceback to the last line of the job's log and its exit code."""

import json

import pytest
from ray.exceptions import RayTaskError

from ray_job.contract.exit_codes import EXIT_FAILED, EXIT_NO_MODEL
from ray_job.contract.leases import SegmentRef
from ray_job.contract.parts import PartError
from ray_job.engines.row_window import first_step
from ray_job.errors import (
    CoordinatorError,
    EngineUnavailableError,
    JobEndedError,
    JobError,
    NoModelError,
    describe_unexpected_error,
    find_job_error,
)
from ray_job.rows import Request, parse_line

SEGMENT = SegmentRef(batch_id="batch_1", segment=0, epoch=1)

ENGINE_START_ERROR = """ray::DirectEngine.start() (pid=151, ip=10.0.0.3)
  File "/x/ray_job/engines/engine_process.py", line 57, in wait_ready
    raise EngineUnavailableError(
ray_job.errors.EngineUnavailableError: the last lines of the engine's log:
RuntimeError: Engine core initialization failed.
The engine ended with exit code 1 before it was ready

The above exception was the direct cause of the following exception:

ray.exceptions.UserCodeException: UDF failed to process a data block.
"""

KEY_ERROR = f"""ray::MapBatches(prepare)() (pid=151, ip=10.0.0.3)
  File "{json.__file__}", line 346, in loads
    return _default_decoder.decode(s)
           ^^^^^^^^^^^^^^^^^^^^^^^^^^
KeyError: 'a prompt
  File "prompt.py", line 1, in prompt
PromptError: more of the prompt'

The above exception was the direct cause of the following exception:

  File "/x/ray/data/_internal/util.py", line 77, in wrapper
    raise UserCodeException from error
ray.exceptions.UserCodeException: UDF failed to process a data block.
"""


def worker_error(traceback: str) -> RayTaskError:
    return RayTaskError("task", traceback, ValueError())


def raised_by_parsing(raw: bytes) -> Exception:
    with pytest.raises(Exception) as caught:  # noqa: PT011 - any error has a place
        parse_line(9, raw)
    return caught.value


def raised_by_a_deep_body() -> Exception:
    request = Request(segment=SEGMENT, row=0, line=1, custom_id="a", url="/v1/completions", body=b"[" * 100_000)
    with pytest.raises(RecursionError) as caught:
        first_step(request)
    return caught.value


def test_job_error_is_found_in_the_traceback_of_a_worker() -> None:
    found = find_job_error(worker_error(ENGINE_START_ERROR))
    assert isinstance(found, JobError)
    assert str(found).splitlines()[-1] == "The engine ended with exit code 1 before it was ready"


def test_job_error_is_found_below_the_error_that_it_caused() -> None:
    known = CoordinatorError("the coordinator answered with status 400")
    wrapped = RuntimeError("execution failed")
    wrapped.__cause__ = known
    assert find_job_error(wrapped) is known


def test_part_error_of_a_worker_keeps_its_message() -> None:
    traceback = "ray::commit()\nray_job.contract.parts.PartError: a part of batch_1 holds a line twice: [1, 1]\n"
    assert str(find_job_error(worker_error(traceback))) == "a part of batch_1 holds a line twice: [1, 1]"
    assert isinstance(find_job_error(PartError("damaged")), PartError)


def test_missing_model_is_distinguished_from_other_engine_start_errors() -> None:
    missing = ENGINE_START_ERROR.replace(
        "EngineUnavailableError: the", "NoModelError: models/a/ holds no config.json: the"
    )
    assert type(find_job_error(worker_error(missing))) is NoModelError
    assert type(find_job_error(worker_error(ENGINE_START_ERROR))) is not NoModelError


@pytest.mark.parametrize("error", [RuntimeError("ray_job.errors.JobError: a prompt"), worker_error(KEY_ERROR)])
def test_other_errors_are_not_job_errors(error: Exception) -> None:
    assert find_job_error(error) is None


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (JobError("failed"), EXIT_FAILED),
        (EngineUnavailableError("out of memory"), EXIT_FAILED),
        (NoModelError("upload it"), EXIT_NO_MODEL),
        (JobEndedError("its token is void"), 0),
    ],
)
def test_exit_code_reports_whether_another_attempt_may_succeed(error: JobError, code: int) -> None:
    assert error.exit_code == code


def test_unexpected_error_is_described_by_its_type_and_place() -> None:
    error = raised_by_a_deep_body()
    described = describe_unexpected_error(error)
    assert described.startswith("RecursionError at json.")
    assert ", called from ray_job.engines.row_window:" in described


def test_unexpected_error_of_a_worker_is_described_without_its_message() -> None:
    assert describe_unexpected_error(worker_error(KEY_ERROR)) == "KeyError at json.__init__:346"


def test_causes_that_were_never_raised_are_skipped() -> None:
    error = raised_by_a_deep_body()
    error.__cause__ = SystemError()
    assert describe_unexpected_error(error).startswith("RecursionError at json.")


@pytest.mark.parametrize("raw", [b'{"secret": \xff}', b'{"secret": 1}', b'"secret"', b"secret"])
def test_invalid_line_is_reported_without_its_content(raw: bytes) -> None:
    error = raised_by_parsing(raw)
    assert isinstance(error, JobError)
    assert "secret" not in str(error)
