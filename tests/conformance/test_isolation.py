"""Access with a key of another project."""

from collections.abc import Iterator
from typing import Any

import httpx
import openai
import pytest

from tests.conformance.prepared import Prepared
from tests.conformance.target import Target, Watched
from tests.conformance.workload import CHAT

pytestmark = pytest.mark.point("A3")


@pytest.fixture(scope="module")
def stranger(target: Target) -> Iterator[openai.OpenAI]:
    """Official client with a key of another project."""
    if not target.other_api_key:
        pytest.skip("no key of another project was given (--other-api-key)")
    with target.client(api_key=target.other_api_key) as opened:
        yield opened


@pytest.fixture(scope="module")
def stranger_http(target: Target, stranger: openai.OpenAI) -> Iterator[httpx.Client]:
    """Plain HTTP client with that key."""
    with target.http(authorization=f"Bearer {stranger.api_key}") as opened:
        yield opened


@pytest.mark.parametrize(
    ("method", "path"),
    [("GET", "files/{}"), ("GET", "files/{}/content"), ("DELETE", "files/{}")],
    ids=["object", "content", "deletion"],
)
def test_a_file_of_another_project_is_a_404(
    stranger_http: httpx.Client, prepared: Prepared, method: str, path: str
) -> None:
    file_id = prepared.created["main"]["input_file_id"]
    assert stranger_http.request(method, path.format(file_id)).status_code == 404


@pytest.mark.parametrize(("method", "path"), [("GET", "batches/{}"), ("POST", "batches/{}/cancel")])
def test_a_batch_of_another_project_is_a_404(
    stranger_http: httpx.Client, prepared: Prepared, method: str, path: str
) -> None:
    assert stranger_http.request(method, path.format(prepared.batch("main").id)).status_code == 404


def test_a_missing_batch_and_a_batch_of_another_project_look_the_same(
    stranger_http: httpx.Client, prepared: Prepared
) -> None:
    batch_id = prepared.batch("main").id
    foreign, missing = stranger_http.get(f"batches/{batch_id}"), stranger_http.get("batches/batch_none")
    assert foreign.text.replace(batch_id, "ID") == missing.text.replace("batch_none", "ID")


@pytest.mark.parametrize("path", ["files", "batches"])
def test_nothing_of_another_project_is_listed(stranger_http: httpx.Client, prepared: Prepared, path: str) -> None:
    own = {watched.id for watched in prepared.batches.values()}
    own |= {batch["input_file_id"] for batch in prepared.created.values()}
    assert own & {item["id"] for item in stranger_http.get(path, params={"limit": 100}).json()["data"]} == set()


@pytest.mark.parametrize("path", ["files", "batches"])
def test_an_object_of_another_project_is_refused_as_a_cursor(
    stranger_http: httpx.Client, prepared: Prepared, path: str
) -> None:
    created: dict[str, Any] = prepared.created["main"]
    after = created["input_file_id"] if path == "files" else created["id"]
    assert stranger_http.get(path, params={"after": after}).status_code in {400, 404}


def test_a_file_of_another_project_is_refused_as_an_input(
    stranger: openai.OpenAI, target: Target, prepared: Prepared
) -> None:
    file_id = prepared.created["main"]["input_file_id"]
    batch = stranger.batches.create(input_file_id=file_id, endpoint=CHAT, completion_window="24h")
    ended = Watched(client=stranger, id=batch.id, timeout_s=target.timeout_s).ended()
    assert [(error["code"], error["param"]) for error in ended["errors"]["data"]] == [("invalid_request", "file_id")]


def test_the_owner_keeps_its_file(client: openai.OpenAI, prepared: Prepared) -> None:
    assert client.files.retrieve(prepared.created["main"]["input_file_id"]).status == "processed"
