"""Reads a batch's input file as a stream and tells all that is wrong with it. Pure; memory does not grow with it.

The error codes are OpenAI's: https://platform.openai.com/docs/guides/batch and what its API was seen to answer.
Line numbers are physical and count from 1; a blank line has a number and is no request.
"""

import difflib
import hashlib
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Final

import orjson

from ray_job.contract.input_lines import Line, split_lines
from ray_job.contract.lanes import lane_problems
from service.model_catalogue import CatalogueModel

MAX_LISTED_ERRORS: Final = 1_000
MAX_EMBEDDING_INPUTS: Final = 50_000
_EMBEDDINGS: Final = "/v1/embeddings"


@dataclass(frozen=True, slots=True, kw_only=True)
class InputError:
    """One thing that is wrong. ``line`` is None where it is the file as a whole."""

    code: str
    message: str
    param: str | None = None
    line: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class InputFacts:
    """What an input file holds.

    Attributes:
        total: its requests.
        model: the model of its first request that names one from the catalogue.
        errors: the first 1,000 errors in the order of the file.
        error_count: all errors.
    """

    total: int
    model: str | None
    errors: tuple[InputError, ...]
    error_count: int


@dataclass(slots=True, kw_only=True)
class _Reading:
    """What is known so far while a file is read. Custom ids are kept as 16-byte digests."""

    endpoint: str
    models: Mapping[str, CatalogueModel]
    total: int = 0
    model: str | None = None
    embedding_inputs: int = 0
    error_count: int = 0
    errors: list[InputError] = field(default_factory=list)
    custom_ids: set[bytes] = field(default_factory=set)

    def add(self, errors: Iterable[InputError]) -> None:
        for error in errors:
            self.error_count += 1
            if len(self.errors) < MAX_LISTED_ERRORS:
                self.errors.append(error)


def read_input_file(
    chunks: Iterable[bytes], *, endpoint: str, models: Mapping[str, CatalogueModel], max_requests: int = 50_000
) -> InputFacts:
    """Reads an input file to its end and tells every error of every line.

    Args:
        chunks: the file's content.
        endpoint: the batch's endpoint; each line must name it.
        models: the model catalogue, by id.
        max_requests: the most requests a batch may have; the model's own limit counts too. Lines beyond are
            counted, not read.
    """
    reading = _Reading(endpoint=endpoint, models=models)
    longest = max((model.limits.max_line_bytes for model in models.values()), default=0)
    limit = max_requests
    for line in split_lines(chunks, max_line_bytes=longest):
        if line.is_blank:
            continue
        reading.total += 1
        if reading.total > limit:
            continue
        reading.add(_line_errors(reading, line))
        if reading.model is not None:
            limit = min(max_requests, models[reading.model].limits.max_requests)
    reading.add(_file_errors(reading, limit))
    return InputFacts(
        total=reading.total, model=reading.model, errors=tuple(reading.errors), error_count=reading.error_count
    )


def _file_errors(reading: _Reading, limit: int) -> Iterator[InputError]:
    if reading.total == 0:
        yield InputError(
            code="empty_file",
            message="The input file holds no request. Write one JSON object per line, each with custom_id, method, "
            "url and body.",
        )
    if reading.total > limit:
        yield InputError(
            code="invalid_request",
            message=f"The input file holds {reading.total:,} requests; a batch may have at most {limit:,}. "
            "Split the file into several batches.",
        )
    if reading.embedding_inputs > MAX_EMBEDDING_INPUTS:
        yield InputError(
            code="invalid_request",
            param="body.input",
            message=f"The requests hold {reading.embedding_inputs:,} embedding inputs in all; a batch may have at most "
            f"{MAX_EMBEDDING_INPUTS:,}. Split the file into several batches.",
        )


def _line_errors(reading: _Reading, line: Line) -> Iterator[InputError]:
    number = line.number
    if line.content is None:
        longest = max((model.limits.max_line_bytes for model in reading.models.values()), default=0)
        yield _too_long(number, longest)
        return
    try:
        request = orjson.loads(line.content)
    except orjson.JSONDecodeError as error:
        yield InputError(code="invalid_json_line", message=_json_message(line.content, error), line=number)
        return
    if not isinstance(request, dict):
        yield InputError(
            code="invalid_json_line",
            message="This line is not a JSON object. Each line must be an object with custom_id, method, url and body.",
            line=number,
        )
        return
    yield from _custom_id_errors(reading, request, number)
    yield from _method_and_url_errors(reading, request, number)
    yield from _body_errors(reading, request, line)


def _json_message(content: bytes, error: orjson.JSONDecodeError) -> str:
    try:
        content.decode()
    except UnicodeDecodeError as decode_error:
        return (
            f"This line is not UTF-8: byte {decode_error.start + 1} of the line cannot be read. Save the file as UTF-8."
        )
    return (
        f"This line is not parseable as valid JSON: {error.msg}, at character {error.pos + 1}. NaN and Infinity are "
        "no JSON, and a request must stand on one line."
    )


def _too_long(number: int, max_line_bytes: int) -> InputError:
    return InputError(
        code="invalid_request",
        message=f"This line is longer than {max_line_bytes:,} bytes. Shorten the request.",
        line=number,
    )


def _missing(param: str, number: int) -> InputError:
    return InputError(
        code="missing_required_parameter", message=f"Missing required parameter: '{param}'.", param=param, line=number
    )


def _wrong_type(param: str, expected: str, number: int) -> InputError:
    return InputError(
        code="invalid_request", message=f"Invalid type for '{param}': it must be {expected}.", param=param, line=number
    )


def _custom_id_errors(reading: _Reading, request: Mapping[str, Any], number: int) -> Iterator[InputError]:
    custom_id = request.get("custom_id")
    if custom_id is None:
        yield _missing("custom_id", number)
    elif not isinstance(custom_id, str) or not custom_id:
        yield _wrong_type("custom_id", "a string that is not empty", number)
    else:
        digest = hashlib.blake2b(custom_id.encode(), digest_size=16).digest()
        if digest in reading.custom_ids:
            yield InputError(
                code="duplicate_custom_id",
                message=f"The custom_id '{_shortened(custom_id)}' stands on an earlier line too. Each must be unique.",
                param="custom_id",
                line=number,
            )
        reading.custom_ids.add(digest)


def _method_and_url_errors(reading: _Reading, request: Mapping[str, Any], number: int) -> Iterator[InputError]:
    method, url = request.get("method"), request.get("url")
    if method is None:
        yield _missing("method", number)
    elif method != "POST":
        yield InputError(
            code="invalid_method",
            message=f"The method must be 'POST', not '{_shortened(method)}'.",
            param="method",
            line=number,
        )
    if url is None:
        yield _missing("url", number)
    elif url != reading.endpoint:
        yield InputError(
            code="invalid_url",
            message=f"The url '{_shortened(url)}' is not the batch's endpoint. It must be '{reading.endpoint}'.",
            param="url",
            line=number,
        )


def _body_errors(reading: _Reading, request: Mapping[str, Any], line: Line) -> Iterator[InputError]:
    number, body = line.number, request.get("body")
    if body is None:
        yield _missing("body", number)
        return
    if not isinstance(body, dict):
        yield _wrong_type("body", "an object", number)
        return
    if body.get("stream"):
        yield InputError(
            code="streaming_unsupported",
            message="A batch cannot stream. Leave out 'stream' or set it to false.",
            param="body.stream",
            line=number,
        )
    if reading.endpoint == _EMBEDDINGS:
        reading.embedding_inputs += embedding_inputs(body.get("input"))
    name = body.get("model")
    if name is None:
        yield _missing("body.model", number)
    elif not isinstance(name, str):
        yield _wrong_type("body.model", "a string", number)
    elif (model := reading.models.get(name)) is None:
        yield _model_not_found(reading, name, number)
    else:
        yield from _model_errors(reading, model, body, line)


def _model_not_found(reading: _Reading, name: str, number: int) -> InputError:
    near = difflib.get_close_matches(name, reading.models, n=1)
    hint = f"Did you mean '{near[0]}'?" if near else f"There are: {', '.join(sorted(reading.models)) or 'none'}."
    return InputError(
        code="model_not_found",
        message=f"The model '{_shortened(name)}' does not exist. {hint}",
        param="body.model",
        line=number,
    )


def _model_errors(
    reading: _Reading, model: CatalogueModel, body: Mapping[str, Any], line: Line
) -> Iterator[InputError]:
    number = line.number
    if reading.model is None:
        reading.model = model.id
    elif reading.model != model.id:
        yield InputError(
            code="model_mismatch",
            message=f"This line names the model '{model.id}', earlier ones '{reading.model}'. A batch has one model: "
            "make a batch for each.",
            param="body.model",
            line=number,
        )
    if reading.endpoint not in model.endpoints:
        yield InputError(
            code="invalid_request",
            message=f"The model '{model.id}' does not offer {reading.endpoint}. It offers: "
            f"{', '.join(model.endpoints)}.",
            param="body.model",
            line=number,
        )
    if line.content is not None and len(line.content) > model.limits.max_line_bytes:
        yield _too_long(number, model.limits.max_line_bytes)
    for problem in lane_problems(model.spec.lane, reading.endpoint, body):
        if problem.param == "stream" and body.get("stream"):
            continue  # told already: no lane streams
        yield InputError(code="invalid_request", message=problem.message, param=f"body.{problem.param}", line=number)


def embedding_inputs(value: Any) -> int:
    """How many inputs the ``input`` of an embeddings request holds: a list of token ids is one input."""
    if isinstance(value, list) and value and not isinstance(value[0], int):
        return len(value)
    return 1


def _shortened(value: Any, limit: int = 100) -> str:
    text = value if isinstance(value, str) else orjson.dumps(value).decode()
    return text if len(text) <= limit else f"{text[:limit]}…"
