"""Token counts of requests."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import jinja2
from tokenizers import Tokenizer

from ray_job.contract.prompt_rules import PromptRules, PromptRulesError
from service.prompts.rendering import UNKNOWN_FIELDS, ChatTemplate, NotCountedError, completion_prompts

_CHAT: Final = "/v1/chat/completions"
_INPUT_FIELDS: Final[Mapping[str, str]] = {"/v1/completions": "prompt", "/v1/embeddings": "input"}
# The tokenizer needs some 150 bytes of memory for each.
MAX_CHARACTERS: Final = 1_000_000
# Of a completion without max_tokens. Source: vLLM's CompletionRequest, and OpenAI's API reference.
_DEFAULT_MAX_TOKENS: Final = 16


@dataclass(frozen=True, slots=True, kw_only=True)
class PromptCount:
    """Tokens of one request.

    Attributes:
        tokens: tokens of all of its prompts.
        longest: tokens of its longest prompt.
        most_output: the most tokens that the engine may generate for it.
    """

    tokens: int
    longest: int
    most_output: int


class PromptCounter:
    """Counts the tokens of requests to one model, as its engine does.

    Args:
        rules: the model's prompt rules.

    Raises:
        PromptRulesError: the tokenizer or a template is not valid.
    """

    def __init__(self, rules: PromptRules) -> None:
        try:
            self._tokenizer = Tokenizer.from_str(rules.tokenizer)
            self._chat = ChatTemplate(rules.chat, rules) if rules.chat else None
            self._tool_chat = ChatTemplate(rules.tool_chat, rules) if rules.tool_chat else None
        except jinja2.TemplateError as error:
            raise PromptRulesError(f"the chat template is not valid: {type(error).__name__}") from None
        except Exception as error:  # noqa: BLE001 - tokenizers raises no narrower class
            raise PromptRulesError(f"the tokenizer is not valid: {type(error).__name__}") from None
        self._tokenizer.no_truncation()
        self._tokenizer.no_padding()
        self.max_prompt_tokens = rules.max_prompt_tokens
        self.max_model_len = rules.max_model_len

    def count(self, endpoint: str, body: Mapping[str, Any]) -> PromptCount | None:
        """Count the tokens of a request.

        Returns:
            None if they cannot be counted exactly, or the prompts have more than a million characters.
        """
        try:
            if body.get("continue_final_message") or any(body.get(name) is not None for name in UNKNOWN_FIELDS):
                return None
            add_special_tokens = body.get("add_special_tokens", endpoint != _CHAT)
            if type(add_special_tokens) is not bool:
                return None
            prompts: Sequence[str | list[int]]
            if endpoint == _CHAT:
                template = self._chat if body.get("tools") is None else self._tool_chat
                if template is None:
                    return None
                prompts = [template.render(body)]
            else:
                prompts = completion_prompts(body, _INPUT_FIELDS[endpoint])
            texts = [prompt for prompt in prompts if isinstance(prompt, str)]
            if sum(map(len, texts)) > MAX_CHARACTERS:
                return None
            encoded = self._tokenizer.encode_batch_fast(texts, add_special_tokens=add_special_tokens)
        except NotCountedError:
            return None
        except Exception:  # noqa: BLE001 - a template is a program, and its errors have any class
            return None
        lengths = [len(each) for each in encoded] or [len(prompt) for prompt in prompts]
        most_output = 0
        if endpoint != "/v1/embeddings":
            default = _DEFAULT_MAX_TOKENS if endpoint == "/v1/completions" else None
            asked = body.get("max_completion_tokens") if endpoint == _CHAT else None
            asked = body.get("max_tokens", default) if asked is None else asked
            answers = body.get("n")
            answers = answers if type(answers) is int and answers > 0 else 1
            for length in lengths:
                room = max(0, self.max_model_len - length)
                most_output += answers * (min(asked, room) if type(asked) is int and asked >= 0 else room)
        return PromptCount(tokens=sum(lengths), longest=max(lengths), most_output=most_output)
