"""Rows of the processor lane: bodies to parameters, tokens to bodies."""

import json
from typing import Any

import pytest

from ray_job.engines.processor_rows import (
    CHAT,
    COMPLETIONS,
    EMBEDDINGS,
    BodyError,
    EndTokens,
    error_response,
    finish,
    response_body,
    sampling_params,
)

ENDS = EndTokens(eos=1, others=frozenset({2}))
PARAMS: dict[str, Any] = {"stop": [], "stop_token_ids": [], "ignore_eos": False}


def test_every_row_has_the_same_parameters() -> None:
    one = sampling_params(CHAT, {"temperature": 0, "stop": "x"}, {})
    assert one.keys() == sampling_params(CHAT, {}, {}).keys()


def test_the_bodys_value_goes_before_the_models_and_that_before_openais() -> None:
    assert sampling_params(CHAT, {"top_p": 0.5}, {"top_p": 0.8})["top_p"] == 0.5
    assert sampling_params(CHAT, {"top_p": None}, {"top_p": 0.8})["top_p"] == 0.8
    assert sampling_params(CHAT, {}, {})["top_p"] == 1.0


def test_completions_end_after_16_tokens_and_chats_with_the_context() -> None:
    assert sampling_params(COMPLETIONS, {}, {})["max_tokens"] == 16
    assert sampling_params(CHAT, {}, {})["max_tokens"] == 2**31 - 1
    assert sampling_params(CHAT, {"max_tokens": 3, "max_completion_tokens": 4}, {})["max_tokens"] == 4


@pytest.mark.parametrize(
    "body", [{"temperature": "hot"}, {"max_tokens": 1.5}, {"top_k": 2**70}, {"stop": 5}, {"ignore_eos": 1}]
)
def test_a_parameter_of_the_wrong_type_is_told_by_name(body: dict[str, Any]) -> None:
    with pytest.raises(BodyError, match=next(iter(body))):
        sampling_params(CHAT, body, {})


def test_no_structure_is_asked_for_by_none_because_vllm_refuses_an_empty_one() -> None:
    assert sampling_params(CHAT, {"structured_outputs": None}, {})["structured_outputs"] is None


def test_a_json_schema_travels_as_text() -> None:
    structure = sampling_params(CHAT, {"structured_outputs": {"json": {"type": "object"}}}, {})["structured_outputs"]
    assert structure["json"] == '{"type": "object"}'


@pytest.mark.parametrize(
    ("tokens", "text", "params", "expected"),
    [
        ([5, 6], "ab", {}, ("ab", "length", None)),
        ([5, 1], "a", {}, ("a", "stop", None)),
        ([5, 2], "a", {}, ("a", "stop", 2)),
        ([5, 1], "a", {"ignore_eos": True}, ("a", "length", None)),
        ([5, 7], "a", {"stop_token_ids": [7]}, ("a", "stop", 7)),
        ([5, 6], "abEND", {"stop": ["END"]}, ("ab", "stop", "END")),
    ],
)
def test_why_a_generation_ended_is_told_by_its_last_token_or_text(
    tokens: list[int], text: str, params: dict[str, Any], expected: tuple[str, str, Any]
) -> None:
    assert finish(tokens, text, {**PARAMS, **params}, ENDS) == expected


def _finished(url: str, **fields: Any) -> tuple[int, dict[str, Any]]:
    row = {"line": 4, "url": url, "num_input_tokens": 7, "ended_by": PARAMS, "refusal": "", **fields}
    status, body = response_body(row, batch_id="batch_1", model="m", created=9, ends=ENDS)
    return status, json.loads(body)


def test_a_chat_body_has_one_choice_and_the_usage() -> None:
    status, body = _finished(CHAT, generated_tokens=[5, 1], generated_text="Hi", num_generated_tokens=2)
    assert (status, body["object"], body["choices"][0]["message"]["content"]) == (200, "chat.completion", "Hi")
    assert body["usage"] == {"prompt_tokens": 7, "completion_tokens": 2, "total_tokens": 9}


def test_an_embedding_body_has_the_vector() -> None:
    status, body = _finished(EMBEDDINGS, embeddings=[0.5, 0.25])
    assert (status, body["data"][0]["embedding"]) == (200, [0.5, 0.25])


@pytest.mark.parametrize(
    ("error", "status", "message"),
    [
        ("ValueError: too long: 5", 400, "too long: 5"),
        ("RuntimeError: broken", 500, "RuntimeError: broken"),
        ("no colon", 500, "no colon"),
    ],
)
def test_a_failed_row_is_the_clients_fault_or_the_servers(error: str, status: int, message: str) -> None:
    found, body = error_response(error)
    assert (found, json.loads(body)["error"]["message"]) == (status, message)
