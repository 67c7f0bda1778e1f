"""Fields of a body that an engine cannot honour."""

from typing import Any

import pytest

from ray_job.contract.engine_support import unsupported_fields
from ray_job.contract.job_spec import ENGINE_KINDS

CHAT, COMPLETIONS, EMBEDDINGS = "/v1/chat/completions", "/v1/completions", "/v1/embeddings"
HELLO = [{"role": "user", "content": "Hello"}]


def _params(body: dict[str, Any], endpoint: str = CHAT) -> set[str]:
    return {problem.param for problem in unsupported_fields("processor", endpoint, body)}


@pytest.mark.parametrize("engine", [engine for engine in ENGINE_KINDS if engine != "processor"])
def test_engines_that_pass_the_body_on_accept_every_field(engine: str) -> None:
    assert list(unsupported_fields(engine, CHAT, {"messages": HELLO, "tools": [{}], "n": 9, "surprise": 1})) == []


def test_processor_accepts_sampling_parameters() -> None:
    body = {"model": "m", "messages": HELLO, "temperature": 0.5, "top_p": 0.9, "max_tokens": 5, "user": "x"}
    assert _params(body) == set()


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("n", 2),
        ("seed", 1),
        ("tools", [{"type": "function"}]),
        ("logprobs", True),
        ("logprobs", 0),
        ("top_logprobs", 2),
        ("echo", True),
        ("stream", True),
        ("logit_bias", {"5": 1}),
        ("response_format", {"type": "json_object"}),
        ("prompt_logprobs", 1),
        ("chat_template", "x"),
        ("invented", 1),
    ],
)
def test_processor_refuses_a_field_by_name(field: str, value: Any) -> None:
    assert _params({"messages": HELLO, field: value}) == {field}


@pytest.mark.parametrize(
    ("field", "value"), [("n", 1), ("stream", False), ("tools", None), ("response_format", {"type": "text"})]
)
def test_processor_accepts_a_field_at_its_neutral_value(field: str, value: Any) -> None:
    assert _params({"messages": HELLO, field: value}) == set()


def test_message_that_is_not_plain_text_is_refused_by_its_path() -> None:
    parts = [{"role": "user", "content": [{"type": "text", "text": "x"}]}]
    calls = [{"role": "assistant", "content": "x", "tool_calls": [{}]}]
    assert _params({"messages": [*HELLO, *parts]}) == {"messages[1].content"}
    assert _params({"messages": [*HELLO, *calls]}) == {"messages[1].tool_calls"}


def test_several_prompts_in_one_line_are_refused() -> None:
    assert _params({"prompt": "x"}, COMPLETIONS) == set()
    assert _params({"prompt": [1, 2]}, COMPLETIONS) == set()
    assert _params({"prompt": ["x", "y"]}, COMPLETIONS) == {"prompt"}
    assert _params({"input": ["x", "y"]}, EMBEDDINGS) == {"input"}
    assert _params({"input": "x", "dimensions": 5}, EMBEDDINGS) == {"dimensions"}


@pytest.mark.parametrize("other", [{"min_tokens": 5}, {"stop_token_ids": [5]}, {"skip_special_tokens": False}])
def test_stop_strings_are_refused_with_options_that_hide_the_finish_reason(other: dict[str, Any]) -> None:
    assert _params({"messages": HELLO, "stop": ["x"], **other}) == {"stop"}


def test_unknown_field_of_structured_outputs_is_refused() -> None:
    assert _params({"messages": HELLO, "structured_outputs": {"regex": "a"}}) == set()
    found = _params({"messages": HELLO, "structured_outputs": {"regex": "a", "whitespace_pattern": " "}})
    assert found == {"structured_outputs.whitespace_pattern"}


@pytest.mark.parametrize("other", [{}, {"min_tokens": 0}, {"stop_token_ids": []}, {"skip_special_tokens": True}])
def test_stop_strings_are_accepted_with_other_options(other: dict[str, Any]) -> None:
    assert _params({"messages": HELLO, "stop": ["x"], **other}) == set()
    assert _params({"messages": HELLO, "stop": [], "min_tokens": 5}) == set()


@pytest.mark.parametrize(
    "messages", [None, "text", ["text"], [{"role": "user"}], [{"role": "user", "tool_calls": None}]]
)
def test_messages_that_only_the_engine_can_judge_are_accepted(messages: Any) -> None:
    assert _params({"messages": messages}) == set()


def test_problems_after_an_accepted_message_are_found() -> None:
    messages = ["text", {"role": "tool", "tool_call_id": "a", "content": None}, {"role": "user", "content": 5}]
    assert _params({"messages": messages}) == {"messages[1].tool_call_id", "messages[1].content", "messages[2].content"}


@pytest.mark.parametrize("prompt", [[], [True], ["x"], [[1]]])
def test_prompt_that_is_not_one_text_or_token_list_is_refused(prompt: Any) -> None:
    assert _params({"prompt": prompt}, COMPLETIONS) == {"prompt"}
    assert _params({"input": prompt}, EMBEDDINGS) == {"input"}


def test_message_names_the_feature_and_the_remedy() -> None:
    messages = {
        param: problem.message
        for body in ({"n": 2}, {"seed": 1}, {"structured_outputs": {"odd": 1}})
        for problem in unsupported_fields("processor", CHAT, body)
        for param in [problem.param]
    }
    assert "cannot honour 'n' other than 1." in messages["n"]
    assert "cannot honour the field 'seed'." in messages["seed"]
    assert "the field 'odd' of structured_outputs" in messages["structured_outputs.odd"]
    several = next(unsupported_fields("processor", EMBEDDINGS, {"input": ["a", "b"]}))
    assert "several inputs in one line" in several.message
