"""Uploaded files: their object, content and deletion."""

import asyncio
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest

from tests.conformance.target import Target

pytestmark = pytest.mark.point("F1")

CONTENTS = {
    "ASCII": b'{"custom_id":"a"}\n',
    "non-ASCII": '{"custom_id":"grüße 日本語 🦜"}\n'.encode(),
    "CRLF": b'{"custom_id":"a"}\r\n{"custom_id":"b"}\r\n',
    "byte order mark": b'\xef\xbb\xbf{"custom_id":"a"}\n',
    "blank lines": b'\n\n{"custom_id":"a"}\n\n  \n',
    "no last line break": b'{"custom_id":"a"}',
    "bytes that are not UTF-8": b'{"custom_id":"\xff\xfe\x00"}\n',
    "a line of 3 MB": b'{"custom_id":"' + b"a" * 3_000_000 + b'"}\n',
}
# All are valid in a path; none exists.
UNKNOWN_IDS = {
    "well formed": "file-00000000000000000000000000000000",
    "malformed": "nonsense",
    "id of a batch": "batch_00000000000000000000000000000000",
    "with dots": "file-..%2f..%2fetc%2fpasswd",
    "with quotes": "file-'%20OR%201=1--",
    "of 5,000 characters": "file-" + "0" * 5_000,
    "not ASCII": "file-%C3%BC%E2%82%AC",
}


def upload(client: openai.OpenAI, content: bytes = CONTENTS["ASCII"]) -> str:
    return client.files.create(file=("input.jsonl", content), purpose="batch").id


def test_a_file_is_retrieved_as_uploaded(client: openai.OpenAI) -> None:
    file = client.files.create(file=("input.jsonl", b"{}"), purpose="batch")
    assert client.files.retrieve(file.id).to_dict() == file.to_dict()


def test_the_client_waits_until_a_file_is_processed(client: openai.OpenAI) -> None:
    assert client.files.wait_for_processing(upload(client), max_wait_seconds=60).status == "processed"


@pytest.mark.point("F2")
@pytest.mark.parametrize("kind", CONTENTS)
def test_content_is_returned_byte_for_byte(client: openai.OpenAI, kind: str) -> None:
    read = client.files.content(upload(client, CONTENTS[kind])).read()
    assert len(read) == len(CONTENTS[kind])
    assert read[:200] == CONTENTS[kind][:200]
    assert read == CONTENTS[kind]


@pytest.mark.point("F2")
def test_content_can_be_streamed_to_a_file(client: openai.OpenAI, tmp_path: Path) -> None:
    with client.files.with_streaming_response.content(upload(client)) as answer:
        answer.stream_to_file(tmp_path / "a.jsonl")
    assert (tmp_path / "a.jsonl").read_bytes() == CONTENTS["ASCII"]


@pytest.mark.point("F2")
def test_the_async_client_reads_content(target: Target, client: openai.OpenAI) -> None:
    file_id = upload(client)

    async def read() -> bytes:
        async with target.async_client() as opened:
            content: bytes = (await opened.files.content(file_id)).read()
            return content

    assert asyncio.run(read()) == CONTENTS["ASCII"]


@pytest.fixture(scope="module")
def deleted(http: httpx.Client, client: openai.OpenAI) -> dict[str, Any]:
    """Response to a deletion."""
    answer: dict[str, Any] = http.delete(f"files/{upload(client)}").raise_for_status().json()
    return answer


@pytest.mark.point("F3")
def test_a_deletion_returns_deleted_true(deleted: dict[str, Any]) -> None:
    assert deleted == {"id": deleted["id"], "object": "file", "deleted": True}


@pytest.mark.point("F3")
@pytest.mark.parametrize(
    ("method", "path"),
    [("GET", "files/{}"), ("GET", "files/{}/content"), ("DELETE", "files/{}")],
    ids=["object", "content", "deletion"],
)
def test_a_deleted_file_is_a_404(http: httpx.Client, deleted: dict[str, Any], method: str, path: str) -> None:
    assert http.request(method, path.format(deleted["id"])).status_code == 404


@pytest.mark.point("F3")
def test_a_deleted_file_is_not_listed(client: openai.OpenAI, deleted: dict[str, Any]) -> None:
    assert deleted["id"] not in {file.id for file in client.files.list(limit=100).data}


@pytest.mark.parametrize("form", UNKNOWN_IDS)
def test_an_unknown_file_is_a_404(http: httpx.Client, form: str) -> None:
    answer = http.get(f"files/{UNKNOWN_IDS[form]}")
    # A server may refuse an id that cannot be valid.
    assert answer.status_code in ({404} if form == "well formed" else {400, 404, 414})
    if answer.status_code != 414:
        assert answer.json()["error"]["type"] == "invalid_request_error"


@pytest.mark.parametrize("what", ["content", "deletion"])
def test_an_unknown_file_is_a_404_for(client: openai.OpenAI, what: str) -> None:
    act = client.files.content if what == "content" else client.files.delete
    with pytest.raises(openai.NotFoundError):
        act(UNKNOWN_IDS["well formed"])
