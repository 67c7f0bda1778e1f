"""Rows of the processor lane, from bodies to sampling parameters and from tokens to bodies. Pure functions.

Every row carries the same parameters, with the value that means "not set" where a body names none. In Arrow's
columns a parameter of one row would appear in the others anyway, as a null that vLLM does not take.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from ray_job.contract.lines import error_body, request_id

CHAT: Final = "/v1/chat/completions"
COMPLETIONS: Final = "/v1/completions"
EMBEDDINGS: Final = "/v1/embeddings"
# OpenAI's default for completions; chat completions may fill the context.
COMPLETION_MAX_TOKENS: Final = 16

_FLOATS: Final = {
    "temperature": 1.0,
    "top_p": 1.0,
    "min_p": 0.0,
    "presence_penalty": 0.0,
    "frequency_penalty": 0.0,
    "repetition_penalty": 1.0,
}
# No seed: between the stages an integer that some rows lack becomes a float, on which the engine dies.
_INTEGERS: Final = {"top_k": 0, "min_tokens": 0}
# The engine ends a generation at its context anyway; null is not to be had, for the same reason.
NO_MAX_TOKENS: Final = 2**31 - 1
_FLAGS: Final = {"ignore_eos": False, "skip_special_tokens": True, "spaces_between_special_tokens": True}
# Errors of vLLM that say that the request is wrong, by the name that ray.data.llm passes on.
_REQUEST_ERRORS: Final = frozenset({"BodyError", "ValueError", "TypeError", "VLLMValidationError", "ValidationError"})


class BodyError(ValueError):
    """A body that vLLM would refuse; the message says why."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EndTokens:
    """The token ids that end a generation: the tokenizer's own, and the others of the generation config."""

    eos: int | None
    others: frozenset[int] = frozenset()


def sampling_params(endpoint: str, body: Mapping[str, Any], defaults: Mapping[str, Any]) -> dict[str, Any]:
    """A body's sampling parameters, complete, by vLLM's names. ``defaults`` are the model's own.

    Raises:
        BodyError: a parameter has the wrong type.
    """
    stop = _strings(body, "stop")
    return {
        **{name: _number(body, name, defaults.get(name, default)) for name, default in _FLOATS.items()},
        **{name: _integer(body, name, defaults.get(name, default)) for name, default in _INTEGERS.items()},
        **{name: _flag(body, name, default=default) for name, default in _FLAGS.items()},
        "max_tokens": _max_tokens(endpoint, body, defaults),
        "stop": stop,
        "stop_token_ids": _integers(body, "stop_token_ids"),
        # The stop string is cut off in response_body: its presence says why the generation ended.
        "include_stop_str_in_output": bool(stop),
        "structured_outputs": _structured_outputs(body),
    }


def _max_tokens(endpoint: str, body: Mapping[str, Any], defaults: Mapping[str, Any]) -> int | None:
    if endpoint == COMPLETIONS:
        return _integer(body, "max_tokens", COMPLETION_MAX_TOKENS)
    return _integer(
        body, "max_completion_tokens", _integer(body, "max_tokens", defaults.get("max_tokens", NO_MAX_TOKENS))
    )


def _structured_outputs(body: Mapping[str, Any]) -> dict[str, Any] | None:
    given = body.get("structured_outputs")
    if given is None:
        return None
    if not isinstance(given, Mapping):
        raise BodyError("structured_outputs must be an object")
    schema = given.get("json")
    return {
        "json": json.dumps(schema) if isinstance(schema, Mapping) else schema,
        "regex": given.get("regex"),
        "choice": given.get("choice"),
        "grammar": given.get("grammar"),
        "json_object": given.get("json_object"),
    }


def _number(body: Mapping[str, Any], name: str, default: float) -> float:
    value = body.get(name)
    if value is None:
        return default
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise BodyError(f"{name} must be a number")
    return float(value)


def _integer(body: Mapping[str, Any], name: str, default: int | None) -> int | None:
    value = body.get(name)
    if value is None:
        return default
    if isinstance(value, bool) or not isinstance(value, int) or not -(2**63) <= value < 2**63:
        raise BodyError(f"{name} must be an integer of 64 bits")
    return value


def _flag(body: Mapping[str, Any], name: str, *, default: bool) -> bool:
    value = body.get(name)
    if value is None:
        return default
    if not isinstance(value, bool):
        raise BodyError(f"{name} must be true or false")
    return value


def _strings(body: Mapping[str, Any], name: str) -> list[str]:
    value = body.get(name) or []
    values = [value] if isinstance(value, str) else value
    if not isinstance(values, list) or not all(isinstance(item, str) for item in values):
        raise BodyError(f"{name} must be a string or a list of strings")
    return values


def _integers(body: Mapping[str, Any], name: str) -> list[int]:
    value = body.get(name) or []
    if not isinstance(value, list) or not all(isinstance(item, int) for item in value):
        raise BodyError(f"{name} must be a list of integers")
    return value


def finish(
    tokens: Sequence[int], text: str, params: Mapping[str, Any], ends: EndTokens
) -> tuple[str, str, int | str | None]:
    """The text without its stop string, the finish_reason and the stop_reason, by vLLM's rules."""
    for stop in params["stop"]:
        if text.endswith(stop):
            return text[: len(text) - len(stop)], "stop", stop
    last = tokens[-1] if len(tokens) else None
    if last is not None:
        if last in params["stop_token_ids"] or (last in ends.others and not params["ignore_eos"]):
            return text, "stop", int(last)
        if last == ends.eos and not params["ignore_eos"]:
            return text, "stop", None
    return text, "length", None


def response_body(
    row: Mapping[str, Any], *, batch_id: str, model: str, created: int, ends: EndTokens
) -> tuple[int, bytes]:
    """The HTTP status and the response body of a row that the processor has finished."""
    error = row.get("refusal") or row.get("__inference_error__")
    if error:
        return error_response(error)
    prompt_tokens = int(row["num_input_tokens"])
    head = {"id": request_id(batch_id, int(row["line"])), "created": created, "model": model}
    if row["url"] == EMBEDDINGS:
        vector = [float(value) for value in row["embeddings"]]
        return 200, _json(
            {
                **head,
                "object": "list",
                "data": [{"index": 0, "object": "embedding", "embedding": vector}],
                "usage": {"prompt_tokens": prompt_tokens, "total_tokens": prompt_tokens, "completion_tokens": 0},
            }
        )
    count = int(row["num_generated_tokens"])
    text, reason, stop = finish(row["generated_tokens"], row["generated_text"], row["ended_by"], ends)
    chat = row["url"] == CHAT
    answer = {"message": {"role": "assistant", "content": text, "refusal": None}} if chat else {"text": text}
    choice = {"index": 0, **answer, "logprobs": None, "finish_reason": reason, "stop_reason": stop}
    usage = {"prompt_tokens": prompt_tokens, "total_tokens": prompt_tokens + count, "completion_tokens": count}
    kind = "chat.completion" if chat else "text_completion"
    return 200, _json({**head, "object": kind, "choices": [choice], "usage": usage})


def error_response(error: str) -> tuple[int, bytes]:
    """The response for ``ErrorName: message`` of a failed row: 400 for a wrong request, 500 for all else."""
    name, _, message = error.partition(": ")
    if name in _REQUEST_ERRORS:
        return 400, error_body(message, type="BadRequestError", param=None, code=400)
    return 500, error_body(error, type="InternalServerError", param=None, code=500)


def _json(body: Mapping[str, Any]) -> bytes:
    return json.dumps(body, ensure_ascii=False, separators=(",", ":")).encode(errors="replace")
