"""Fixtures of the suite, which pytest collects only through ``python -m tests.conformance``."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest

from tests.conformance.collector import PLUGIN_NAME, Collector
from tests.conformance.prepared import Prepared, prepare
from tests.conformance.target import Target, Watched
from tests.conformance.workload import Workload, main_workload


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Collect nothing unless the suite's plugin is registered."""
    del collection_path
    return None if config.pluginmanager.has_plugin(PLUGIN_NAME) else True


@pytest.fixture(scope="session")
def target(request: pytest.FixtureRequest) -> Target:
    """The server under check."""
    collector: Collector = request.config.pluginmanager.getplugin(PLUGIN_NAME)
    return collector.target


@pytest.fixture(scope="session")
def client(target: Target) -> Iterator[openai.OpenAI]:
    """Official client with retries, for loaded servers. Checks of single requests create their own client."""
    with target.client(max_retries=2) as opened:
        yield opened


@pytest.fixture(scope="session")
def http(target: Target) -> Iterator[httpx.Client]:
    """Plain HTTP client with a valid key."""
    with target.http() as opened:
        yield opened


@pytest.fixture(scope="session", autouse=True)
def prepared(target: Target, client: openai.OpenAI) -> Prepared:
    """All batches of the suite, started."""
    return prepare(target, client)


@pytest.fixture(scope="session")
def workload(target: Target) -> Workload:
    """Requests of the main batch."""
    return main_workload(target.model)


@pytest.fixture(scope="session")
def main(prepared: Prepared) -> dict[str, Any]:
    """Main batch in its final state."""
    return prepared.batch("main").ended()


@pytest.fixture(scope="session")
def all_refused(prepared: Prepared) -> dict[str, Any]:
    """Final state of the batch whose rows the engine all refuses."""
    return prepared.batch("all refused").ended()


@pytest.fixture(scope="session")
def cancelled(prepared: Prepared) -> dict[str, Any]:
    """Final state of the batch that was cancelled right after its creation."""
    batch = prepared.batch("cancelled at once").ended()
    assert batch["status"] == "cancelled"
    return batch


@pytest.fixture(scope="session")
def stopped(prepared: Prepared) -> Watched:
    """Batch of the unusual but valid file, cancelled after its validation."""
    return prepared.batch("unusual but valid")


@pytest.fixture(scope="session")
def failed(prepared: Prepared) -> dict[str, Any]:
    """A batch that failed at validation."""
    batch = prepared.batch("seven kinds").ended()
    assert batch["status"] == "failed"
    return batch


def _lines(client: openai.OpenAI, batch: dict[str, Any], name: str) -> list[dict[str, Any]]:
    assert batch.get(name) is not None, f"the batch has no {name}: {batch['status']}, {batch.get('errors')}"
    return [json.loads(text) for text in client.files.content(batch[name]).text.split("\n") if text]


@pytest.fixture(scope="session")
def output(client: openai.OpenAI, main: dict[str, Any]) -> list[dict[str, Any]]:
    """Lines of the main batch's output file."""
    return _lines(client, main, "output_file_id")


@pytest.fixture(scope="session")
def errors(client: openai.OpenAI, main: dict[str, Any]) -> list[dict[str, Any]]:
    """Lines of the main batch's error file."""
    return _lines(client, main, "error_file_id")


def _other_endpoint(prepared: Prepared, client: openai.OpenAI, name: str) -> list[dict[str, Any]]:
    batch = prepared.batch(name).ended()
    if batch["status"] == "failed" and batch.get("in_progress_at") is None:
        message = ((batch.get("errors") or {}).get("data") or [{}])[0].get("message", "it failed")
        pytest.skip(f"the model does not seem to serve {name}: {message}")
    return _lines(client, batch, "output_file_id")


@pytest.fixture(scope="session")
def completions(prepared: Prepared, client: openai.OpenAI) -> list[dict[str, Any]]:
    """Output of the batch of /v1/completions; skips if the model does not serve it."""
    return _other_endpoint(prepared, client, "completions")


@pytest.fixture(scope="session")
def embeddings(prepared: Prepared, client: openai.OpenAI) -> list[dict[str, Any]]:
    """Output of the batch of /v1/embeddings; skips if the model does not serve it."""
    return _other_endpoint(prepared, client, "embeddings")
