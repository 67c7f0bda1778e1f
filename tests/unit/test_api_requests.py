"""The pure pieces of the API."""

import io
from typing import get_args

import pytest
from pydantic import ValidationError

from ray_job.contract.lines import ENDPOINTS
from service.api.batch_requests import idempotency_key, is_retry, request_sha256
from service.api.error_mapping import invalid_request
from service.api.schemas import BatchRequest, Endpoint, FileObject, page
from service.api.uploads import Upload, expires_after_s, jsonl_problem, plain_filename
from service.errors import InvalidRequestError

BATCH = BatchRequest(input_file_id="file-1", endpoint="/v1/embeddings", completion_window="24h")


def test_the_api_takes_the_endpoints_of_the_contract() -> None:
    assert get_args(Endpoint) == ENDPOINTS


@pytest.mark.parametrize("head", [b"", b" \r\n", b'{"a":1}', b'\n \t{"a', b'\xef\xbb\xbf{"a"'])
def test_what_could_be_jsonl_is_taken(head: bytes) -> None:
    assert jsonl_problem(head) is None


@pytest.mark.parametrize("head", [b"\x1f\x8b\x08", b"[{}]", b"\n[", b"id,text", b"\xfe\xff\0{", b"PK\x03\x04", b"\0"])
def test_what_is_plainly_no_jsonl_is_told(head: bytes) -> None:
    assert jsonl_problem(head)


@pytest.mark.parametrize(
    ("headers", "expected"),
    [
        ({}, False),
        ({"x-stainless-retry-count": "0"}, False),
        ({"x-stainless-retry-count": "1"}, True),
        ({"x-stainless-retry-count": "-1"}, False),
        ({"x-stainless-retry-count": "²"}, False),
    ],
)
def test_a_retry_is_recognised_by_its_headers(headers: dict[str, str], expected: bool) -> None:
    assert is_retry(headers) is expected


@pytest.mark.parametrize("key", ["k", "a b", "~" * 255])
def test_a_printable_idempotency_key_is_taken(key: str) -> None:
    assert idempotency_key({"idempotency-key": key}) == key
    assert idempotency_key({}) is None


@pytest.mark.parametrize("key", ["", " ", "k" * 256, "a\tb", "é", "a\x7f"])
def test_any_other_idempotency_key_is_refused(key: str) -> None:
    with pytest.raises(InvalidRequestError, match="1 to 255 printable ASCII characters"):
        idempotency_key({"idempotency-key": key})


def test_only_equal_requests_under_one_key_share_a_digest() -> None:
    other = BATCH.model_copy(update={"metadata": {"a": "b"}})
    same = BatchRequest.model_validate_json(BATCH.model_dump_json())
    assert request_sha256(BATCH, None) == request_sha256(same, None)
    assert len({request_sha256(BATCH, None), request_sha256(BATCH, "k"), request_sha256(other, None)}) == 3


def test_an_error_names_the_parameter_and_both_types() -> None:
    with pytest.raises(ValidationError) as caught:
        BatchRequest.model_validate({**BATCH.model_dump(), "metadata": {"x": True}})
    error = invalid_request(caught.value.errors()[0])
    assert error.message == "Invalid type for 'metadata.x': expected a string, but got a boolean instead."


def test_a_page_tells_of_more_only_if_there_is_more() -> None:
    files = [
        FileObject(id=f"file-{n}", bytes=0, created_at=0, expires_at=None, filename="a", purpose="batch")
        for n in range(3)
    ]
    assert page(files, limit=2) == {"data": files[:2], "first_id": "file-0", "last_id": "file-1", "has_more": True}
    assert page(files, limit=3)["has_more"] is False
    assert page(files, limit=0) == {"data": [], "first_id": None, "last_id": None, "has_more": False}


@pytest.mark.parametrize(
    ("sent", "kept"),
    [
        ("a.jsonl", "a.jsonl"),
        ("../../etc/passwd", "passwd"),
        ("C:\\x\\ü y.jsonl", "ü y.jsonl"),
        ("a\0b", "ab"),
        ("", "upload"),
        ("a/", "upload"),
    ],
)
def test_of_a_filename_the_last_part_is_kept(sent: str, kept: str) -> None:
    assert plain_filename(sent) == kept


@pytest.mark.parametrize(
    ("purpose", "wish", "retention_days", "kept_days"),
    [
        ("batch", None, 30, 30),
        ("batch", None, 7, 7),
        ("batch", None, 60, 30),
        ("user_data", None, 60, 60),
        ("user_data", 2 * 86_400, 60, 2),
        ("batch", 20 * 86_400, 7, 20),
    ],
)
def test_a_file_is_kept_as_its_owner_wishes_or_as_the_retention_says(
    purpose: str, wish: int | None, retention_days: int, kept_days: int
) -> None:
    upload = Upload(file=io.BytesIO(), filename="a", purpose=purpose, expires_after_s=wish)
    assert expires_after_s(upload, retention_days * 86_400) == kept_days * 86_400
