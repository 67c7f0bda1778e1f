"""The http engine: ``ray.data.llm``'s HTTP processor with an OpenAI-compatible endpoint that is already running.

The processor has one URL for all rows, sends them one after the other, drops the status code, and ends the job when a
response is not JSON, with the row's content in the message. But it accepts a session factory. The session below sends
all rows of a batch at once, each to its own path, and returns each status and body unchanged.
"""

import asyncio
import functools
import json
import math
import os
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, Final, Self

from ray_job.contract.job_spec import ModelSpec
from ray_job.engines.deadlines import LineDeadlines, LineSize, LineTimeoutError, generated_tokens
from ray_job.engines.llm_stages import response_row, use_few_actors
from ray_job.errors import EngineUnavailableError
from ray_job.rows import timed_out

if TYPE_CHECKING:
    from ray.data import Dataset

API_KEY_VARIABLE: Final = "CLOISTER_HTTP_ENGINE_API_KEY"
# The path of a file that holds the key: on Kubernetes, secrets are files.
API_KEY_FILE_VARIABLE: Final = "CLOISTER_HTTP_ENGINE_API_KEY_FILE"
RETRIED_STATUSES: Final = frozenset({408, 425, 429, 502, 503, 504})
REDIRECTS: Final = range(300, 400)
ATTEMPTS: Final = 6
FIRST_PAUSE_S: Final = 0.5
CONNECT_TIMEOUT_S: Final = 30.0


def http_engine(model: ModelSpec, requests: "Dataset") -> "Dataset":
    """Add the stage that posts lines to ``model.base_url``."""
    from ray.data.llm import HttpRequestProcessorConfig, build_processor

    config = HttpRequestProcessorConfig(
        url=model.base_url,
        batch_size=model.call_rows,
        # The deadlines outlive the sessions of a stage: it opens one for each call.
        session_factory=functools.partial(EndpointSession, model.base_url, model.request_timeout_s, LineDeadlines()),
    )
    stage = {"num_cpus": model.stage_num_cpus}
    processor = build_processor(
        config,
        preprocess=lambda row: {"payload": {"path": row["url"], "body": row["body"].decode(), "tokens": row["tokens"]}},
        postprocess=lambda row: response_row(
            row, row["http_response"]["status_code"], row["http_response"]["response_body"]
        ),
        preprocess_map_kwargs=stage,
        postprocess_map_kwargs=stage,
    )
    use_few_actors(processor.get_stage_by_name("HttpRequestStage"), model)
    return processor(requests)


def api_key(environment: Mapping[str, str]) -> str:
    """Return the API key of the endpoint, or "" if the environment names none.

    Raises:
        EngineUnavailableError: the environment names a file that is missing, unreadable or empty.
    """
    path = environment.get(API_KEY_FILE_VARIABLE, "")
    if environment.get(API_KEY_VARIABLE) or not path:
        return environment.get(API_KEY_VARIABLE, "")
    try:
        key = Path(path).read_text().strip()
        problem = "" if key else "which is empty"
    except (OSError, UnicodeDecodeError) as error:
        problem = f"which cannot be read ({type(error).__name__})"
    if problem:
        raise EngineUnavailableError(
            f"{API_KEY_FILE_VARIABLE} names {path}, {problem}. Set the secret http_engine_api_key of the stack again, "
            "or remove it if the endpoint needs no key"
        )
    return key


class EndpointSession:
    """A session with the interface that the HTTP stage uses of ``aiohttp.ClientSession``.

    Each of its responses has status 200 and a JSON body, which holds the real status and body.

    Args:
        base_url: the URL of the endpoint, ending in ``/v1``.
        request_timeout_s: how long the endpoint may take for an answer.
        deadlines: the deadlines of the lines that it answers.
    """

    def __init__(self, base_url: str, request_timeout_s: float, deadlines: LineDeadlines | None = None) -> None:
        import aiohttp

        key = api_key(os.environ)
        headers = {"content-type": "application/json", **({"authorization": f"Bearer {key}"} if key else {})}
        self._timeout_s = request_timeout_s
        self._deadlines = deadlines or LineDeadlines()
        self._base_url = base_url.rstrip("/").removesuffix("/v1")
        self._session = aiohttp.ClientSession(
            headers=headers,
            connector=aiohttp.TCPConnector(limit=0),
            timeout=aiohttp.ClientTimeout(total=None, sock_connect=CONNECT_TIMEOUT_S),
        )

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._session.close()

    def post(self, url: str, *, headers: Any, data: str) -> "asyncio.Task[EndpointAnswer]":
        """Start a request at once. The stage awaits the answers later."""
        del url, headers
        payload = json.loads(data)
        body = payload["body"].encode()
        size = LineSize(tokens=payload.get("tokens", math.inf), prompt=len(body))
        return asyncio.ensure_future(self._ask(f"{self._base_url}{payload['path']}", body, size))

    async def _ask(self, url: str, body: bytes, size: LineSize) -> "EndpointAnswer":
        import aiohttp

        failure = ""
        for attempt in range(ATTEMPTS):
            if attempt:
                await asyncio.sleep(FIRST_PAUSE_S * 2 ** (attempt - 1))
            try:
                answer = await self._deadlines.answer(
                    size,
                    lambda: self._post(url, body),
                    lambda answer: generated_tokens(answer.status_code, answer.response_body),
                    ceiling_s=self._timeout_s,
                )
            except LineTimeoutError as error:
                status_code, error_json = timed_out(str(error))
                return EndpointAnswer(status_code, error_json.decode())
            except (aiohttp.ClientError, OSError) as error:
                # Protocol errors quote what the endpoint sent.
                failure = f"{type(error).__name__}: {error}" if isinstance(error, OSError) else type(error).__name__
                continue
            if answer.status_code in REDIRECTS:
                raise EngineUnavailableError(
                    f"{url} answers {answer.status_code}, a redirect, which is not followed; set the model's base_url "
                    "to the address that answers requests"
                )
            if answer.status_code not in RETRIED_STATUSES or attempt == ATTEMPTS - 1:
                return answer
        raise EngineUnavailableError(
            f"{url} did not answer {ATTEMPTS} times ({failure}); check the model's base_url and that the endpoint runs"
        )

    async def _post(self, url: str, body: bytes) -> "EndpointAnswer":
        # A redirect would send the prompt to another address.
        async with self._session.post(url, data=body, allow_redirects=False) as response:
            return EndpointAnswer(response.status, (await response.read()).decode(errors="replace"))


class EndpointAnswer:
    """A response of the endpoint, with the interface that the HTTP stage uses of ``aiohttp.ClientResponse``."""

    status: Final = 200

    def __init__(self, status_code: int, response_body: str) -> None:
        self.status_code = status_code
        self.response_body = response_body

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        return None

    async def json(self) -> dict[str, Any]:
        """Return the real status and body, the same two fields for every row."""
        return {"status_code": self.status_code, "response_body": self.response_body}
