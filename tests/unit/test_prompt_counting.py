"""Token counts against transformers, which vLLM's engines use."""

from collections.abc import Mapping
from typing import Any

import pytest
from tokenizers import Tokenizer, models, pre_tokenizers, processors, trainers
from transformers import PreTrainedTokenizerFast

from ray_job.contract.prompt_rules import ChatRules, PromptRules, PromptRulesError
from service.prompts import PromptCount, PromptCounter

CHAT, TEXT, EMBED = "/v1/chat/completions", "/v1/completions", "/v1/embeddings"
TEMPLATE = """{{ bos_token }}
{%- for message in messages %}
    {%- if message.role not in ('system', 'user', 'assistant', 'tool') %}{{ raise_exception('no') }}{% endif %}
    {%- generation %}
    <{{ message['role'] }}>{{ message.content }}
    {%- for call in message.tool_calls or [] %}{{ call | tojson }}{% endfor %}
    {%- endgeneration %}
{% endfor %}
{%- if tools %}{{ tools | tojson(indent=1) }}{% endif %}
{%- if loud is defined %}LOUD {{ loud }}{% endif %}
{%- if add_generation_prompt %}<assistant>{% endif %}"""
WEATHER = {
    "type": "function",
    "function": {"name": "weather", "description": "Où ?", "parameters": {"type": "object"}},
}
CALL = {"id": "c", "type": "function", "function": {"name": "weather", "arguments": '{"b": 1, "a": "é"}'}}
USER = {"role": "user", "content": "How many loops end when the condition is false?"}
SYSTEM = {"role": "system", "content": "Be brief.\nBe kind."}


@pytest.fixture(scope="module")
def tokenizer() -> PreTrainedTokenizerFast:
    made = Tokenizer(models.BPE())
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    special = ["<s>", "<user>", "<assistant>"]
    trainer = trainers.BpeTrainer(vocab_size=400, special_tokens=special, initial_alphabet=alphabet)
    made.train_from_iterator([TEMPLATE, USER["content"]] * 4, trainer)
    made.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 0)])
    return PreTrainedTokenizerFast(tokenizer_object=made, bos_token="<s>", chat_template=TEMPLATE)


@pytest.fixture(scope="module")
def rules(tokenizer: PreTrainedTokenizerFast) -> PromptRules:
    tokenizer("cut", truncation=True, max_length=3)  # as an engine does; it must not cut here
    chat = ChatRules(template=TEMPLATE, content_format="string")
    return PromptRules(
        max_prompt_tokens=100,
        max_model_len=100,
        tokenizer=tokenizer.backend_tokenizer.to_str(),
        chat=chat,
        tool_chat=chat,
        special_tokens={"bos_token": "<s>"},
        tool_fields={"name": True, "description": True, "parameters": True, "strict": False},
    )


@pytest.fixture(scope="module")
def counter(rules: PromptRules) -> PromptCounter:
    return PromptCounter(PromptRules.from_json(rules.to_json()))


def rendered(tokenizer: PreTrainedTokenizerFast, messages: list[dict[str, Any]], **options: Any) -> int:
    options = {"add_generation_prompt": True, **options}
    return len(tokenizer.apply_chat_template(messages, tokenize=True, return_dict=False, **options))


PARTS = {"role": "user", "content": [{"type": "text", "text": "one"}, {"type": "text", "text": "two"}]}
ASSISTANT = {"role": "assistant", "content": None, "tool_calls": [CALL]}
# As vLLM passes it on: arguments are an object, and fields are in the order of OpenAI's types.
PASSED = {"id": "c", "function": {"arguments": {"b": 1, "a": "é"}, "name": "weather"}, "type": "function"}


@pytest.mark.parametrize(
    ("body", "messages", "options"),
    [
        ({"messages": [SYSTEM, USER]}, [SYSTEM, USER], {}),
        ({"messages": [PARTS]}, [{"role": "user", "content": "one\ntwo"}], {}),
        ({"messages": [USER], "tools": [WEATHER]}, [USER], {"tools": [WEATHER]}),
        (
            {"messages": [USER, ASSISTANT, {"role": "tool", "tool_call_id": "c", "content": "17"}]},
            [USER, {"role": "assistant", "content": "", "tool_calls": [PASSED]}, {"role": "tool", "content": "17"}],
            {},
        ),
        ({"messages": [USER], "chat_template_kwargs": {"loud": True, "else": 1}}, [USER], {"loud": True}),
        ({"messages": [USER], "add_generation_prompt": False}, [USER], {"add_generation_prompt": False}),
    ],
)
def test_chats_have_the_tokens_that_transformers_counts(
    tokenizer: PreTrainedTokenizerFast,
    counter: PromptCounter,
    body: Mapping[str, Any],
    messages: list[dict[str, Any]],
    options: dict[str, Any],
) -> None:
    count = counter.count(CHAT, body)
    assert count is not None
    assert count.tokens == rendered(tokenizer, messages, **options)


@pytest.mark.parametrize("endpoint", [TEXT, EMBED])
def test_prompts_have_the_tokens_that_transformers_counts(
    tokenizer: PreTrainedTokenizerFast, counter: PromptCounter, endpoint: str
) -> None:
    field = "prompt" if endpoint == TEXT else "input"
    texts = ["loops end", "", "<user> é\n\t中文 🙂"]
    lengths = [len(ids) for ids in tokenizer(texts)["input_ids"]]
    for value, expected in [
        (texts[0], lengths[:1]),
        (texts, lengths),
        ([5, 6, 7], [3]),
        ([[5], [6, 7]], [1, 2]),
    ]:
        count = counter.count(endpoint, {field: value})
        assert count is not None
        assert (count.tokens, count.longest) == (sum(expected), max(expected))


def test_output_is_bounded_by_the_request_and_the_context(counter: PromptCounter) -> None:
    ids = [5] * 60
    bounds = [
        counter.count(TEXT, {"prompt": ids, **fields})
        for fields in ({}, {"max_tokens": 30}, {"max_tokens": 90}, {"max_tokens": 7, "n": 3}, {"max_tokens": None})
    ]
    assert [count and count.most_output for count in bounds] == [16, 30, 40, 21, 40]
    chat = counter.count(CHAT, {"messages": [USER], "max_completion_tokens": 2, "max_tokens": 9})
    assert chat is not None
    assert chat.most_output == 2
    assert counter.count(EMBED, {"input": ids}) == PromptCount(tokens=60, longest=60, most_output=0)


@pytest.mark.parametrize(
    "fields",
    [
        {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]},
        {"messages": [{"role": "other", "content": "x"}]},
        {"messages": [{"role": "user", "content": "x", "more": 1}]},
        {"messages": [{"role": ["user"], "content": "x"}]},
        {"messages": [{"role": "assistant", "tool_calls": [{**CALL, "function": {"name": "f", "arguments": "["}}]}]},
        {"messages": [USER] * 5000},
        {"messages": "x"},
        {"messages": [USER], "truncate_prompt_tokens": 5},
        {"messages": [USER], "truncate_prompt_tokens": 0},
        {"messages": [USER], "continue_final_message": True},
        {"messages": [USER], "chat_template": "x"},
        {"messages": [USER], "chat_template_kwargs": {"loud": "x" * 10_000}},
        {"messages": [USER], "chat_template_kwargs": {"loud": [[]]}},
        {"messages": [USER], "chat_template_kwargs": {"tools": []}},
        {"messages": [USER], "tools": [{"type": "function", "function": {"name": "f", "more": 1}}]},
        {"messages": [USER], "tools": 7},
    ],
)
def test_requests_that_are_not_rendered_exactly_are_not_counted(counter: PromptCounter, fields: dict[str, Any]) -> None:
    assert counter.count(CHAT, fields) is None


def test_prompts_of_other_types_are_not_counted(counter: PromptCounter) -> None:
    values = (7, [], ["a", 1], [True], [[]], None, "a" * 1_000_001)
    assert [counter.count(TEXT, {"prompt": value}) for value in values] == [None] * len(values)


@pytest.mark.parametrize(
    "text",
    [
        b"",
        b"[]",
        b"{}",
        b'{"version": 2}',
        b'{"version": 1, "max_prompt_tokens": 1, "max_model_len": "x", "tokenizer": ""}',
    ],
)
def test_other_documents_are_no_prompt_rules(text: bytes) -> None:
    with pytest.raises(PromptRulesError):
        PromptRules.from_json(text)


def test_unusable_tokenizers_and_templates_are_refused(rules: PromptRules) -> None:
    raw = rules.to_json()
    for wrong in (
        PromptRules(max_prompt_tokens=1, max_model_len=1, tokenizer="{}"),
        PromptRules.from_json(raw.replace(b"{%- endgeneration %}", b"")),
    ):
        with pytest.raises(PromptRulesError):
            PromptCounter(wrong)
