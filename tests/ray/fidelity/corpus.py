"""Request lines that cover what a client may send. They are the same on every run.

Every line is deterministic: it has temperature 0 or a seed. The name of a line is its subject, so that a difference
is easy to place. An OpenAI-compatible server refuses the lines whose name starts with ``refuse-``, or looks as if it
should.
"""

from collections.abc import Iterator
from typing import Any

CHAT = "/v1/chat/completions"
COMPLETIONS = "/v1/completions"
EMBEDDINGS = "/v1/embeddings"
GENERATION_MODEL = "demo"
EMBEDDING_MODEL = "demo-embed"

Line = dict[str, Any]

QUESTION = "Which statement ends a loop before its condition is false?"
SCHEMA = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 8}, "size": {"type": "integer", "maximum": 99}},
    "required": ["name", "size"],
    "additionalProperties": False,
}
TOOL = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "The weather in a city.",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
    },
}
UNICODE_TEXTS = (
    "Grüße aus Köln, ça va très bien",
    "日本語のテキストを要約してください。",
    "مرحبا بالعالم",
    "emoji 👩‍👩‍👧‍👦 and 🏳️‍🌈 joined by zero width joiners",
    "a\u0301 combining, \u2028 line separator, \u200b zero width space",
    'tab\tnewline\nnull \u0000 quote " backslash \\',
)


def corpus() -> list[Line]:
    """Return all lines in a fixed order. Group them by ``url``: a batch has one endpoint."""
    lines = [
        *_lines(CHAT, GENERATION_MODEL, {"max_tokens": 12, "temperature": 0}, _chat()),
        *_lines(CHAT, GENERATION_MODEL, {}, _refused_chat()),
        *_lines(COMPLETIONS, GENERATION_MODEL, {"max_tokens": 12, "temperature": 0}, _completions()),
        *_lines(COMPLETIONS, GENERATION_MODEL, {}, _refused_completions()),
        *_lines(EMBEDDINGS, EMBEDDING_MODEL, {}, _embeddings()),
    ]
    names = [line["custom_id"] for line in lines]
    if len(set(names)) != len(names):
        raise ValueError(f"two lines share a name: {sorted(name for name in names if names.count(name) > 1)}")
    return lines


def _lines(
    url: str, model: str, defaults: dict[str, Any], cases: Iterator[tuple[str, dict[str, Any]]]
) -> Iterator[Line]:
    for name, parameters in cases:
        body = {"model": model, **defaults, **parameters}
        yield {"custom_id": f"{url.split('/')[2]}-{name}", "method": "POST", "url": url, "body": body}


def _user(content: Any = QUESTION) -> list[dict[str, Any]]:
    return [{"role": "user", "content": content}]


def _chat() -> Iterator[tuple[str, dict[str, Any]]]:
    for name, parameters in {**_CHAT_SAMPLING, **_CHAT_STRUCTURE}.items():
        yield name, {"messages": _user(), **parameters}
    for number, text in enumerate(UNICODE_TEXTS):
        yield f"unicode-{number}", {"messages": _user(text)}
    for seed in (0, 7, 2**31):
        yield f"seed-{seed}", {"messages": _user(), "temperature": 0.9, "seed": seed}
    for turns in (1, 2, 4):
        yield f"turns-{turns}", {"messages": _conversation(turns)}
    for length in (20, 200, 900):
        text = " ".join(f"rule {number}" for number in range(length // 2))
        yield f"system-{length}", {"messages": [{"role": "system", "content": text}, *_user()]}
    for name, messages in _CHAT_MESSAGES.items():
        yield name, {"messages": messages}


def _conversation(turns: int) -> list[dict[str, Any]]:
    history = [
        message
        for turn in range(turns)
        for message in (
            {"role": "user", "content": f"Name the module number {turn}."},
            {"role": "assistant", "content": f"It is module {turn}."},
        )
    ]
    return [{"role": "system", "content": "Answer in one sentence."}, *history, *_user()]


_CHAT_SAMPLING: dict[str, dict[str, Any]] = {
    "plain": {},
    "default-max-tokens": {"max_tokens": None, "stop": ["e"], "min_tokens": 1},
    "max-completion-tokens": {"max_tokens": None, "max_completion_tokens": 5},
    "max-tokens-1": {"max_tokens": 1},
    "max-tokens-100": {"max_tokens": 100},
    "max-tokens-is-the-context": {"max_tokens": 2048, "stop": ["a", "e", "i"]},
    "min-tokens": {"min_tokens": 10, "max_tokens": 14},
    "ignore-eos": {"ignore_eos": True, "max_tokens": 60},
    "stop-one": {"stop": "e", "max_tokens": 40},
    "stop-four": {"stop": ["a", "e", "t", " "], "max_tokens": 40},
    "stop-included": {"stop": ["e"], "include_stop_str_in_output": True, "max_tokens": 40},
    "stop-null": {"stop": None},
    "stop-empty-list": {"stop": []},
    "stop-token-ids": {"stop_token_ids": list(range(300, 700)), "max_tokens": 40},
    "logprobs": {"logprobs": True},
    "logprobs-top-1": {"logprobs": True, "top_logprobs": 1},
    "logprobs-top-5": {"logprobs": True, "top_logprobs": 5},
    "logprobs-top-20": {"logprobs": True, "top_logprobs": 20, "max_tokens": 4},
    "logprobs-sampled": {"logprobs": True, "top_logprobs": 2, "temperature": 1.1, "seed": 3},
    "prompt-logprobs": {"prompt_logprobs": 2, "max_tokens": 2},
    "n-2": {"n": 2, "temperature": 0.8, "seed": 11},
    "n-4": {"n": 4, "temperature": 1.0, "seed": 12, "max_tokens": 6},
    "n-3-greedy": {"n": 3},
    "top-p": {"temperature": 1.0, "top_p": 0.5, "seed": 1},
    "top-k": {"temperature": 1.0, "top_k": 5, "seed": 2},
    "min-p": {"temperature": 1.0, "min_p": 0.1, "seed": 4},
    "temperature-2": {"temperature": 2.0, "seed": 5},
    "all-samplers": {"temperature": 0.7, "top_p": 0.9, "top_k": 40, "min_p": 0.01, "seed": 6},
    "presence-penalty": {"presence_penalty": 1.5, "max_tokens": 24},
    "frequency-penalty": {"frequency_penalty": 2.0, "max_tokens": 24},
    "negative-penalties": {"presence_penalty": -1.0, "frequency_penalty": -1.0, "max_tokens": 24},
    "repetition-penalty": {"repetition_penalty": 1.3, "max_tokens": 24},
    "logit-bias": {"logit_bias": {"400": 100}, "max_tokens": 4},
    "logit-bias-ban": {"logit_bias": {str(token): -100 for token in range(500, 900)}},
    "bad-words": {"bad_words": ["the", "is"]},
    "allowed-token-ids": {"allowed_token_ids": [400, 401, 402, 403]},
    "return-token-ids": {"return_token_ids": True},
    "tokens-as-ids": {"logprobs": True, "top_logprobs": 2, "return_tokens_as_token_ids": True},
    "special-tokens-kept": {"skip_special_tokens": False},
    "truncated-prompt": {"truncate_prompt_tokens": 6},
    "user-and-metadata": {"user": "someone", "metadata": {"team": "a"}, "store": False},
    "unknown-field": {"surprise": {"deep": [1, 2]}},
    "null-everything": {"stop": None, "seed": None, "top_p": None, "n": None, "logit_bias": None, "tools": None},
    "model-null": {"model": None},
    "best-of": {"best_of": 3},
}

_CHAT_STRUCTURE: dict[str, dict[str, Any]] = {
    "json-object": {"response_format": {"type": "json_object"}, "max_tokens": 24},
    "json-schema": {
        "response_format": {"type": "json_schema", "json_schema": {"name": "thing", "schema": SCHEMA}},
        "max_tokens": 40,
    },
    "json-schema-strict": {
        "response_format": {"type": "json_schema", "json_schema": {"name": "thing", "strict": True, "schema": SCHEMA}},
        "max_tokens": 40,
    },
    "response-format-text": {"response_format": {"type": "text"}},
    "structured-json": {"structured_outputs": {"json": SCHEMA}, "max_tokens": 40},
    "structured-regex": {"structured_outputs": {"regex": r"[A-Z]{2}-[0-9]{4}"}},
    "structured-choice": {"structured_outputs": {"choice": ["red", "green", "blue"]}},
    "structured-grammar": {"structured_outputs": {"grammar": 'root ::= "yes" | "no"'}},
    "structured-regex-sampled": {"structured_outputs": {"regex": r"\d{3}"}, "temperature": 1.0, "seed": 9},
    "guided-choice-of-old": {"guided_choice": ["red", "green"]},
    "tools-no-choice": {"tools": [TOOL]},
    "tools-choice-none": {"tools": [TOOL], "tool_choice": "none"},
    "tools-two": {
        "tools": [TOOL, {**TOOL, "function": {**TOOL["function"], "name": "get_tide"}}],
        "tool_choice": "none",
    },
    "chat-template-own": {"chat_template": "{% for m in messages %}{{ m['content'] }} {% endfor %}"},
    "chat-template-kwargs": {"chat_template_kwargs": {"enable_thinking": False}},
    "no-generation-prompt": {"add_generation_prompt": False},
    "reasoning-effort": {"reasoning_effort": "low"},
    "echo": {"echo": True},
}

_CHAT_MESSAGES: dict[str, list[dict[str, Any]]] = {
    "content-parts": _user([{"type": "text", "text": "First part."}, {"type": "text", "text": "Second part."}]),
    "content-empty": _user(""),
    "named-user": [{"role": "user", "name": "Ada", "content": QUESTION}],
    "developer-role": [{"role": "developer", "content": "Be short."}, *_user()],
    "unknown-role": [{"role": "wizard", "content": QUESTION}],
    "system-only": [{"role": "system", "content": QUESTION}],
    "ends-with-assistant": [*_user(), {"role": "assistant", "content": "The answer"}],
    "tool-turn": [
        *_user("What is the weather?"),
        {
            "role": "assistant",
            "content": None,
            "tool_calls": [
                {
                    "id": "call_1",
                    "type": "function",
                    "function": {"name": "get_weather", "arguments": '{"city":"Oslo"}'},
                }
            ],
        },
        {"role": "tool", "tool_call_id": "call_1", "content": "rain"},
    ],
}


def _refused_chat() -> Iterator[tuple[str, dict[str, Any]]]:
    for name, parameters in _REFUSED_SAMPLING.items():
        yield f"refuse-{name}", {"messages": _user(), "max_tokens": 4, "temperature": 0, **parameters}
    for name, messages in _REFUSED_MESSAGES.items():
        yield f"refuse-{name}", {"messages": messages, "max_tokens": 4, "temperature": 0}
    yield "refuse-messages-missing", {"max_tokens": 4}
    yield "refuse-prompt-for-chat", {"prompt": QUESTION}
    yield "refuse-long-prompt", {"messages": _user("word " * 3_000)}
    yield "refuse-prompt-and-max-tokens", {"messages": _user("word " * 1_000), "max_tokens": 1_900, "temperature": 0}


_REFUSED_SAMPLING: dict[str, dict[str, Any]] = {
    "temperature-negative": {"temperature": -1},
    "temperature-string": {"temperature": "hot"},
    "top-p-2": {"top_p": 2},
    "top-p-0": {"top_p": 0},
    "top-k-negative": {"top_k": -5},
    "min-p-2": {"min_p": 2},
    "n-0": {"n": 0},
    "n-negative": {"n": -1},
    "n-2-greedy-best-of": {"n": 2, "best_of": 1},
    "max-tokens-0": {"max_tokens": 0},
    "max-tokens-negative": {"max_tokens": -5},
    "max-tokens-too-big": {"max_tokens": 1_000_000},
    "max-tokens-string": {"max_tokens": "many"},
    "max-tokens-float": {"max_tokens": 1.5},
    "min-tokens-above-max": {"min_tokens": 10, "max_tokens": 5},
    "presence-penalty-9": {"presence_penalty": 9},
    "frequency-penalty-negative-9": {"frequency_penalty": -9},
    "repetition-penalty-0": {"repetition_penalty": 0},
    "top-logprobs-without-logprobs": {"top_logprobs": 3},
    "top-logprobs-1000": {"logprobs": True, "top_logprobs": 1_000},
    "top-logprobs-negative": {"logprobs": True, "top_logprobs": -2},
    "logprobs-integer": {"logprobs": 5},
    "logit-bias-unknown-token": {"logit_bias": {"999999": 5}},
    "logit-bias-word": {"logit_bias": {"hello": 5}},
    "logit-bias-list": {"logit_bias": [1, 2]},
    "allowed-token-ids-empty": {"allowed_token_ids": []},
    "allowed-token-ids-unknown": {"allowed_token_ids": [999_999]},
    "seed-string": {"seed": "seven"},
    "seed-too-big": {"seed": 2**70},
    "stop-number": {"stop": 5},
    "stop-empty-string": {"stop": ""},
    "stop-many": {"stop": [f"stop {number}" for number in range(64)]},
    "stop-long": {"stop": ["x" * 20_000]},
    "regex-open": {"structured_outputs": {"regex": "[a-"}},
    "schema-not-a-schema": {
        "response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": {"type": "nonsense"}}}
    },
    "schema-missing": {"response_format": {"type": "json_schema"}},
    "response-format-unknown": {"response_format": {"type": "yaml"}},
    "structured-two-kinds": {"structured_outputs": {"regex": "a", "choice": ["b"]}},
    "structured-choice-empty": {"structured_outputs": {"choice": []}},
    "grammar-bad": {"structured_outputs": {"grammar": "this is not a grammar ::="}},
    "tools-empty": {"tools": []},
    "tools-choice-auto": {"tools": [TOOL], "tool_choice": "auto"},
    "tools-choice-required": {"tools": [TOOL], "tool_choice": "required"},
    "tools-choice-named": {"tools": [TOOL], "tool_choice": {"type": "function", "function": {"name": "get_weather"}}},
    "tools-choice-unknown": {"tools": [TOOL], "tool_choice": {"type": "function", "function": {"name": "nobody"}}},
    "tools-choice-word": {"tools": [TOOL], "tool_choice": "sometimes"},
    "tools-choice-without-tools": {"tool_choice": "auto"},
    "tools-not-a-list": {"tools": {"name": "x"}},
    "stream-options-without-stream": {"stream_options": {"include_usage": True}},
    "model-unknown": {"model": "gpt-nothing"},
    "reasoning-effort-unknown": {"reasoning_effort": "enormous"},
    "chat-template-broken": {"chat_template": "{% for"},
    "bad-words-string": {"bad_words": "the"},
    "truncate-prompt-negative": {"truncate_prompt_tokens": -7},
}

_REFUSED_MESSAGES: dict[str, Any] = {
    "messages-empty": [],
    "messages-string": "hello",
    "messages-null": None,
    "messages-of-strings": ["hello"],
    "message-without-role": [{"content": "hello"}],
    "message-without-content": [{"role": "user"}],
    "message-content-number": [{"role": "user", "content": 5}],
    "message-image": _user([{"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}}]),
    "message-part-unknown": _user([{"type": "smell", "smell": "rose"}]),
}


def _completions() -> Iterator[tuple[str, dict[str, Any]]]:
    for name, parameters in _COMPLETION_CASES.items():
        yield name, {"prompt": "The loop ends when", **parameters}
    for number, text in enumerate(UNICODE_TEXTS):
        yield f"unicode-{number}", {"prompt": text}


_COMPLETION_CASES: dict[str, dict[str, Any]] = {
    "string": {},
    "list": {"prompt": ["The first", "The second", "The third"]},
    "list-of-one": {"prompt": ["The only"]},
    "tokens": {"prompt": [300, 301, 302, 303]},
    "token-lists": {"prompt": [[300, 301], [302, 303, 304]]},
    "default-max-tokens": {"max_tokens": None},
    "echo": {"echo": True},
    "echo-list": {"echo": True, "prompt": ["One", "Two"]},
    "echo-tokens": {"echo": True, "prompt": [300, 301, 302]},
    "echo-only": {"echo": True, "max_tokens": 0},
    "echo-logprobs": {"echo": True, "logprobs": 2, "max_tokens": 3},
    "logprobs-0": {"logprobs": 0},
    "logprobs-1": {"logprobs": 1},
    "logprobs-5": {"logprobs": 5},
    "prompt-logprobs": {"prompt_logprobs": 1, "max_tokens": 2},
    "n-2": {"n": 2, "temperature": 0.9, "seed": 21},
    "n-2-list": {"n": 2, "temperature": 0.9, "seed": 22, "prompt": ["One", "Two"]},
    "seed": {"temperature": 1.0, "seed": 23},
    "stop": {"stop": ["e"], "max_tokens": 40},
    "penalties": {"presence_penalty": 1.0, "frequency_penalty": 1.0, "max_tokens": 24},
    "logit-bias": {"logit_bias": {"400": 100}, "max_tokens": 4},
    "min-tokens": {"min_tokens": 10, "max_tokens": 14},
    "regex": {"structured_outputs": {"regex": r"[0-9]{4}"}},
    "json-schema": {
        "response_format": {"type": "json_schema", "json_schema": {"name": "thing", "schema": SCHEMA}},
        "max_tokens": 40,
    },
    "no-special-tokens": {"add_special_tokens": False},
    "return-token-ids": {"return_token_ids": True},
    "user": {"user": "someone"},
}


def _refused_completions() -> Iterator[tuple[str, dict[str, Any]]]:
    for name, parameters in _REFUSED_COMPLETIONS.items():
        yield f"refuse-{name}", {"prompt": "The loop ends when", "max_tokens": 4, "temperature": 0, **parameters}
    yield "refuse-prompt-missing", {"max_tokens": 4}
    yield "refuse-messages-for-completions", {"messages": _user()}


_REFUSED_COMPLETIONS: dict[str, dict[str, Any]] = {
    "prompt-empty": {"prompt": ""},
    "prompt-empty-list": {"prompt": []},
    "prompt-number": {"prompt": 5},
    "prompt-mixed": {"prompt": ["a", 5]},
    "prompt-long": {"prompt": "word " * 3_000},
    "prompt-unknown-token": {"prompt": [999_999]},
    "prompt-negative-token": {"prompt": [-4]},
    "suffix": {"suffix": "the end"},
    "logprobs-1000": {"logprobs": 1_000},
    "logprobs-string": {"logprobs": "five"},
    "temperature-negative": {"temperature": -0.5},
    "max-tokens-0": {"max_tokens": 0},
    "n-0": {"n": 0},
    "model-unknown": {"model": "gpt-nothing"},
}


def _embeddings() -> Iterator[tuple[str, dict[str, Any]]]:
    yield from _EMBEDDING_CASES.items()
    for number, text in enumerate(UNICODE_TEXTS):
        yield f"unicode-{number}", {"input": text}
    yield "refuse-input-missing", {}


_EMBEDDING_CASES: dict[str, dict[str, Any]] = {
    "string": {"input": QUESTION},
    "list": {"input": ["One text", "Another text", "A third"]},
    "tokens": {"input": [300, 301, 302]},
    "token-lists": {"input": [[300, 301], [302]]},
    "base64": {"input": QUESTION, "encoding_format": "base64"},
    "float": {"input": QUESTION, "encoding_format": "float"},
    "messages": {"messages": _user()},
    "truncated": {"input": "word " * 50, "truncate_prompt_tokens": 8},
    "user": {"input": QUESTION, "user": "someone"},
    "refuse-long-input": {"input": "word " * 3_000},
    "refuse-input-empty": {"input": ""},
    "refuse-input-empty-list": {"input": []},
    "refuse-input-number": {"input": 5},
    "refuse-dimensions": {"input": QUESTION, "dimensions": 16},
    "refuse-encoding-format": {"input": QUESTION, "encoding_format": "hex"},
    "refuse-model-unknown": {"input": QUESTION, "model": "gpt-nothing"},
}
