"""The errors of the service.

CloisterError
├── SettingsError            a setting or the model catalogue is wrong
├── ObjectStoreError         the object store cannot be reached or refused
│   └── ObjectNotFoundError  no object with that key
├── LauncherError            Ray cannot be reached or refused the job
│   └── LaunchRefusedError   the job is refused as it is
└── ApiError                 an answer to a client: HTTP status, type, code and param
    ├── InvalidRequestError  400
    ├── AuthenticationError  401
    ├── ScopeError           403
    ├── NotFoundError        404
    ├── ConflictError        409, not to be retried
    ├── TooLargeError        413
    ├── RateLimitError       429, to be retried once others have ended
    ├── QuotaError           429, not to be retried as it is
    └── UnavailableError     503, to be retried
"""

from collections.abc import Mapping


class CloisterError(Exception):
    """The root of all errors that the service raises on purpose."""


class SettingsError(CloisterError):
    """A setting or the model catalogue is wrong; the message names the field and what is allowed."""


class ObjectStoreError(CloisterError):
    """The object store cannot be reached, or refused."""


class ObjectNotFoundError(ObjectStoreError):
    """There is no object with that key."""


class LauncherError(CloisterError):
    """Ray cannot be reached, or refused the job."""


class LaunchRefusedError(LauncherError):
    """The job is refused as it is: until somebody changes something it will be refused again."""


class ApiError(CloisterError):
    """An answer to a client in OpenAI's envelope."""

    status_code = 500
    type = "server_error"
    headers: Mapping[str, str] = {}

    def __init__(
        self,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        if headers:
            self.headers = {**self.headers, **headers}
        self.message = message
        self.param = param
        self.code = code


class InvalidRequestError(ApiError):
    """The request is wrong; the message says what to change."""

    status_code = 400
    type = "invalid_request_error"


class AuthenticationError(ApiError):
    """No API key, or none that is valid."""

    status_code = 401
    type = "invalid_request_error"


class ScopeError(ApiError):
    """The API key is good, but lacks the scope that this needs."""

    status_code = 403
    type = "invalid_request_error"


class NotFoundError(ApiError):
    """There is no such object in this project."""

    status_code = 404
    type = "invalid_request_error"


class ConflictError(ApiError):
    """The object's state does not allow this. The official client retries 409 unless it is told not to."""

    status_code = 409
    type = "invalid_request_error"
    headers = {"x-should-retry": "false"}  # noqa: RUF012 - class constant, never mutated


class TooLargeError(ApiError):
    """The upload is over the limit."""

    status_code = 413
    type = "invalid_request_error"


class RateLimitError(ApiError):
    """A limit of the project is reached for now; room is made when a batch of it ends."""

    status_code = 429
    type = "rate_limit_error"
    headers = {"retry-after": "30"}  # noqa: RUF012 - class constant, never mutated


class QuotaError(ApiError):
    """A limit of the project that waiting does not help with: something must be deleted, made smaller or raised."""

    status_code = 429
    type = "insufficient_quota"
    headers = {"x-should-retry": "false"}  # noqa: RUF012 - class constant, never mutated


class UnavailableError(ApiError):
    """A part of the stack does not answer; the client may try again."""

    status_code = 503
    type = "server_error"
    headers = {"retry-after": "2"}  # noqa: RUF012 - class constant, never mutated
