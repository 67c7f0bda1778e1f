"""The part of the doctor that uses the API as a client does: readiness, models, and a batch of one line for each."""

import json
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import httpx

from ray_job.contract.lines import ENDPOINTS
from service.cli.client import open_client
from service.cli.doctor.findings import Finding, failed, not_checked, ok, told
from service.cli.doctor.one_line_batch import OneLineBatch, one_line_batch
from service.cli.following import update_of
from service.cli.terminal import duration, progress_text
from service.transitions import FINAL

if TYPE_CHECKING:
    from openai.types import Batch

_OWNER: Final = "cloister"
_TIMEOUT_S: Final = 15.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Trial:
    """What to try.

    Attributes:
        data_dir: of the `cloister local` to talk to, where the environment names no server; None for none.
        models: ids; none for all that the server lists.
        has_batches: whether each gets a batch.
        limit_s: how long one batch may take, in seconds.
        quiet: show no progress on stderr.
    """

    data_dir: Path | None
    models: Sequence[str]
    has_batches: bool
    limit_s: float
    quiet: bool


def api_findings(trial: Trial) -> Iterator[Finding]:
    """Readiness, models, and the batches."""
    yield from told("readiness", lambda: _readiness(trial))
    listed: list[str] = []
    yield from told("models", lambda: _models(trial, listed))
    if not listed:
        yield not_checked("batches", "no models are listed")
        return
    for model in trial.models or listed:
        check = f"batch of one line, model {model}"
        if not trial.has_batches:
            yield not_checked(check, "--no-batch is given")
        elif model not in listed:
            yield failed(check, f"the server has no such model. It has: {', '.join(listed)}")
        else:
            yield from told(check, partial(_batch, trial, model))


def _readiness(trial: Trial) -> Iterator[Finding]:
    with open_client(trial.data_dir) as client:
        url = f"{str(client.base_url).rstrip('/').removesuffix('/v1')}/readyz"
    try:
        answer = httpx.get(url, timeout=_TIMEOUT_S)
    except (httpx.HTTPError, httpx.InvalidURL) as error:
        yield failed(
            "readiness", f"{url}: {error or type(error).__name__}. Check that the API runs and that the URL is right"
        )
        return
    yield judge_readiness(url, answer.status_code, answer.text)


def judge_readiness(url: str, status: int, text: str) -> Finding:
    """What ``/readyz`` says."""
    try:
        checks: dict[str, Any] = dict(json.loads(text)["checks"])
    except (ValueError, KeyError, TypeError):
        checks = {}
    if not checks and status >= httpx.codes.INTERNAL_SERVER_ERROR:
        return failed("readiness", f"{url} answers {status}: the API does not work, or what is before it finds none")
    if not checks:
        return not_checked(
            "readiness",
            f"{url} answers {status} and no checks, so something else answers: an ingress that lets /v1 through and no "
            "probes, or a page to log in",
        )
    bad = [f"{name}: {check['message']}" for name, check in checks.items() if check["status"] != "ok"]
    if bad:
        return failed("readiness", f"{url}: {' '.join(bad)}")
    return ok("readiness", f"{url}: {', '.join(checks)}")


def _models(trial: Trial, listed: list[str]) -> Iterator[Finding]:
    with open_client(trial.data_dir) as client:
        answer = client.models.with_raw_response.list()
        if "json" not in answer.headers.get("content-type", ""):
            yield failed(
                "models", f"{client.base_url} answers with a page, not with models: is a login between, or a wrong URL?"
            )
            return
        models = list(answer.parse())
        if any(getattr(model, "owned_by", None) != _OWNER for model in models):
            # Nothing is sent to a server of somebody else, which may be on the internet and cost money.
            yield failed(
                "models", f"{client.base_url} is no cloister: name yours with CLOISTER_BASE_URL and CLOISTER_API_KEY"
            )
        elif not models:
            yield failed("models", "the catalogue is empty; add a model to `cloister:models` of the stack file")
        else:
            listed += [model.id for model in models]
            yield ok("models", ", ".join(listed))


def _batch(trial: Trial, model: str) -> Iterator[Finding]:
    begun = time.monotonic()
    with open_client(trial.data_dir) as client:
        for endpoint in ENDPOINTS:
            with one_line_batch(client, model, endpoint) as tried:
                batch = tried.run(limit_s=trial.limit_s, quiet=trial.quiet)
                if tried.is_refused and endpoint != ENDPOINTS[-1]:
                    continue  # to the next endpoint
                yield _judged(tried, batch, model, duration(time.monotonic() - begun))
                return


def _judged(tried: OneLineBatch, batch: "Batch", model: str, took: str) -> Finding:
    check = f"batch of one line, model {model}"
    if batch.status not in FINAL:
        state = f"{batch.status} {progress_text(update_of(batch))}".strip()
        return failed(
            check,
            f"{batch.id} was not done after {took} ({state}), and is cancelled. `kubectl get rayjobs,pods` in the "
            "namespace of jobs says what it waits for; --time-limit gives it longer",
        )
    if batch.status != "completed" or update_of(batch).failed:
        return failed(check, f"{batch.id} {batch.status} after {took}: {tried.reason() or 'no reason given'}")
    if not tried.is_answered:
        return failed(check, f"{batch.id} completed after {took}, but its output has not the line: look at its parts")
    return ok(check, f"{batch.id} completed in {took}, from upload to output, by {batch.endpoint}")
