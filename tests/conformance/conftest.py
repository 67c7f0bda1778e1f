"""Fixtures of the suite. Without ``python -m tests.conformance`` there is no server, and nothing here is collected."""

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
    """Collects nothing unless a server was named."""
    del collection_path
    return None if config.pluginmanager.has_plugin(PLUGIN_NAME) else True


@pytest.fixture(scope="session")
def target(request: pytest.FixtureRequest) -> Target:
    """The server under check."""
    collector: Collector = request.config.pluginmanager.getplugin(PLUGIN_NAME)
    return collector.target


@pytest.fixture(scope="session")
def client(target: Target) -> Iterator[openai.OpenAI]:
    """The official client. It repeats what a loaded server put off; what must not be repeated says so itself."""
    with target.client(max_retries=2) as opened:
        yield opened


@pytest.fixture(scope="session")
def http(target: Target) -> Iterator[httpx.Client]:
    """Plain HTTP with a good key."""
    with target.http() as opened:
        yield opened


@pytest.fixture(scope="session", autouse=True)
def prepared(target: Target, client: openai.OpenAI) -> Prepared:
    """All batches, begun."""
    return prepare(target, client)


@pytest.fixture(scope="session")
def workload(target: Target) -> Workload:
    """What the main batch was asked."""
    return main_workload(target.model)


@pytest.fixture(scope="session")
def main(prepared: Prepared) -> dict[str, Any]:
    """The main batch at its end."""
    return prepared.batch("main").ended()


@pytest.fixture(scope="session")
def all_refused(prepared: Prepared) -> dict[str, Any]:
    """The batch whose every row the engine refuses, at its end."""
    return prepared.batch("all refused").ended()


@pytest.fixture(scope="session")
def cancelled(prepared: Prepared) -> dict[str, Any]:
    """The batch that was cancelled right after its creation, at its end."""
    batch = prepared.batch("cancelled at once").ended()
    assert batch["status"] == "cancelled"
    return batch


@pytest.fixture(scope="session")
def stopped(prepared: Prepared) -> Watched:
    """The batch of the odd but good file, cancelled once it was past its validation."""
    return prepared.batch("odd but good")


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
    """The lines of the main batch's output file."""
    return _lines(client, main, "output_file_id")


@pytest.fixture(scope="session")
def errors(client: openai.OpenAI, main: dict[str, Any]) -> list[dict[str, Any]]:
    """The lines of the main batch's error file."""
    return _lines(client, main, "error_file_id")


def _other_endpoint(prepared: Prepared, client: openai.OpenAI, name: str) -> list[dict[str, Any]]:
    batch = prepared.batch(name).ended()
    if batch["status"] == "failed" and batch.get("in_progress_at") is None:
        told = ((batch.get("errors") or {}).get("data") or [{}])[0].get("message", "it failed")
        pytest.skip(f"the model does not seem to serve {name}: {told}")
    return _lines(client, batch, "output_file_id")


@pytest.fixture(scope="session")
def completions(prepared: Prepared, client: openai.OpenAI) -> list[dict[str, Any]]:
    """The output of the batch of /v1/completions, if the model serves it."""
    return _other_endpoint(prepared, client, "completions")


@pytest.fixture(scope="session")
def embeddings(prepared: Prepared, client: openai.OpenAI) -> list[dict[str, Any]]:
    """The output of the batch of /v1/embeddings, if the model serves it."""
    return _other_endpoint(prepared, client, "embeddings")
