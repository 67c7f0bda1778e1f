import json
from collections.abc import Iterator
from typing import Any

import pytest

from ray_job.contract.input_lines import split_lines
from ray_job.contract.job_spec import ModelSpec
from service.input_file import InputFacts, embedding_inputs, read_input_file
from service.model_catalogue import CatalogueModel, ModelLimits

CHAT = "/v1/chat/completions"
MODELS = {
    "demo": CatalogueModel(
        spec=ModelSpec(id="demo", source="x"), endpoints=(CHAT,), limits=ModelLimits(max_line_bytes=2_000)
    ),
    "other": CatalogueModel(spec=ModelSpec(id="other", source="x"), endpoints=(CHAT, "/v1/embeddings")),
}


HELLO = [{"role": "user", "content": "hi"}]


def request(custom_id: str = "a", /, **changes: Any) -> dict[str, Any]:
    body = {"model": "demo", "messages": HELLO}
    return {"custom_id": custom_id, "method": "POST", "url": CHAT, "body": body} | changes


def chat(custom_id: str = "a", /, **changes: Any) -> dict[str, Any]:
    return request(custom_id, body={"model": "demo", "messages": HELLO} | changes)


def read(*lines: dict[str, Any] | bytes, endpoint: str = CHAT, **options: Any) -> InputFacts:
    content = b"\n".join(line if isinstance(line, bytes) else json.dumps(line).encode() for line in lines)
    return read_input_file([content], endpoint=endpoint, models=MODELS, **options)


def test_valid_file_is_accepted() -> None:
    facts = read(request("a"), request("b"))
    assert (facts.total, facts.model, facts.errors, facts.error_count) == (2, "demo", (), 0)


def without(key: str) -> dict[str, Any]:
    return {name: value for name, value in request().items() if name != key}


@pytest.mark.parametrize(
    ("line", "code", "param"),
    [
        (b"{", "invalid_json_line", None),
        (b"[1]", "invalid_json_line", None),
        (b"null", "invalid_json_line", None),
        (b'{"custom_id": "\xff"}', "invalid_json_line", None),
        (json.dumps(request(body={"model": "demo", "seed": float("nan")})).encode(), "invalid_json_line", None),
        (b'{"custom_id": 1e999}', "invalid_json_line", None),
        (b"[" * 5_000, "invalid_json_line", None),
        (without("custom_id"), "missing_required_parameter", "custom_id"),
        (request(custom_id=7), "invalid_request", "custom_id"),
        (request(custom_id=""), "invalid_request", "custom_id"),
        (without("method"), "missing_required_parameter", "method"),
        (request(method="GET"), "invalid_method", "method"),
        (without("url"), "missing_required_parameter", "url"),
        (request(url="/v1/completions"), "invalid_url", "url"),
        (request(url=["x"]), "invalid_url", "url"),
        (without("body"), "missing_required_parameter", "body"),
        (request(body="x"), "invalid_request", "body"),
        (request(body={"messages": HELLO}), "missing_required_parameter", "body.model"),
        (chat(model=1), "invalid_request", "body.model"),
        (chat(model=""), "invalid_request", "body.model"),
        (chat(model="dem"), "model_not_found", "body.model"),
        (chat(messages=None), "missing_required_parameter", "body.messages"),
        (chat(messages=[]), "missing_required_parameter", "body.messages"),
        (request(body={"model": "demo", "prompt": "x"}), "missing_required_parameter", "body.messages"),
        (chat(stream=True), "streaming_unsupported", "body.stream"),
        (request("first"), "duplicate_custom_id", "custom_id"),
        (chat(model="other"), "model_mismatch", "body.model"),
        (chat(x="y" * 2_000), "invalid_request", None),
    ],
)
def test_line_error_has_code_param_and_number(line: dict[str, Any] | bytes, code: str, param: str | None) -> None:
    facts = read(request("first"), b"", line, request("last"))
    assert [(error.code, error.param, error.line) for error in facts.errors] == [(code, param, 3)]
    assert facts.total == 3


def test_unknown_model_error_suggests_the_closest_name() -> None:
    assert "Did you mean 'demo'?" in read(chat(model="demos")).errors[0].message


def test_unknown_model_error_lists_all_names_without_a_close_one() -> None:
    assert read(chat(model="xyz")).errors[0].message.endswith("Available models: demo, other.")
    facts = read_input_file([json.dumps(request()).encode()], endpoint=CHAT, models={})
    assert facts.errors[0].message.endswith("Available models: none.")


def test_endpoint_that_a_model_does_not_offer_is_an_error() -> None:
    facts = read(request(url="/v1/embeddings"), endpoint="/v1/embeddings")
    assert facts.errors[0].message == "The model 'demo' does not offer /v1/embeddings. It offers: /v1/chat/completions."


def test_field_that_an_engine_does_not_support_is_an_error() -> None:
    spec = ModelSpec(id="plain", source="x", engine="processor")
    body = {"model": "plain", "messages": [], "stream": True, "n": 2}
    content = json.dumps(request(body=body)).encode()
    facts = read_input_file([content], endpoint=CHAT, models={"plain": CatalogueModel(spec=spec)})
    assert ("invalid_request", "body.n", 1) in {(error.code, error.param, error.line) for error in facts.errors}
    assert [error.code for error in facts.errors if error.param == "body.stream"] == ["streaming_unsupported"]


@pytest.mark.parametrize("content", [b"", b"\n\r\n  \n", b"\xef\xbb\xbf"])
def test_file_without_requests_is_an_error(content: bytes) -> None:
    assert [error.code for error in read(content).errors] == ["empty_file"]


def test_every_error_is_counted_and_the_first_1000_are_listed() -> None:
    facts = read(*[b"x"] * 1_200)
    assert (len(facts.errors), facts.error_count, facts.errors[-1].line) == (1_000, 1_200, 1_000)


def test_all_errors_of_a_line_are_reported() -> None:
    assert [error.code for error in read(request(method="PUT", url="/x", body=None)).errors] == [
        "invalid_method",
        "invalid_url",
        "missing_required_parameter",
    ]


def test_too_many_requests_are_one_error() -> None:
    facts = read(*[request(str(n)) for n in range(4)], max_requests=3)
    assert (facts.total, facts.error_count) == (4, 1)
    assert "holds 4 requests; a batch may have at most 3" in facts.errors[0].message


def test_requests_beyond_the_limit_are_counted_without_blank_lines() -> None:
    first = json.dumps(request()).encode() + b"\n"
    models = {"demo": MODELS["demo"]}
    chunks = [first, b"\n \nnot JSON\n", b"x" * 3_000 + b"\n", b"last"]
    facts = read_input_file(chunks, endpoint=CHAT, models=models, max_requests=1)
    assert (facts.total, facts.error_count) == (4, 1)


def test_embedding_inputs_are_summed() -> None:
    body = {"model": "other", "input": ["x"] * 30_000}
    lines = [request(str(n), url="/v1/embeddings", body=body) for n in range(2)]
    facts = read(*lines, endpoint="/v1/embeddings")
    assert "60,000 embedding inputs" in facts.errors[0].message


def test_only_embedding_requests_have_embedding_inputs() -> None:
    assert read(chat(model="other", input=["x"] * 60_000)).errors == ()
    facts = read(request(url="/v1/embeddings", body="x"), endpoint="/v1/embeddings")
    assert [error.param for error in facts.errors] == ["body"]


@pytest.mark.parametrize(
    ("value", "count"), [("x", 1), (["x", "y"], 2), ([1, 2, 3], 1), ([[1], [2]], 2), (["x", 1], 2), (None, 1), ([], 1)]
)
def test_token_list_is_one_input(value: Any, count: int) -> None:
    assert embedding_inputs(value) == count


def test_lines_do_not_depend_on_chunk_boundaries() -> None:
    content = b"\xef\xbb\xbfone\r\n\r\n two \nlast"
    whole = [(line.number, line.content) for line in split_lines([content])]
    assert whole == [(1, b"one"), (2, b""), (3, b" two "), (4, b"last")]
    for size in range(1, len(content)):
        pieces = [content[start : start + size] for start in range(0, len(content), size)]
        assert [(line.number, line.content) for line in split_lines(pieces)] == whole


def test_endless_line_takes_no_memory() -> None:
    def endless() -> Iterator[bytes]:
        yield from (b"x" * 1_000_000 for _ in range(200))
        yield b"\nnext"

    lines = list(split_lines(endless(), max_line_bytes=1_000))
    assert [(line.number, line.content) for line in lines] == [(1, None), (2, b"next")]
