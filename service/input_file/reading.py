"""Reading of an input file line by line: which lines need a full check, and the errors of the file as a whole.

A file that is not JSONL at all gets one error, which is more useful than one for each of its lines.
"""

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

import orjson

from ray_job.contract.engine_support import unsupported_fields
from ray_job.contract.input_lines import line_blocks
from ray_job.contract.media import file_images
from service.input_file.errors import ErrorList, InputError
from service.input_file.field_limits import PLAIN_FIELDS, field_errors
from service.input_file.json_lines import MAX_DEPTH, MIN_DEEP_BYTES, is_flat, is_too_deep, json_error
from service.input_file.media import file_errors, has_file_id_form, has_only_own_media, media_errors
from service.input_file.requests import (
    INPUT_FIELDS,
    MAX_KEPT_CHARACTERS,
    LineContext,
    embedding_inputs,
    request_errors,
    too_long,
    too_many_tokens,
)
from service.model_catalogue import MAX_REQUESTS, CatalogueModel
from service.prompts import FileCount, TokenCount
from service.prompts.file_count import RANGE_MASK, SPREAD

MAX_EMBEDDING_INPUTS: Final = 50_000
_EMBEDDINGS: Final = "/v1/embeddings"
# First bytes of files in a binary format or another encoding.
_SIGNATURES: Final = {
    b"\x1f\x8b": "is compressed with gzip. Unpack it first (gunzip)",
    b"PK\x03\x04": "is a ZIP archive. Unpack it first (unzip)",
    b"PK\x05\x06": "is an empty ZIP archive",
    b"\x28\xb5\x2f\xfd": "is compressed with zstd. Unpack it first (unzstd)",
    b"BZh": "is compressed with bzip2. Unpack it first (bunzip2)",
    b"\xfd7zXZ\x00": "is compressed with xz. Unpack it first (unxz)",
    b"PAR1": "is a Parquet file. Write its rows as lines of JSON",
    b"%PDF": "is a PDF",
    b"SQLite format 3": "is a SQLite database. Write its rows as lines of JSON",
    b"\xff\xfe\x00\x00": "is in UTF-32. Save it as UTF-8",
    b"\x00\x00\xfe\xff": "is in UTF-32. Save it as UTF-8",
    b"\xff\xfe": "is in UTF-16. Save it as UTF-8",
    b"\xfe\xff": "is in UTF-16. Save it as UTF-8",
    b"{\x00": "is in UTF-16. Save it as UTF-8",
    b"\x00{": "is in UTF-16. Save it as UTF-8",
}

LineFiles = Mapping[int, Sequence[tuple[str, int]]]
"""Uploaded files that are images of lines: by line, the id and the size in bytes of each."""

# Receives the number of a line, the contents of this and the next lines (None for one that is too long), and their
# files.
LineConsumer = Callable[[int, Sequence[bytes | None], LineFiles], None]

FileFinder = Callable[[Collection[str]], Mapping[str, int]]
"""Returns the sizes in bytes of those of some files that the lines may name, by id."""


@dataclass(frozen=True, slots=True, kw_only=True)
class InputFacts:
    """Result of reading an input file.

    Attributes:
        total: the number of its requests.
        model: the model of the first request that names one from the catalogue.
        errors: the first 1,000 errors: those of the whole file, then those of its lines in order.
        error_count: the number of all errors.
        tokens: the tokens of its requests; None if nobody asked for them or they cannot be counted.
    """

    total: int
    model: str | None
    errors: tuple[InputError, ...]
    error_count: int
    tokens: TokenCount | None = None


def read_input_file(
    chunks: Iterable[bytes],
    *,
    endpoint: str,
    models: Mapping[str, CatalogueModel] | None,
    max_requests: int = MAX_REQUESTS,
    file_count: FileCount | None = None,
    on_lines: LineConsumer | None = None,
    find_files: FileFinder | None = None,
) -> InputFacts:
    """Read an input file to its end and report every error of every line.

    If a key appears twice in an object, the last one counts, as it does for the engine.

    Args:
        chunks: the file's content.
        endpoint: the batch's endpoint; each line must name it.
        models: the model catalogue, by id. None accepts any model, with the default limits.
        max_requests: the most requests that a batch may have; the model's own limit applies too. Lines beyond it are
            counted but not checked.
        file_count: counts the tokens; requests with more than their model accepts are errors then.
        on_lines: receives the lines in order, until an error is found.
        find_files: looks up the images that are uploaded files, once for each block of lines. None accepts any.
    """
    context = LineContext(endpoint=endpoint, models=models)
    file_count = file_count or FileCount(find_counter=lambda _: None, endpoint=endpoint, size_bytes=0, line_count=0)
    reader = _Reader(context=context, max_requests=max_requests, file_count=file_count, find_files=find_files)
    return reader.read(chunks, on_lines)


@dataclass(slots=True, kw_only=True)
class _Reader:
    """State of one read.

    Attributes:
        total: lines that are not blank.
        has_objects: whether any line is a JSON object.
        first_line: the first line that is not blank.
    """

    context: LineContext
    max_requests: int
    file_count: FileCount
    find_files: FileFinder | None
    total: int = 0
    embedding_inputs: int = 0
    has_objects: bool = False
    first_line: bytes = b""
    errors: ErrorList = field(default_factory=ErrorList)

    def read(self, chunks: Iterable[bytes], on_lines: LineConsumer | None) -> InputFacts:
        for first, block in line_blocks(chunks, max_line_bytes=self.context.max_line_bytes):
            if first == 1:
                start = block[0] or b""
                found = [problem for signature, problem in _SIGNATURES.items() if start.startswith(signature)]
                if found:
                    message = f"The file {found[0]}. A batch needs JSONL: one JSON object per line."
                    self.errors.add([InputError(message=message)])
                    break
            if self.total >= self.max_requests:
                self.total += sum(content is None or bool(content.strip()) for content in block)
                continue
            for number, content in self._lines_to_check(first, block):
                self.total += 1
                if self.total == 1:
                    self.first_line = content or b""
                if self.total <= self.max_requests:
                    self.errors.add(self._line_errors(number, content))
            files = self._check_files()
            if on_lines is not None and not self.errors.count:
                on_lines(first, block, files)
        else:
            self.errors.add(self._file_errors())
        return InputFacts(
            total=self.total,
            model=self.context.model_id,
            errors=self.errors.listed(),
            error_count=self.errors.count,
            tokens=None if self.errors.count else self.file_count.result(),
        )

    def _check_files(self) -> LineFiles:
        """Check the images that are uploaded files of the lines since the last call, and return those that exist."""
        lines, self.context.images = self.context.images, {}
        if self.find_files is None or not lines:
            return {}
        ids = {file_id for images in lines.values() for _, file_id in images}
        sizes = self.find_files([file_id for file_id in ids if has_file_id_form(file_id)])
        for number, images in lines.items():
            self.errors.add(file_errors(images, sizes, number))
        if self.errors.count:
            return {}
        return {number: [(file_id, sizes[file_id]) for _, file_id in images] for number, images in lines.items()}

    def _lines_to_check(self, first: int, block: list[bytes | None]) -> Iterator[tuple[int, bytes | None]]:
        """Yield the lines that need a full check; skip blank lines and accept lines that are clearly valid.

        Most lines of most files are accepted here. A line that is yielded may still be valid, for example every line
        before the file's model is known; a line that is accepted must have no error. Everything is in one loop
        because a function call per line costs as much as one of the checks.
        """
        context, loads = self.context, orjson.loads
        endpoint, custom_ids, input_field = context.endpoint, context.custom_ids, INPUT_FIELDS[context.endpoint][0]
        model_id, engine, longest = context.good_line_facts
        count, size, good_bytes = self.file_count, 0, 0
        threshold, longest_uncounted, most_tokens = count.threshold, count.longest_uncounted, count.most_tokens
        good, room = 0, self.max_requests - self.total
        content: Any  # None stands for a line that is too long; orjson rejects it like any other non-JSON
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
                    # A flat body has neither depth nor media.
                    and (
                        (is_flat(request) if size >= MIN_DEEP_BYTES else has_only_own_media(body))
                        or not (is_too_deep(content) or _names_media(body, number))
                    )
                    and not (engine == "processor" and any(unsupported_fields(engine, endpoint, body)))
                    and (PLAIN_FIELDS.issuperset(body) or not any(field_errors(body, number)))
                    and good < room
                    # Otherwise the full check counts its tokens.
                    and size <= longest_uncounted
                    and (not threshold or number * SPREAD & RANGE_MASK >= threshold)
                    and (body.get("max_completion_tokens") or body.get("max_tokens") or 0) <= most_tokens
                ):
                    custom_ids.add(custom_id)
                    good += 1
                    good_bytes += size
                    if endpoint == _EMBEDDINGS:
                        self.embedding_inputs += embedding_inputs(body["input"])
                    continue
            except (KeyError, TypeError, ValueError):
                pass  # the full check finds the reason
            self.total += good
            yield number, content
            good, room = 0, self.max_requests - self.total
            if model_id is None:
                model_id, engine, longest = context.good_line_facts
                threshold, longest_uncounted, most_tokens = count.threshold, count.longest_uncounted, count.most_tokens
        self.total += good
        count.seen_bytes += good_bytes

    def _line_errors(self, number: int, content: bytes | None) -> Iterator[InputError]:
        if content is None:
            yield too_long(number, self.context.max_line_bytes)
            return
        try:
            request: Any = orjson.loads(content)
        except orjson.JSONDecodeError as error:
            yield json_error(content, error, number)
            return
        if is_too_deep(content):
            message = f"This line nests arrays or objects more than {MAX_DEPTH} levels deep. Flatten it."
            yield InputError(message=message, line=number)
        if not isinstance(request, dict):
            array = "is a JSON array. Write each of its elements on its own line, without the array around them."
            problem = array if isinstance(request, list) else "is not a JSON object."
            message = f"This line {problem} Each line must be an object with custom_id, method, url and body."
            yield InputError(code="invalid_json_line", message=message, line=number)
            return
        self.has_objects = True
        errors = list(request_errors(self.context, request, number, len(content)))
        yield from errors
        body = request.get("body")
        if self.context.model_id is not None:
            self.file_count.set_model(self.context.model_id)
        if not errors and isinstance(body, dict):
            tokens = self.file_count.add(number, len(content), body)
            if over := self.file_count.limits(tokens, body):
                yield too_many_tokens(number, self.context, *over)
        if self.context.endpoint == _EMBEDDINGS and isinstance(body, dict):
            self.embedding_inputs += embedding_inputs(body.get("input"))

    def _file_errors(self) -> Iterator[InputError]:
        start = self.first_line.strip()
        layout = command = ""
        # A line can be an object by itself although it is the last one of an array.
        if start.startswith(b"[") and not (self.has_objects and start.endswith(b"]")):
            layout, command = "one JSON array", "jq -c '.[]'"
        elif not self.has_objects and start.startswith(b"{") and start.endswith((b",", b"{", b"[")):
            layout, command = "JSON spread over several lines (pretty-printed)", "jq -c ."
        if layout:
            message = (
                f"The file is {layout}. A batch needs JSONL: each request as one object on one line, with no array "
                f"around them and no commas between them, as `{command} FILE > FILE.jsonl` writes it."
            )
            yield InputError(code="invalid_json_line", message=message)
            return  # the lines are not requests, so their number means nothing
        if self.total == 0:
            message = (
                "The input file holds no request. Write one JSON object per line, each with custom_id, method, url and "
                "body."
            )
            yield InputError(code="empty_file", message=message)
        limit = min(self.max_requests, self.context.model_limits.max_requests)
        if self.total > limit:
            message = (
                f"The input file holds {self.total:,} requests; a batch may have at most {limit:,}. "
                "Split the file into several batches."
            )
            yield InputError(message=message)
        if self.embedding_inputs > MAX_EMBEDDING_INPUTS:
            message = (
                f"The requests hold {self.embedding_inputs:,} embedding inputs in total; a batch may have at most "
                f"{MAX_EMBEDDING_INPUTS:,}. Split the file into several batches."
            )
            yield InputError(message=message, param="body.input")


def _names_media(body: Mapping[str, Any], number: int) -> bool:
    """Return whether a body names media that it does not hold, with or without an error."""
    return not has_only_own_media(body) and (any(file_images(body)) or any(media_errors(body, number)))
