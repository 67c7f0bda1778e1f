"""Messages of input errors describe what a line holds; they never quote its content."""

import json
from typing import Any

import pytest

from ray_job.contract.job_spec import ModelSpec
from service.input_file import InputFacts, read_input_file
from service.model_catalogue import CatalogueModel

CHAT = "/v1/chat/completions"
PROMPT = "Summarise the medical record of patient 4711"
BODY = {"model": "demo", "messages": [{"role": "user", "content": PROMPT}]}
REQUEST = {"custom_id": "a", "method": "POST", "url": CHAT, "body": BODY}


def read(line: bytes, engine: Any = "direct") -> InputFacts:
    models = {"demo": CatalogueModel(spec=ModelSpec(id="demo", source="x", engine=engine))}
    return read_input_file([line], endpoint=CHAT, models=models)


def assert_refused_without_content(facts: InputFacts) -> None:
    assert facts.errors
    for error in facts.errors:
        text = f"{error.message} {error.param}"
        assert not any(word in text for word in ("medical", "patient", "4711"))
        assert len(text) < 1_200


@pytest.mark.parametrize(
    "change",
    [
        {"body": PROMPT},
        {"body": [PROMPT]},
        {"body": 4711},
        {"custom_id": [PROMPT]},
        {"custom_id": {"content": PROMPT}},
        {"custom_id": 4711},
        {"method": PROMPT},
        {"method": {"content": PROMPT}},
        {"method": 4711},
        {"url": PROMPT},
        {"url": [PROMPT]},
        {"url": f"https://api.example.com/{'4711' * 50}"},
        {"body": BODY | {"model": PROMPT}},
        {"body": BODY | {"model": [PROMPT]}},
        {"body": BODY | {"model": 4711}},
        {"body": BODY | {"stream": PROMPT}},
        {"body": {"model": "demo", "messages": [], "metadata": {"note": PROMPT}}},
        {"body": {"model": "demo", "prompt": PROMPT}},
    ],
)
def test_values_of_a_request_are_not_quoted(change: dict[str, Any]) -> None:
    assert_refused_without_content(read(json.dumps(REQUEST | change).encode()))


@pytest.mark.parametrize(
    "line",
    [
        json.dumps(PROMPT).encode(),
        json.dumps([PROMPT]).encode(),
        PROMPT.encode(),
        json.dumps(REQUEST)[:-5].encode(),
        json.dumps(REQUEST).encode() + b",",
        json.dumps(REQUEST).encode() + PROMPT.encode(),
        json.dumps(REQUEST).replace("medical", "med\tical \0 \\ud800").encode(),
        b"\xef\xbb\xbf\xef\xbb\xbf" + json.dumps(REQUEST).encode(),
        json.dumps(REQUEST).encode() + b"\xff",
    ],
)
def test_broken_lines_are_not_quoted(line: bytes) -> None:
    assert_refused_without_content(read(line))


@pytest.mark.parametrize(
    "change",
    [
        {PROMPT: 1},
        {"n": PROMPT},
        {"structured_outputs": {PROMPT: PROMPT}},
        {"messages": [{"role": "user", "content": "hi", PROMPT: PROMPT}]},
        {"messages": [{"role": "user", "content": [{"type": "text", "text": PROMPT}]}]},
    ],
)
def test_fields_that_an_engine_does_not_support_are_not_quoted(change: dict[str, Any]) -> None:
    assert_refused_without_content(read(json.dumps(REQUEST | {"body": BODY | change}).encode(), "processor"))


def test_identifiers_are_not_quoted_either() -> None:
    request = REQUEST | {
        "custom_id": "id-1",
        "method": "GET",
        "url": "/v1/responses",
        "body": BODY | {"model": "dem-1"},
    }
    messages = " ".join(error.message for error in read(json.dumps(request).encode()).errors)
    assert not any(name in messages for name in ("id-1", "GET", "/v1/responses", "dem-1"))
    assert "Did you mean 'demo'?" in messages
