"""Output and error lines."""

import json

from ray_job.contract.lines import BATCH_EXPIRED, error_line, line_id, response_line


def test_response_line_holds_the_body_byte_for_byte() -> None:
    body = '{"text":"grüße","n":1.0}'.encode()
    line = response_line("batch_1", 4, "a", 200, body)
    assert body in line
    assert json.loads(line) == {
        "id": line_id("batch_req_", "batch_1", 4),
        "custom_id": "a",
        "response": {
            "status_code": 200,
            "request_id": line_id("req_", "batch_1", 4),
            "body": json.loads(body),
        },
        "error": None,
    }


def test_ids_are_stable_and_unique_per_line_and_batch() -> None:
    ids = {
        line_id(prefix, batch, line)
        for prefix in ("batch_req_", "req_")
        for batch in ("batch_1", "batch_2")
        for line in (1, 2)
    }
    assert len(ids) == 8
    assert line_id("batch_req_", "batch_1", 1) in ids


def test_request_that_never_ran_has_no_response() -> None:
    parsed = json.loads(error_line("batch_1", 2, 'odd "id"', BATCH_EXPIRED))
    assert parsed["response"] is None
    assert parsed["custom_id"] == 'odd "id"'
    assert parsed["error"]["code"] == "batch_expired"
