"""Prompts of a request, as vLLM renders them: the text of each, or the number of its tokens.

Source: ``vllm.renderers``, ``vllm.entrypoints.openai.*.protocol`` (0.32), and transformers'
``utils.chat_template_utils``, whose Jinja environment this module repeats.
"""

import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Any, Final

import jinja2
import jinja2.ext
import jinja2.meta
from jinja2.sandbox import ImmutableSandboxedEnvironment

from ray_job.contract.prompt_rules import ChatRules, PromptRules

MAX_MESSAGES: Final = 4_096
MAX_VARIABLES: Final = 64
MAX_VARIABLE_CHARACTERS: Final = 4_096
# Fields that change a prompt in ways that are not repeated here.
UNKNOWN_FIELDS: Final = (
    "chat_template",
    "documents",
    "kv_transfer_params",
    "media_io_kwargs",
    "mm_processor_kwargs",
    "padding",
    "prompt_embeds",
    "reasoning_effort",
    "suffix",
    "truncate_prompt_tokens",
    "truncation_side",
)
_MESSAGE_FIELDS: Final[Mapping[str, frozenset[str]]] = {
    "system": frozenset({"role", "content", "name"}),
    "user": frozenset({"role", "content", "name"}),
    "assistant": frozenset({"role", "content", "name", "tool_calls", "refusal"}),
    "tool": frozenset({"role", "content", "tool_call_id"}),
}
# vLLM removes a first line that begins so.
_STRIPPED_HEADER: Final = "x-anthropic-billing-header"
# Arguments of transformers' apply_chat_template, which a request cannot set as variables of the template.
_ARGUMENTS: Final = frozenset(
    {
        "add_generation_prompt",
        "chat_template",
        "continue_final_message",
        "conversation",
        "documents",
        "max_length",
        "messages",
        "padding",
        "processor_kwargs",
        "raise_exception",
        "return_assistant_tokens_mask",
        "return_dict",
        "return_tensors",
        "strftime_now",
        "tokenize",
        "tokenizer_kwargs",
        "tools",
        "truncation",
    }
)


class NotCountedError(Exception):
    """This request cannot be rendered exactly. It never quotes the request."""


class _GenerationBlock(jinja2.ext.Extension):
    """``{% generation %}`` marks the assistant's text for training; the text itself is unchanged."""

    tags = {"generation"}  # noqa: RUF012 - the type of the base class

    def parse(self, parser: jinja2.parser.Parser) -> jinja2.nodes.Node:
        """See ``jinja2.ext.Extension``."""
        line = next(parser.stream).lineno
        return jinja2.nodes.Scope(parser.parse_statements(("name:endgeneration",), drop_needle=True), lineno=line)


class ChatTemplate:
    """A compiled chat template.

    Args:
        chat: the template, and the content that it expects.
        rules: the other rules of its model.

    Raises:
        jinja2.TemplateError: the template is not valid.
    """

    def __init__(self, chat: ChatRules, rules: PromptRules) -> None:
        def raise_exception(message: str) -> None:
            raise jinja2.TemplateError(message)

        def to_json(
            value: Any, ensure_ascii: bool = False, indent: Any = None, separators: Any = None, sort_keys: bool = False
        ) -> str:
            return json.dumps(
                value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
            )

        environment = ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationBlock, jinja2.ext.loopcontrols]
        )
        environment.filters["tojson"] = to_json
        environment.globals["raise_exception"] = raise_exception
        # The engine's clock and time zone: the date is part of some prompts.
        environment.globals["strftime_now"] = lambda text: datetime.now().strftime(text)  # noqa: DTZ005
        self._variables = jinja2.meta.find_undeclared_variables(environment.parse(chat.template)) - _ARGUMENTS
        self._template = environment.from_string(chat.template)
        self._has_parts = chat.content_format == "openai"
        self._rules = rules

    def render(self, body: Mapping[str, Any]) -> str:
        """Return the prompt of a chat request.

        Raises:
            NotCountedError: see the class.
            jinja2.TemplateError: the template refuses the request. Other errors of a template have any class.
        """
        messages, given = body.get("messages"), body.get("chat_template_kwargs") or {}
        if not isinstance(messages, list) or not 0 < len(messages) <= MAX_MESSAGES:
            raise NotCountedError("messages")
        if not isinstance(given, dict) or len(given) > MAX_VARIABLES or not _ARGUMENTS.isdisjoint(given):
            raise NotCountedError("chat_template_kwargs")
        for value in given.values():
            is_scalar = value is None or type(value) in {bool, int, float, str}
            if not is_scalar or len(str(value)) > MAX_VARIABLE_CHARACTERS:
                raise NotCountedError("chat_template_kwargs")
        # vLLM keeps its own value where a request gives none.
        set_here = {name: value for name, value in given.items() if value not in (None, "auto")}
        variables = {**self._rules.template_variables, **set_here}
        add_generation_prompt = body.get("add_generation_prompt", True)
        if type(add_generation_prompt) is not bool:
            raise NotCountedError("add_generation_prompt")
        return self._template.render(
            messages=[_conversation_message(message, has_parts=self._has_parts) for message in messages],
            tools=_tools(body.get("tools"), self._rules.tool_fields),
            documents=None,
            add_generation_prompt=add_generation_prompt,
            **{
                **self._rules.special_tokens,
                **{name: value for name, value in variables.items() if name in self._variables},
            },
        )


def completion_prompts(body: Mapping[str, Any], name: str) -> Sequence[str | list[int]]:
    """Return the prompts of a completion or an embedding: texts, or lists of token ids.

    Args:
        body: the request's body.
        name: the field that holds them.

    Raises:
        NotCountedError: the field has another type.
    """
    value = body.get(name)
    if isinstance(value, str):
        return [value]
    if isinstance(value, list) and value:
        types = set(map(type, value))
        if types == {int}:
            return [value]
        if types == {str} or (types == {list} and all(each and set(map(type, each)) == {int} for each in value)):
            return value
    raise NotCountedError(name)


def _conversation_message(message: Any, *, has_parts: bool) -> dict[str, Any]:
    """Return a message as templates see it."""
    role = message.get("role") if isinstance(message, dict) else None
    fields = _MESSAGE_FIELDS.get(role) if isinstance(role, str) else None
    if not isinstance(message, dict) or fields is None or not fields.issuperset(message):
        raise NotCountedError("role")
    content = message.get("content")
    texts: list[Any] | None = [content] if isinstance(content, str) else content if isinstance(content, list) else None
    if texts is None and (content is not None or role != "assistant"):
        raise NotCountedError("content")
    texts = texts or []
    if not isinstance(content, str):
        for part in texts:
            if not isinstance(part, dict) or part.keys() != {"type", "text"} or part["type"] != "text":
                raise NotCountedError("content")
        texts = [part["text"] for part in texts]
    if not all(isinstance(text, str) for text in texts):
        raise NotCountedError("content")
    if role == "system" and any(text.startswith(_STRIPPED_HEADER) for text in texts):
        raise NotCountedError("content")
    is_list = has_parts and role != "tool"
    result: dict[str, Any] = {
        "role": role,
        "content": [{"type": "text", "text": text} for text in texts] if is_list else "\n".join(texts),
    }
    if message.get("refusal") is not None:
        raise NotCountedError("refusal")
    if calls := message.get("tool_calls"):
        result["tool_calls"] = _tool_calls(calls)
    if "tool_call_id" in message:
        if not isinstance(message["tool_call_id"], str):
            raise NotCountedError("tool_call_id")
        result["tool_call_id"] = message["tool_call_id"]
    if "name" in message:
        if not isinstance(message["name"], str):
            raise NotCountedError("name")
        result["name"] = message["name"]
    return result


def _tool_calls(calls: Any) -> list[dict[str, Any]]:
    """Return the calls of an assistant, with their arguments as objects."""
    result = []
    for call in calls if isinstance(calls, list) else [None]:
        function = call.get("function") if isinstance(call, dict) else None
        if (
            not isinstance(call, dict)
            or not isinstance(function, dict)
            or call.keys() != {"id", "type", "function"}
            or call["type"] != "function"
            or not isinstance(call["id"], str)
            or function.keys() != {"name", "arguments"}
            or not all(isinstance(value, str) for value in function.values())
        ):
            raise NotCountedError("tool_calls")
        try:
            arguments = json.loads(function["arguments"] or "{}")
        except (ValueError, RecursionError):
            raise NotCountedError("tool_calls") from None
        if not isinstance(arguments, dict):
            raise NotCountedError("tool_calls")
        result.append(
            {"id": call["id"], "function": {"arguments": arguments, "name": function["name"]}, "type": "function"}
        )
    return result


def _tools(tools: Any, fields: Mapping[str, bool]) -> list[dict[str, Any]] | None:
    """Return the tools as templates see them."""
    if tools is None:
        return None
    result = []
    for tool in tools if isinstance(tools, list) and fields else [None]:
        function = tool.get("function") if isinstance(tool, dict) else None
        if (
            not isinstance(tool, dict)
            or not isinstance(function, dict)
            or tool.keys() != {"type", "function"}
            or tool["type"] != "function"
            or not fields.keys() >= function.keys()
            or not isinstance(function.get("name"), str)
            or not isinstance(function.get("description", ""), str)
            or not isinstance(function.get("parameters", {}), dict)
            or type(function.get("strict", False)) is not bool
        ):
            raise NotCountedError("tools")
        visible = {name: function.get(name) for name, is_shown in fields.items() if is_shown or name in function}
        result.append({"type": "function", "function": visible})
    return result
