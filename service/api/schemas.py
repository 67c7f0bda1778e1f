"""What clients send and get, in the shape of OpenAI's API reference.

Source: https://platform.openai.com/docs/api-reference/files, …/batch and …/models.
"""

from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Annotated, Any, Final, Generic, Literal, TypeVar

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, StrictInt, StringConstraints
from pydantic_core import PydanticCustomError

from service.transitions import BatchStatus

T = TypeVar("T")

MIN_EXPIRY_S: Final = 3_600
MAX_EXPIRY_S: Final = 2_592_000

Endpoint = Literal["/v1/chat/completions", "/v1/completions", "/v1/embeddings"]
DeadlineRisk = Literal["low", "medium", "high"]
FilePurpose = Literal["batch", "assistants", "evals", "fine-tune", "user_data", "vision"]


def _without_nul(text: str) -> str:
    if "\0" in text:
        raise PydanticCustomError("nul", "a NUL character is not allowed")
    return text


# Postgres cannot hold a NUL in text or jsonb.
Text = Annotated[str, AfterValidator(_without_nul)]
ExpirySeconds = Field(ge=MIN_EXPIRY_S, le=MAX_EXPIRY_S)


class ExpiresAfter(BaseModel):
    """When a batch's output and error files expire: so many seconds after they were made."""

    model_config = ConfigDict(extra="forbid")

    anchor: Literal["created_at"]
    seconds: Annotated[StrictInt, ExpirySeconds]


MetadataKey = Annotated[str, StringConstraints(max_length=64), AfterValidator(_without_nul)]
MetadataValue = Annotated[str, StringConstraints(max_length=512), AfterValidator(_without_nul)]


class BatchRequest(BaseModel):
    """The body of ``POST /v1/batches``."""

    model_config = ConfigDict(extra="forbid", use_attribute_docstrings=True)

    input_file_id: Annotated[Text, Field(min_length=1)]
    """The id of a file of purpose `batch`."""
    endpoint: Endpoint
    """The endpoint of every request in the file."""
    completion_window: Literal["24h"]
    """Only `24h`: after that, requests without an answer expire."""
    metadata: Annotated[dict[MetadataKey, MetadataValue] | None, Field(max_length=16)] = None
    """At most 16 pairs; keys of at most 64 characters, values of at most 512."""
    output_expires_after: ExpiresAfter | None = None
    """When its output and error files expire; after 30 days by default, or as the retention of the project says."""


class UploadFields(BaseModel):
    """The form fields of ``POST /v1/files`` besides the file itself."""

    model_config = ConfigDict(extra="forbid")

    purpose: FilePurpose
    expires_after_anchor: Annotated[Literal["created_at"] | None, Field(alias="expires_after[anchor]")] = None
    expires_after_s: Annotated[int | None, ExpirySeconds, Field(alias="expires_after[seconds]")] = None


class FileObject(BaseModel):
    """OpenAI's File object."""

    model_config = ConfigDict(use_attribute_docstrings=True)

    id: str
    """Names the file."""
    object: Literal["file"] = "file"
    """Always `file`."""
    bytes: int
    """Its size in bytes."""
    created_at: int
    """When it was made, in Unix seconds."""
    expires_at: int | None
    """When it is deleted, in Unix seconds; null for never."""
    filename: str
    """The name that it was uploaded with."""
    purpose: str
    """What it was uploaded for; `batch_output` for output and error files."""
    status: Literal["processed"] = "processed"
    """Always `processed`."""
    status_details: None = None
    """Always null."""


class DeletedFile(BaseModel):
    """The answer to the deletion of a file."""

    id: str
    object: Literal["file"] = "file"
    deleted: Literal[True] = True


class BatchErrorItem(BaseModel):
    """One reason why a batch failed; ``line`` counts from 1."""

    code: str
    message: str
    param: str | None
    line: int | None


class BatchErrors(BaseModel):
    """Why a batch failed."""

    object: Literal["list"] = "list"
    data: list[BatchErrorItem]


class RequestCounts(BaseModel):
    """Requests of a batch, by outcome."""

    total: int
    completed: int
    failed: int


class InputTokensDetails(BaseModel):
    """Input tokens that were found in the engine's prefix cache."""

    cached_tokens: int


class OutputTokensDetails(BaseModel):
    """Output tokens that were spent on reasoning."""

    reasoning_tokens: int


class BatchUsage(BaseModel):
    """Tokens that a batch used."""

    input_tokens: int
    input_tokens_details: InputTokensDetails
    output_tokens: int
    output_tokens_details: OutputTokensDetails
    total_tokens: int


class BatchObject(BaseModel):
    """OpenAI's Batch object. Times are Unix seconds."""

    model_config = ConfigDict(use_attribute_docstrings=True)

    id: str
    """Names the batch."""
    object: Literal["batch"] = "batch"
    """Always `batch`."""
    endpoint: str
    """The endpoint of every request in it."""
    model: str | None
    """The model of every request in it, once it was validated."""
    errors: BatchErrors | None
    """Why it failed; null unless it did."""
    input_file_id: str
    """The file with its requests."""
    completion_window: str
    """How long it may take."""
    status: BatchStatus
    """Its state."""
    output_file_id: str | None
    """The file with the answers; null before the end, or when there are none."""
    error_file_id: str | None
    """The file with the requests that have no answer; null before the end, or when there are none."""
    created_at: int
    """When it was made, in Unix seconds."""
    in_progress_at: int | None
    """When its input was accepted, in Unix seconds."""
    expires_at: int | None
    """Its deadline, in Unix seconds."""
    finalizing_at: int | None
    """When all requests were done or the deadline had passed, in Unix seconds."""
    completed_at: int | None
    """When it was completed, in Unix seconds."""
    failed_at: int | None
    """When it failed, in Unix seconds."""
    expired_at: int | None
    """When it expired, in Unix seconds."""
    cancelling_at: int | None
    """When its cancellation was asked for, in Unix seconds."""
    cancelled_at: int | None
    """When it was cancelled, in Unix seconds."""
    request_counts: RequestCounts
    """Its requests, by outcome."""
    usage: BatchUsage | None
    """Tokens that it used; null before the end."""
    metadata: dict[str, str] | None
    """What it was created with."""


class Extension(BaseModel):
    """What cloister tells of one batch beyond OpenAI's object. A value that is not known is null."""

    model_config = ConfigDict(use_attribute_docstrings=True)

    queue_position: int | None
    """1 is launched next; null unless the batch waits for its job to be launched."""
    rate_rows_per_second: float | None
    """Finished requests per second, over about the last minute."""
    eta_seconds: int | None
    """Until every request has a result, at this rate."""
    estimated_completion_at: int | None
    """The same as a time, in Unix seconds."""
    deadline_risk: DeadlineRisk | None
    """Of missing `expires_at`. With a rate: `low` while the ETA takes at most half of the time that is left, `medium`
    while it fits, else `high`. Without: by the share of the completion window that is left, over a half and over a
    tenth. Null unless the batch is validating or in progress."""
    gpu_seconds: float
    """GPUs times the seconds that jobs of the batch held them."""
    enqueued_tokens: int
    """Tokens of the input, estimated, that count towards the limit of the project."""
    attempt: int
    """The number of the newest job, 0 before the first."""
    failed_attempts: int
    """Jobs that failed in a row without a new result between them."""
    last_job_message: str | None
    """Why the last job that failed did."""


class RetrievedBatch(BatchObject):
    """OpenAI's Batch object, and what cloister tells beyond it."""

    x_cloister: Extension
    """Queue, rate and prospects."""


class ModelObject(BaseModel):
    """OpenAI's Model object."""

    id: str
    object: Literal["model"] = "model"
    created: int
    owned_by: str = "cloister"


class ModelList(BaseModel):
    """All models; OpenAI does not page them."""

    object: Literal["list"] = "list"
    data: list[ModelObject]


class Page(BaseModel, Generic[T]):
    """One page of a listing."""

    object: Literal["list"] = "list"
    data: list[T]
    first_id: str | None
    last_id: str | None
    has_more: bool


def file_object(row: Mapping[str, Any]) -> FileObject:
    """A row of ``files`` as the client sees it."""
    return FileObject(
        id=row["id"],
        bytes=row["size_bytes"],
        created_at=int(row["created_at"].timestamp()),
        expires_at=_unix_seconds(row["expires_at"]),
        filename=row["filename"],
        purpose=row["purpose"],
    )


def batch_object(row: Mapping[str, Any]) -> BatchObject:
    """A row of ``batches``, with its ``batch_errors`` as a list in ``errors``, as the client sees it."""
    times: dict[str, Any] = {
        name: _unix_seconds(row[name])
        for name in (
            "in_progress_at", "expires_at", "finalizing_at", "completed_at", "failed_at", "expired_at",
            "cancelling_at", "cancelled_at",
        )
    }  # fmt: skip
    same = {name: row[name] for name in BatchObject.model_fields if name in row and not name.endswith("_at")}
    same["errors"] = None
    if row["status"] == "failed":
        same["errors"] = BatchErrors(data=[BatchErrorItem.model_validate(error) for error in row["errors"] or []])
    return BatchObject(
        **same,
        **times,
        created_at=int(row["created_at"].timestamp()),
        request_counts=RequestCounts(total=row["total"], completed=row["completed"], failed=row["failed"]),
        usage=_usage(row),
    )


def page(objects: Sequence[Any], *, limit: int) -> dict[str, Any]:
    """A page of at most ``limit`` objects, made of one object more than that if there is one."""
    shown = objects[:limit]
    return {
        "data": shown,
        "first_id": shown[0].id if shown else None,
        "last_id": shown[-1].id if shown else None,
        # A page of limit 0 has no last object to go on from.
        "has_more": 0 < limit < len(objects),
    }


def _usage(row: Mapping[str, Any]) -> BatchUsage | None:
    """Told once the batch has ended, and only if it ran."""
    if row["status"] not in {"completed", "failed", "expired", "cancelled"} or row["in_progress_at"] is None:
        return None
    return BatchUsage(
        input_tokens=row["input_tokens"],
        input_tokens_details=InputTokensDetails(cached_tokens=row["cached_tokens"]),
        output_tokens=row["output_tokens"],
        output_tokens_details=OutputTokensDetails(reasoning_tokens=row["reasoning_tokens"]),
        total_tokens=row["input_tokens"] + row["output_tokens"],
    )


def _unix_seconds(moment: datetime | None) -> int | None:
    return None if moment is None else int(moment.timestamp())
