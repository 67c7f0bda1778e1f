"""Common mistakes in input files: each is reported as an error with a remedy, and none raises."""

import json
from typing import Any

import pytest

from ray_job.contract.job_spec import ModelSpec
from service.input_file import InputError, InputFacts, read_input_file
from service.model_catalogue import CatalogueModel
from tests.ray.fidelity.corpus import CHAT, COMPLETIONS, EMBEDDINGS, corpus

MODELS = {
    name: CatalogueModel(spec=ModelSpec(id=name, source="x"), endpoints=(CHAT, COMPLETIONS, EMBEDDINGS))
    for name in ("demo", "demo-embed", "gpt-nothing")
}
GOOD = {
    "custom_id": "good",
    "method": "POST",
    "url": CHAT,
    "body": {"model": "demo", "messages": [{"role": "user", "content": "hi"}]},
}
GOOD_LINE = json.dumps(GOOD).encode()


def read(content: bytes, endpoint: str = CHAT) -> InputFacts:
    return read_input_file([content], endpoint=endpoint, models=MODELS)


def only_error(line: bytes) -> InputError:
    """Return the only error of a file whose other lines are valid."""
    last = json.dumps(GOOD | {"custom_id": "last"}).encode()
    facts = read(b"\n".join([GOOD_LINE, line, last]))
    assert (facts.total, facts.error_count) == (3, 1)
    assert facts.errors[0].line == 2
    return facts.errors[0]


def changed(**changes: Any) -> bytes:
    return json.dumps({"custom_id": "a"} | {name: GOOD[name] for name in ("method", "url", "body")} | changes).encode()


def nested(depth: int) -> str:
    return "[" * depth + "]" * depth


@pytest.mark.parametrize(
    ("line", "message"),
    [
        (b"\xef\xbb\xbf" + changed(), "begins with a byte order mark"),
        (b'{"custom_id": "a\xff"}', "not UTF-8: byte 17 of the line"),
        (b'{"custom_id": "a\0b"}', "holds a NUL byte, at byte 17"),
        (b'{"custom_id": "ab\0"}', "holds a NUL byte, at byte 18"),
        (b"\0" * 40, "holds a NUL byte, at byte 1"),
        (b'{"custom_id": "a\\ud800"}', "holds half a character"),
        (b'{"seed": 1e999}', "larger than about 1.8e308"),
        (b'{"seed": ' + b"9" * 400 + b"}", "larger than about 1.8e308"),
        (b'{"seed": -' + b"9" * 5_000 + b"}", "larger than about 1.8e308"),
        (b"[" * 100_000, "at most 500 levels"),
        (b'{"a":' * 100_000, "at most 500 levels"),
        (changed() + b",", "Remove the comma"),
        (b'{"custom_id": "a",}', "Remove the comma"),
        (b'{"a": 1,}', "at character 8. Remove the comma"),
        (b'{"custom_id": "a\tb"}', "write tabs, line breaks and other control characters as"),
        (b'{"custom_id": "a\tb"},', "write tabs, line breaks and other control characters as"),
        (b'{"a" 1}', "at character 6. JSON has no NaN"),
        (b"{'custom_id': 'a'}", "not parseable as valid JSON"),
        (changed() + b"\r" + changed(), "Lines must end with LF or CRLF"),
        (b"[" + changed() + b"]", "This line is a JSON array."),
        (b'"text"', "This line is not a JSON object."),
    ],
)
def test_line_that_is_not_a_json_object_has_a_reason(line: bytes, message: str) -> None:
    error = only_error(line)
    assert error.code == "invalid_json_line"
    assert message in error.message


@pytest.mark.parametrize(
    ("line", "code", "message"),
    [
        (changed(custom_id="x" * 513), "invalid_request", "has 513 characters; at most 512"),
        (changed(custom_id="a\0b"), "invalid_request", "custom_id holds a NUL character"),
        (changed(custom_id=["a"]), "invalid_request", "expected a string that is not empty, but got an array"),
        (changed(method="post"), "invalid_method", "The method is not supported. It must be 'POST', in capitals"),
        (changed(method="PUT"), "invalid_method", "The method is not supported. It must be 'POST'."),
        (changed(method={"a": 1}), "invalid_method", "It must be 'POST'."),
        (changed(url=f"{CHAT}/"), "invalid_url", "the path alone"),
        (changed(url=f"https://api.openai.com{CHAT}"), "invalid_url", "the path alone"),
        (changed(url="/v1/embeddings"), "invalid_url", f"It must be '{CHAT}'."),
        (changed(body=None), "missing_required_parameter", "'body'"),
        (changed(body=[]), "invalid_request", "expected an object, but got an array"),
        (changed(body={"model": "demo", "prompt": "x"}), "missing_required_parameter", "belongs to another endpoint"),
        (
            changed(body=GOOD["body"] | {"model": "no\0pe"}),
            "model_not_found",
            "The model does not exist. Available models:",
        ),
        (
            changed(body=GOOD["body"] | {"model": "x" * 1_000_000}),
            "model_not_found",
            "The model does not exist. Available models:",
        ),
        (changed(method=json.loads(nested(400))), "invalid_method", "It must be 'POST'."),
        (changed(other=json.loads(nested(501))), "invalid_request", "more than 500 levels"),
        (changed(body=GOOD["body"] | {"x": json.loads(nested(600))}), "invalid_request", "more than 500 levels"),
    ],
)
def test_invalid_request_has_a_remedy(line: bytes, code: str, message: str) -> None:
    error = only_error(line)
    assert error.code == code
    assert message in error.message


@pytest.mark.parametrize(
    "content",
    [
        b"\xef\xbb\xbf" + GOOD_LINE,
        GOOD_LINE + b"\r\n",
        b"\r\n\n \t\n" + GOOD_LINE + b"\n\n\r\n",
        b" \t" + GOOD_LINE + b"\t \n",
        changed(custom_id="x" * 512),
        changed(body=GOOD["body"] | {"seed": 2**70, "x": json.loads(nested(490))}),
        changed(body=GOOD["body"] | {"messages": [{"role": "user", "content": "a\0[[[{" * 2_000}]}),
        changed(body=GOOD["body"] | {"messages": "anything that the engine may answer", "n": -1}),
    ],
)
def test_unusual_but_valid_lines_are_accepted(content: bytes) -> None:
    facts = read(content)
    assert (facts.total, facts.errors) == (1, ())


@pytest.mark.parametrize(
    ("endpoint", "param"), [(CHAT, "body.messages"), (COMPLETIONS, "body.prompt"), (EMBEDDINGS, "body.input")]
)
def test_missing_input_is_the_usual_field_of_the_endpoint(endpoint: str, param: str) -> None:
    (error,) = read(changed(url=endpoint, body={"model": "demo"}), endpoint).errors
    assert (error.param, error.message) == (param, f"Missing required parameter: '{param}'.")


def test_last_of_two_equal_keys_counts() -> None:
    assert read(GOOD_LINE[:-1] + b', "method": "POST", "custom_id": "b"}').error_count == 0
    assert read(GOOD_LINE[:-1] + b', "method": "GET"}').errors[0].code == "invalid_method"


@pytest.mark.parametrize(
    ("content", "what"),
    [
        (b"\x1f\x8b\x08" + bytes(range(256)) * 40, "gzip"),
        (b"PK\x03\x04" + bytes(range(256)) * 40, "ZIP"),
        (b"\x28\xb5\x2f\xfd" + bytes(range(256)) * 40, "zstd"),
        (("\ufeff" + "{}\n" * 50).encode("utf-16-le"), "UTF-16"),
        (("{}\n" * 50).encode("utf-16-le"), "UTF-16"),
        (("{}\n" * 50).encode("utf-16-be"), "UTF-16"),
        (b"PAR1" + bytes(range(256)), "Parquet"),
    ],
)
def test_binary_file_is_one_error(content: bytes, what: str) -> None:
    facts = read(content)
    assert (facts.error_count, facts.errors[0].code, facts.errors[0].line) == (1, "invalid_request", None)
    assert what in facts.errors[0].message


@pytest.mark.parametrize(
    ("content", "hint"),
    [
        (json.dumps([GOOD] * 700, indent=2).encode(), "jq -c '.[]'"),
        (b"[\n" + b",\n".join([GOOD_LINE] * 3) + b"\n]", "jq -c '.[]'"),
        (b"\n".join([json.dumps(GOOD, indent=2).encode()] * 700), "jq -c . "),
    ],
)
def test_layout_error_comes_before_line_errors(content: bytes, hint: str) -> None:
    facts = read(content)
    assert (facts.errors[0].code, facts.errors[0].line) == ("invalid_json_line", None)
    assert hint in facts.errors[0].message
    assert facts.errors[1].line == 1
    assert facts.error_count > 3


@pytest.mark.parametrize(
    "content", [b'{"custom_id": "a",\n"method": "POST"}', b'{"body": {\n}}', b'{"a": [\n1]}', b"{\n}"]
)
def test_object_over_several_lines_is_a_layout_error(content: bytes) -> None:
    assert "pretty-printed" in read(content).errors[0].message


@pytest.mark.parametrize("content", [b"id,\nname,", b"[", b'{"a": 1', b"{,\n{}"])
def test_other_lines_are_no_object_over_several_lines(content: bytes) -> None:
    assert not any("pretty-printed" in error.message for error in read(content).errors)


@pytest.mark.parametrize("content", [b"[1]", b"{"])
def test_one_wrong_line_among_requests_is_no_layout_error(content: bytes) -> None:
    assert [error.line for error in read(content + b"\n" + GOOD_LINE).errors] == [1]


def test_last_listed_error_keeps_its_own_message() -> None:
    facts = read(b"x\n" * 999 + b"[1]\n" + b"x\n" * 10)
    assert facts.errors[-1].message.startswith("This line is a JSON array.")
    assert facts.errors[-1].line == 1_000


def test_last_listed_error_mentions_omitted_ones() -> None:
    facts = read(b"x\n" * 1_200)
    assert facts.errors[-1].message.endswith(
        "(Of 1,200 errors in this file, the first 1,000 are listed; this is the last.)"
    )
    assert "are listed" not in read(b"x\n" * 1_000).errors[-1].message


def test_file_errors_are_listed_despite_many_line_errors() -> None:
    facts = read_input_file([b"x\n" * 1_200], endpoint=CHAT, models=MODELS, max_requests=1_100)
    assert "holds 1,200 requests" in facts.errors[0].message
    assert facts.error_count == 1_101


def test_line_of_10_mb_is_accepted_but_not_a_longer_one() -> None:
    body = GOOD["body"] | {"messages": [{"role": "user", "content": "x" * (10 * 2**20 - 200)}]}
    assert read(changed(body=body)).error_count == 0
    error = only_error(changed(body=body | {"user": "x" * 200}))
    assert "longer than 10,485,760 bytes" in error.message


def test_without_a_catalogue_any_single_model_is_accepted() -> None:
    lines = [json.dumps(GOOD).encode(), changed(body=GOOD["body"] | {"model": "another"})]
    facts = read_input_file(lines[:1], endpoint=CHAT, models=None)
    assert (facts.model, facts.error_count) == ("demo", 0)
    facts = read_input_file([b"\n".join(lines)], endpoint=CHAT, models=None)
    assert [error.code for error in facts.errors] == ["model_mismatch"]


# Lines of the corpus that validation keeps from the engine.
HARMFUL = ("chat-template-own", "chat-template-broken", "logprobs-1000", "stop-long")


@pytest.mark.parametrize(
    ("endpoint", "incomplete"),
    [
        (CHAT, {"messages-missing", "messages-null", "messages-empty", "prompt-for-chat"}),
        (COMPLETIONS, {"prompt-missing", "messages-for-completions"}),
        (EMBEDDINGS, {"input-missing"}),
    ],
)
def test_values_that_the_engine_judges_are_accepted(endpoint: str, incomplete: set[str]) -> None:
    lines = [
        line
        for line in corpus()
        if line["url"] == endpoint
        and line["body"]["model"] in ("demo", "demo-embed")
        and not line["custom_id"].endswith(HARMFUL)
    ]
    facts = read("\n".join(map(json.dumps, lines)).encode(), endpoint)
    assert {error.code for error in facts.errors} == {"missing_required_parameter"}
    refused = {lines[error.line - 1]["custom_id"].split("refuse-")[1] for error in facts.errors if error.line}
    assert refused == incomplete


def test_missing_field_has_a_message_with_and_without_a_hint() -> None:
    assert only_error(changed(body=None)).message == "Missing required parameter: 'body'."
    assert only_error(changed(method=None)).message == "Missing required parameter: 'method'. It must be 'POST'."


def test_repeated_custom_id_is_not_quoted() -> None:
    line = changed(custom_id="patient-4711")
    (error,) = read(line + b"\n" + line).errors
    assert error.message == "The custom_id also appears on an earlier line. Each must be unique."
