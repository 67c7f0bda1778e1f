"""Errors that end a job. The message of each is the last line of the job's log.

JobError
├── EngineUnavailableError   the engine did not start: engine arguments, memory or model files;
│   │                        or the endpoint of the http engine does not answer
│   └── NoModelError         the object store has no such model, one too large for its volume, or a changed one
├── JobEndedError            the coordinator has ended the job
├── CoordinatorError         the coordinator refuses a request, or the job has no token
├── ObjectError              an object cannot be read or written
│   ├── ObjectMissingError   it does not exist, or is too short
│   └── UrlRefusedError      the store refuses its URL, which may have expired
└── InputError               a row of a plan differs from what the service validated

The messages never quote a request or a response. Those of other errors may, so only their type and place are logged.
"""

import re
import sys
import traceback
from pathlib import Path
from typing import ClassVar, Final

from ray_job.contract.exit_codes import EXIT_FAILED, EXIT_NO_MODEL
from ray_job.contract.parts import PartError


class JobError(Exception):
    """Base of the errors that end a job on purpose."""

    exit_code: ClassVar[int] = EXIT_FAILED


class EngineUnavailableError(JobError):
    """The engine did not start, or its endpoint does not answer.

    The message holds the last lines of the engine's log, or names the endpoint.
    """


class NoModelError(EngineUnavailableError):
    """The model is missing or was changed, and so it would be in another attempt. The message names the remedy."""

    exit_code = EXIT_NO_MODEL


class JobEndedError(JobError):
    """The coordinator has ended the job, which is a success of the process: it has nothing left to do."""

    exit_code = 0


class CoordinatorError(JobError):
    """The coordinator refuses a request or its answer is unreadable, or the job has no token."""


class ObjectError(JobError):
    """An object cannot be read or written. The message names it without the query of its URL."""


class ObjectMissingError(ObjectError):
    """An object does not exist or is too short."""


class UrlRefusedError(ObjectError):
    """The object store refuses the URL of an object, for example because it has expired."""


class InputError(JobError):
    """A row of a plan is not the request that the service validated. The message names the line."""


# One of the errors above in the traceback of a worker, which Ray passes on as text only.
_JOB_ERROR: Final = re.compile(
    r"^ray_job\.(?:errors|contract\.parts)\.(\w+): (.*?)(?:\n\n|\Z)", re.DOTALL | re.MULTILINE
)
# The frames of a traceback and the type of its error. The first traceback in a text is that of the root cause, and
# its message follows the type: nothing that a message quotes can come before it.
_TRACEBACK: Final = re.compile(
    r'((?:^  File "[^"\n]+", line \d+, in .*\n(?:    .*\n)*)+)^([A-Za-z_][\w.]*)', re.MULTILINE
)
_FRAME: Final = re.compile(r'^  File "([^"\n]+)", line (\d+)', re.MULTILINE)


def find_job_error(error: BaseException) -> JobError | PartError | None:
    """Return the error of this package that Ray wrapped into ``error``, or None if there is none."""
    causes, worker_traceback = _causes(error)
    for cause in causes:
        if isinstance(cause, JobError | PartError):
            return cause
    found = _JOB_ERROR.findall(worker_traceback)
    if not found:
        return None
    name, message = found[-1]
    return (NoModelError if name == NoModelError.__name__ else JobError)(message.strip())


def describe_unexpected_error(error: BaseException) -> str:
    """Return the type of an error and the places where it was raised, without its message.

    The result looks like ``KeyError at ray_job.rows:57``. For an error that a library raised it also names the
    innermost line of this package: ``ValueError at json.decoder:355, called from ray_job.rows:57``.
    """
    causes, worker_traceback = _causes(error)
    match = _TRACEBACK.search(worker_traceback)
    if match is not None:
        name = match[2].rpartition(".")[2]
        frames = _FRAME.findall(match[1])
    else:
        # Ray Data adds a cause that was never raised.
        root = next((cause for cause in reversed(causes) if cause.__traceback__), error)
        name = type(root).__name__
        frames = [(frame.filename, frame.lineno) for frame in traceback.extract_tb(root.__traceback__)]
    if not frames:
        return name
    places = []
    for file, line in frames:
        roots = [root for root in sys.path if root and Path(file).is_relative_to(root)]
        path = Path(file).relative_to(max(roots, key=len)) if roots else Path(Path(file).name)
        places.append(f"{'.'.join(path.with_suffix('').parts)}:{line}")
    own = next((place for place in reversed(places) if place.startswith("ray_job.")), places[-1])
    return f"{name} at {places[-1]}" + (f", called from {own}" if own != places[-1] else "")


def _causes(error: BaseException) -> tuple[list[BaseException], str]:
    """Return the error, its cause, the cause of that and so on, and the traceback of the worker that failed.

    The traceback is "" if the error is not from a worker of Ray.
    """
    causes: list[BaseException] = []
    found: BaseException | None = error
    while found is not None and found not in causes:
        causes.append(found)
        found = getattr(found, "cause", None) or found.__cause__ or found.__context__
    for cause in causes:
        if any(base.__module__ == "ray.exceptions" for base in type(cause).__mro__):
            return causes, str(cause)
    return causes, ""
