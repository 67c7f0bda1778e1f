"""The errors of the service.

CloisterError
├── SettingsError            a setting or the model catalogue is invalid
├── ObjectStoreError         the object store is unreachable or refused the request
│   ├── ObjectNotFoundError  the key does not exist
│   └── ObjectVersionsError  the store keeps versions that the service cannot delete
├── LauncherError            Ray is unreachable or refused the job
│   └── LaunchRefusedError   the job cannot run as it is
└── ApiError                 an answer to a client: HTTP status, type, code and param
    ├── InvalidRequestError  400, or another status from 401 to 413 that means: change the request
    │   └── NotFoundError    404
    ├── RateLimitError       429, retry after other batches have ended
    ├── QuotaError           429, do not retry unchanged
    └── UnavailableError     503, retry
"""

from collections.abc import Mapping


class CloisterError(Exception):
    """Root of all errors that the service raises on purpose."""


class SettingsError(CloisterError):
    """A setting or the model catalogue is invalid. The message names the field and what is allowed."""


class ObjectStoreError(CloisterError):
    """The object store is unreachable or refused the request."""


class ObjectNotFoundError(ObjectStoreError):
    """The object store has no object with this key."""


class ObjectVersionsError(ObjectStoreError):
    """The object store keeps versions of objects that the service cannot delete. The message includes advice."""


class LauncherError(CloisterError):
    """Ray is unreachable or refused the job."""


class LaunchRefusedError(LauncherError):
    """The launcher refused the job as it is. Retrying helps only after something in the stack has changed."""


class ApiError(CloisterError):
    """An answer to a client in OpenAI's envelope.

    Args:
        message: what is wrong and what to do.
        status_code: the HTTP status; by default the one of the class.
        param: the parameter that is wrong.
        code: a code for programs, e.g. ``invalid_api_key``.
        headers: headers of the response, besides those of the class.
    """

    status_code = 500
    type = "server_error"
    headers: Mapping[str, str] = {}

    def __init__(
        self,
        message: str,
        *,
        status_code: int | None = None,
        param: str | None = None,
        code: str | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        if status_code is not None:
            self.status_code = status_code
        if headers:
            self.headers = {**self.headers, **headers}
        self.message = message
        self.param = param
        self.code = code


class InvalidRequestError(ApiError):
    """The request is invalid. The message explains what to change."""

    status_code = 400
    type = "invalid_request_error"


def unknown_cursor(kind: str, object_id: str) -> InvalidRequestError:
    """Return the error of a listing that starts after an object that the project does not have."""
    return InvalidRequestError(
        f"Invalid 'after': there is no {kind} {object_id!r}. Use the id of the last {kind} of the previous page.",
        param="after",
        code="invalid_value",
    )


class NotFoundError(InvalidRequestError):
    """The object does not exist in this project."""

    status_code = 404


class RateLimitError(ApiError):
    """A limit of the project is reached for now. Room becomes free when one of its batches ends."""

    status_code = 429
    type = "rate_limit_error"
    headers = {"retry-after": "30"}  # noqa: RUF012 - class constant, never mutated


class QuotaError(ApiError):
    """A limit of the project that waiting does not help with: delete something, send less, or raise the limit."""

    status_code = 429
    type = "insufficient_quota"
    headers = {"x-should-retry": "false"}  # noqa: RUF012 - class constant, never mutated


class UnavailableError(ApiError):
    """A backend does not answer. The client may retry."""

    status_code = 503
    type = "server_error"
    headers = {"retry-after": "2"}  # noqa: RUF012 - class constant, never mutated
