"""The http lane: ``ray.data.llm``'s HTTP processor against an OpenAI-compatible endpoint that already runs.

The processor alone has one URL for all rows, sends them one after the other, drops the status code, and
ends the job (with the row's content in the message) when an answer is not JSON. It takes a session factory,
though: the session below sends all rows of a batch at once, each to its own path, and answers with the
status and the body as they came.
"""

import asyncio
import functools
import json
import os
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, Final, Self

from ray_job.contract.job_spec import JobSpec
from ray_job.engines.waiting_stage import wait_in_few_actors
from ray_job.errors import EndpointUnreachableError

if TYPE_CHECKING:
    import aiohttp
    from ray.data import Dataset

API_KEY_VARIABLE: Final = "CLOISTER_HTTP_LANE_API_KEY"
# The path of a file with the key instead: on Kubernetes secrets are files.
API_KEY_FILE_VARIABLE: Final = "CLOISTER_HTTP_LANE_API_KEY_FILE"
RETRIED_STATUSES: Final = frozenset({408, 425, 429, 502, 503, 504})
ATTEMPTS: Final = 6
FIRST_PAUSE_S: Final = 0.5
# A generation of many thousand tokens on a busy endpoint; longer than that nobody answers.
ANSWER_TIMEOUT_S: Final = 3_600


def http_lane(spec: JobSpec, requests: "Dataset") -> "Dataset":
    """Adds the stage that asks ``spec.model.base_url``."""
    from ray.data.llm import HttpRequestProcessorConfig, build_processor

    model = spec.model
    config = HttpRequestProcessorConfig(
        url=model.base_url,
        batch_size=model.batch_size,
        session_factory=functools.partial(EndpointSession, model.base_url),
    )
    stage = {"num_cpus": model.stage_num_cpus}
    processor = build_processor(
        config,
        preprocess=to_payload,
        postprocess=to_response,
        preprocess_map_kwargs=stage,
        postprocess_map_kwargs=stage,
    )
    wait_in_few_actors(processor.get_stage_by_name("HttpRequestStage"), model)
    return processor(requests)


def to_payload(row: dict[str, Any]) -> dict[str, Any]:
    """What the session below is given for a row."""
    return {"payload": {"path": row["url"], "body": row["body"].decode()}}


def to_response(row: dict[str, Any]) -> dict[str, Any]:
    """The response row; see ``ray_job.engines`` for the columns."""
    answer = row["http_response"]
    return {
        "line": row["line"],
        "custom_id": row["custom_id"],
        "status_code": answer["status_code"],
        "response_body": answer["response_body"].encode(),
    }


def api_key(environment: Mapping[str, str]) -> str:
    """The endpoint's API key; empty where it asks for none, which a file that is not there says too."""
    path = environment.get(API_KEY_FILE_VARIABLE, "")
    if environment.get(API_KEY_VARIABLE) or not path:
        return environment.get(API_KEY_VARIABLE, "")
    try:
        return Path(path).read_text().strip()
    except FileNotFoundError:
        return ""


class EndpointSession:
    """Looks to the HTTP stage like an aiohttp session whose every answer is 200 and JSON."""

    def __init__(self, base_url: str) -> None:
        import aiohttp

        key = api_key(os.environ)
        headers = {"content-type": "application/json", **({"authorization": f"Bearer {key}"} if key else {})}
        self._base_url = base_url.rstrip("/").removesuffix("/v1")
        self._session = aiohttp.ClientSession(
            headers=headers,
            connector=aiohttp.TCPConnector(limit=0),
            timeout=aiohttp.ClientTimeout(total=ANSWER_TIMEOUT_S),
        )

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._session.close()

    def post(self, url: str, *, headers: Any, data: str) -> "asyncio.Task[EndpointAnswer]":
        """Starts the request at once; the stage collects the answers afterwards."""
        del url, headers
        payload = json.loads(data)
        return asyncio.ensure_future(self._ask(f"{self._base_url}{payload['path']}", payload["body"].encode()))

    async def _ask(self, url: str, body: bytes) -> "EndpointAnswer":
        import aiohttp

        failure = ""
        for attempt in range(ATTEMPTS):
            if attempt:
                await asyncio.sleep(FIRST_PAUSE_S * 2 ** (attempt - 1))
            try:
                async with self._session.post(url, data=body) as response:
                    answer = await _read(response)
            except (aiohttp.ClientError, TimeoutError, OSError) as error:
                failure = f"{type(error).__name__}: {error}"
                continue
            if answer.status_code not in RETRIED_STATUSES or attempt == ATTEMPTS - 1:
                return answer
        raise EndpointUnreachableError(
            f"{url} did not answer {ATTEMPTS} times ({failure}); check the model's base_url and that the endpoint runs"
        )


async def _read(response: "aiohttp.ClientResponse") -> "EndpointAnswer":
    return EndpointAnswer(response.status, (await response.read()).decode(errors="replace"))


class EndpointAnswer:
    """An answer of the endpoint, as the HTTP stage reads it."""

    status: Final = 200

    def __init__(self, status_code: int, response_body: str) -> None:
        self.status_code = status_code
        self._response_body = response_body

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        return None

    async def json(self) -> dict[str, Any]:
        """The real status and body, the same two columns for every row."""
        return {"status_code": self.status_code, "response_body": self._response_body}
