"""Rows before and after the engine."""

import json

import pytest

from ray_job.contract.parts import Usage
from ray_job.errors import InputError
from ray_job.rows import parse_request, part_row


def raw(body: object, custom_id: str = "a") -> bytes:
    return json.dumps({"custom_id": custom_id, "method": "POST", "url": "/v1/chat/completions", "body": body}).encode()


def test_body_reaches_the_engine_unchanged() -> None:
    body = {"seed": 12345678901234567890123, "temperature": 1e-300, "text": "😀 ü"}
    assert json.loads(parse_request(3, raw(body)).body) == body


def test_line_that_is_not_a_request_is_reported_by_number() -> None:
    with pytest.raises(InputError, match="line 9"):
        parse_request(9, b'{"custom_id": "a"}')


def test_response_becomes_an_output_row_with_its_tokens() -> None:
    usage = {"prompt_tokens": 5, "completion_tokens": 2, "prompt_tokens_details": {"cached_tokens": 4}}
    row = part_row("batch_1", 1, "a", 200, json.dumps({"usage": usage}).encode())
    assert (row.outcome, row.usage) == ("completed", Usage(input_tokens=5, output_tokens=2, cached_tokens=4))


def test_error_keeps_the_engines_error_object_and_status() -> None:
    body = {"error": {"message": "no", "type": "BadRequestError", "param": None, "code": 400}}
    row = part_row("batch_1", 1, "a", 400, json.dumps(body).encode())
    assert row.outcome == "failed"
    assert json.loads(row.data)["response"]["body"] == body


def test_error_without_an_error_object_gets_one() -> None:
    row = part_row("batch_1", 1, "a", 404, b'{"detail":"Not Found"}')
    error = json.loads(row.data)["response"]["body"]["error"]
    assert error == {"message": "Not Found", "type": "invalid_request_error", "param": None, "code": None}


def test_response_that_is_not_json_fails_without_its_content() -> None:
    row = part_row("batch_1", 1, "a", 200, b"<html>secret</html>")
    parsed = json.loads(row.data)["response"]
    assert (row.outcome, parsed["status_code"]) == ("failed", 500)
    assert "secret" not in parsed["body"]["error"]["message"]


def test_body_with_line_breaks_is_written_on_one_line() -> None:
    assert b"\n" not in part_row("batch_1", 1, "a", 200, b'{\n "choices": []\n}').data
