"""Reads the lines of an input file one after the other and keeps what must be known of all of them."""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Final

import orjson

from ray_job.contract.input_lines import line_blocks
from ray_job.contract.lanes import lane_problems
from service.input_file.errors import ErrorList, InputError, invalid
from service.input_file.file_format import binary_format_error, layout_error
from service.input_file.json_errors import MIN_DEEP_BYTES, is_flat, is_too_deep, json_error, too_deep
from service.input_file.requests import (
    INPUT_FIELDS,
    MAX_KEPT_CHARACTERS,
    LineContext,
    embedding_inputs,
    request_errors,
    too_long,
)
from service.model_catalogue import MAX_REQUESTS, CatalogueModel

MAX_EMBEDDING_INPUTS: Final = 50_000
_EMBEDDINGS: Final = "/v1/embeddings"
_ARRAY_HINT: Final = "Write each of its elements on a line of its own, without the array around them."


@dataclass(frozen=True, slots=True, kw_only=True)
class InputFacts:
    """What an input file holds.

    Attributes:
        total: its requests.
        model: the model of its first request that names one from the catalogue.
        errors: the first 1,000 errors: those of the file as a whole, then those of its lines in order.
        error_count: all errors.
    """

    total: int
    model: str | None
    errors: tuple[InputError, ...]
    error_count: int


@dataclass(slots=True, kw_only=True)
class _Reading:
    """What is known so far while a file is read.

    Attributes:
        total: lines that are not blank.
        has_objects: whether any of them is a JSON object.
        first_line: the first of them.
    """

    context: LineContext
    max_requests: int
    total: int = 0
    embedding_inputs: int = 0
    has_objects: bool = False
    first_line: bytes = b""
    errors: ErrorList = field(default_factory=ErrorList)


def read_input_file(
    chunks: Iterable[bytes],
    *,
    endpoint: str,
    models: Mapping[str, CatalogueModel] | None,
    max_requests: int = MAX_REQUESTS,
) -> InputFacts:
    """Reads an input file to its end and tells every error of every line.

    Of a key that stands twice in an object the last one counts, as for the engine.

    Args:
        chunks: the file's content.
        endpoint: the batch's endpoint; each line must name it.
        models: the model catalogue, by id; None where it is not known: any model is taken, at the default limits.
        max_requests: the most requests a batch may have; the model's own limit counts too. Lines beyond are
            counted, not read.
    """
    context = LineContext(endpoint=endpoint, models=models)
    reading = _Reading(context=context, max_requests=max_requests)
    for first, block in line_blocks(chunks, max_line_bytes=context.max_line_bytes):
        if first == 1 and (problem := binary_format_error(block[0] or b"")):
            reading.errors.add([problem])
            break
        _read_block(reading, first, block)
    else:
        reading.errors.add(_file_errors(reading))
    return InputFacts(
        total=reading.total, model=context.model_id, errors=reading.errors.listed(), error_count=reading.errors.count
    )


def _read_block(reading: _Reading, first: int, block: list[bytes | None]) -> None:
    if reading.total >= reading.max_requests:
        reading.total += sum(content is None or bool(content.strip()) for content in block)
        return
    for number, content in _doubtful_lines(reading, first, block):
        reading.total += 1
        if reading.total == 1:
            reading.first_line = content or b""
        if reading.total <= reading.max_requests:
            reading.errors.add(_line_errors(reading, number, content))


def _doubtful_lines(reading: _Reading, first: int, block: list[bytes | None]) -> Iterator[tuple[int, bytes | None]]:
    """The lines that must be looked at in full; blank ones are none.

    Those that plainly have no error, most of most files, are taken here. What is left over may be good all the same,
    e.g. all lines before the model of the file is known; what is taken must have no error. Everything stands in one
    loop because a call for each line costs as much as a check.
    """
    context, loads = reading.context, orjson.loads
    endpoint, custom_ids, input_field = context.endpoint, context.custom_ids, INPUT_FIELDS[context.endpoint][0]
    model_id, lane, longest = context.good_line_facts
    good, room = 0, reading.max_requests - reading.total
    content: Any  # None, which a line that is too long is here, is no JSON either
    for number, content in enumerate(block, first):
        if content is not None and not content.strip():
            continue
        try:
            request = loads(content)
            custom_id, body = request["custom_id"], request["body"]
            if (
                request["method"] == "POST"
                and request["url"] == endpoint
                and body["model"] == model_id is not None
                and body[input_field]
                and not body.get("stream")
                and type(custom_id) is str
                and 0 < len(custom_id) <= MAX_KEPT_CHARACTERS
                and custom_id not in custom_ids
                and "\0" not in custom_id
                and (size := len(content)) <= longest
                and (size < MIN_DEEP_BYTES or is_flat(request) or not is_too_deep(content))
                and not (lane == "processor" and any(lane_problems(lane, endpoint, body)))
                and good < room
            ):
                custom_ids.add(custom_id)
                good += 1
                if endpoint == _EMBEDDINGS:
                    reading.embedding_inputs += embedding_inputs(body["input"])
                continue
        except (KeyError, TypeError, ValueError):
            pass  # the full look tells what it is
        reading.total += good
        yield number, content
        good, room = 0, reading.max_requests - reading.total
        if model_id is None:
            model_id, lane, longest = context.good_line_facts
    reading.total += good


def _line_errors(reading: _Reading, number: int, content: bytes | None) -> Iterator[InputError]:
    if content is None:
        yield too_long(number, reading.context.max_line_bytes)
        return
    try:
        request: Any = orjson.loads(content)
    except orjson.JSONDecodeError as error:
        yield json_error(content, error, number)
        return
    if is_too_deep(content):
        yield too_deep(number)
    if not isinstance(request, dict):
        what = f"is a JSON array. {_ARRAY_HINT}" if isinstance(request, list) else "is not a JSON object."
        message = f"This line {what} Each line must be an object with custom_id, method, url and body."
        yield InputError(code="invalid_json_line", message=message, line=number)
        return
    reading.has_objects = True
    yield from request_errors(reading.context, request, number, len(content))
    body = request.get("body")
    if reading.context.endpoint == _EMBEDDINGS and isinstance(body, dict):
        reading.embedding_inputs += embedding_inputs(body.get("input"))


def _file_errors(reading: _Reading) -> Iterator[InputError]:
    if reading.total == 0:
        yield InputError(
            code="empty_file",
            message="The input file holds no request. Write one JSON object per line, each with custom_id, method, "
            "url and body.",
        )
    elif problem := layout_error(reading.first_line, has_objects=reading.has_objects):
        yield problem
        return  # its lines are no requests to be counted
    limit = min(reading.max_requests, reading.context.model_limits.max_requests)
    if reading.total > limit:
        message = (
            f"The input file holds {reading.total:,} requests; a batch may have at most {limit:,}. "
            "Split the file into several batches."
        )
        yield invalid(None, message, None)
    if reading.embedding_inputs > MAX_EMBEDDING_INPUTS:
        message = (
            f"The requests hold {reading.embedding_inputs:,} embedding inputs in all; a batch may have at most "
            f"{MAX_EMBEDDING_INPUTS:,}. Split the file into several batches."
        )
        yield invalid("body.input", message, None)
