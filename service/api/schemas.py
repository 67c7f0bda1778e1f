"""What clients send and get, in the shape of OpenAI's API reference.

Source: https://platform.openai.com/docs/api-reference/files, …/batch and …/models.
"""

from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Annotated, Any, Final, Generic, Literal, TypeVar

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, StrictInt, StringConstraints
from pydantic_core import PydanticCustomError

T = TypeVar("T")

MIN_EXPIRY_S: Final = 3_600
MAX_EXPIRY_S: Final = 2_592_000

Endpoint = Literal["/v1/chat/completions", "/v1/completions", "/v1/embeddings"]
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

    model_config = ConfigDict(extra="forbid")

    input_file_id: Text
    endpoint: Endpoint
    completion_window: Literal["24h"]
    metadata: Annotated[dict[MetadataKey, MetadataValue] | None, Field(max_length=16)] = None
    output_expires_after: ExpiresAfter | None = None


class UploadFields(BaseModel):
    """The form fields of ``POST /v1/files`` besides the file itself."""

    model_config = ConfigDict(extra="forbid")

    purpose: FilePurpose
    expires_after_anchor: Annotated[Literal["created_at"] | None, Field(alias="expires_after[anchor]")] = None
    expires_after_s: Annotated[int | None, ExpirySeconds, Field(alias="expires_after[seconds]")] = None


class FileObject(BaseModel):
    """OpenAI's File object."""

    id: str
    object: Literal["file"] = "file"
    bytes: int
    created_at: int
    expires_at: int | None
    filename: str
    purpose: str
    status: Literal["processed"] = "processed"
    status_details: None = None


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

    id: str
    object: Literal["batch"] = "batch"
    endpoint: str
    model: str | None
    errors: BatchErrors | None
    input_file_id: str
    completion_window: str
    status: str
    output_file_id: str | None
    error_file_id: str | None
    created_at: int
    in_progress_at: int | None
    expires_at: int | None
    finalizing_at: int | None
    completed_at: int | None
    failed_at: int | None
    expired_at: int | None
    cancelling_at: int | None
    cancelled_at: int | None
    request_counts: RequestCounts
    usage: BatchUsage | None
    metadata: dict[str, str] | None


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
