"""Rows of the processor engine: from bodies to parameters, and from tokens to bodies."""

import json
from typing import Any

import pytest

from ray_job.engines.llm_stages import ROW_COLUMNS
from ray_job.engines.processor_rows import (
    CHAT,
    COMPLETIONS,
    EMBEDDINGS,
    BodyError,
    error_response,
    finish,
    finished_response,
    sampling_params,
)
from ray_job.rows import timed_out

ENDS = {1: None, 2: 2}
PARAMS: dict[str, Any] = {"stop": [], "stop_token_ids": [], "ignore_eos": False}


def test_every_row_has_the_same_parameters() -> None:
    one = sampling_params(CHAT, {"temperature": 0, "stop": "x"}, {})
    assert one.keys() == sampling_params(CHAT, {}, {}).keys()


def test_body_overrides_the_model_which_overrides_openai() -> None:
    assert sampling_params(CHAT, {"top_p": 0.5}, {"top_p": 0.8})["top_p"] == 0.5
    assert sampling_params(CHAT, {"top_p": None}, {"top_p": 0.8})["top_p"] == 0.8
    assert sampling_params(CHAT, {}, {})["top_p"] == 1.0


def test_max_tokens_is_16_for_completions_and_unlimited_for_chats() -> None:
    assert sampling_params(COMPLETIONS, {}, {})["max_tokens"] == 16
    assert sampling_params(CHAT, {}, {})["max_tokens"] == 2**31 - 1
    assert sampling_params(CHAT, {"max_tokens": 3, "max_completion_tokens": 4}, {})["max_tokens"] == 4


@pytest.mark.parametrize(
    "body", [{"temperature": "hot"}, {"max_tokens": 1.5}, {"top_k": 2**70}, {"stop": 5}, {"ignore_eos": 1}]
)
def test_parameter_of_the_wrong_type_is_reported_by_name(body: dict[str, Any]) -> None:
    with pytest.raises(BodyError, match=next(iter(body))):
        sampling_params(CHAT, body, {})


def test_missing_structure_is_none_because_vllm_refuses_an_empty_one() -> None:
    assert sampling_params(CHAT, {"structured_outputs": None}, {})["structured_outputs"] is None


def test_json_schema_is_passed_as_text() -> None:
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
def test_finish_reason_is_derived_from_the_last_token_or_the_text(
    tokens: list[int], text: str, params: dict[str, Any], expected: tuple[str, str, Any]
) -> None:
    assert finish(tokens, text, {**PARAMS, **params}, ENDS) == expected


def _finished(url: str, **fields: Any) -> tuple[int, dict[str, Any]]:
    row = {**dict.fromkeys(ROW_COLUMNS), "batch_id": "batch_1", "line": 4, "custom_id": "a", "url": url}
    row |= {"num_input_tokens": 7, "ended_by": PARAMS, "refusal": "", **fields}
    response = finished_response(row, model="m", ends=ENDS, clock=lambda: 9.5)
    assert (response["line"], response["custom_id"]) == (4, "a")
    return response["status_code"], json.loads(response["response_body"])


def test_chat_body_has_one_choice_and_usage() -> None:
    status, body = _finished(CHAT, generated_tokens=[5, 1], generated_text="Hi", num_generated_tokens=2)
    assert (status, body["object"], body["choices"][0]["message"]["content"]) == (200, "chat.completion", "Hi")
    assert body["usage"] == {"prompt_tokens": 7, "completion_tokens": 2, "total_tokens": 9}


def test_embedding_body_has_the_vector() -> None:
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
def test_failed_row_is_a_client_error_or_a_server_error(error: str, status: int, message: str) -> None:
    found, body = error_response(error)
    assert (found, json.loads(body)["error"]["message"]) == (status, message)


def test_row_that_took_too_long_has_no_response() -> None:
    assert error_response("LineTimeoutError: it took: 60 s") == timed_out("it took: 60 s")
