"""Rows before and after the engine."""

import json
import math
from dataclasses import replace

import pytest

from ray_job.contract.leases import Lease
from ray_job.contract.parts import Usage
from ray_job.contract.plans import PlanError, PlanRow
from ray_job.errors import InputError
from ray_job.rows import LeasedRow, committed_rows, finished_row, leased_rows, most_tokens, parse_request, part_row


def raw(body: object, custom_id: str = "a") -> bytes:
    return json.dumps({"custom_id": custom_id, "method": "POST", "url": "/v1/chat/completions", "body": body}).encode()


def leased(line: int, data: bytes, cache_salt: str = "") -> LeasedRow:
    return LeasedRow(segment=LEASE.ref, row=0, line=line, raw=data, cache_salt=cache_salt)


LEASE = Lease(
    batch_id="batch_1",
    segment=2,
    epoch=3,
    endpoint="/v1/chat/completions",
    url="file:///plan",
    start=0,
    end=9,
    rows=3,
    tokens=30,
    done="2",
    cache_salt="project",
)


def test_body_reaches_the_engine_unchanged() -> None:
    body = {"seed": 12345678901234567890123, "temperature": 1e-300, "text": "😀 ü"}
    assert json.loads(parse_request(leased(3, raw(body))).body) == body


@pytest.mark.parametrize("data", [b'{"custom_id": "a"}', b"[" * 100_000])
def test_line_that_is_not_a_request_is_reported_by_number(data: bytes) -> None:
    with pytest.raises(InputError, match="line 9"):
        parse_request(leased(9, data))


@pytest.mark.parametrize(
    ("body", "salt"),
    [
        ({}, "project"),
        ({"cache_salt": None}, "project"),
        ({"cache_salt": "own"}, "projectown"),
        ({"cache_salt": ""}, ""),
    ],
)
def test_salt_of_the_lease_comes_before_that_of_the_body(body: dict[str, object], salt: str) -> None:
    assert json.loads(parse_request(leased(1, raw(body), "project")).body)["cache_salt"] == salt


def test_rows_of_a_lease_are_those_that_are_not_committed() -> None:
    plan = [PlanRow(line=line, raw=raw({}), twins=((line + 1, "twin"),)) for line in (1, 3, 5)]
    rows = leased_rows(LEASE, b"".join(row.encode() for row in plan))
    assert [(row.key, row.line, row.tokens, row.cache_salt) for row in rows] == [
        ((LEASE.ref, 0), 1, 10, "project"),
        ((LEASE.ref, 2), 5, 10, "project"),
    ]


def test_segment_with_another_number_of_rows_is_refused() -> None:
    with pytest.raises(PlanError, match="has 1 rows instead of 3"):
        leased_rows(LEASE, PlanRow(line=1, raw=raw({})).encode())


def test_answer_is_committed_for_each_line_that_shares_it() -> None:
    row = replace(leased(1, raw({})), row=4, twins=((7, "b"),))
    usage = b'{"usage": {"prompt_tokens": 5}}'
    (committed,) = committed_rows([finished_row(parse_request(row), 200, usage)])
    assert (committed.segment, committed.epoch, committed.rows) == (2, 3, "10")
    assert (committed.lines, committed.completed, committed.failed) == ((1, 7), 2, 0)
    assert committed.usage == Usage(input_tokens=10)


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


@pytest.mark.parametrize(
    ("url", "body", "tokens"),
    [
        ("/v1/chat/completions", {}, math.inf),
        ("/v1/chat/completions", {"max_tokens": 7}, 7),
        ("/v1/chat/completions", {"max_tokens": 7, "max_completion_tokens": 9, "n": 3}, 27),
        ("/v1/chat/completions", {"max_tokens": "many"}, math.inf),
        ("/v1/chat/completions", {"max_tokens": 7, "n": "2"}, math.inf),
        ("/v1/chat/completions", {"max_tokens": 7, "use_beam_search": True}, math.inf),
        ("/v1/completions", {"prompt": "a"}, 16),
        ("/v1/completions", {"prompt": ["a", "b"], "max_tokens": 5}, 10),
        ("/v1/completions", {"prompt": [1, 2, 3], "max_tokens": 5}, 5),
        ("/v1/embeddings", {"input": "a"}, 1),
    ],
)
def test_most_tokens_of_a_request(url: str, body: dict[str, object], tokens: float) -> None:
    assert most_tokens(url, body) == tokens
