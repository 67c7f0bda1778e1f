"""The API as a client sees it: readiness, models, and a batch of one line for each model."""

import json
import os
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, Final, Self

import httpx

from ray_job.contract.lines import ENDPOINTS
from service.client.connection import find_server, open_client
from service.client.exit_codes import CommandError
from service.client.following import Update, listed_errors, retrieve
from service.client.terminal import BatchProgress, duration, note, progress_text
from service.doctor.findings import Finding, run_check
from service.transitions import FINAL

if TYPE_CHECKING:
    from openai import OpenAI
    from openai.types import Batch

_OWNER: Final = "cloister"
_TIMEOUT_S: Final = 15.0
_CUSTOM_ID: Final = "doctor"
_POLL_INTERVAL_S: Final = 2.0
_CANCEL_TIMEOUT_S: Final = 120.0
# After Ctrl-C nobody wants to wait.
_INTERRUPTED_TIMEOUT_S: Final = 5.0
_MAX_REASON: Final = 500
_BODIES: Final[dict[str, dict[str, Any]]] = {
    "/v1/chat/completions": {"messages": [{"role": "user", "content": "Say yes."}], "max_tokens": 4},
    "/v1/completions": {"prompt": "Say yes.", "max_tokens": 4},
    "/v1/embeddings": {"input": "yes"},
}


def check_api(
    data_dir: Path | None, *, models: Sequence[str], with_batches: bool, time_limit_s: float, quiet: bool
) -> Iterator[Finding]:
    """Check readiness and models, then send a batch of one line to each model.

    Args:
        data_dir: the data directory of a `cloister local`, used if the environment names no server; None for none.
        models: ids of the models to test; empty for all models of the server.
        with_batches: whether to send a batch to each model.
        time_limit_s: the time limit of one batch, in seconds.
        quiet: whether to hide the progress on stderr.
    """
    try:
        find_server(os.environ, data_dir)
    except CommandError as error:
        yield Finding.not_checked("API", str(error))
        return
    yield from run_check("readiness", check_readiness, data_dir)
    listed: list[str] = []
    yield from run_check("models", check_models, data_dir, listed)
    if not listed:
        yield Finding.not_checked("batches", "the server listed no models")
        return
    for model in models or listed:
        check = f"batch of one line, model {model}"
        if not with_batches:
            yield Finding.not_checked(check, "--no-batch is given")
        elif model not in listed:
            yield Finding.failed(check, f"the server has no such model. It has: {', '.join(listed)}")
        else:
            yield from run_check(check, check_batch, data_dir, model, time_limit_s=time_limit_s, quiet=quiet)


def check_readiness(data_dir: Path | None) -> Iterator[Finding]:
    """Check the readiness of the API and of what it depends on."""
    with open_client(data_dir) as client:
        url = f"{str(client.base_url).rstrip('/').removesuffix('/v1')}/readyz"
    try:
        answer = httpx.get(url, timeout=_TIMEOUT_S)
    except (httpx.HTTPError, httpx.InvalidURL) as error:
        reason = str(error) or type(error).__name__
        yield Finding.failed("readiness", f"{url}: {reason}. Check that the API runs and that the URL is right")
        return
    try:
        checks: dict[str, Any] = dict(answer.json()["checks"])
    except (ValueError, KeyError, TypeError):
        checks = {}
    problems = [f"{name}: {check['message']}" for name, check in checks.items() if check["status"] != "ok"]
    if problems:
        yield Finding.failed("readiness", f"{url}: {' '.join(problems)}")
    elif checks:
        yield Finding.ok("readiness", f"{url}: {', '.join(checks)}")
    elif answer.status_code >= httpx.codes.INTERNAL_SERVER_ERROR:
        yield Finding.failed(
            "readiness", f"{url} answers {answer.status_code}: the API fails, or a proxy cannot reach it"
        )
    else:
        yield Finding.not_checked(
            "readiness",
            f"{url} answers {answer.status_code} without checks, so another server answers: an ingress that passes /v1 "
            "only, or a login page",
        )


def check_models(data_dir: Path | None, models: list[str]) -> Iterator[Finding]:
    """Check that the server is a cloister with models, and append their ids to ``models``."""
    with open_client(data_dir) as client:
        answer = client.models.with_raw_response.list()
        if "json" not in answer.headers.get("content-type", ""):
            yield Finding.failed(
                "models", f"{client.base_url} answers with a web page: is there a login page, or is the URL wrong?"
            )
            return
        listed = list(answer.parse())
        if any(getattr(model, "owned_by", None) != _OWNER for model in listed):
            # Nothing is sent to another server, which may be on the internet and cost money.
            yield Finding.failed(
                "models",
                f"{client.base_url} is not a cloister: set CLOISTER_BASE_URL and CLOISTER_API_KEY to your server",
            )
        elif not listed:
            yield Finding.failed("models", "the catalogue is empty; add a model to `cloister:models` of the stack file")
        else:
            models += [model.id for model in listed]
            yield Finding.ok("models", ", ".join(models))


def check_batch(data_dir: Path | None, model: str, *, time_limit_s: float, quiet: bool) -> Iterator[Finding]:
    """Send a batch of one line to a model, for the first endpoint that it offers."""
    started = time.monotonic()
    check = f"batch of one line, model {model}"
    with open_client(data_dir) as client:
        for endpoint in ENDPOINTS:
            with OneLineBatch(client, model, endpoint) as trial:
                batch = trial.run(time_limit_s=time_limit_s, quiet=quiet)
                if trial.is_endpoint_refused and endpoint != ENDPOINTS[-1]:
                    continue
                took, update = duration(time.monotonic() - started), Update.of(batch)
                if not update.is_final:
                    state = f"{batch.status} {progress_text(update)}".strip()
                    yield Finding.failed(
                        check,
                        f"{batch.id} did not end within {took} ({state}), and was cancelled. `kubectl get "
                        "rayjobs,pods` in the namespace of jobs shows what it waits for; --time-limit sets the limit",
                    )
                elif batch.status != "completed" or update.failed:
                    reason = trial.reason() or "no reason given"
                    yield Finding.failed(check, f"{batch.id} {batch.status} after {took}: {reason}")
                elif not trial.has_output:
                    yield Finding.failed(
                        check, f"{batch.id} completed after {took}, but its output lacks the line: check its parts"
                    )
                else:
                    yield Finding.ok(
                        check, f"{batch.id} completed in {took}, from upload to output, with {batch.endpoint}"
                    )
                return


class OneLineBatch:
    """A batch of one line, as a context that cleans it up at its end: only its Batch object stays.

    Every method raises the errors of the official client. The end of the context raises ``CommandError`` if the batch
    did not end or its files cannot be deleted; an error in the context takes precedence.

    Args:
        client: the client of the server.
        model: the model's id.
        endpoint: the endpoint of the line. The model may not offer it.

    Attributes:
        batch: the batch as last seen; None before it is created.
    """

    def __init__(self, client: "OpenAI", model: str, endpoint: str) -> None:
        self._client = client
        self._endpoint = endpoint
        body = {"model": model, **_BODIES[endpoint]}
        line = json.dumps({"custom_id": _CUSTOM_ID, "method": "POST", "url": endpoint, "body": body})
        file = client.files.create(file=("cloister-doctor.jsonl", line.encode()), purpose="batch")
        self._input_file_id = file.id
        self.batch: Batch | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        import openai

        try:
            self.clean_up(hurry=error is not None and not isinstance(error, Exception))
        except Exception as leftover:
            if error is not None:
                note(f"{self.leftovers()}: {leftover}")
            elif isinstance(leftover, CommandError | openai.OpenAIError):
                raise CommandError(f"{self.leftovers()}: {leftover}") from leftover
            else:
                raise

    def run(self, *, time_limit_s: float, quiet: bool) -> "Batch":
        """Create the batch and wait for its end. Return it after ``time_limit_s`` seconds in any state."""
        endpoint: Any = self._endpoint
        self.batch = self._client.batches.create(
            input_file_id=self._input_file_id,
            endpoint=endpoint,
            completion_window="24h",
            metadata={"made_by": "cloister doctor"},
        )
        return self._wait(self.batch, time_limit_s, quiet=quiet, patiently=True)

    def _wait(self, batch: "Batch", time_limit_s: float, *, quiet: bool, patiently: bool) -> "Batch":
        deadline = time.monotonic() + time_limit_s
        with BatchProgress(quiet=quiet) as progress:
            while batch.status not in FINAL and time.monotonic() < deadline:
                progress.show(Update.of(batch))
                time.sleep(min(_POLL_INTERVAL_S, max(0, deadline - time.monotonic())))
                self.batch = batch = retrieve(self._client, batch.id, patiently=patiently)
        return batch

    @property
    def is_endpoint_refused(self) -> bool:
        """True if the model does not offer the endpoint."""
        return self.batch is not None and any("does not offer" in each.message for each in listed_errors(self.batch))

    @property
    def has_output(self) -> bool:
        """True if the output file has the line."""
        if self.batch is None or not self.batch.output_file_id:
            return False
        return self._first_line(self.batch.output_file_id).get("custom_id") == _CUSTOM_ID

    def reason(self) -> str:
        """Return the reason why the batch or its line failed; empty if there is none."""
        if self.batch is None or not self.batch.error_file_id:
            return "; ".join(each.message for each in listed_errors(self.batch)) if self.batch else ""
        line = self._first_line(self.batch.error_file_id)
        reason = line.get("error") or (line.get("response") or {}).get("body")
        return json.dumps(reason, ensure_ascii=False)[:_MAX_REASON]

    def _first_line(self, file_id: str) -> dict[str, Any]:
        lines = self._client.files.content(file_id).content.splitlines()
        line: dict[str, Any] = json.loads(lines[0]) if lines else {}
        return line

    def leftovers(self) -> str:
        """Return what is left on the server if the cleanup fails."""
        running = ""
        if self.batch and self.batch.status not in FINAL:
            running = f"the batch {self.batch.id} may still run, and "
        return f"{running}the file {', '.join(self._file_ids())} is left: cancel and delete them"

    def _file_ids(self) -> list[str]:
        results = (self.batch.output_file_id, self.batch.error_file_id) if self.batch else ()
        return [file_id for file_id in (self._input_file_id, *results) if file_id]

    def clean_up(self, *, hurry: bool) -> None:
        """Cancel the batch if it still runs, and delete its files.

        Args:
            hurry: whether to spend a few seconds only, without retries.

        Raises:
            CommandError: the batch did not end, so its files stay.
        """
        if hurry:
            self._client = self._client.with_options(timeout=_INTERRUPTED_TIMEOUT_S, max_retries=0)
        if self.batch is not None and self.batch.status not in FINAL:
            self._cancel(self.batch.id, hurry=hurry)
        for file_id in self._file_ids():
            self._client.files.delete(file_id)

    def _cancel(self, batch_id: str, *, hurry: bool) -> None:
        import openai

        note(f"cancelling {batch_id}; Ctrl-C leaves it and its file {self._input_file_id} on the server")
        time_limit_s = _INTERRUPTED_TIMEOUT_S if hurry else _CANCEL_TIMEOUT_S
        try:
            # After an outage the batch may have ended.
            self.batch = retrieve(self._client, batch_id, patiently=not hurry)
            if self.batch.status not in FINAL:
                self.batch = self._client.batches.cancel(batch_id)
        except openai.ConflictError:  # it ended between the two requests
            self.batch = retrieve(self._client, batch_id, patiently=not hurry)
        batch = self._wait(self.batch, time_limit_s, quiet=True, patiently=not hurry)
        if batch.status not in FINAL:
            raise CommandError(
                f"it is still {batch.status} {duration(time_limit_s)} after it was cancelled. Does a reconciler run?"
            )
