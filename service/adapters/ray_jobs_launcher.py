"""Runs jobs through the Ray Jobs REST API, so that the service does not need the Ray package.

Source of the routes and fields: https://docs.ray.io/en/latest/cluster/running-applications/job-submission/rest.html
"""

import dataclasses
import re
from pathlib import Path
from types import TracebackType
from typing import Any, Final, Self
from urllib.parse import quote

import httpx

from ray_job.contract.exit_codes import EXIT_NO_MODEL
from ray_job.contract.job_spec import ENVIRONMENT_VARIABLE, JobSpec, ModelSpec
from ray_job.contract.leases import TOKEN_VARIABLE
from ray_job.contract.object_keys import model_prefix
from service.errors import LauncherError
from service.ports import JobState, JobStatus

# The job's entrypoint mostly waits for Ray's workers. The fraction leaves room for them.
ENTRYPOINT_NUM_CPUS: Final = 0.1
TIMEOUT_S: Final = 20.0

_STATES: Final = {
    "PENDING": JobState.PENDING,
    "RUNNING": JobState.RUNNING,
    "SUCCEEDED": JobState.SUCCEEDED,
    "FAILED": JobState.FAILED,
    "STOPPED": JobState.STOPPED,
}
_LAST_LINES: Final = 15
_LAST_CHARACTERS: Final = 2_000
# Precedes the reason in the log of a failed job: see ray_job.__main__.
_REASON: Final = "\nERROR ray_job "
# Colours and other control sequences, and characters that upset terminals or JSON parsers.
_CONTROL: Final = re.compile(r"\x1b\[[0-9;?]*[ -/]*[@-~]|[\x00-\x08\x0b-\x1f\x7f]")


class RayJobsLauncher:
    """Launches ``ray_job`` on an existing Ray cluster. Use it as a context manager.

    A job's spec and token are variables of its runtime environment, so all who can use Ray's dashboard can read them.

    Args:
        address: the HTTP address of Ray's dashboard, e.g. ``http://127.0.0.1:8265``.
        entrypoint: the shell command of a job.
        token: Ray's authentication token; empty for a Ray without token authentication.
        objects: the directory of the object store, which all nodes can read; None for a store in S3.
    """

    def __init__(self, address: str, *, entrypoint: str, token: str = "", objects: Path | None = None) -> None:
        self._address = address
        self._entrypoint = entrypoint
        self._objects = objects
        # Ignores proxies of the environment: the cluster is in the same network, and the job spec must not leave it.
        headers = {"Authorization": f"Bearer {token}"} if token else {}
        self._client = httpx.Client(base_url=address, timeout=TIMEOUT_S, trust_env=False, headers=headers)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._client.close()

    def refusal(self, model: ModelSpec) -> str:
        """See ``service.ports.Launcher.refusal``. Ray reports the nodes that it has, not those that it could get."""
        if model.digest and self._objects is None:
            return (
                "its digest names a model in S3, and jobs on a running Ray read models from directories only; the "
                "operator of this stack can set its source to a directory on the nodes instead"
            )
        return ""

    def launch(self, spec: JobSpec, token: str) -> None:
        """See ``service.ports.Launcher.launch``. A repeated launch does not change the token.

        A pushed model is read in place, in the directory of the object store.
        """
        if spec.model.digest and self._objects is not None:
            source = str(self._objects / model_prefix(spec.model.digest).rstrip("/"))
            spec = dataclasses.replace(spec, model=dataclasses.replace(spec.model, source=source))
        request = {
            "submission_id": spec.job_id,
            "entrypoint": self._entrypoint,
            "entrypoint_num_cpus": ENTRYPOINT_NUM_CPUS,
            "runtime_env": {"env_vars": {ENVIRONMENT_VARIABLE: spec.to_json(), TOKEN_VARIABLE: token}},
            "metadata": {"model": spec.model.id},
        }
        response = self._request("POST", "", json=request)
        # For an id that it knows, Ray answers with the same status as for any other error.
        if response.is_error and self.status(spec.job_id).state is JobState.MISSING:
            raise self._refused(f"launch {spec.job_id}", response)

    def status(self, job_id: str) -> JobStatus:
        """See ``service.ports.Launcher.status``."""
        response = self._request("GET", job_id)
        if response.status_code == httpx.codes.NOT_FOUND:
            return JobStatus(state=JobState.MISSING)
        job = self._json(f"ask for {job_id}", response)
        state = _STATES.get(str(job.get("status")))
        if state is None:
            raise LauncherError(f"Ray at {self._address} reports an unknown state of {job_id}: {job.get('status')!r}")
        if state is JobState.FAILED:
            logs = self._request("GET", job_id, "/logs")
            # If the log is lost with its node, Ray's own message is the next best.
            log = "" if logs.is_error else str(self._json(f"read the log of {job_id}", logs).get("logs") or "")
            message = last_words(log) or last_words(str(job.get("message") or ""))
            return JobStatus(state=state, message=message, is_final=job.get("driver_exit_code") == EXIT_NO_MODEL)
        return JobStatus(state=state)

    def stop(self, job_id: str) -> None:
        """See ``service.ports.Launcher.stop``."""
        response = self._request("POST", job_id, "/stop")
        if response.is_error and response.status_code != httpx.codes.NOT_FOUND:
            raise self._refused(f"stop {job_id}", response)

    def _request(self, method: str, job_id: str, action: str = "", **options: Any) -> httpx.Response:
        try:
            return self._client.request(method, f"/api/jobs/{quote(job_id, safe='')}{action}", **options)
        except httpx.HTTPError as error:
            raise LauncherError(f"cannot reach Ray at {self._address}: {error or type(error).__name__}") from error

    def _json(self, what: str, response: httpx.Response) -> dict[str, Any]:
        if response.is_error:
            raise self._refused(what, response)
        try:
            answer = response.json()
        except ValueError as error:
            raise LauncherError(
                f"cannot {what}: {self._address} did not answer with JSON; is it the Ray Jobs API?"
            ) from error
        if not isinstance(answer, dict):
            raise LauncherError(
                f"cannot {what}: {self._address} did not answer with a JSON object; is it the Ray Jobs API?"
            )
        return answer

    def _refused(self, what: str, response: httpx.Response) -> LauncherError:
        if response.status_code in (httpx.codes.UNAUTHORIZED, httpx.codes.FORBIDDEN):
            return LauncherError(
                f"cannot {what}: Ray at {self._address} answered {response.status_code}: the token is missing or "
                "wrong. Set RAY_AUTH_TOKEN_PATH to the file with the token"
            )
        lines = last_words(response.text).splitlines() or ["no reason given"]
        return LauncherError(f"cannot {what}: Ray at {self._address} answered {response.status_code}: {lines[-1]}")


def last_words(log: str) -> str:
    """Return the last lines of a log that are not blank, without control characters and short enough for an error.

    If the job itself logged why it failed, only that is returned, without the lines of Ray before it.
    """
    lines = [line.rstrip() for line in _CONTROL.sub("", log.replace("\r", "\n")).splitlines()]
    text = "\n".join([line for line in lines if line][-_LAST_LINES:])
    _, _, reason = f"\n{text}".rpartition(_REASON)
    return reason.removeprefix("\n")[-_LAST_CHARACTERS:]
