"""Parsing of an upload: a multipart form whose file is written to disk as it arrives."""

from collections.abc import AsyncGenerator, AsyncIterator
from typing import Annotated, Final, Literal, get_args

from fastapi import Depends, Request
from pydantic import BaseModel, ConfigDict, Field, ValidationError
from starlette.datastructures import FormData, UploadFile
from starlette.formparsers import MultiPartException, MultiPartParser

from ray_job.contract.media import HEAD_BYTES, image_type
from ray_job.contract.media import MAX_FILE_BYTES as MAX_IMAGE_BYTES
from service.api.dependencies import BackendsDependency, SubmitAccess
from service.api.errors import invalid_request
from service.api.schemas import MAX_EXPIRY_S, MIN_EXPIRY_S, ExpirySeconds, FilePurpose
from service.api.transfers import Transfers, full_disk_reported
from service.db.rows import fetch_one
from service.errors import InvalidRequestError
from service.quotas import ProjectSettings, upload_refusal

_MIB: Final = 1 << 20
MAX_BATCH_FILE_BYTES: Final = 200 * _MIB
MAX_FILE_BYTES: Final = 512 * _MIB
_HEAD_BYTES: Final = 64 * 1024
# What a form may hold besides its file, for an early check of the file's size.
_FORM_BYTES: Final = 64 * 1024
_MAX_LENGTH_DIGITS: Final = 20

UPLOAD_BODY: Final = {
    "required": True,
    "content": {
        "multipart/form-data": {
            "schema": {
                "type": "object",
                "required": ["file", "purpose"],
                "properties": {
                    "file": {
                        "type": "string",
                        "contentMediaType": "application/octet-stream",
                        "description": "The content. With purpose `batch`: JSON Lines in UTF-8, one request per line, "
                        "at most 200 MiB; with purpose `vision`: a PNG, JPEG, WebP or GIF image of at most 20 MiB; "
                        "otherwise at most 512 MiB.",
                    },
                    "purpose": {
                        "type": "string",
                        "enum": list(get_args(FilePurpose)),
                        "description": "`batch` for input files, `vision` for images that their lines name.",
                    },
                    "expires_after[anchor]": {
                        "type": "string",
                        "enum": ["created_at"],
                        "description": "The start of `expires_after[seconds]`. Send both fields or neither.",
                    },
                    "expires_after[seconds]": {
                        "type": "integer",
                        "minimum": MIN_EXPIRY_S,
                        "maximum": MAX_EXPIRY_S,
                        "description": "Seconds until the file is deleted, at most the project's retention. By default "
                        "a batch file is kept for 30 days or the retention, whichever is shorter.",
                    },
                },
                "dependentRequired": {
                    "expires_after[anchor]": ["expires_after[seconds]"],
                    "expires_after[seconds]": ["expires_after[anchor]"],
                },
                "additionalProperties": False,
            }
        }
    },
}


class Upload(BaseModel):
    """The form of ``POST /v1/files``. ``file`` is open at its start, and on disk if it is large."""

    model_config = ConfigDict(extra="forbid", arbitrary_types_allowed=True)

    file: UploadFile
    purpose: FilePurpose
    expires_after_anchor: Annotated[Literal["created_at"] | None, Field(alias="expires_after[anchor]")] = None
    expires_after_s: Annotated[int | None, ExpirySeconds, Field(alias="expires_after[seconds]")] = None


def check_batch_file(file: UploadFile) -> None:
    """Check the size and the beginning of a file with purpose ``batch``. Validation checks every line later.

    Raises:
        InvalidRequestError: the file is too large, or it cannot be JSON Lines.
    """
    size_bytes = file.size or 0
    if size_bytes > MAX_BATCH_FILE_BYTES:
        raise InvalidRequestError(
            f"The file has {size_bytes:,} bytes; a file with purpose batch may have at most "
            f"{MAX_BATCH_FILE_BYTES // _MIB} MB ({MAX_BATCH_FILE_BYTES:,} bytes). Split it into several batches.",
            status_code=413,
            param="file",
        )
    head = file.file.read(_HEAD_BYTES)
    file.file.seek(0)
    text = head.removeprefix(b"\xef\xbb\xbf").lstrip()
    if head.startswith(b"\x1f\x8b"):
        problem = "The file is compressed with gzip: upload it uncompressed"
    elif head.startswith((b"\xff\xfe", b"\xfe\xff")):
        problem = "The file is in UTF-16: save it in UTF-8"
    elif text.startswith(b"["):
        problem = "The file starts with '[': write one JSON object per line, without an array around them"
    elif text and not text.startswith(b"{"):
        problem = "The file does not start with '{': write one JSON object per line"
    else:
        return
    raise InvalidRequestError(
        f"Invalid file format for Batch API. Must be .jsonl. {problem}.", param="file", code="invalid_file_format"
    )


def check_image_file(file: UploadFile) -> None:
    """Check the size and the type of a file with purpose ``vision``.

    Raises:
        InvalidRequestError: the file is too large, or it is no image that lines of a batch may name.
    """
    size_bytes = file.size or 0
    if size_bytes > MAX_IMAGE_BYTES:
        raise InvalidRequestError(
            f"The file has {size_bytes:,} bytes; a file with purpose vision may have at most "
            f"{MAX_IMAGE_BYTES // _MIB} MB ({MAX_IMAGE_BYTES:,} bytes). Use a smaller image.",
            status_code=413,
            param="file",
        )
    head = file.file.read(HEAD_BYTES)
    file.file.seek(0)
    if image_type(head) is None:
        raise InvalidRequestError(
            "A file with purpose vision must be a PNG, JPEG, WebP or GIF image. Convert it to one of these formats.",
            param="file",
            code="invalid_file_format",
        )


class _FormParser(MultiPartParser):
    """A parser that also refuses a form without its closing boundary."""

    _is_complete = False

    def on_end(self) -> None:
        self._is_complete = True

    async def parse(self) -> FormData:
        form = await super().parse()
        if not self._is_complete:
            for file in self._files_to_close_on_error:
                file.close()
            raise MultiPartException("it ends before its closing boundary. Send it again.")
        return form


def _declared_bytes(request: Request) -> int:
    """Return the length of the body that the request declares; 0 if it declares none."""
    length = request.headers.get("content-length", "")
    # int() refuses numbers with thousands of digits.
    return int(length) if length.isascii() and length.isdecimal() and len(length) < _MAX_LENGTH_DIGITS else 0


def check_room(request: Request, access: SubmitAccess, backends: BackendsDependency) -> None:
    """Refuse an upload whose Content-Length already exceeds the project's limit, before its body is read.

    Raises:
        QuotaError: the project's limit leaves no room for the file.
    """
    length = _declared_bytes(request)
    if not length:
        return
    with backends.pool.connection() as connection:
        settings = fetch_one(connection, ProjectSettings, "project_settings", {"id": access.project.id})
    size_bytes = max(0, length - _FORM_BYTES)
    if refusal := upload_refusal(settings, settings.stored_bytes or 0, size_bytes):
        raise refusal


async def parsed_upload(
    request: Request, access: SubmitAccess, _room: Annotated[None, Depends(check_room)]
) -> AsyncIterator[Upload]:
    """Parse and check the form of an authenticated request, and close its file after the answer.

    Raises:
        InvalidRequestError: the form or its file is invalid.
        RateLimitError: the disk has no room for the file, or the key has too many large uploads.
    """
    if not request.headers.get("content-type", "").lower().startswith("multipart/form-data"):
        raise InvalidRequestError("An upload must be a multipart form (Content-Type: multipart/form-data).")

    transfers: Transfers = request.app.state.transfers
    with transfers.begin(access.key_id, expected_bytes=_declared_bytes(request)) as transfer:

        async def limited_stream() -> AsyncGenerator[bytes, None]:
            received = 0
            async for chunk in request.stream():
                received += len(chunk)
                transfer.claim(len(chunk))
                # The form around the file is small.
                if received > MAX_FILE_BYTES + _MIB:
                    raise InvalidRequestError(
                        f"The file is larger than {MAX_FILE_BYTES // _MIB} MB.", status_code=413, param="file"
                    )
                yield chunk

        with full_disk_reported():
            form = await _FormParser(request.headers, limited_stream(), max_files=1, max_fields=20).parse()
        try:
            file = form.get("file")
            if not isinstance(file, UploadFile):
                raise InvalidRequestError(
                    "Missing required parameter: 'file'. Send it as a file in a multipart form.",
                    param="file",
                    code="missing_required_parameter",
                )
            try:
                upload = Upload.model_validate(dict(form))
            except ValidationError as error:
                raise invalid_request(error.errors()[0]) from None
            for one, other in (("anchor", "seconds"), ("seconds", "anchor")):
                if f"expires_after[{one}]" in form and f"expires_after[{other}]" not in form:
                    name = f"expires_after[{other}]"
                    raise InvalidRequestError(
                        f"Missing required parameter: '{name}'.", param=name, code="missing_required_parameter"
                    )
            if upload.purpose == "batch":
                check_batch_file(file)
            elif upload.purpose == "vision":
                check_image_file(file)
            yield upload
        finally:
            await form.close()


UploadDependency = Annotated[Upload, Depends(parsed_upload)]
