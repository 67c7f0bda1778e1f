"""Which fields of a body a lane cannot honour."""

from typing import Any

import pytest

from ray_job.contract.job_spec import ENGINE_LANES
from ray_job.contract.lanes import lane_problems

CHAT, COMPLETIONS, EMBEDDINGS = "/v1/chat/completions", "/v1/completions", "/v1/embeddings"
HELLO = [{"role": "user", "content": "Hello"}]


def _params(body: dict[str, Any], endpoint: str = CHAT) -> set[str]:
    return {problem.param for problem in lane_problems("processor", endpoint, body)}


@pytest.mark.parametrize("lane", [lane for lane in ENGINE_LANES if lane != "processor"])
def test_lanes_that_pass_the_body_on_refuse_nothing(lane: str) -> None:
    assert list(lane_problems(lane, CHAT, {"messages": HELLO, "tools": [{}], "n": 9, "surprise": 1})) == []


def test_plain_sampling_is_honoured_by_the_processor_lane() -> None:
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
def test_what_the_processor_lane_cannot_say_or_see_is_refused_by_name(field: str, value: Any) -> None:
    assert _params({"messages": HELLO, field: value}) == {field}


@pytest.mark.parametrize(
    ("field", "value"), [("n", 1), ("stream", False), ("tools", None), ("response_format", {"type": "text"})]
)
def test_a_field_at_the_value_that_asks_for_nothing_is_no_problem(field: str, value: Any) -> None:
    assert _params({"messages": HELLO, field: value}) == set()


def test_messages_that_are_not_plain_text_are_refused_with_their_place() -> None:
    parts = [{"role": "user", "content": [{"type": "text", "text": "x"}]}]
    calls = [{"role": "assistant", "content": "x", "tool_calls": [{}]}]
    assert _params({"messages": [*HELLO, *parts]}) == {"messages[1].content"}
    assert _params({"messages": [*HELLO, *calls]}) == {"messages[1].tool_calls"}


def test_one_prompt_of_text_or_tokens_is_honoured_and_several_are_not() -> None:
    assert _params({"prompt": "x"}, COMPLETIONS) == set()
    assert _params({"prompt": [1, 2]}, COMPLETIONS) == set()
    assert _params({"prompt": ["x", "y"]}, COMPLETIONS) == {"prompt"}
    assert _params({"input": ["x", "y"]}, EMBEDDINGS) == {"input"}
    assert _params({"input": "x", "dimensions": 5}, EMBEDDINGS) == {"dimensions"}


@pytest.mark.parametrize("other", [{"min_tokens": 5}, {"stop_token_ids": [5]}, {"skip_special_tokens": False}])
def test_stop_strings_are_refused_beside_what_hides_why_a_generation_ended(other: dict[str, Any]) -> None:
    assert _params({"messages": HELLO, "stop": ["x"], **other}) == {"stop"}


def test_only_kinds_of_structure_that_the_lane_passes_on_are_honoured() -> None:
    assert _params({"messages": HELLO, "structured_outputs": {"regex": "a"}}) == set()
    found = _params({"messages": HELLO, "structured_outputs": {"regex": "a", "whitespace_pattern": " "}})
    assert found == {"structured_outputs.whitespace_pattern"}
