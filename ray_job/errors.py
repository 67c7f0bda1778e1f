"""The errors of a job. Each ends the job with its message as the last line of the log.

JobError
├── EngineStartError   the engine did not start: engine arguments, memory or model files
│   └── NoModelError   the object store has no such model, or one too large for its volume
├── EndpointUnreachableError   the endpoint of the http lane does not answer
├── SupersededError    the batch was cancelled, ended, or a newer attempt has begun
└── InputError         the input object is not what the service validated
"""


class JobError(Exception):
    """The root of the errors that end a job on purpose."""


class EngineStartError(JobError):
    """The engine did not start; the message holds the last lines of its log."""


class NoModelError(EngineStartError):
    """There is no model that another attempt could have; the message says what to upload or to change."""


class EndpointUnreachableError(JobError):
    """The endpoint of the http lane does not answer; the message names it."""


class SupersededError(JobError):
    """The database no longer takes this attempt's progress: nothing is left for it to do."""


class InputError(JobError):
    """The input object is not what the service validated; the message names the line."""
