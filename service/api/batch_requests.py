"""Reads the request that creates a batch, and recognises a retry of it."""

import hashlib
import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Final

from fastapi import Depends, Request
from pydantic import ValidationError

from service.api.authentication import SubmitAccess
from service.api.error_mapping import invalid_request
from service.api.schemas import BatchRequest
from service.errors import InvalidRequestError, TooLargeError

_MAX_BODY_BYTES: Final = 1 << 20
_IDEMPOTENCY_KEY: Final = re.compile(r"[!-~][ -~]{0,254}")


@dataclass(frozen=True, slots=True, kw_only=True)
class Creation:
    """A checked request for a batch.

    Attributes:
        batch: what is asked for.
        request_sha256: see ``request_sha256``.
        idempotency_key: the client's own name for the request: the batch of that name is the one, at any time.
        is_retry: the client has sent the request before, under no name: it may have made a batch already.
    """

    batch: BatchRequest
    request_sha256: bytes
    idempotency_key: str | None
    is_retry: bool


def request_sha256(batch: BatchRequest, idempotency_key: str | None) -> bytes:
    """The digest that two requests share only if they ask for the same batch under the same key."""
    # What is left out and what is null is the same request.
    canonical = json.dumps([batch.model_dump(mode="json", exclude_none=True), idempotency_key or ""], sort_keys=True)
    return hashlib.sha256(canonical.encode()).digest()


def is_retry(headers: Mapping[str, str]) -> bool:
    """Whether the official client says that it has sent the request before."""
    attempts = headers.get("x-stainless-retry-count", "0")
    # Not by int(): it refuses a number of thousands of digits.
    return attempts.isdecimal() and bool(attempts.strip("0"))


def idempotency_key(headers: Mapping[str, str]) -> str | None:
    """The ``Idempotency-Key`` of a request, or None.

    Raises:
        InvalidRequestError: it is empty, too long or not printable.
    """
    key = headers.get("idempotency-key")
    if key is not None and not _IDEMPOTENCY_KEY.fullmatch(key):
        raise InvalidRequestError(
            "Invalid 'Idempotency-Key': expected 1 to 255 printable ASCII characters. Use a new random value, e.g. a "
            "UUID, for each batch.",
            param="Idempotency-Key",
            code="invalid_value",
        )
    return key


async def _parsed_creation(request: Request, _access: SubmitAccess) -> Creation:
    body = bytearray()
    async for chunk in request.stream():
        body += chunk
        if len(body) > _MAX_BODY_BYTES:
            raise TooLargeError("The request body is larger than 1 MB.")
    try:
        batch = BatchRequest.model_validate_json(bytes(body))
    except ValidationError as error:
        raise invalid_request(error.errors()[0]) from None
    key = idempotency_key(request.headers)
    return Creation(
        batch=batch,
        request_sha256=request_sha256(batch, key),
        idempotency_key=key,
        is_retry=is_retry(request.headers),
    )


CreationDependency = Annotated[Creation, Depends(_parsed_creation)]
