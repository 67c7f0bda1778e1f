"""Rows of the processor engine: from bodies to sampling parameters, and from tokens to bodies. Pure functions.

Every row carries the same parameters. One that a body leaves out has the value that means "not set". In Arrow's
columns it would otherwise appear as a null, which vLLM refuses.
"""

import json
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

from ray_job.contract.lines import error_body, line_id
from ray_job.engines.deadlines import LineTimeoutError
from ray_job.engines.llm_stages import response_row
from ray_job.rows import timed_out

CHAT: Final = "/v1/chat/completions"
COMPLETIONS: Final = "/v1/completions"
EMBEDDINGS: Final = "/v1/embeddings"
# OpenAI's default for completions. Chat completions may fill the context.
COMPLETION_MAX_TOKENS: Final = 16

# Without a seed: between the stages an integer that some rows lack becomes a float, which ends the engine.
_DEFAULTS: Final[dict[str, Any]] = {
    "temperature": 1.0,
    "top_p": 1.0,
    "min_p": 0.0,
    "presence_penalty": 0.0,
    "frequency_penalty": 0.0,
    "repetition_penalty": 1.0,
    "top_k": 0,
    "min_tokens": 0,
    "ignore_eos": False,
    "skip_special_tokens": True,
    "spaces_between_special_tokens": True,
}
# The engine ends a generation at its context anyway. A null would become a float, as a seed does.
NO_MAX_TOKENS: Final = 2**31 - 1
_STRUCTURES: Final = ("json", "regex", "choice", "grammar", "json_object")
# Errors of vLLM that mean a wrong request, by the name that ray.data.llm passes on.
_REQUEST_ERRORS: Final = frozenset({"BodyError", "ValueError", "TypeError", "VLLMValidationError", "ValidationError"})


EndTokens = Mapping[int, int | None]
"""The tokens that end a generation of a model, each with its ``stop_reason``: None for the tokenizer's end of text, and
the token itself for the others in the model's generation config."""


class BodyError(ValueError):
    """A body that vLLM would refuse. The message is the reason."""


def sampling_params(endpoint: str, body: Mapping[str, Any], defaults: Mapping[str, Any]) -> dict[str, Any]:
    """Return all sampling parameters of a body, by vLLM's names.

    Args:
        endpoint: the endpoint of the line.
        body: the body of the line. Its values override all defaults.
        defaults: the model's own defaults. They override OpenAI's.

    Raises:
        BodyError: a parameter has the wrong type.
    """
    if endpoint == COMPLETIONS:
        max_tokens = _parameter(body, "max_tokens", COMPLETION_MAX_TOKENS)
    else:
        max_tokens = _parameter(body, "max_tokens", defaults.get("max_tokens", NO_MAX_TOKENS))
        max_tokens = _parameter(body, "max_completion_tokens", max_tokens)
    stop = body.get("stop") or []
    stop = [stop] if isinstance(stop, str) else stop
    if not isinstance(stop, list) or not all(isinstance(item, str) for item in stop):
        raise BodyError("stop must be a string or a list of strings")
    stop_token_ids = body.get("stop_token_ids") or []
    if not isinstance(stop_token_ids, list) or not all(isinstance(item, int) for item in stop_token_ids):
        raise BodyError("stop_token_ids must be a list of integers")
    structure = body.get("structured_outputs")
    if structure is not None:
        if not isinstance(structure, Mapping):
            raise BodyError("structured_outputs must be an object")
        structure = {name: structure.get(name) for name in _STRUCTURES}
        if isinstance(structure["json"], Mapping):
            structure["json"] = json.dumps(structure["json"])
    return {
        **{name: _parameter(body, name, default, defaults.get(name)) for name, default in _DEFAULTS.items()},
        "max_tokens": max_tokens,
        "stop": stop,
        "stop_token_ids": stop_token_ids,
        # The stop string is cut off in finish. Its presence is the reason that the generation ended.
        "include_stop_str_in_output": bool(stop),
        "structured_outputs": structure,
    }


def _parameter(body: Mapping[str, Any], name: str, default: Any, model_default: Any = None) -> Any:
    """Return one parameter of a body, which must have the type of its default.

    Raises:
        BodyError: it has another type.
    """
    value = body.get(name)
    if value is None:
        return default if model_default is None else model_default
    if isinstance(default, bool):
        if not isinstance(value, bool):
            raise BodyError(f"{name} must be true or false")
    elif isinstance(default, float):
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise BodyError(f"{name} must be a number")
        return float(value)
    elif isinstance(value, bool) or not isinstance(value, int) or not -(2**63) <= value < 2**63:
        raise BodyError(f"{name} must be an integer of 64 bits")
    return value


def finish(
    tokens: Sequence[int], text: str, params: Mapping[str, Any], ends: EndTokens
) -> tuple[str, str, int | str | None]:
    """Derive by vLLM's rules how a generation ended.

    Args:
        tokens: the generated tokens.
        text: the generated text.
        params: ``stop``, ``stop_token_ids`` and ``ignore_eos`` of the sampling parameters.
        ends: the tokens that end a generation of the model.

    Returns:
        The text without its stop string, the ``finish_reason`` and the ``stop_reason``.
    """
    for stop in params["stop"]:
        if text.endswith(stop):
            return text[: len(text) - len(stop)], "stop", stop
    last = tokens[-1] if len(tokens) else None
    if last is not None:
        if last in params["stop_token_ids"]:
            return text, "stop", int(last)
        if last in ends and not params["ignore_eos"]:
            return text, "stop", ends[last]
    return text, "length", None


def finished_response(
    row: Mapping[str, Any], *, model: str, ends: EndTokens, clock: Callable[[], float] = time.time
) -> dict[str, Any]:
    """Return the response to a finished row; see ``ray_job.engines`` for the columns.

    Args:
        row: the row after the engine, with its request.
        model: the id of the model.
        ends: the tokens that end a generation of the model.
        clock: the current time in Unix seconds.
    """
    error = row.get("refusal") or row.get("__inference_error__")
    if error:
        return response_row(row, *error_response(error))
    prompt_tokens = int(row["num_input_tokens"])
    count = 0
    if row["url"] == EMBEDDINGS:
        vector = [float(value) for value in row["embeddings"]]
        content = {"object": "list", "data": [{"index": 0, "object": "embedding", "embedding": vector}]}
    else:
        count = int(row["num_generated_tokens"])
        text, reason, stop = finish(row["generated_tokens"], row["generated_text"], row["ended_by"], ends)
        chat = row["url"] == CHAT
        answer = {"message": {"role": "assistant", "content": text, "refusal": None}} if chat else {"text": text}
        choice = {"index": 0, **answer, "logprobs": None, "finish_reason": reason, "stop_reason": stop}
        content = {"object": "chat.completion" if chat else "text_completion", "choices": [choice]}
    body = {
        "id": line_id("req_", row["batch_id"], int(row["line"])),
        "created": int(clock()),
        "model": model,
        **content,
        "usage": {"prompt_tokens": prompt_tokens, "total_tokens": prompt_tokens + count, "completion_tokens": count},
    }
    encoded = json.dumps(body, ensure_ascii=False, separators=(",", ":")).encode(errors="replace")
    return response_row(row, 200, encoded)


def error_response(error: str) -> tuple[int, bytes]:
    """Return the response to a failed row: 400 for a wrong request, none after a timeout, 500 for any other error.

    Args:
        error: ``ErrorName: message``.
    """
    name, _, message = error.partition(": ")
    if name == LineTimeoutError.__name__:
        return timed_out(message)
    if name in _REQUEST_ERRORS:
        return 400, error_body(message, type="BadRequestError", param=None, code=400)
    return 500, error_body(error, type="InternalServerError", param=None, code=500)
