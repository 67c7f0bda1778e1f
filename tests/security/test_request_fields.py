"""Fields of a request that harm an engine or another project: refused at validation, by size or altogether."""

import json
from typing import Any

import pytest

from tests.integration.reconciler_harness import CHAT, Stack
from tests.security.test_media_urls import COMPLETIONS, EMBEDDINGS, line, read

CANARY = "canary"
USER = {"messages": [{"role": "user", "content": "hi"}]}
PROMPTS: dict[str, dict[str, Any]] = {CHAT: USER, COMPLETIONS: {"prompt": "hi"}, EMBEDDINGS: {"input": "hi"}}


def errors(fields: dict[str, Any], endpoint: str = CHAT) -> list[tuple[str, str | None, int | None]]:
    facts = read({**PROMPTS[endpoint], **fields}, endpoint=endpoint)
    assert CANARY not in str(facts.errors)
    for error in facts.errors:
        assert error.message.endswith(".")
    return [(error.code, error.param, error.line) for error in facts.errors]


def nested(levels: int, key: str = "items") -> dict[str, Any]:
    schema: dict[str, Any] = {"type": "string"}
    for _ in range(levels):
        schema = {"type": "array", key: schema}
    return schema


def schema_format(schema: Any) -> dict[str, Any]:
    return {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}}


def tool(parameters: Any) -> dict[str, Any]:
    return {"type": "function", "function": {"name": "f", "parameters": parameters}}


@pytest.mark.parametrize("endpoint", PROMPTS)
@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("chat_template", "{{ CANARY }}" + CANARY),
        ("chat_template", ""),
        ("prompt_embeds", CANARY),
        ("prompt_embeds", [CANARY]),
        ("kv_transfer_params", {"do_remote_prefill": True, "remote_host": CANARY, "remote_port": 1}),
        ("ec_transfer_params", {"remote_host": CANARY}),
        ("mm_processor_kwargs", {"max_pixels": 10**12}),
        ("media_io_kwargs", {"video": {"num_frames": 10**9}}),
        ("request_id", CANARY),
        ("priority", -1),
        ("priority", 2**62),
    ],
)
def test_field_that_reaches_into_the_engine_is_refused(endpoint: str, name: str, value: Any) -> None:
    assert errors({name: value}, endpoint) == [("unsupported_parameter", f"body.{name}", 2)]


@pytest.mark.parametrize(
    "fields",
    [
        {"priority": 0, "vllm_xargs": {}, "kv_transfer_params": None, "chat_template": None, "request_id": None},
        {"mm_processor_kwargs": {}, "media_io_kwargs": {}},
    ],
)
def test_field_without_effect_is_accepted(fields: dict[str, Any]) -> None:
    assert errors(fields) == []


@pytest.mark.parametrize(
    "name", ["chat_template", "tokenize", "return_dict", "max_length", "padding", "tokenizer_kwargs"]
)
def test_template_argument_that_is_no_variable_is_refused(name: str) -> None:
    found = errors({"chat_template_kwargs": {"enable_thinking": False, name: CANARY}})
    assert found == [("unsupported_parameter", f"body.chat_template_kwargs.{name}", 2)]


@pytest.mark.parametrize(
    ("fields", "code", "param"),
    [
        ({"n": 129}, "integer_above_max_value", "n"),
        ({"best_of": 129}, "integer_above_max_value", "best_of"),
        ({"n": 10**30}, "integer_above_max_value", "n"),
        ({"n": 1e9}, "integer_above_max_value", "n"),
        ({"top_logprobs": 101}, "integer_above_max_value", "top_logprobs"),
        ({"logprobs": 101}, "integer_above_max_value", "logprobs"),
        ({"prompt_logprobs": 101}, "integer_above_max_value", "prompt_logprobs"),
        ({"stop": [CANARY] * 65}, "array_above_max_length", "stop"),
        ({"stop": CANARY * 1_000}, "string_above_max_length", "stop"),
        ({"stop": ["a", CANARY * 1_000]}, "string_above_max_length", "stop[1]"),
        ({"bad_words": [CANARY] * 129}, "array_above_max_length", "bad_words"),
        ({"bad_words": [CANARY * 1_000]}, "string_above_max_length", "bad_words[0]"),
        ({"stop_token_ids": [1] * 1_025}, "array_above_max_length", "stop_token_ids"),
        ({"logit_bias": {str(n): 1 for n in range(1_025)}}, "object_above_max_properties", "logit_bias"),
        ({"cache_salt": CANARY * 100}, "string_above_max_length", "cache_salt"),
        ({"session_id": CANARY * 100}, "string_above_max_length", "session_id"),
        ({"chat_template_kwargs": {"x": CANARY * 10_000}}, "object_too_large", "chat_template_kwargs"),
        ({"vllm_xargs": {"kv_transfer_params": CANARY}}, "unsupported_parameter", "vllm_xargs.kv_transfer_params"),
        ({"vllm_xargs": {"x": [CANARY] * 10_000}}, "object_too_large", "vllm_xargs"),
        ({"chat_template_kwargs": {"x": nested(65)}}, "object_too_deep", "chat_template_kwargs"),
        ({"tools": [tool({})] * 129}, "array_above_max_length", "tools"),
        ({"tools": [tool({}), tool({"x": CANARY * 30_000})]}, "object_too_large", "tools[1]"),
        ({"tools": [tool(nested(65))]}, "object_too_deep", "tools[0]"),
        (schema_format({"enum": [CANARY] * 30_000}), "object_too_large", "response_format"),
        (schema_format(nested(65)), "object_too_deep", "response_format"),
        ({"response_format": {"type": "structural_tag", "format": nested(65)}}, "object_too_deep", "response_format"),
        (schema_format({"pattern": "a" * 5_000}), "string_above_max_length", "response_format"),
        ({"structured_outputs": {"json": nested(65)}}, "object_too_deep", "structured_outputs"),
        ({"structured_outputs": {"json": json.dumps(nested(65))}}, "object_too_deep", "structured_outputs"),
        ({"structured_outputs": {"structural_tag": json.dumps(nested(65))}}, "object_too_deep", "structured_outputs"),
        ({"structured_outputs": {"grammar": CANARY * 30_000}}, "object_too_large", "structured_outputs"),
        ({"structured_outputs": {"choice": [CANARY] * 30_000}}, "object_too_large", "structured_outputs"),
        ({"structured_outputs": {"regex": "a" * 5_000}}, "string_above_max_length", "structured_outputs"),
        ({"structured_outputs": {"json": {"pattern": "a" * 5_000}}}, "string_above_max_length", "structured_outputs"),
        ({"guided_regex": "a" * 5_000}, "string_above_max_length", "guided_regex"),
        ({"guided_json": nested(65)}, "object_too_deep", "guided_json"),
        ({"guided_grammar": CANARY * 30_000}, "object_too_large", "guided_grammar"),
        ({"guided_whitespace_pattern": "a" * 5_000}, "string_above_max_length", "guided_whitespace_pattern"),
    ],
)
def test_field_beyond_its_limit_is_refused(fields: dict[str, Any], code: str, param: str) -> None:
    assert errors(fields) == [(code, f"body.{param}", 2)]


@pytest.mark.parametrize(
    "fields",
    [
        # All fields of OpenAI's chat completions that a batch may have.
        {
            "audio": {"voice": "a", "format": "wav"},
            "frequency_penalty": 0.5,
            "functions": [{"name": "f", "parameters": {}}],
            "function_call": "auto",
            "logit_bias": {str(n): -100 for n in range(300)},
            "logprobs": True,
            "max_completion_tokens": 5,
            "max_tokens": 5,
            "metadata": {"a": "b"},
            "modalities": ["text"],
            "n": 128,
            "parallel_tool_calls": False,
            "prediction": {"type": "content", "content": "x"},
            "presence_penalty": 0.5,
            "prompt_cache_key": "k",
            "reasoning_effort": "low",
            "response_format": {"type": "json_object"},
            "safety_identifier": "s",
            "seed": 1,
            "service_tier": "flex",
            "stop": ["a", "b", "c", "d"],
            "store": True,
            "temperature": 2,
            "tool_choice": {"type": "function", "function": {"name": "f"}},
            "tools": [tool({"type": "object", "properties": {"a": {"type": "string", "pattern": "^a+$"}}})] * 128,
            "top_logprobs": 20,
            "top_p": 0.5,
            "user": "u",
            "verbosity": "low",
            "web_search_options": {},
        },
        schema_format(nested(20)),
        schema_format({"properties": {"pattern": {"type": "string"}}}),
        {"structured_outputs": {"regex": r"(\(\[){40}"}},
        {"chat_template_kwargs": {"enable_thinking": False, "documents": [{"title": "a"}]}},
        {"vllm_xargs": {"x": 1}, "top_logprobs": -1},
        {"bad_words": ["a"], "cache_salt": "s", "prompt_logprobs": 5, "stop": None, "n": None, "logit_bias": None},
        # Values of the wrong type are left to the engine, whose answer is data.
        {
            "n": "x",
            "stop": 5,
            "bad_words": "the",
            "logit_bias": [1],
            "tools": {},
            "structured_outputs": 1,
            "top_logprobs": [],
        },
    ],
)
def test_requests_within_the_limits_are_accepted(fields: dict[str, Any]) -> None:
    assert errors(fields) == []


def test_engine_that_honours_few_fields_reports_a_refused_one_once() -> None:
    facts = read({**USER, "chat_template": CANARY}, model="processor")
    assert [(error.code, error.param) for error in facts.errors] == [("unsupported_parameter", "body.chat_template")]


def test_prompt_of_tensors_alone_is_refused_once() -> None:
    facts = read({"prompt_embeds": CANARY}, endpoint=COMPLETIONS)
    assert [(error.code, error.param) for error in facts.errors] == [("unsupported_parameter", "body.prompt_embeds")]


def test_harmful_line_is_found_among_many_and_fails_the_batch(stack: Stack) -> None:
    good = [line(USER, model="demo", custom_id=f"g{number}") for number in range(50)]
    bad = line({**USER, "kv_transfer_params": {"remote_host": CANARY}}, model="demo", custom_id="bad")
    stack.create(*good[:30], bad, *good[30:])
    assert stack.advance()["status"] == "failed"
    (error,) = stack.errors()
    assert (error["code"], error["line"], error["param"]) == ("unsupported_parameter", 31, "body.kv_transfer_params")
    assert CANARY not in str(stack.sql("SELECT * FROM batch_events"))
