"""Rendered prompts against those of the vLLM that is installed. Needs no engine."""

import copy
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from ray_job.contract.prompt_rules import ChatRules, PromptRules
from ray_job.engines.engine_rules import prompt_rules
from service.prompts.rendering import ChatTemplate

# Importing vLLM warns of torch's own deprecations.
pytestmark = [pytest.mark.ray, pytest.mark.filterwarnings("default")]

WHOLE_MESSAGES = (
    "{{ bos_token }}{% for m in messages %}\n  {% generation %}{{ m | tojson }}{% endgeneration %}{% endfor %}"
    "{% if tools %}{{ tools | tojson(indent=2) }}{% endif %}{% if add_generation_prompt %}<A>{% endif %}{{ thinks }}"
)
PARTS = "{% for m in messages %}{% for c in m['content'] %}[{{ c | tojson }}]{% endfor %}{{ m | tojson }}{% endfor %}"
USER = {"role": "user", "content": "é"}
CALL = {"type": "function", "id": "c", "function": {"name": "f", "arguments": '{"b": 1, "a": [1, 2]}'}}
TEXTS = [{"type": "text", "text": "a"}, {"text": "b", "type": "text"}]
BODIES: list[dict[str, Any]] = [
    {"messages": [USER]},
    {"messages": [{"content": "s", "role": "system", "name": "n"}, {"role": "user", "content": TEXTS}]},
    {
        "messages": [
            USER,
            {"role": "assistant", "content": None, "tool_calls": [CALL]},
            {"role": "tool", "tool_call_id": "c", "content": TEXTS},
        ],
        "tools": [{"type": "function", "function": {"parameters": {"z": {"y": 1}}, "name": "f", "description": "d"}}],
    },
    {"messages": [USER], "tools": [{"type": "function", "function": {"name": "f", "strict": True}}]},
    {"messages": [{"role": "assistant", "content": "x", "tool_calls": []}, {"role": "user", "content": ""}]},
    {"messages": [{"role": "assistant", "content": TEXTS}, {"role": "user", "content": []}]},
    {"messages": [{"role": "assistant"}, USER], "add_generation_prompt": False},
    {"messages": [USER], "chat_template_kwargs": {"thinks": False, "add": "auto", "other": 3}},
]


@pytest.fixture(scope="module")
def loaded(demo_model: Path) -> tuple[Any, PromptRules]:
    """The model's configuration and tokenizer as vLLM loads them, and its prompt rules."""
    from vllm.engine.arg_utils import AsyncEngineArgs
    from vllm.renderers import renderer_from_config

    config = AsyncEngineArgs(model=str(demo_model), enforce_eager=True, max_model_len=2048).create_engine_config()
    engine = SimpleNamespace(vllm_config=config, renderer=renderer_from_config(config))
    arguments = SimpleNamespace(
        chat_template=None, chat_template_content_format="auto", default_chat_template_kwargs=None
    )
    rules = prompt_rules(engine, arguments)
    assert rules is not None
    return engine, rules


@pytest.mark.parametrize("template", ["", WHOLE_MESSAGES, PARTS], ids=["own", "whole messages", "parts"])
def test_prompts_are_those_of_vllm(loaded: tuple[Any, PromptRules], template: str) -> None:
    from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest
    from vllm.renderers.chat_utils import parse_chat_messages
    from vllm.renderers.hf import resolve_chat_template_content_format, safe_apply_chat_template

    engine, rules = loaded
    tokenizer, config = engine.renderer.tokenizer, engine.vllm_config.model_config
    assert rules.chat is not None
    template = template or rules.chat.template
    content_format = resolve_chat_template_content_format(template, None, "auto", tokenizer, model_config=config)
    ours = ChatTemplate(ChatRules(template=template, content_format=content_format), rules)
    for body in BODIES:
        request = ChatCompletionRequest.model_validate({"model": "m", **copy.deepcopy(body)})
        tools = request.tools and [tool.model_dump() for tool in request.tools]
        params = request.build_chat_params(template, "auto").with_defaults({"tools": tools, "tokenize": False})
        messages, _, _ = parse_chat_messages(request.messages, config, content_format=content_format)
        theirs = safe_apply_chat_template(config, tokenizer, messages, **params.get_apply_chat_template_kwargs())
        assert ours.render(body) == theirs
