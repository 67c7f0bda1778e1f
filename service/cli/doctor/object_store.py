"""The object store as the settings name it: what the service does with objects, tried on one of the doctor's own."""

import contextlib
import hashlib
import secrets
from collections.abc import Iterator
from typing import Final

from ray_job.contract.job_spec import ObjectStoreLocation
from service.adapters.open_object_store import open_object_store
from service.cli.doctor.findings import Finding, failed, ok
from service.errors import ObjectNotFoundError, ObjectStoreError
from service.ports import ObjectStore
from service.settings import Settings

_SETTING: Final = "CLOISTER_OBJECT_STORE"
PREFIX: Final = "doctor/"
# One byte more than an S3 store sends in one request, so that an upload in parts is tried too.
SIZE_BYTES: Final = (16 << 20) + 1
_CHUNK_BYTES: Final = 1 << 20

_WHAT_TO_DO: Final = {
    "NoSuchBucket": "there is no such bucket: make it, or correct the name",
    "404": "there is no such bucket: make it, or correct the name",
    "InvalidAccessKeyId": "the store does not know this access key",
    "SignatureDoesNotMatch": "the secret key is wrong, or the region",
    "AuthorizationHeaderMalformed": "the region is wrong",
    "AccessDenied": "the key has not the right: it must list, read, write and delete below the prefix",
    "403": "the key has not the right: it must list, read, write and delete below the prefix",
    "EndpointConnectionError": "no answer: see that it runs and that a network policy lets this pod reach it",
    "ConnectTimeoutError": "no answer: see that it runs and that a network policy lets this pod reach it",
    "SSLError": "its certificate is signed by nobody whom the image knows (images/README.md)",
    "NoCredentialsError": "AWS_SHARED_CREDENTIALS_FILE names no file with a key",
}


def object_store(settings: Settings) -> Iterator[Finding]:
    """Writes, lists, reads and deletes an object of 16 MiB below the prefix ``doctor/``."""
    where = _shown(settings.object_store)
    try:
        problems = try_object(open_object_store(settings.object_store), f"{PREFIX}{secrets.token_hex(8)}")
    except ObjectStoreError as error:
        yield failed("object store", f"{_SETTING}, {where}: {error}; {_advice(str(error))}")
    except ValueError as error:
        # The S3 client's, of addresses and names that cannot be.
        yield failed("object store", f"{_SETTING}, {where}: {error}")
    else:
        if problems:
            yield failed("object store", f"{_SETTING}, {where}: {'; '.join(problems)}")
        else:
            yield ok("object store", f"{where}: an object of {SIZE_BYTES >> 20} MiB written, listed, read and deleted")


def try_object(store: ObjectStore, key: str) -> list[str]:
    """What is wrong, where the store refuses nothing; no object is left."""
    try:
        stored = store.put(key, _chunks())
        problems = [] if key in store.keys(PREFIX) else ["a new object is not in the listing"]
        digest = hashlib.sha256()
        for chunk in store.read(key, start=1):
            digest.update(chunk)
    except BaseException:
        # It may be there though the answer was lost. The first error is the one to tell.
        with contextlib.suppress(ObjectStoreError):
            store.delete(key)
        raise
    store.delete(key)
    if digest.digest() != hashlib.sha256(bytes(SIZE_BYTES - 1)).digest() or stored.size_bytes != SIZE_BYTES:
        problems.append("what is read from byte 1 on is not what was written")
    with contextlib.suppress(ObjectNotFoundError):
        next(store.read(key), None)
        problems.append("a deleted object can still be read: is a cache between?")
    return problems


def _chunks() -> Iterator[bytes]:
    yield from (bytes(_CHUNK_BYTES) for _ in range(SIZE_BYTES // _CHUNK_BYTES))
    yield bytes(SIZE_BYTES % _CHUNK_BYTES)


def _advice(error: str) -> str:
    return next((advice for code, advice in _WHAT_TO_DO.items() if error.endswith(code)), "see the store's own log")


def _shown(location: ObjectStoreLocation) -> str:
    if location.kind == "directory":
        return location.root
    at = f" at {location.endpoint_url}" if location.endpoint_url else ""
    return f"s3://{location.bucket}/{location.prefix}{at}"
