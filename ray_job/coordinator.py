"""The coordinator, from which a job leases segments and to which it reports its parts."""

import asyncio
import logging
import time
from collections.abc import MutableMapping
from pathlib import Path
from types import TracebackType
from typing import Final, Protocol, Self, TypeVar

import aiohttp

from ray_job.contract.leases import (
    COMMITS_PATH,
    END_PATH,
    FAILURES_PATH,
    PART_URLS_PATH,
    SYNC_PATH,
    TOKEN_FILE_VARIABLE,
    TOKEN_VARIABLE,
    Commit,
    CommitResponse,
    EndRequest,
    EndResponse,
    Failure,
    Message,
    MessageError,
    PartUrls,
    PartUrlsRequest,
    SyncRequest,
    SyncResponse,
)
from ray_job.errors import CoordinatorError, JobEndedError

logger = logging.getLogger(__name__)

FIRST_PAUSE_S: Final = 0.05
LAST_PAUSE_S: Final = 5.0
ANSWER_TIMEOUT_S: Final = 30.0
# Nobody else ends a job, and its GPUs, while the service is away. Its rows run again in another job.
AWAY_LIMIT_S: Final = 3600.0
# A connection that the coordinator closed while it was idle fails once. Only a second failure is worth a warning.
FAILURES_BEFORE_WARNING: Final = 2
_OK: Final = 200
_UNAUTHORIZED: Final = 401
_SERVER_ERROR: Final = 500
_M = TypeVar("_M", bound=Message)

WITHOUT_TOKEN: Final = {"env_vars": {TOKEN_VARIABLE: "", TOKEN_FILE_VARIABLE: ""}}
"""A ``runtime_env`` of Ray that hides the token. Ray Jobs give the environment of the driver to all workers too."""


class Coordinator(Protocol):
    """Requests of a job to the coordinator.

    Each method waits until the coordinator answers, for an hour at most.

    Raises:
        JobEndedError: the coordinator refuses the job's token.
        CoordinatorError: the coordinator is away or refuses the request, or its answer is unreadable.
    """

    async def sync(self, request: SyncRequest) -> SyncResponse:
        """Extend leases and take new ones."""

    async def part_urls(self, request: PartUrlsRequest) -> PartUrls:
        """Return places for part objects of a batch."""

    async def commit(self, commit: Commit) -> CommitResponse:
        """Record a part that was written."""

    async def fail(self, failure: Failure) -> None:
        """Give a segment back that cannot be run."""

    async def end(self, request: EndRequest) -> EndResponse:
        """End the job if there is no work for it."""


def take_token(environment: MutableMapping[str, str]) -> str:
    """Return the job's token and remove it from the environment, so that no child process inherits it.

    Raises:
        CoordinatorError: there is no token.
    """
    token = environment.pop(TOKEN_VARIABLE, "")
    path = environment.pop(TOKEN_FILE_VARIABLE, "")
    if not token and path:
        try:
            token = Path(path).read_text().strip()
        except OSError as error:
            raise CoordinatorError(
                f"the job's token in {path} is unreadable ({type(error).__name__}); mount the job's secret there"
            ) from None
    if not token:
        raise CoordinatorError(f"the job has no token; set {TOKEN_VARIABLE} or {TOKEN_FILE_VARIABLE}")
    return token


class HttpCoordinator:
    """The coordinator over HTTP. Use it as an async context manager.

    Args:
        url: where it listens.
        token: the job's token.
    """

    def __init__(self, url: str, token: str) -> None:
        self._url = url.rstrip("/")
        self._headers = {"authorization": f"Bearer {token}", "content-type": "application/json"}
        self._is_unreachable = False

    async def __aenter__(self) -> Self:
        self._session = aiohttp.ClientSession(headers=self._headers)
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._session.close()

    async def sync(self, request: SyncRequest) -> SyncResponse:
        """See ``Coordinator``."""
        answer = await self._post(SYNC_PATH, request, timeout_s=request.wait_s + ANSWER_TIMEOUT_S)
        return _read(SyncResponse, answer)

    async def part_urls(self, request: PartUrlsRequest) -> PartUrls:
        """See ``Coordinator``."""
        return _read(PartUrls, await self._post(PART_URLS_PATH, request))

    async def commit(self, commit: Commit) -> CommitResponse:
        """See ``Coordinator``."""
        return _read(CommitResponse, await self._post(COMMITS_PATH, commit))

    async def fail(self, failure: Failure) -> None:
        """See ``Coordinator``."""
        await self._post(FAILURES_PATH, failure)

    async def end(self, request: EndRequest) -> EndResponse:
        """See ``Coordinator``."""
        return _read(EndResponse, await self._post(END_PATH, request))

    async def _post(self, path: str, message: Message, *, timeout_s: float = ANSWER_TIMEOUT_S) -> bytes:
        """Post a message until the coordinator answers it, and return the answer."""
        data, pause_s, failures = message.to_json(), FIRST_PAUSE_S, 0
        deadline_s = time.monotonic() + AWAY_LIMIT_S
        timeout = aiohttp.ClientTimeout(total=timeout_s)
        while True:
            try:
                async with self._session.post(f"{self._url}{path}", data=data, timeout=timeout) as response:
                    answer, status = await response.read(), response.status
                failure = f"status {status}"
            except (aiohttp.ClientError, OSError) as error:
                answer, status, failure = b"", _SERVER_ERROR, type(error).__name__
            if status < _SERVER_ERROR:
                break
            failures += 1
            if failures == FAILURES_BEFORE_WARNING and not self._is_unreachable:
                self._is_unreachable = True
                logger.warning("the coordinator at %s does not answer (%s); trying again", self._url, failure)
            if time.monotonic() > deadline_s:
                raise CoordinatorError(
                    f"the coordinator at {self._url} did not answer for {AWAY_LIMIT_S / 60:.0f} minutes ({failure})"
                )
            await asyncio.sleep(pause_s)
            pause_s = min(2 * pause_s, LAST_PAUSE_S)
        if self._is_unreachable:
            self._is_unreachable = False
            logger.info("the coordinator at %s answers again", self._url)
        if status == _UNAUTHORIZED:
            raise JobEndedError("the coordinator ended this job: its token is void")
        if status != _OK:
            raise CoordinatorError(
                f"the coordinator at {self._url} answered {path} with status {status}; check coordinator_url, and "
                "that the service and the job's image have the same version"
            )
        return answer


def _read(kind: type[_M], answer: bytes) -> _M:
    """Read an answer.

    Raises:
        CoordinatorError: it is not a message of this kind.
    """
    try:
        return kind.from_json(answer)
    except MessageError as error:
        raise CoordinatorError(
            f"the coordinator's answer is unreadable: {error}; run the service and the job's image in one version"
        ) from None
