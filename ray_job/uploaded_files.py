"""Uploaded files that rows name as images: the job reads them, so that engines get ``data:`` URLs only."""

import asyncio
import dataclasses
import json
from collections import OrderedDict
from collections.abc import Mapping
from typing import Final

import aiohttp

from ray_job.contract.leases import Lease, LeasedFile
from ray_job.contract.media import HEAD_BYTES, data_url, file_images, image_type
from ray_job.errors import ObjectMissingError
from ray_job.object_urls import read_range
from ray_job.rows import LeasedRow

CACHE_BYTES: Final = 64 << 20
READS: Final = 8
_GONE: Final = "names a file that no longer exists. Upload the image again, and send the line again."
_NO_IMAGE: Final = "names a file that is not a PNG, JPEG, WebP or GIF image. Upload such an image."


class UploadedFiles:
    """The files that were read last, as ``data:`` URLs."""

    def __init__(self) -> None:
        self._urls: OrderedDict[str, str] = OrderedDict()
        self._size_bytes = 0
        self._reads = asyncio.Semaphore(READS)

    async def resolve(self, session: aiohttp.ClientSession, lease: Lease, rows: list[LeasedRow]) -> list[LeasedRow]:
        """Return the rows of a lease with the content of the files that they name.

        A row that names a file that is gone, or that is no image, gets a refusal.

        Args:
            session: the HTTP client.
            lease: the lease.
            rows: its rows.

        Raises:
            UrlRefusedError: the store refuses the URL of a file.
            ObjectError: the store is away for several minutes.
        """
        if not lease.files:
            return rows
        # Reads that have failed leave none running.
        found = await asyncio.gather(*(self._url(session, file) for file in lease.files), return_exceptions=True)
        urls: dict[str, str | None] = {}
        for file, url in zip(lease.files, found, strict=True):
            if isinstance(url, BaseException) and not isinstance(url, ObjectMissingError):
                raise url
            urls[file.id] = None if isinstance(url, BaseException) else url
        return await asyncio.to_thread(lambda: [_with_images(row, urls) for row in rows])

    async def _url(self, session: aiohttp.ClientSession, file: LeasedFile) -> str:
        """Return the ``data:`` URL of a file, or an empty text if it is no image."""
        async with self._reads:
            if not file.url:
                raise ObjectMissingError(f"the file {file.id} does not exist")
            if file.id in self._urls:
                self._urls.move_to_end(file.id)
                return self._urls[file.id]
            data = await read_range(session, file.url, 0, file.size_bytes) if file.size_bytes else b""
            media_type = image_type(data[:HEAD_BYTES])
            url = await asyncio.to_thread(data_url, media_type, data) if media_type else ""
        # Another lease may have read it meanwhile.
        self._size_bytes += len(url) - len(self._urls.pop(file.id, ""))
        self._urls[file.id] = url
        while self._size_bytes > CACHE_BYTES:
            _, oldest = self._urls.popitem(last=False)
            self._size_bytes -= len(oldest)
        return url


def _with_images(row: LeasedRow, urls: Mapping[str, str | None]) -> LeasedRow:
    """Return a row with ``data:`` URLs instead of ids. The URL of a file that is gone is None, of no image empty."""
    try:
        request = json.loads(row.raw)
        images = list(file_images(request["body"]))
    except (ValueError, KeyError, TypeError, RecursionError):
        return row  # parse_request reports it
    if not images:
        return row
    for place, image in images:
        if not (url := urls.get(image.pop("file_id"))):
            return dataclasses.replace(row, refusal=f"{place}.file_id {_GONE if url is None else _NO_IMAGE}")
        image["url"] = url
    return dataclasses.replace(row, raw=json.dumps(request, separators=(",", ":")).encode())
