"""The pure pieces of the API."""

from typing import get_args

import pytest
from pydantic import ValidationError

from ray_job.contract.lines import ENDPOINTS
from service.api.batch_requests import may_be_a_retry, request_sha256
from service.api.error_mapping import invalid_request
from service.api.schemas import BatchRequest, Endpoint, FileObject, page
from service.api.uploads import jsonl_problem

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
        ({"idempotency-key": "k"}, True),
    ],
)
def test_a_retry_is_recognised_by_its_headers(headers: dict[str, str], expected: bool) -> None:
    assert may_be_a_retry(headers) is expected


def test_only_equal_requests_under_one_key_share_a_digest() -> None:
    other = BATCH.model_copy(update={"metadata": {"a": "b"}})
    same = BatchRequest.model_validate_json(BATCH.model_dump_json())
    assert request_sha256(BATCH, "") == request_sha256(same, "")
    assert len({request_sha256(BATCH, ""), request_sha256(BATCH, "k"), request_sha256(other, "")}) == 3


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
