"""What each engine lane can answer exactly, so that a line it cannot answer is told at validation.

The direct, serve and http lanes put the body before an OpenAI-compatible server as it stands: they answer
whatever that server answers. The processor lane hands prompts and sampling parameters to ``ray.data.llm``,
which gives back one text and its token ids for each line. What cannot be said or seen that way is refused.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Final


@dataclass(frozen=True, slots=True, kw_only=True)
class LaneProblem:
    """A field of a request body that a lane cannot honour; ``message`` says what to do instead."""

    param: str
    message: str


# Fields that change nothing in the answer.
_IGNORED: Final = frozenset({"model", "user", "metadata", "store"})
_SAMPLING: Final = frozenset(
    {
        "frequency_penalty",
        "ignore_eos",
        "max_tokens",
        "min_p",
        "min_tokens",
        "presence_penalty",
        "repetition_penalty",
        "skip_special_tokens",
        "spaces_between_special_tokens",
        "stop",
        "stop_token_ids",
        "structured_outputs",
        "temperature",
        "top_k",
        "top_p",
    }
)
_HONOURED: Final[dict[str, frozenset[str]]] = {
    "/v1/chat/completions": _IGNORED | _SAMPLING | {"messages", "max_completion_tokens"},
    "/v1/completions": _IGNORED | _SAMPLING | {"prompt"},
    "/v1/embeddings": _IGNORED | {"input"},
}
# Fields that are honoured only at the value that means "not asked for".
_ONLY: Final[dict[str, tuple[Any, ...]]] = {
    "n": (1,),
    "best_of": (1,),
    "stream": (False,),
    "logprobs": (False,),
    "top_logprobs": (0,),
    "echo": (False,),
    "tools": ([],),
    "tool_choice": ("none",),
    "response_format": ({"type": "text"},),
    "encoding_format": ("float",),
    "logit_bias": ({},),
    "suffix": ("",),
}
_STRUCTURES: Final = frozenset({"json", "regex", "choice", "grammar", "json_object"})
_MESSAGE_FIELDS: Final = frozenset({"role", "content", "name"})


def lane_problems(lane: str, endpoint: str, body: Mapping[str, Any]) -> Iterator[LaneProblem]:
    """Every field of ``body`` that ``lane`` cannot answer exactly at ``endpoint``; nothing if it can."""
    if lane != "processor":
        return
    honoured = _HONOURED.get(endpoint, frozenset())
    for name, value in body.items():
        if value is None or name in honoured or _not_asked_for(name, value):
            continue
        yield _problem(name, f"the field {name!r}" if name not in _ONLY else f"{name!r} other than {_only(name)}")
    yield from _INPUT_PROBLEMS.get(endpoint, _no_problems)(body)
    yield from _combination_problems(body)


def _not_asked_for(name: str, value: Any) -> bool:
    # By type too: "logprobs": 0 asks for something, "logprobs": false does not.
    return any(value == one and type(value) is type(one) for one in _ONLY.get(name, ()))


def _only(name: str) -> str:
    return " or ".join(repr(value) for value in _ONLY[name])


def _problem(param: str, what: str) -> LaneProblem:
    return LaneProblem(
        param=param,
        message=f"The processor lane, in which this model runs, cannot honour {what}. "
        "Leave it out, or use a model whose lane is direct.",
    )


def _combination_problems(body: Mapping[str, Any]) -> Iterator[LaneProblem]:
    # Why a generation ended is found from its text and its last token, which these combinations hide.
    for name, hides in (("min_tokens", True), ("stop_token_ids", True), ("skip_special_tokens", False)):
        value = body.get(name)
        if body.get("stop") and (bool(value) is hides and value is not None):
            yield _problem("stop", f"'stop' together with {name!r}")
    structure = body.get("structured_outputs")
    for name in structure.keys() - _STRUCTURES if isinstance(structure, Mapping) else ():
        yield _problem(f"structured_outputs.{name}", f"the field {name!r} of structured_outputs")


def _chat_problems(body: Mapping[str, Any]) -> Iterator[LaneProblem]:
    messages = body.get("messages")
    for index, message in enumerate(messages if isinstance(messages, list) else ()):
        if not isinstance(message, Mapping):
            continue
        for name in message.keys() - _MESSAGE_FIELDS:
            if message[name] is not None:
                yield _problem(f"messages[{index}].{name}", f"the field {name!r} of a message")
        if "content" in message and not isinstance(message["content"], str):
            yield _problem(f"messages[{index}].content", "message content that is not a string")


def _completion_problems(body: Mapping[str, Any]) -> Iterator[LaneProblem]:
    prompt = body.get("prompt")
    if isinstance(prompt, list) and not _is_token_list(prompt):
        yield _problem("prompt", "several prompts in one line")


def _embedding_problems(body: Mapping[str, Any]) -> Iterator[LaneProblem]:
    texts = body.get("input")
    if isinstance(texts, list) and not _is_token_list(texts):
        yield _problem("input", "several inputs in one line")


def _no_problems(body: Mapping[str, Any]) -> Iterator[LaneProblem]:
    del body
    yield from ()


def _is_token_list(value: list[Any]) -> bool:
    return bool(value) and all(isinstance(item, int) and not isinstance(item, bool) for item in value)


_INPUT_PROBLEMS: Final[dict[str, Callable[[Mapping[str, Any]], Iterator[LaneProblem]]]] = {
    "/v1/chat/completions": _chat_problems,
    "/v1/completions": _completion_problems,
    "/v1/embeddings": _embedding_problems,
}
