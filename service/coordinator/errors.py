"""Errors of the coordinator: answers to a job."""

from service.errors import CloisterError


class RefusedError(CloisterError):
    """A request that is refused, with the HTTP status of the answer."""

    def __init__(self, message: str, *, status_code: int = 400) -> None:
        super().__init__(message)
        self.status_code = status_code


class JobEndedError(RefusedError):
    """The job has ended, or there never was one with this token."""

    def __init__(self) -> None:
        super().__init__("the token is not that of a running job: the job has ended", status_code=401)
