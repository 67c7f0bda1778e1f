"""Reads the request that creates a batch, and recognises a retry of it."""

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Final

from fastapi import Depends, Request
from pydantic import ValidationError

from service.api.authentication import SubmitAccess
from service.api.error_mapping import invalid_request
from service.api.schemas import BatchRequest
from service.errors import TooLargeError

_MAX_BODY_BYTES: Final = 1 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class Creation:
    """A checked request for a batch. ``may_be_a_retry``: the batch may be there already."""

    batch: BatchRequest
    request_sha256: bytes
    may_be_a_retry: bool


def request_sha256(batch: BatchRequest, idempotency_key: str) -> bytes:
    """The digest that two requests share only if they ask for the same batch under the same key."""
    canonical = json.dumps([batch.model_dump(mode="json"), idempotency_key], sort_keys=True)
    return hashlib.sha256(canonical.encode()).digest()


def may_be_a_retry(headers: Mapping[str, str]) -> bool:
    """Whether a client says so.

    The official client counts its attempts in ``x-stainless-retry-count`` and sends no ``Idempotency-Key`` here;
    other clients do.
    """
    attempts = headers.get("x-stainless-retry-count", "0")
    return "idempotency-key" in headers or (attempts.isdecimal() and int(attempts) > 0)


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
    return Creation(
        batch=batch,
        request_sha256=request_sha256(batch, request.headers.get("idempotency-key", "")),
        may_be_a_retry=may_be_a_retry(request.headers),
    )


CreationDependency = Annotated[Creation, Depends(_parsed_creation)]
