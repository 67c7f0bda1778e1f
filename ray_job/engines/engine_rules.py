"""Prompt rules of a running engine, for the service; see ``ray_job.contract.prompt_rules``."""

import logging
from typing import Any

from ray_job.contract.prompt_rules import ChatRules, PromptRules

logger = logging.getLogger(__name__)


def prompt_rules(engine: Any, arguments: Any) -> PromptRules | None:
    """Return the prompt rules of an engine, or None if only the engine itself can count its prompts.

    Args:
        engine: vLLM's ``AsyncLLM``.
        arguments: its parsed command line.
    """
    try:
        return _read_rules(engine, arguments)
    except Exception as error:  # noqa: BLE001 - vLLM's internals change with its version; the engine must serve anyway
        logger.warning("the prompt rules of the engine are unknown: %s", type(error).__name__)
        return None


def _read_rules(engine: Any, arguments: Any) -> PromptRules | None:
    from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionToolsParam
    from vllm.renderers import hf
    from vllm.renderers.chat_utils import load_chat_template

    config, tokenizer = engine.vllm_config.model_config, engine.renderer.tokenizer
    encoder = getattr(config, "encoder_config", None) or {}
    # Other renderers and tokenizers have their own rules.
    if type(engine.renderer) is not hf.HfRenderer or not getattr(tokenizer, "is_fast", False):
        return None
    if encoder.get("do_lower_case") or config.enable_prompt_embeds:
        return None
    longest = config.max_model_len
    if pooler := config.pooler_config:
        is_chunked = getattr(pooler, "enable_chunked_processing", False)
        longest = getattr(pooler, "max_embed_len", None) or (None if is_chunked else longest)

    given = load_chat_template(arguments.chat_template)

    def chat_rules(tools: list[dict[str, Any]] | None) -> ChatRules | None:
        template = hf.resolve_chat_template(tokenizer, given, tools, model_config=config)
        if template is None or config.hf_config.model_type == "gpt_oss":  # which is rendered without its template
            return None
        content_format = hf.resolve_chat_template_content_format(
            given, tools, arguments.chat_template_content_format, tokenizer, model_config=config
        )
        return ChatRules(template=template, content_format=content_format)

    tools = [
        ChatCompletionToolsParam.model_validate({"type": "function", "function": function}).model_dump()
        for function in ({"name": "n"}, {"name": "n", "strict": True})
    ]
    always = tools[0]["function"]
    return PromptRules(
        max_prompt_tokens=longest,
        max_model_len=config.max_model_len,
        tokenizer=tokenizer.backend_tokenizer.to_str(),
        chat=chat_rules(None),
        tool_chat=chat_rules(tools),
        special_tokens=dict(tokenizer.special_tokens_map),
        template_variables=arguments.default_chat_template_kwargs or {},
        tool_fields={name: name in always for name in tools[1]["function"]},
    )
