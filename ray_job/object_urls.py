"""Reads and writes objects by URLs: presigned ones of S3, or ``file:///…`` for a directory.

A presigned URL is a credential, so errors and logs name the object without the query of its URL.
"""

import asyncio
import os
import secrets
import time
from contextlib import suppress
from pathlib import Path
from typing import Final
from urllib.parse import unquote, urlsplit

import aiohttp
from yarl import URL

from ray_job.errors import ObjectError, ObjectMissingError, UrlRefusedError

FIRST_PAUSE_S: Final = 0.5
LAST_PAUSE_S: Final = 15.0
RETRY_FOR_S: Final = 300.0
"""A store that is away for longer ends the job."""
ATTEMPT_TIMEOUT_S: Final = 120.0
_BAD_REQUEST: Final = 400
_FORBIDDEN: Final = 403
# The latter is the answer to a range that begins after the end.
_MISSING: Final = frozenset({404, 416})
_SERVER_ERROR: Final = 500
# S3 asks to slow down with the latter.
_RETRIED: Final = frozenset({408, 429})


async def read_range(session: aiohttp.ClientSession, url: str, start: int, end: int) -> bytes:
    """Read a range of an object.

    Args:
        session: the HTTP client.
        url: the object.
        start: the first byte.
        end: the byte after the last one.

    Raises:
        UrlRefusedError: the store refuses the URL.
        ObjectMissingError: the object does not exist, or ends before the range does.
        ObjectError: the store is away for several minutes.
    """
    if url.startswith("file:"):
        data = await asyncio.to_thread(_read_file, url, start, end)
    else:
        data = await _request(session, "GET", url, headers={"range": f"bytes={start}-{end - 1}"})
    if len(data) != end - start:
        raise ObjectMissingError(f"{_name(url)} returned {len(data)} bytes instead of bytes {start} to {end}")
    return data


async def put_object(session: aiohttp.ClientSession, url: str, data: bytes) -> None:
    """Write an object, completely or not at all.

    Raises:
        UrlRefusedError: the store refuses the URL.
        ObjectError: the store is away for several minutes.
    """
    if url.startswith("file:"):
        await asyncio.to_thread(_write_file, url, data)
    else:
        await _request(session, "PUT", url, data=data)


async def _request(
    session: aiohttp.ClientSession, method: str, url: str, *, headers: dict[str, str] | None = None, data: bytes = b""
) -> bytes:
    pause_s, deadline = FIRST_PAUSE_S, time.monotonic() + RETRY_FOR_S
    timeout = aiohttp.ClientTimeout(total=ATTEMPT_TIMEOUT_S)
    while True:
        try:
            # The signature covers the URL as it is written.
            async with session.request(
                method, URL(url, encoded=True), headers=headers, data=data or None, timeout=timeout
            ) as response:
                body, status = await response.read(), response.status
            failure = f"status {status}"
        except (aiohttp.ClientError, OSError) as error:
            body, status, failure = b"", _SERVER_ERROR, type(error).__name__
        if status < _BAD_REQUEST:
            return body
        if status == _FORBIDDEN:
            raise UrlRefusedError(f"the object store refuses {method} of {_name(url)} with {failure}")
        if status in _MISSING:
            raise ObjectMissingError(f"the object store answered {method} of {_name(url)} with {failure}")
        if status < _SERVER_ERROR and status not in _RETRIED:
            raise ObjectError(f"the object store answered {method} of {_name(url)} with {failure}")
        if time.monotonic() + pause_s > deadline:
            raise ObjectError(
                f"the object store did not answer {method} of {_name(url)} for {RETRY_FOR_S:.0f} s ({failure}); see "
                "that it runs and that pods of jobs reach it"
            )
        await asyncio.sleep(pause_s)
        pause_s = min(2 * pause_s, LAST_PAUSE_S)


def _path(url: str) -> Path:
    return Path(unquote(urlsplit(url).path))


def _name(url: str) -> str:
    """Return an URL without its query."""
    return url.partition("?")[0]


def _read_file(url: str, start: int, end: int) -> bytes:
    try:
        with _path(url).open("rb") as file:
            file.seek(start)
            return file.read(end - start)
    except FileNotFoundError:
        raise ObjectMissingError(f"{_name(url)} does not exist") from None
    except OSError as error:
        raise ObjectError(f"{_name(url)} is unreadable: {type(error).__name__}") from None


def _write_file(url: str, data: bytes) -> None:
    path = _path(url)
    # A directory shows unfinished files. Readers skip names that begin with a dot.
    temporary = path.with_name(f".{secrets.token_hex(8)}")
    try:
        # mkdir applies its mode to the last directory only.
        for parent in reversed((path.parent, *path.parent.parents)):
            with suppress(FileExistsError):
                parent.mkdir(mode=0o700)
        descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        with os.fdopen(descriptor, "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        temporary.rename(path)
        directory = os.open(path.parent, os.O_RDONLY)
        try:
            os.fsync(directory)
        finally:
            os.close(directory)
    except OSError as error:
        with suppress(OSError):
            temporary.unlink()
        raise ObjectError(
            f"{_name(url)} cannot be written: {error.strerror}; check the directory's space and permissions"
        ) from None
