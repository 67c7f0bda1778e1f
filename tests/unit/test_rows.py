"""What happens to a row before and after the engine."""

import json

import pytest

from ray_job.contract.parts import Usage
from ray_job.errors import InputError
from ray_job.rows import execution_order, parse_request, part_row, prefix_key


def raw(body: object, custom_id: str = "a") -> bytes:
    return json.dumps({"custom_id": custom_id, "method": "POST", "url": "/v1/chat/completions", "body": body}).encode()


def asked(system: str, user: str) -> bytes:
    return raw({"messages": [{"role": "system", "content": system}, {"role": "user", "content": user}]})


def test_the_body_reaches_the_engine_as_it_was_sent() -> None:
    body = {"seed": 12345678901234567890123, "temperature": 1e-300, "text": "😀 ü"}
    assert json.loads(parse_request(3, raw(body)).body) == body


def test_a_line_that_is_no_request_is_named() -> None:
    with pytest.raises(InputError, match="line 9"):
        parse_request(9, b'{"custom_id": "a"}')


def test_lines_with_one_system_prompt_share_a_key_whatever_the_question() -> None:
    assert prefix_key(asked("Be brief.", "A?")) == prefix_key(asked("Be brief.", "B?"))
    assert prefix_key(asked("Be brief.", "A?")) != prefix_key(asked("Be long.", "A?"))


@pytest.mark.parametrize(
    "line", [b"", b"[]", b"{", b'{"body": 5}', b'{"body": {"messages": [3]}}', b'{"body": {"messages": []}}']
)
def test_a_line_of_any_shape_has_a_key(line: bytes) -> None:
    assert isinstance(prefix_key(line), bytes)


def test_lines_that_share_nothing_keep_their_order() -> None:
    assert execution_order([b"a", b"b", b"c"]) == [0, 1, 2]


def test_lines_of_one_key_run_side_by_side() -> None:
    assert execution_order([b"a", b"b", b"a", b"c", b"b"]) == [0, 2, 1, 4, 3]


def test_a_response_becomes_an_output_row_with_its_tokens() -> None:
    usage = {"prompt_tokens": 5, "completion_tokens": 2, "prompt_tokens_details": {"cached_tokens": 4}}
    row = part_row("batch_1", 1, "a", 200, json.dumps({"usage": usage}).encode())
    assert (row.outcome, row.usage) == ("completed", Usage(input_tokens=5, output_tokens=2, cached_tokens=4))


def test_an_error_keeps_the_engines_envelope_and_status() -> None:
    body = {"error": {"message": "no", "type": "BadRequestError", "param": None, "code": 400}}
    row = part_row("batch_1", 1, "a", 400, json.dumps(body).encode())
    assert row.outcome == "failed"
    assert json.loads(row.data)["response"]["body"] == body


def test_an_error_without_an_envelope_gets_one() -> None:
    row = part_row("batch_1", 1, "a", 404, b'{"detail":"Not Found"}')
    error = json.loads(row.data)["response"]["body"]["error"]
    assert error == {"message": "Not Found", "type": "invalid_request_error", "param": None, "code": None}


def test_an_answer_that_is_not_json_is_a_failed_row_that_shows_no_content() -> None:
    row = part_row("batch_1", 1, "a", 200, b"<html>secret</html>")
    parsed = json.loads(row.data)["response"]
    assert (row.outcome, parsed["status_code"]) == ("failed", 500)
    assert "secret" not in parsed["body"]["error"]["message"]


def test_a_body_with_line_breaks_is_written_on_one_line() -> None:
    assert b"\n" not in part_row("batch_1", 1, "a", 200, b'{\n "choices": []\n}').data
