"""Prompt rules of a model: how its engine turns a request into tokens, and how many it accepts.

A ready engine writes them as one JSON document, so that the service counts exactly as the engine does without the
model's weights. They hold nothing of a request.
"""

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any, Final, Literal

VERSION: Final = 1
MAX_BYTES: Final = 128 << 20
"""The largest document that is read. Those of published models have 2 to 40 MB."""

ContentFormat = Literal["string", "openai"]


class PromptRulesError(ValueError):
    """A document that does not hold prompt rules; the message gives the reason and quotes nothing."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ChatRules:
    """Conversion of messages into one text.

    Attributes:
        template: a Jinja template.
        content_format: ``string``: the template expects the text of a message; ``openai``: a list of its parts.
    """

    template: str
    content_format: ContentFormat


@dataclass(frozen=True, slots=True, kw_only=True)
class PromptRules:
    """The rules of one model on one engine.

    Attributes:
        max_prompt_tokens: the longest prompt that the engine accepts; None if it has no such limit.
        max_model_len: most tokens of a prompt and its answer; ``max_tokens`` above it is refused.
        tokenizer: the content of ``tokenizer.json``, as the engine uses it.
        chat: rules of requests without tools; None if they cannot be rendered outside of the engine.
        tool_chat: rules of requests with tools.
        special_tokens: variables of the template such as ``bos_token``.
        template_variables: variables that the engine sets for every request.
        tool_fields: fields of a tool's function that templates see, in order; whether they see one that is absent.
    """

    max_prompt_tokens: int | None
    max_model_len: int
    tokenizer: str
    chat: ChatRules | None = None
    tool_chat: ChatRules | None = None
    special_tokens: Mapping[str, Any] = field(default_factory=dict)
    template_variables: Mapping[str, Any] = field(default_factory=dict)
    tool_fields: Mapping[str, bool] = field(default_factory=dict)

    def to_json(self) -> bytes:
        """Write the rules as JSON."""
        return json.dumps({"version": VERSION, **asdict(self)}, ensure_ascii=False).encode()

    @classmethod
    def from_json(cls, text: bytes) -> "PromptRules":
        """Read what ``to_json`` has written.

        Raises:
            PromptRulesError: not JSON, another version, or a field that is missing, unknown or has the wrong type.
        """
        try:
            raw = json.loads(text)
            if raw.pop("version") != VERSION:
                raise PromptRulesError(f"the prompt rules do not have version {VERSION}")  # noqa: TRY301
            for name in ("chat", "tool_chat"):
                raw[name] = raw.get(name) and ChatRules(**raw[name])
            rules = cls(**raw)
        except PromptRulesError:
            raise
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
            raise PromptRulesError(f"the prompt rules are unreadable: {type(error).__name__}") from None
        limits = (rules.max_model_len, rules.max_model_len if (most := rules.max_prompt_tokens) is None else most)
        if not isinstance(rules.tokenizer, str) or any(type(limit) is not int or limit < 1 for limit in limits):
            raise PromptRulesError("the prompt rules have no tokenizer or no limits")
        return rules
