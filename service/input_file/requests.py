"""Checks of one request, after its line was parsed as a JSON object."""

import difflib
import hashlib
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Final

from ray_job.contract.engine_support import unsupported_fields
from ray_job.contract.media import MAX_FILES, file_images
from service.input_file.errors import InputError, missing, wrong_type
from service.input_file.field_limits import field_errors
from service.input_file.media import FileImage, media_errors, too_many_files
from service.model_catalogue import CatalogueModel, ModelLimits

MAX_CUSTOM_ID_CHARACTERS: Final = 512
# Longer custom ids are remembered by their digest, so that memory does not grow with their length.
MAX_KEPT_CHARACTERS: Final = 64
_MAX_MODEL_CHARACTERS: Final = 256
_MAX_UNKNOWN_MODELS: Final = 100
# The names of fields that an engine may know. A text without spaces, in Chinese for example, is none.
_FIELD_PATH: Final = re.compile(r"[a-z0-9_.\[\]]{1,60}")
# A request needs one of these fields: the first, or another that engines accept in its place.
INPUT_FIELDS: Final[Mapping[str, tuple[str, ...]]] = {
    "/v1/chat/completions": ("messages",),
    "/v1/completions": ("prompt", "prompt_embeds"),
    "/v1/embeddings": ("input", "messages"),
}


@dataclass(slots=True, kw_only=True)
class LineContext:
    """The facts about a file that the checks of a line need: endpoint, models, and the lines before it.

    ``images`` are those that are uploaded files, by line, of the lines whose files are still to be looked up.
    """

    endpoint: str
    models: Mapping[str, CatalogueModel] | None
    model_id: str | None = None
    custom_ids: set[str | bytes] = field(default_factory=set)
    images: dict[int, list[FileImage]] = field(default_factory=dict)
    _model_hints: dict[str, str] = field(default_factory=dict)

    @property
    def model(self) -> CatalogueModel | None:
        """The file's model; None until a line names one, and without a catalogue."""
        return self.models[self.model_id] if self.models is not None and self.model_id is not None else None

    @property
    def model_limits(self) -> ModelLimits:
        """The limits of the file's model."""
        return self.model.limits if self.model else ModelLimits()

    @property
    def good_line_facts(self) -> tuple[str | None, str, int]:
        """The model of a valid line (None: no line is valid), that model's engine, and its longest line in bytes."""
        model = self.model
        if model is None:
            return self.model_id, "direct", ModelLimits().max_line_bytes
        return (
            self.model_id if self.endpoint in model.endpoints else None,
            model.spec.engine,
            model.limits.max_line_bytes,
        )

    @property
    def max_line_bytes(self) -> int:
        """The longest line that any model accepts."""
        if not self.models:
            return ModelLimits().max_line_bytes
        return max(model.limits.max_line_bytes for model in self.models.values())

    def add_custom_id(self, custom_id: str) -> bool:
        """Remember a custom id; return False if an earlier line has the same one."""
        key: str | bytes = custom_id
        if len(custom_id) > MAX_KEPT_CHARACTERS:
            key = hashlib.blake2b(custom_id.encode(), digest_size=16).digest()
        is_new = key not in self.custom_ids
        self.custom_ids.add(key)
        return is_new

    def model_hint(self, name: str) -> str:
        """Return a hint for a model that is not in the catalogue: the closest name, or all names."""
        # Finding a close match is slow, and the lines of a file mostly name the same model.
        start = name[:_MAX_MODEL_CHARACTERS]
        if start not in self._model_hints:
            if len(self._model_hints) >= _MAX_UNKNOWN_MODELS:
                self._model_hints.clear()
            models = self.models or {}
            near = difflib.get_close_matches(start, models, n=1)
            available = f"Available models: {', '.join(sorted(models)) or 'none'}."
            self._model_hints[start] = f"Did you mean '{near[0]}'?" if near else available
        return self._model_hints[start]


def request_errors(
    context: LineContext, request: Mapping[str, Any], number: int, size_bytes: int
) -> Iterator[InputError]:
    """Yield every error of a request. The context learns the request's custom id and model.

    Args:
        context: the file so far.
        request: the parsed line.
        number: the line's number.
        size_bytes: the line's length.
    """
    custom_id, method, url, body = (request.get(name) for name in ("custom_id", "method", "url", "body"))
    if custom_id is None:
        yield missing("custom_id", number, "Give each request a unique string that identifies its result.")
    elif not isinstance(custom_id, str) or not custom_id:
        yield wrong_type("custom_id", "a string that is not empty", custom_id, number)
    elif len(custom_id) > MAX_CUSTOM_ID_CHARACTERS:
        message = f"The custom_id has {len(custom_id):,} characters; at most {MAX_CUSTOM_ID_CHARACTERS} are allowed."
        yield InputError(message=f"{message} Shorten it.", param="custom_id", line=number)
    elif "\0" in custom_id:
        message = "The custom_id holds a NUL character. Remove it."
        yield InputError(message=message, param="custom_id", line=number)
    elif not context.add_custom_id(custom_id):
        message = "The custom_id also appears on an earlier line. Each must be unique."
        yield InputError(code="duplicate_custom_id", message=message, param="custom_id", line=number)
    if method is None:
        yield missing("method", number, "It must be 'POST'.")
    elif method != "POST":
        capitals = ", in capitals" if isinstance(method, str) and method.upper() == "POST" else ""
        message = f"The method is not supported. It must be 'POST'{capitals}."
        yield InputError(code="invalid_method", message=message, param="method", line=number)
    if url is None:
        yield missing("url", number, f"It must be '{context.endpoint}'.")
    elif url != context.endpoint:
        path_only = isinstance(url, str) and url.rstrip("/").endswith(context.endpoint)
        hint = ", the path alone, without a host or a trailing slash" if path_only else ""
        message = f"The url is not the batch's endpoint. It must be '{context.endpoint}'{hint}."
        yield InputError(code="invalid_url", message=message, param="url", line=number)
    if body is None:
        yield missing("body", number)
    elif not isinstance(body, dict):
        yield wrong_type("body", "an object", body, number)
    else:
        yield from _body_errors(context, body, number, size_bytes)


def too_long(number: int, max_line_bytes: int) -> InputError:
    """Return the error for a line with more bytes than its model, or any model, accepts."""
    return InputError(message=f"This line is longer than {max_line_bytes:,} bytes. Shorten the request.", line=number)


def too_many_tokens(number: int, context: LineContext, name: str, tokens: int, limit: int) -> InputError:
    """Return the error for a request with more tokens than its model accepts.

    Args:
        number: the line's number.
        context: the file.
        name: ``prompt``, or the field that asks for too many tokens.
        tokens: its tokens.
        limit: the most that the model accepts.
    """
    field = INPUT_FIELDS[context.endpoint][0]
    problem, remedy = f"The prompt has {tokens:,} tokens", f"Shorten '{field}'."
    if name != "prompt":
        field, problem, remedy = name, f"'{name}' asks for {tokens:,} tokens", "Lower it."
    message = f"{problem}; the model '{context.model_id}' accepts at most {limit:,}. {remedy}"
    return InputError(code="token_limit_exceeded", message=message, param=f"body.{field}", line=number)


def embedding_inputs(value: Any) -> int:
    """Count the inputs in the ``input`` of an embeddings request. A list of token ids is one input."""
    if isinstance(value, list) and value and not isinstance(value[0], int):
        return len(value)
    return 1


def _body_errors(context: LineContext, body: Mapping[str, Any], number: int, size_bytes: int) -> Iterator[InputError]:
    if body.get("stream"):
        message = "A batch cannot stream. Remove 'stream' or set it to false."
        yield InputError(code="streaming_unsupported", message=message, param="body.stream", line=number)
    # Only absence is an error here: the engine judges the value, and its answer is data.
    fields = INPUT_FIELDS.get(context.endpoint, ())
    if fields and all(body.get(name) is None for name in fields):
        other = next((name for names in INPUT_FIELDS.values() for name in names if body.get(name) is not None), None)
        hint = f"'{other}' belongs to another endpoint than {context.endpoint}." if other else ""
        yield missing(f"body.{fields[0]}", number, hint)
    elif fields == ("messages",) and body["messages"] == []:
        yield missing("body.messages", number, "The array is empty: give at least one message.")
    harmful = [*field_errors(body, number), *media_errors(body, number)]
    yield from harmful
    images = [(place, image["file_id"]) for place, image in file_images(body)]
    if len(images) > MAX_FILES:
        yield too_many_files(len(images), number)
    elif images:
        context.images[number] = images
    name = body.get("model")
    if name is None:
        yield missing("body.model", number)
        return
    if not isinstance(name, str) or not name:
        yield wrong_type("body.model", "a string that is not empty", name, number)
        return
    if context.models is not None and name not in context.models:
        message = f"The model does not exist. {context.model_hint(name)}"
        yield InputError(code="model_not_found", message=message, param="body.model", line=number)
        return
    if context.model_id is None:
        context.model_id = name
    elif context.model_id != name:
        yield InputError(
            code="model_mismatch",
            message="This line names another model than earlier ones. A batch has one model: create a batch for each.",
            param="body.model",
            line=number,
        )
    if context.models is None:
        return
    model = context.models[name]
    if context.endpoint not in model.endpoints:
        message = f"The model '{model.id}' does not offer {context.endpoint}. It offers: {', '.join(model.endpoints)}."
        yield InputError(message=message, param="body.model", line=number)
    if size_bytes > model.limits.max_line_bytes:
        yield too_long(number, model.limits.max_line_bytes)
    for problem in unsupported_fields(model.spec.engine, context.endpoint, body):
        if problem.param == "stream" and body.get("stream"):
            continue  # reported above: no engine streams
        if any(error.param == f"body.{problem.param}" for error in harmful):
            continue  # reported above: no engine gets it
        if _FIELD_PATH.fullmatch(problem.param):
            yield InputError(message=problem.message, param=f"body.{problem.param}", line=number)
        else:
            # The name of an unknown field can be anything, even a prompt.
            message = (
                f"The {model.spec.engine} engine, which runs this model, does not support one of the fields. Its name "
                "is not a usual field name. Remove it."
            )
            yield InputError(message=message, param="body", line=number)
