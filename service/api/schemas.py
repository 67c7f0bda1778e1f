"""Requests and answers of the API, in the shape of OpenAI's API reference.

Source: https://platform.openai.com/docs/api-reference/files, …/batch and …/models.

To add a field or a state: states are ``service.transitions.BatchStatus``; the columns of a batch are
``service.db.rows.BatchRow``, and ``BatchObject.from_row`` turns them into the answer.
"""

from collections.abc import Sequence
from datetime import datetime
from typing import Annotated, Any, Final, Generic, Literal, Self, TypeVar

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, StrictInt, StringConstraints
from pydantic_core import PydanticCustomError

from service.db.rows import BatchRow, FileRow
from service.model_catalogue import Endpoint
from service.transitions import FINAL, BatchStatus

T = TypeVar("T")

MIN_EXPIRY_S: Final = 3_600
MAX_EXPIRY_S: Final = 2_592_000
# The cursor for a listing of the newest first: above every ``seq``.
NEWEST: Final = (1 << 63) - 1

FilePurpose = Literal["batch", "assistants", "evals", "fine-tune", "user_data", "vision"]


def _without_nul(text: str) -> str:
    if "\0" in text:
        raise PydanticCustomError("nul", "a NUL character is not allowed")
    return text


def unix_seconds(moment: datetime | None) -> int | None:
    """Return a time in whole Unix seconds."""
    return None if moment is None else int(moment.timestamp())


# Postgres rejects NUL in text and jsonb.
Text = Annotated[str, AfterValidator(_without_nul)]
ExpirySeconds = Field(ge=MIN_EXPIRY_S, le=MAX_EXPIRY_S)
MetadataKey = Annotated[str, StringConstraints(max_length=64), AfterValidator(_without_nul)]
MetadataValue = Annotated[str, StringConstraints(max_length=512), AfterValidator(_without_nul)]


class ExpiresAfter(BaseModel):
    """When a batch's output and error files expire: seconds after their creation."""

    model_config = ConfigDict(extra="forbid")

    anchor: Literal["created_at"]
    seconds: Annotated[StrictInt, ExpirySeconds]


class BatchOptions(BaseModel):
    """cloister's options of a new batch."""

    model_config = ConfigDict(extra="forbid", use_attribute_docstrings=True)

    priority: Annotated[int, Field(ge=-100, le=100, strict=True)] = 0
    """Of the batches of a project, those with the highest priority are launched first, then the oldest."""


class BatchRequest(BaseModel):
    """The body of ``POST /v1/batches``."""

    model_config = ConfigDict(extra="forbid", use_attribute_docstrings=True)

    input_file_id: Annotated[Text, Field(min_length=1)]
    """The id of a file with purpose `batch`."""
    endpoint: Endpoint
    """The endpoint of every request in the file."""
    completion_window: Literal["24h"]
    """Only `24h`: after that, requests without an answer expire."""
    metadata: Annotated[dict[MetadataKey, MetadataValue] | None, Field(max_length=16)] = None
    """At most 16 pairs; keys of at most 64 characters, values of at most 512."""
    output_expires_after: ExpiresAfter | None = None
    """When its output and error files expire: at the latest, and by default, after the project's retention."""
    x_cloister: BatchOptions | None = None
    """What cloister adds to OpenAI's request."""


class Answer(BaseModel):
    """Base of all answers. An answer never omits a field, so the schema requires all of them."""

    model_config = ConfigDict(use_attribute_docstrings=True, json_schema_serialization_defaults_required=True)


class ErrorDetails(Answer):
    """The content of OpenAI's error envelope."""

    model_config = ConfigDict(extra="forbid")

    message: str
    """What is wrong, where, and what to do."""
    type: Literal["invalid_request_error", "rate_limit_error", "insufficient_quota", "server_error"]
    """The kind of error."""
    param: str | None
    """The parameter that is wrong."""
    code: str | None
    """A code for programs, e.g. `invalid_api_key`."""


class Error(Answer):
    """OpenAI's error envelope."""

    error: ErrorDetails
    """The error."""


class Page(Answer, Generic[T]):
    """One page of a listing."""

    object: Literal["list"] = "list"
    data: list[T]
    first_id: str | None
    last_id: str | None
    has_more: bool

    @classmethod
    def of(cls, objects: Sequence[Any], *, limit: int) -> Self:
        """Return the page of the first ``limit`` objects. One object more than that means that another page follows."""
        data = list(objects[:limit])
        return cls(
            data=data,
            first_id=data[0].id if data else None,
            last_id=data[-1].id if data else None,
            # A page with limit 0 has no last object to continue from.
            has_more=0 < limit < len(objects),
        )


class FileObject(Answer):
    """OpenAI's File object."""

    id: str
    """The id of the file."""
    object: Literal["file"] = "file"
    """Always `file`."""
    bytes: int
    """The size in bytes."""
    created_at: int
    """When the file was created, in Unix seconds."""
    expires_at: int | None
    """When the file is deleted, in Unix seconds; null for never."""
    filename: str
    """The name given at upload."""
    purpose: str
    """The purpose given at upload; `batch_output` for output and error files."""
    status: Literal["processed"] = "processed"
    """Always `processed`."""
    status_details: None = None
    """Always null."""

    @classmethod
    def from_row(cls, row: FileRow) -> Self:
        """Return a stored file as clients see it."""
        return cls(
            id=row.id,
            bytes=row.size_bytes,
            created_at=int(row.created_at.timestamp()),
            expires_at=unix_seconds(row.expires_at),
            filename=row.filename,
            purpose=row.purpose,
        )


class DeletedFile(Answer):
    """The answer to the deletion of a file."""

    id: str
    object: Literal["file"] = "file"
    deleted: Literal[True] = True


class BatchErrorItem(Answer):
    """One reason why a batch failed. ``line`` counts from 1."""

    code: str
    message: str
    param: str | None
    line: int | None


class BatchErrors(Answer):
    """The reasons why a batch failed."""

    object: Literal["list"] = "list"
    data: list[BatchErrorItem]


class RequestCounts(Answer):
    """Requests of a batch, by outcome."""

    total: int
    completed: int
    failed: int


class InputTokensDetails(Answer):
    """Input tokens that the engine found in its prefix cache."""

    cached_tokens: int


class OutputTokensDetails(Answer):
    """Output tokens that were used for reasoning."""

    reasoning_tokens: int


class BatchUsage(Answer):
    """Tokens that a batch used."""

    input_tokens: int
    input_tokens_details: InputTokensDetails
    output_tokens: int
    output_tokens_details: OutputTokensDetails
    total_tokens: int


class BatchObject(Answer):
    """OpenAI's Batch object. Times are Unix seconds."""

    id: str
    """The id of the batch."""
    object: Literal["batch"] = "batch"
    """Always `batch`."""
    endpoint: str
    """The endpoint of every request in the batch."""
    model: str | None
    """The model of every request in the batch; null before validation."""
    errors: BatchErrors | None
    """Why the batch failed; null unless it did."""
    input_file_id: str
    """The file with the requests."""
    completion_window: str
    """How long the batch may take."""
    status: BatchStatus
    """The state of the batch."""
    output_file_id: str | None
    """The file with the answers; null before the end, or if there are none."""
    error_file_id: str | None
    """The file with the requests that have no answer; null before the end, or if there are none."""
    created_at: int
    """When the batch was created, in Unix seconds."""
    in_progress_at: int | None
    """When the input was accepted, in Unix seconds."""
    expires_at: int | None
    """The deadline, in Unix seconds."""
    finalizing_at: int | None
    """When all requests were done or the deadline passed, in Unix seconds."""
    completed_at: int | None
    """When the batch completed, in Unix seconds."""
    failed_at: int | None
    """When the batch failed, in Unix seconds."""
    expired_at: int | None
    """When the batch expired, in Unix seconds."""
    cancelling_at: int | None
    """When a client cancelled the batch, in Unix seconds."""
    cancelled_at: int | None
    """When the cancellation finished, in Unix seconds."""
    request_counts: RequestCounts
    """The requests, by outcome."""
    usage: BatchUsage | None
    """Tokens that the batch used; null before the end."""
    metadata: dict[str, str] | None
    """The metadata given at creation."""

    @classmethod
    def from_row(cls, row: BatchRow, **extension: Any) -> Self:
        """Return a stored batch as clients see it. ``extension`` holds the fields that a subclass adds."""
        status = BatchStatus(row.status)
        errors = None
        if status is BatchStatus.FAILED:
            errors = BatchErrors(data=[BatchErrorItem.model_validate(error) for error in row.errors or ()])
        usage = None
        if status in FINAL and row.in_progress_at is not None:
            usage = BatchUsage(
                input_tokens=row.input_tokens,
                input_tokens_details=InputTokensDetails(cached_tokens=row.cached_tokens),
                output_tokens=row.output_tokens,
                output_tokens_details=OutputTokensDetails(reasoning_tokens=row.reasoning_tokens),
                total_tokens=row.input_tokens + row.output_tokens,
            )
        return cls(
            id=row.id,
            endpoint=row.endpoint,
            model=row.model,
            errors=errors,
            input_file_id=row.input_file_id,
            completion_window=row.completion_window,
            status=status,
            output_file_id=row.output_file_id,
            error_file_id=row.error_file_id,
            created_at=int(row.created_at.timestamp()),
            in_progress_at=unix_seconds(row.in_progress_at),
            expires_at=unix_seconds(row.expires_at),
            finalizing_at=unix_seconds(row.finalizing_at),
            completed_at=unix_seconds(row.completed_at),
            failed_at=unix_seconds(row.failed_at),
            expired_at=unix_seconds(row.expired_at),
            cancelling_at=unix_seconds(row.cancelling_at),
            cancelled_at=unix_seconds(row.cancelled_at),
            request_counts=RequestCounts(total=row.total, completed=row.completed, failed=row.failed),
            usage=usage,
            metadata=row.metadata,
            **extension,
        )


class ModelObject(Answer):
    """OpenAI's Model object."""

    id: str
    object: Literal["model"] = "model"
    created: int
    owned_by: str = "cloister"


class ModelList(Answer):
    """All models; OpenAI does not paginate them."""

    object: Literal["list"] = "list"
    data: list[ModelObject]
