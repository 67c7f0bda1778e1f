"""Uploads."""

import asyncio
import io
import time
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest

from tests.conformance.target import Target

LINE = b'{"custom_id":"a"}\n'
DAY_S = 24 * 3600
# Allowed difference between the clocks of two machines.
CLOCKS_S = 300

pytestmark = pytest.mark.point("U1")


@pytest.fixture(scope="module")
def uploaded(http: httpx.Client) -> dict[str, Any]:
    """File object of a plain upload."""
    file: dict[str, Any] = post(http).raise_for_status().json()
    return file


def post(http: httpx.Client, content: bytes = LINE, name: str = "input.jsonl", **fields: str) -> httpx.Response:
    form = {"purpose": "batch", **{key.replace("__", "[") + "]" * ("__" in key): v for key, v in fields.items()}}
    return http.post("files", data={key: v for key, v in form.items() if v != "-"}, files={"file": (name, content)})


@pytest.mark.parametrize(
    ("field", "expected"),
    [("object", "file"), ("bytes", len(LINE)), ("filename", "input.jsonl"), ("purpose", "batch"),
     ("status", "processed")],
    ids=["object", "bytes", "filename", "purpose", "status"],
)  # fmt: skip
def test_an_uploaded_file_has_its(uploaded: dict[str, Any], field: str, expected: object) -> None:
    assert uploaded[field] == expected


def test_a_file_id_starts_with_file(uploaded: dict[str, Any]) -> None:
    assert uploaded["id"][:5] == "file-"


def test_created_at_is_the_current_time_in_unix_seconds(uploaded: dict[str, Any]) -> None:
    assert type(uploaded["created_at"]) is int
    assert abs(uploaded["created_at"] - time.time()) < CLOCKS_S


def test_an_upload_returns_200_and_json(http: httpx.Client) -> None:
    answer = post(http)
    assert answer.status_code == 200
    assert answer.headers["content-type"].split(";")[0] == "application/json"


@pytest.mark.point("U3")
def test_a_batch_file_expires_after_30_days(uploaded: dict[str, Any]) -> None:
    assert uploaded["expires_at"] - uploaded["created_at"] == 30 * DAY_S


@pytest.mark.point("U2")
@pytest.mark.parametrize("seconds", [3_600, 86_400, 2_592_000])
def test_a_file_expires_the_requested_seconds_after_its_creation(client: openai.OpenAI, seconds: int) -> None:
    file = client.files.create(
        file=("a.jsonl", LINE), purpose="batch", expires_after={"anchor": "created_at", "seconds": seconds}
    )
    assert file.expires_at == file.created_at + seconds


@pytest.mark.point("U2")
@pytest.mark.parametrize(
    ("fields", "code"),
    [
        ({"seconds": "3599"}, "integer_below_min_value"),
        ({"seconds": "0"}, "integer_below_min_value"),
        ({"seconds": "-1"}, "integer_below_min_value"),
        ({"seconds": "2592001"}, "integer_above_max_value"),
        ({"seconds": "soon"}, None),
        ({"seconds": "3600.5"}, None),
        ({"anchor": "last_active_at"}, "invalid_value"),
        ({"anchor": "-"}, "missing_required_parameter"),
        ({"seconds": "-"}, "missing_required_parameter"),
    ],
    ids=["seconds 3599", "seconds 0", "seconds -1", "seconds 2592001", "seconds soon", "seconds 3600.5",
         "anchor last_active_at", "no anchor", "no seconds"],
)  # fmt: skip
def test_a_wrong_expiry_is_refused(http: httpx.Client, fields: dict[str, str], code: str | None) -> None:
    expiry = {"anchor": "created_at", "seconds": "3600"} | fields
    answer = post(http, expires_after__anchor=expiry["anchor"], expires_after__seconds=expiry["seconds"])
    assert answer.status_code == 400
    error = answer.json()["error"]
    assert "expires_after" in error["param"]
    if code is not None:
        assert error["code"] == code


def test_an_upload_without_a_purpose_is_refused(http: httpx.Client) -> None:
    answer = post(http, purpose="-")
    assert answer.status_code == 400
    error = answer.json()["error"]
    assert (error["code"], error["param"]) == ("missing_required_parameter", "purpose")


@pytest.mark.parametrize("purpose", ["poetry", "batch_output"])
def test_a_purpose_that_uploads_do_not_support_is_refused(http: httpx.Client, purpose: str) -> None:
    answer = post(http, purpose=purpose)
    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == "purpose"


def test_an_upload_without_a_file_is_refused(http: httpx.Client) -> None:
    answer = http.post("files", files={"purpose": (None, "batch")})
    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == "file"


def test_a_file_sent_as_a_plain_form_field_is_refused(http: httpx.Client) -> None:
    answer = http.post("files", files={"purpose": (None, "batch"), "file": (None, LINE)})
    assert answer.status_code == 400


@pytest.mark.parametrize("kind", ["application/json", "multipart/form-data", "application/x-www-form-urlencoded"])
def test_a_body_that_is_not_a_multipart_form_is_refused(http: httpx.Client, kind: str) -> None:
    answer = http.post("files", content=b'{"purpose": "batch"}', headers={"content-type": kind})
    assert answer.status_code in {400, 415}
    assert answer.json()["error"]["message"] != ""


def test_a_truncated_multipart_form_is_refused(http: httpx.Client) -> None:
    head = b'--b\r\nContent-Disposition: form-data; name="file"; filename="a.jsonl"\r\n\r\n{"custom_id"'
    answer = http.post("files", content=head, headers={"content-type": "multipart/form-data; boundary=b"})
    assert answer.status_code == 400


FILE_PART = b'--b\r\nContent-Disposition: form-data; name="file"; filename="a.jsonl"\r\n\r\n' + LINE + b"\r\n"
PURPOSE_PART = b'--b\r\nContent-Disposition: form-data; name="purpose"\r\n\r\nbatch\r\n'
AS_FORM = {"content-type": "multipart/form-data; boundary=b"}


@pytest.mark.parametrize(
    "parts", [(PURPOSE_PART, FILE_PART), (FILE_PART, PURPOSE_PART)], ids=["purpose first", "file first"]
)
def test_a_form_accepts_file_and_purpose_in_any_order(http: httpx.Client, parts: tuple[bytes, bytes]) -> None:
    answer = http.post("files", content=b"".join(parts) + b"--b--\r\n", headers=AS_FORM)
    assert (answer.status_code, answer.json().get("bytes")) == (200, len(LINE))


def test_a_chunked_upload_of_unknown_length_is_accepted(http: httpx.Client) -> None:
    chunks = iter([PURPOSE_PART, FILE_PART[:30], FILE_PART[30:], b"--b--\r\n"])
    answer = http.post("files", content=chunks, headers=AS_FORM)
    assert (answer.status_code, answer.json().get("bytes")) == (200, len(LINE))


@pytest.mark.parametrize("name", ["grüße €.jsonl", "with space;.jsonl"], ids=["non-ASCII", "space"])
def test_a_filename_is_kept(client: openai.OpenAI, name: str) -> None:
    file = client.files.create(file=(name, LINE), purpose="batch")
    assert client.files.retrieve(file.id).filename == name


def test_the_client_uploads_a_path(client: openai.OpenAI, tmp_path: Path) -> None:
    (tmp_path / "on disk.jsonl").write_bytes(LINE)
    file = client.files.create(file=tmp_path / "on disk.jsonl", purpose="batch")
    assert (file.filename, file.bytes) == ("on disk.jsonl", len(LINE))


def test_the_client_uploads_an_open_file(client: openai.OpenAI, tmp_path: Path) -> None:
    (tmp_path / "open.jsonl").write_bytes(LINE)
    with (tmp_path / "open.jsonl").open("rb") as opened:
        assert client.files.create(file=opened, purpose="batch").filename == "open.jsonl"


def test_the_client_uploads_bytes_without_a_name(client: openai.OpenAI) -> None:
    assert client.files.create(file=io.BytesIO(LINE), purpose="batch").bytes == len(LINE)


def test_the_client_uploads_with_a_content_type(client: openai.OpenAI) -> None:
    file = client.files.create(file=("a.jsonl", LINE, "application/jsonl"), purpose="batch")
    assert file.bytes == len(LINE)


def test_the_async_client_uploads(target: Target) -> None:
    async def upload() -> int:
        async with target.async_client() as client:
            return (await client.files.create(file=("a.jsonl", LINE), purpose="batch")).bytes

    assert asyncio.run(upload()) == len(LINE)


@pytest.mark.point("U4")
def test_a_batch_file_over_200_mb_is_refused(target: Target, http: httpx.Client) -> None:
    if not target.large:
        pytest.skip("uploads over 200 MB were not requested (--large)")
    answer = http.post(
        "files", data={"purpose": "batch"}, files={"file": ("a.jsonl", b"{" + b" " * (201 << 20))}, timeout=600
    )
    assert answer.status_code in {400, 413}
    assert answer.json()["error"]["type"] == "invalid_request_error"
