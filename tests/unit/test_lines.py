"""Output and error lines."""

import json

from ray_job.contract.lines import BATCH_EXPIRED, error_line, request_line_id, response_line


def test_a_response_line_holds_the_body_byte_for_byte() -> None:
    body = '{"text":"grüße","n":1.0}'.encode()
    line = response_line("batch_1", 4, "a", 200, body)
    assert body in line
    assert json.loads(line) == {
        "id": request_line_id("batch_1", 4),
        "custom_id": "a",
        "response": {
            "status_code": 200,
            "request_id": json.loads(line)["response"]["request_id"],
            "body": json.loads(body),
        },
        "error": None,
    }


def test_ids_are_the_same_at_each_writing_and_differ_between_lines_and_batches() -> None:
    ids = {request_line_id(batch, line) for batch in ("batch_1", "batch_2") for line in (1, 2)}
    assert len(ids) == 4
    assert request_line_id("batch_1", 1) in ids


def test_a_request_that_never_ran_has_no_response() -> None:
    parsed = json.loads(error_line("batch_1", 2, 'odd "id"', BATCH_EXPIRED))
    assert parsed["response"] is None
    assert parsed["custom_id"] == 'odd "id"'
    assert parsed["error"]["code"] == "batch_expired"
