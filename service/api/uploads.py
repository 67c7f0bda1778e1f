"""Reads an upload: a multipart form whose file goes to disk as it comes in."""

import re
from collections.abc import AsyncGenerator, AsyncIterator
from dataclasses import dataclass
from typing import Annotated, BinaryIO, Final

from fastapi import Depends, Request
from pydantic import ValidationError
from starlette.datastructures import FormData, UploadFile
from starlette.formparsers import MultiPartException, MultiPartParser

from service.api.authentication import SubmitAccess
from service.api.error_mapping import invalid_request
from service.api.parts import PartsDependency
from service.api.schemas import UploadFields
from service.db import query
from service.errors import InvalidRequestError, TooLargeError
from service.quotas import limits_of, upload_refusal

_MIB: Final = 1 << 20
MAX_BATCH_FILE_BYTES: Final = 200 * _MIB
MAX_FILE_BYTES: Final = 512 * _MIB
BATCH_FILE_EXPIRES_AFTER_S: Final = 30 * 24 * 3600
_HEAD_BYTES: Final = 64 * 1024
# What a form may have besides its file, for a first look at the size of the file.
_FORM_BYTES: Final = 64 * 1024


@dataclass(frozen=True, slots=True, kw_only=True)
class Upload:
    """A checked upload; ``file`` is open at its start and lies on disk if it is large.

    ``expires_after_s`` is the client's own wish.
    """

    file: BinaryIO
    filename: str
    purpose: str
    expires_after_s: int | None


def jsonl_problem(head: bytes) -> str | None:
    """Why a file that starts with ``head`` is plainly no JSONL, or None. Every line is checked later."""
    if head.startswith(b"\x1f\x8b"):
        return "The file is compressed with gzip: upload it uncompressed"
    if head.startswith((b"\xff\xfe", b"\xfe\xff")):
        return "The file is in UTF-16: save it in UTF-8"
    text = head.removeprefix(b"\xef\xbb\xbf").lstrip()
    if text.startswith(b"["):
        return "The file starts with '[': write one JSON object per line, without an array around them"
    if text and not text.startswith(b"{"):
        return "The file does not start with '{': write one JSON object per line"
    return None


def plain_filename(name: str) -> str:
    """The last part of what a client calls a file: some send a whole path, of their own system or of a trap."""
    return re.split(r"[/\\]", name.replace("\0", ""))[-1] or "upload"


def expires_after_s(upload: Upload, retention_s: int) -> int:
    """How long a new file is kept.

    What the client wishes; else a batch file as long as OpenAI keeps one or as the retention says, whichever is
    shorter, and any other file as long as the retention says.
    """
    if upload.expires_after_s is not None:
        return upload.expires_after_s
    return min(BATCH_FILE_EXPIRES_AFTER_S, retention_s) if upload.purpose == "batch" else retention_s


class _FormParser(MultiPartParser):
    """Refuses a form whose body came to its end but which itself did not."""

    _is_whole = False

    def on_end(self) -> None:
        self._is_whole = True

    async def parse(self) -> FormData:
        form = await super().parse()
        if not self._is_whole:
            for file in self._files_to_close_on_error:
                file.close()
            raise MultiPartException("it breaks off before its closing boundary. Send it again.")
        return form


async def _limited(stream: AsyncIterator[bytes]) -> AsyncGenerator[bytes, None]:
    received = 0
    async for chunk in stream:
        received += len(chunk)
        # The form around the file is small.
        if received > MAX_FILE_BYTES + _MIB:
            raise TooLargeError(f"The file is larger than {MAX_FILE_BYTES // _MIB} MB.", param="file")
        yield chunk


def _fields(form: FormData) -> UploadFields:
    try:
        return UploadFields.model_validate({name: value for name, value in form.items() if name != "file"})
    except ValidationError as error:
        raise invalid_request(error.errors()[0]) from None


def _checked(form: FormData) -> Upload:
    file = form.get("file")
    if not isinstance(file, UploadFile):
        raise InvalidRequestError(
            "Missing required parameter: 'file'. Send it as a file in a multipart form.",
            param="file",
            code="missing_required_parameter",
        )
    fields = _fields(form)
    for one, other in (("anchor", "seconds"), ("seconds", "anchor")):
        if f"expires_after[{one}]" in form and f"expires_after[{other}]" not in form:
            name = f"expires_after[{other}]"
            raise InvalidRequestError(
                f"Missing required parameter: '{name}'.", param=name, code="missing_required_parameter"
            )
    if fields.purpose == "batch":
        _check_batch_file(file.file, file.size or 0)
    return Upload(
        file=file.file,
        filename=plain_filename(file.filename or ""),
        purpose=fields.purpose,
        expires_after_s=fields.expires_after_s,
    )


def _check_batch_file(file: BinaryIO, size_bytes: int) -> None:
    if size_bytes > MAX_BATCH_FILE_BYTES:
        raise TooLargeError(
            f"The file has {size_bytes:,} bytes; a file of purpose batch may have at most "
            f"{MAX_BATCH_FILE_BYTES // _MIB} MB ({MAX_BATCH_FILE_BYTES:,} bytes). Split it into several batches.",
            param="file",
        )
    problem = jsonl_problem(file.read(_HEAD_BYTES))
    file.seek(0)
    if problem:
        raise InvalidRequestError(
            f"Invalid file format for Batch API. Must be .jsonl. {problem}.", param="file", code="invalid_file_format"
        )


def _room_for_upload(request: Request, access: SubmitAccess, parts: PartsDependency) -> None:
    """Refuses an upload that its project has no room for, as far as Content-Length tells, before the body is read."""
    length = request.headers.get("content-length", "")
    if not (length.isascii() and length.isdecimal()):
        return
    with parts.pool.connection() as connection:
        settings = connection.execute(query("project_settings"), {"id": access.project.id}).fetchone()
    assert settings is not None  # noqa: S101 - projects are never deleted
    size_bytes = max(0, int(length) - _FORM_BYTES)
    if refusal := upload_refusal(limits_of(settings), settings["stored_bytes"] or 0, size_bytes):
        raise refusal


async def _parsed_upload(request: Request, _room: Annotated[None, Depends(_room_for_upload)]) -> AsyncIterator[Upload]:
    """The form of a request whose API key is known to be good. Its file is closed after the answer."""
    if not request.headers.get("content-type", "").lower().startswith("multipart/form-data"):
        raise InvalidRequestError("An upload must be a multipart form (Content-Type: multipart/form-data).")
    form = await _FormParser(request.headers, _limited(request.stream()), max_files=1, max_fields=20).parse()
    try:
        yield _checked(form)
    finally:
        await form.close()


UploadDependency = Annotated[Upload, Depends(_parsed_upload)]
