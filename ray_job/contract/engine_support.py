"""Fields of a request body that an engine cannot honour, so that validation refuses a line before it runs.

The direct, serve and http engines pass the body unchanged to an OpenAI-compatible server, so they support what
that server supports. The processor engine passes prompts and sampling parameters to ``ray.data.llm``, which returns
one text and its token ids for each line. Fields that need more than that are refused.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Final


@dataclass(frozen=True, slots=True, kw_only=True)
class UnsupportedField:
    """A field that an engine cannot honour.

    Attributes:
        param: the path of the field in the body, e.g. ``messages[1].content``.
        feature: a description of the field, or of the value that is not honoured.
    """

    param: str
    feature: str

    @property
    def message(self) -> str:
        """The reason, and what to do instead."""
        return (
            f"The processor engine, in which this model runs, cannot honour {self.feature}. "
            "Leave it out, or use a model whose engine is direct."
        )


# Fields that do not change the response.
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
# Fields that are honoured only at the value that has no effect.
_NEUTRAL: Final[dict[str, Any]] = {
    "n": 1,
    "best_of": 1,
    "stream": False,
    "logprobs": False,
    "top_logprobs": 0,
    "echo": False,
    "tools": [],
    "tool_choice": "none",
    "response_format": {"type": "text"},
    "encoding_format": "float",
    "logit_bias": {},
    "suffix": "",
}
_STRUCTURES: Final = frozenset({"json", "regex", "choice", "grammar", "json_object"})
_MESSAGE_FIELDS: Final = frozenset({"role", "content", "name"})


def unsupported_fields(engine: str, endpoint: str, body: Mapping[str, Any]) -> Iterator[UnsupportedField]:
    """Yield each field of a body that an engine cannot honour.

    Args:
        engine: the engine of the model, e.g. ``processor``.
        endpoint: the endpoint of the line, e.g. ``/v1/chat/completions``.
        body: the body of the line.
    """
    if engine != "processor":
        return
    honoured = _HONOURED.get(endpoint, frozenset())
    for name, value in body.items():
        if value is None or name in honoured:
            continue
        if name not in _NEUTRAL:
            yield UnsupportedField(param=name, feature=f"the field {name!r}")
        # The types must match too: "logprobs": 0 asks for log probabilities, "logprobs": false does not.
        elif value != _NEUTRAL[name] or type(value) is not type(_NEUTRAL[name]):
            yield UnsupportedField(param=name, feature=f"{name!r} other than {_NEUTRAL[name]!r}")
    if endpoint == "/v1/chat/completions":
        messages = body.get("messages")
        # A message is plain text with a role and a name.
        for index, message in enumerate(messages if isinstance(messages, list) else ()):
            if not isinstance(message, Mapping):
                continue
            for name in message.keys() - _MESSAGE_FIELDS:
                if message[name] is not None:
                    yield UnsupportedField(
                        param=f"messages[{index}].{name}", feature=f"the field {name!r} of a message"
                    )
            if not isinstance(message.get("content", ""), str):
                yield UnsupportedField(
                    param=f"messages[{index}].content", feature="message content that is not a string"
                )
    elif endpoint in {"/v1/completions", "/v1/embeddings"}:
        name, plural = ("prompt", "prompts") if endpoint == "/v1/completions" else ("input", "inputs")
        value = body.get(name)
        if isinstance(value, list) and not (value and all(type(token) is int for token in value)):
            yield UnsupportedField(param=name, feature=f"several {plural} in one line")
    # The finish reason is derived from the text and its last token, which these combinations hide.
    for name, hides in (("min_tokens", True), ("stop_token_ids", True), ("skip_special_tokens", False)):
        value = body.get(name)
        if body.get("stop") and value is not None and bool(value) is hides:
            yield UnsupportedField(param="stop", feature=f"'stop' together with {name!r}")
    structure = body.get("structured_outputs")
    for name in structure.keys() - _STRUCTURES if isinstance(structure, Mapping) else ():
        yield UnsupportedField(param=f"structured_outputs.{name}", feature=f"the field {name!r} of structured_outputs")
