"""Fields of a request that an engine must not get, or not of any size.

A value of the wrong type is left to the engine, whose answer is data. All that OpenAI's own API has is accepted.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Final

import orjson

from service.input_file.errors import InputError
from service.input_file.json_lines import nesting

MAX_CHOICES: Final = 128
"""Most answers to one request. OpenAI has the same limit. An engine keeps the state of each."""
MAX_LOGPROBS: Final = 100
"""Most alternatives for one token. OpenAI allows 20. Each takes about 60 bytes of the response."""
MAX_STOP_SEQUENCES: Final = 64
"""OpenAI allows 4. The engine searches the text for each of them after each token."""
MAX_BAD_WORDS: Final = 128
"""The default limit of vLLM 0.32."""
MAX_WORD_CHARACTERS: Final = 1_000
"""The longest stop sequence, and the longest of the ``bad_words``."""
MAX_STOP_TOKENS: Final = 1_024
"""Most ``stop_token_ids``. The engine looks at all of them for each token."""
MAX_LOGIT_BIAS: Final = 1_024
"""Most entries of ``logit_bias``. The engine changes all of them for each token."""
MAX_NAME_CHARACTERS: Final = 512
"""The longest ``cache_salt`` and ``session_id``. vLLM allows 1,024 with the salt that the service prepends."""
MAX_ARGUMENTS_BYTES: Final = 16 * 1024
"""The most that ``chat_template_kwargs`` and ``vllm_xargs`` hold."""
MAX_STRUCTURE_BYTES: Final = 128 * 1024
"""The largest schema, grammar, list of choices or tool. OpenAI allows 120,000 characters of names and values."""
MAX_NESTING: Final = 64
"""Deepest schema. vLLM 0.32 has the same limit: xgrammar compiles 500 levels in 6 s, and 2,000 in more than 60 s."""
MAX_REGEX_CHARACTERS: Final = 4_096
"""Longest regular expression, alone or as ``pattern`` of a schema. The time to compile it grows with its length."""
MAX_TOOLS: Final = 128
"""OpenAI's limit."""

_REFUSED: Final[Mapping[str, str]] = {
    "chat_template": "It is a program that the engine would run. Set chat_template in the engine_args of the model",
    "ec_transfer_params": "It names hosts that the engine would connect to. Remove it",
    "kv_transfer_params": "It names hosts that the engine would connect to. Remove it",
    "media_io_kwargs": "It raises the memory that media take. Set it in the engine_args of the model",
    "mm_processor_kwargs": "It raises the memory that media take. Set it in the engine_args of the model",
    "priority": "It would put the line before those of others. Set x_cloister.priority of the batch",
    "prompt_embeds": "The engine would have to deserialize tensors. Send text or token ids",
    "request_id": "The service names requests itself. Use custom_id",
}
# Refused fields that are accepted with a value without effect, besides null.
_NEUTRAL: Final[Mapping[str, Any]] = {
    "ec_transfer_params": {},
    "kv_transfer_params": {},
    "media_io_kwargs": {},
    "mm_processor_kwargs": {},
    "priority": 0,
}
# Parameters of the function that renders templates. All others are variables of the template.
# Source: apply_chat_template of transformers' tokenizers and processors.
_RENDERING_PARAMETERS: Final = frozenset(
    {
        "chat_template",
        "conversation",
        "load_audio_from_video",
        "max_length",
        "padding",
        "processor_kwargs",
        "return_assistant_tokens_mask",
        "return_dict",
        "return_tensors",
        "tokenize",
        "tokenizer_kwargs",
        "truncation",
    }
)
_STRUCTURES: Final = ("response_format", "structured_outputs", "guided_json", "guided_choice", "guided_grammar")
_REGEX_FIELDS: Final = frozenset({"regex", "pattern", "whitespace_pattern"})
_REGEXES: Final = ("guided_regex", "guided_whitespace_pattern")

PLAIN_FIELDS: Final = frozenset(
    {
        "dimensions",
        "echo",
        "encoding_format",
        "frequency_penalty",
        "ignore_eos",
        "input",
        "max_completion_tokens",
        "max_tokens",
        "messages",
        "metadata",
        "min_p",
        "min_tokens",
        "model",
        "presence_penalty",
        "prompt",
        "reasoning_effort",
        "repetition_penalty",
        "seed",
        "service_tier",
        "store",
        "stream",
        "suffix",
        "temperature",
        "top_k",
        "top_p",
        "user",
    }
)
"""Fields that this module never refuses. Most bodies have no others."""


def field_errors(body: Mapping[str, Any], line: int) -> Iterator[InputError]:
    """Yield an error for each field that an engine must not get, or not of this size.

    Args:
        body: the body of the request.
        line: the number of its line.
    """
    for name, value in body.items():
        check = _CHECKS.get(name)
        if check is None or value is None:
            continue
        for place, code, problem in check(value):
            message = f"'{name}{place}' {problem}."
            yield InputError(code=code, message=message, param=f"body.{name}{place}", line=line)


# Place within the field, code, and what is wrong with the remedy. No generators: nearly every value has no error, and
# starting a generator costs more than its check.
_Found = Sequence[tuple[str, str, str]]
_Check = Callable[[Any], _Found]


def _refused(remedy: str, neutral: Any) -> _Check:
    """Return a check that refuses every value but ``neutral``."""

    def check(value: Any) -> _Found:
        if neutral is not None and value == neutral:
            return ()
        return [("", "unsupported_parameter", f"is not supported. {remedy}")]

    return check


def _at_most(limit: int) -> _Check:
    def check(value: Any) -> _Found:
        if type(value) in (int, float) and value > limit:
            return [("", "integer_above_max_value", f"is more than {limit:,}. Lower it")]
        return ()

    return check


def _no_longer_than(characters: int, item_count: int = 0) -> _Check:
    """Return a check of a string, or of a list of strings or numbers."""

    def check(value: Any) -> _Found:
        if type(value) is str and len(value) <= characters:
            return ()
        is_list = isinstance(value, list)
        if is_list and len(value) > item_count:
            problem = f"has {len(value):,} items; at most {item_count:,} are allowed"
            return [("", "array_above_max_length", problem)]
        return [
            (
                f"[{index}]" if is_list else "",
                "string_above_max_length",
                f"has {len(item):,} characters; at most {characters:,} are allowed. Shorten it",
            )
            for index, item in enumerate(value if is_list else (value,))
            if isinstance(item, str) and len(item) > characters
        ]

    return check


def _logit_bias(value: Any) -> _Found:
    if isinstance(value, dict) and len(value) > MAX_LOGIT_BIAS:
        problem = f"has {len(value):,} entries; at most {MAX_LOGIT_BIAS:,} are allowed"
        return [("", "object_above_max_properties", problem)]
    return ()


def _structure(value: Any, max_bytes: int = MAX_STRUCTURE_BYTES) -> _Found:
    """Check the size of a value, its nesting, and its regular expressions."""
    written = orjson.dumps(value)
    if len(written) > max_bytes:
        problem = f"has {len(written):,} bytes; at most {max_bytes:,} are allowed. Shorten it"
        return [("", "object_too_large", problem)]
    # Most values are too small for the other limits, brackets in texts included.
    if len(written) <= MAX_REGEX_CHARACTERS and written.count(b"[") + written.count(b"{") <= MAX_NESTING:
        return ()
    waiting, deepest, longest = [value], nesting(written), 0
    while waiting:
        item = waiting.pop()
        if isinstance(item, dict):
            for name, inner in item.items():
                if isinstance(inner, str):
                    longest = max(longest, len(inner) if name in _REGEX_FIELDS else 0)
                waiting.append(inner)
        elif isinstance(item, list):
            waiting += item
        elif isinstance(item, str) and item.lstrip()[:1] in ("{", "["):
            deepest = max(deepest, nesting(item.encode()))  # a schema may be given as text
    if deepest > MAX_NESTING:
        problem = f"nests {deepest:,} levels deep; at most {MAX_NESTING} are allowed. Flatten it"
        return [("", "object_too_deep", problem)]
    if longest > MAX_REGEX_CHARACTERS:
        limit = f"at most {MAX_REGEX_CHARACTERS:,} are allowed. Shorten it"
        return [("", "string_above_max_length", f"has a regular expression of {longest:,} characters; {limit}")]
    return ()


def _tools(value: Any) -> _Found:
    if not isinstance(value, list):
        return ()
    if len(value) > MAX_TOOLS:
        problem = f"has {len(value):,} items; at most {MAX_TOOLS} are allowed. Send fewer"
        return [("", "array_above_max_length", problem)]
    return [(f"[{index}]", code, problem) for index, tool in enumerate(value) for _, code, problem in _structure(tool)]


def _template_arguments(value: Any) -> _Found:
    if not isinstance(value, dict):
        return ()
    return [
        *(
            (f".{name}", "unsupported_parameter", "is no variable of a chat template. Remove it")
            for name in sorted(_RENDERING_PARAMETERS & value.keys())
        ),
        *_structure(value, MAX_ARGUMENTS_BYTES),
    ]


def _extension_arguments(value: Any) -> _Found:
    """Check arguments for extensions of the engine, which a model must acknowledge. vLLM itself ignores them."""
    if not isinstance(value, dict):
        return ()
    return [
        *(
            (f".{name}", "unsupported_parameter", "is not supported. Remove it")
            for name in sorted({"kv_transfer_params", "ec_transfer_params"} & value.keys())
        ),
        *_structure(value, MAX_ARGUMENTS_BYTES),
    ]


_CHECKS: Final[Mapping[str, _Check]] = {
    **{name: _refused(remedy, _NEUTRAL.get(name)) for name, remedy in _REFUSED.items()},
    "n": _at_most(MAX_CHOICES),
    "best_of": _at_most(MAX_CHOICES),
    **dict.fromkeys(("logprobs", "top_logprobs", "prompt_logprobs"), _at_most(MAX_LOGPROBS)),
    "stop": _no_longer_than(MAX_WORD_CHARACTERS, MAX_STOP_SEQUENCES),
    "bad_words": _no_longer_than(MAX_WORD_CHARACTERS, MAX_BAD_WORDS),
    "stop_token_ids": _no_longer_than(MAX_WORD_CHARACTERS, MAX_STOP_TOKENS),
    **dict.fromkeys(("cache_salt", "session_id"), _no_longer_than(MAX_NAME_CHARACTERS)),
    **dict.fromkeys(_REGEXES, _no_longer_than(MAX_REGEX_CHARACTERS)),
    "logit_bias": _logit_bias,
    **dict.fromkeys(("tools", "functions"), _tools),
    **dict.fromkeys(_STRUCTURES, _structure),
    "chat_template_kwargs": _template_arguments,
    "vllm_xargs": _extension_arguments,
}
