"""What is wrong with one request, once its line was read as a JSON object."""

import difflib
import hashlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Final

from ray_job.contract.lanes import lane_problems
from service.input_file.errors import InputError, invalid, missing, shown, wrong_type
from service.model_catalogue import CatalogueModel, ModelLimits

MAX_CUSTOM_ID_CHARACTERS: Final = 512
# Longer custom ids are remembered by their digest, so that memory does not grow with their length.
MAX_KEPT_CHARACTERS: Final = 64
_MAX_MODEL_CHARACTERS: Final = 256
_MAX_UNKNOWN_MODELS: Final = 100
# The fields of which a request needs one: the first, or what engines take instead.
INPUT_FIELDS: Final[Mapping[str, tuple[str, ...]]] = {
    "/v1/chat/completions": ("messages",),
    "/v1/completions": ("prompt", "prompt_embeds"),
    "/v1/embeddings": ("input", "messages"),
}


@dataclass(slots=True, kw_only=True)
class LineContext:
    """What the checks of a line need to know of its file: the batch's endpoint, the models, the lines before."""

    endpoint: str
    models: Mapping[str, CatalogueModel] | None
    model_id: str | None = None
    custom_ids: set[str | bytes] = field(default_factory=set)
    unknown_models: dict[str, str] = field(default_factory=dict)

    @property
    def model(self) -> CatalogueModel | None:
        """The file's model, once it is known and where there is a catalogue."""
        return self.models[self.model_id] if self.models is not None and self.model_id is not None else None

    @property
    def model_limits(self) -> ModelLimits:
        """The limits of the file's model."""
        return self.model.limits if self.model else ModelLimits()

    @property
    def good_line_facts(self) -> tuple[str | None, str, int]:
        """What a line without errors needs: its model (None: no line is without), that one's lane, its longest line."""
        model = self.model
        if model is None:
            return self.model_id, "direct", ModelLimits().max_line_bytes
        return self.model_id if self.endpoint in model.endpoints else None, model.spec.lane, model.limits.max_line_bytes

    @property
    def max_line_bytes(self) -> int:
        """The longest line that any model takes."""
        if not self.models:
            return ModelLimits().max_line_bytes
        return max(model.limits.max_line_bytes for model in self.models.values())


def request_errors(
    context: LineContext, request: Mapping[str, Any], number: int, size_bytes: int
) -> Iterator[InputError]:
    """Every error of a request on line ``number`` of ``size_bytes``; the context learns its custom id and model."""
    yield from _custom_id_errors(context, request.get("custom_id"), number)
    yield from _method_errors(request.get("method"), number)
    yield from _url_errors(context, request.get("url"), number)
    body = request.get("body")
    if body is None:
        yield missing("body", number)
    elif not isinstance(body, dict):
        yield wrong_type("body", "an object", body, number)
    else:
        yield from _body_errors(context, body, number, size_bytes)


def too_long(number: int, max_line_bytes: int) -> InputError:
    """A line has more bytes than its model, or any, takes."""
    return invalid(None, f"This line is longer than {max_line_bytes:,} bytes. Shorten the request.", number)


def embedding_inputs(value: Any) -> int:
    """How many inputs the ``input`` of an embeddings request holds: a list of token ids is one input."""
    if isinstance(value, list) and value and not isinstance(value[0], int):
        return len(value)
    return 1


def _custom_id_key(custom_id: Any) -> str | bytes | None:
    """What a custom id is remembered by; None for one that cannot be used."""
    if type(custom_id) is not str or not custom_id or "\0" in custom_id:
        return None
    if len(custom_id) <= MAX_KEPT_CHARACTERS:
        return custom_id
    if len(custom_id) > MAX_CUSTOM_ID_CHARACTERS:
        return None
    return hashlib.blake2b(custom_id.encode(), digest_size=16).digest()


def _custom_id_errors(context: LineContext, custom_id: Any, number: int) -> Iterator[InputError]:
    key = _custom_id_key(custom_id)
    if custom_id is None:
        yield missing("custom_id", number, "Give each request a string of its own, by which you find its answer.")
    elif not isinstance(custom_id, str) or not custom_id:
        yield wrong_type("custom_id", "a string that is not empty", custom_id, number)
    elif len(custom_id) > MAX_CUSTOM_ID_CHARACTERS:
        message = (
            f"The custom_id has {len(custom_id):,} characters; at most {MAX_CUSTOM_ID_CHARACTERS} are allowed. "
            "Shorten it."
        )
        yield invalid("custom_id", message, number)
    elif key is None:
        yield invalid("custom_id", f"The custom_id {shown(custom_id)} holds a NUL character. Leave it out.", number)
    elif key in context.custom_ids:
        yield InputError(
            code="duplicate_custom_id",
            message=f"The custom_id {shown(custom_id)} stands on an earlier line too. Each must be unique.",
            param="custom_id",
            line=number,
        )
    else:
        context.custom_ids.add(key)


def _method_errors(method: Any, number: int) -> Iterator[InputError]:
    if method is None:
        yield missing("method", number, "It must be 'POST'.")
    elif method != "POST":
        capitals = ", in capitals" if isinstance(method, str) and method.upper() == "POST" else ""
        yield InputError(
            code="invalid_method",
            message=f"The method must be 'POST'{capitals}, not {shown(method)}.",
            param="method",
            line=number,
        )


def _url_errors(context: LineContext, url: Any, number: int) -> Iterator[InputError]:
    if url is None:
        yield missing("url", number, f"It must be '{context.endpoint}'.")
    elif url != context.endpoint:
        path_only = isinstance(url, str) and url.rstrip("/").endswith(context.endpoint)
        hint = ", the path alone, without a host or a slash at its end" if path_only else ""
        yield InputError(
            code="invalid_url",
            message=f"The url {shown(url)} is not the batch's endpoint. It must be '{context.endpoint}'{hint}.",
            param="url",
            line=number,
        )


def _body_errors(context: LineContext, body: Mapping[str, Any], number: int, size_bytes: int) -> Iterator[InputError]:
    if body.get("stream"):
        yield InputError(
            code="streaming_unsupported",
            message="A batch cannot stream. Leave out 'stream' or set it to false.",
            param="body.stream",
            line=number,
        )
    yield from _input_errors(context, body, number)
    name = body.get("model")
    if name is None:
        yield missing("body.model", number)
    elif not isinstance(name, str) or not name:
        yield wrong_type("body.model", "a string that is not empty", name, number)
    elif context.models is not None and name not in context.models:
        yield _model_not_found(context, name, number)
    else:
        yield from _model_errors(context, name, body, number, size_bytes)


def _input_errors(context: LineContext, body: Mapping[str, Any], number: int) -> Iterator[InputError]:
    # Only what is not there at all: whether a value will do is the engine's to say, and its answer is data.
    fields = INPUT_FIELDS.get(context.endpoint, ())
    if fields and all(body.get(name) is None for name in fields):
        other = next((name for names in INPUT_FIELDS.values() for name in names if body.get(name) is not None), None)
        hint = f"'{other}' belongs to another endpoint than {context.endpoint}." if other else ""
        yield missing(f"body.{fields[0]}", number, hint)
    elif fields == ("messages",) and body["messages"] == []:
        yield missing("body.messages", number, "The array is empty: give at least one message.")


def _model_not_found(context: LineContext, name: str, number: int) -> InputError:
    # Looking for a near name is slow, for a long one very, and a file's lines mostly name the same model.
    start = name[:_MAX_MODEL_CHARACTERS]
    if start not in context.unknown_models:
        if len(context.unknown_models) >= _MAX_UNKNOWN_MODELS:
            context.unknown_models.clear()
        context.unknown_models[start] = _model_hint(context, start)
    return InputError(
        code="model_not_found",
        message=f"The model {shown(name)} does not exist. {context.unknown_models[start]}",
        param="body.model",
        line=number,
    )


def _model_hint(context: LineContext, name: str) -> str:
    models = context.models or {}
    near = difflib.get_close_matches(name, models, n=1)
    return f"Did you mean '{near[0]}'?" if near else f"There are: {', '.join(sorted(models)) or 'none'}."


def _model_errors(
    context: LineContext, name: str, body: Mapping[str, Any], number: int, size_bytes: int
) -> Iterator[InputError]:
    if context.model_id is None:
        context.model_id = name
    elif context.model_id != name:
        yield InputError(
            code="model_mismatch",
            message=f"This line names the model {shown(name)}, earlier ones {shown(context.model_id)}. A batch has one "
            "model: make a batch for each.",
            param="body.model",
            line=number,
        )
    if context.models is None:
        return
    model = context.models[name]
    if context.endpoint not in model.endpoints:
        message = f"The model '{model.id}' does not offer {context.endpoint}. It offers: {', '.join(model.endpoints)}."
        yield invalid("body.model", message, number)
    if size_bytes > model.limits.max_line_bytes:
        yield too_long(number, model.limits.max_line_bytes)
    for problem in lane_problems(model.spec.lane, context.endpoint, body):
        if problem.param == "stream" and body.get("stream"):
            continue  # told already: no lane streams
        yield invalid(f"body.{problem.param}", problem.message, number)
