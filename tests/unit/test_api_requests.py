"""Pure functions of the API."""

import io
from typing import get_args

import pytest
from pydantic import ValidationError
from starlette.datastructures import UploadFile

from ray_job.contract.lines import ENDPOINTS
from service.api.errors import invalid_request
from service.api.routes.batches import request_sha256
from service.api.routes.uploads import check_batch_file
from service.api.schemas import BatchRequest, FileObject, Page
from service.errors import InvalidRequestError
from service.model_catalogue import Endpoint

BATCH = BatchRequest(input_file_id="file-1", endpoint="/v1/embeddings", completion_window="24h")


def test_api_accepts_the_endpoints_of_the_contract() -> None:
    assert get_args(Endpoint) == ENDPOINTS


@pytest.mark.parametrize("head", [b"", b" \r\n", b'{"a":1}', b'\n \t{"a', b'\xef\xbb\xbf{"a"'])
def test_possible_jsonl_is_accepted_and_read_from_its_start(head: bytes) -> None:
    file = UploadFile(io.BytesIO(head), size=len(head))
    check_batch_file(file)
    assert file.file.read() == head


@pytest.mark.parametrize("head", [b"\x1f\x8b\x08", b"[{}]", b"\n[", b"id,text", b"\xfe\xff\0{", b"PK\x03\x04", b"\0"])
def test_other_formats_are_reported(head: bytes) -> None:
    with pytest.raises(InvalidRequestError, match=r"Must be .jsonl. The file \w+ "):
        check_batch_file(UploadFile(io.BytesIO(head), size=len(head)))


def test_only_equal_requests_under_one_key_share_a_digest() -> None:
    other = BATCH.model_copy(update={"metadata": {"a": "b"}})
    same = BatchRequest.model_validate_json(BATCH.model_dump_json())
    assert request_sha256(BATCH, None) == request_sha256(same, None)
    assert len({request_sha256(BATCH, None), request_sha256(BATCH, "k"), request_sha256(other, None)}) == 3


def test_error_names_the_parameter_and_both_types() -> None:
    with pytest.raises(ValidationError) as caught:
        BatchRequest.model_validate({**BATCH.model_dump(), "metadata": {"x": True}})
    error = invalid_request(caught.value.errors()[0])
    assert error.message == "Invalid type for 'metadata.x': expected a string, but got a boolean instead."


def test_page_reports_more_only_if_more_follows() -> None:
    files = [
        FileObject(id=f"file-{n}", bytes=0, created_at=0, expires_at=None, filename="a", purpose="batch")
        for n in range(3)
    ]
    page = Page[FileObject].of(files, limit=2)
    assert (page.data, page.first_id, page.last_id, page.has_more) == (files[:2], "file-0", "file-1", True)
    assert not Page[FileObject].of(files, limit=3).has_more
    empty = Page[FileObject].of(files, limit=0)
    assert (empty.data, empty.first_id, empty.last_id, empty.has_more) == ([], None, None, False)
