"""An object store that tries again: a hiccup of the network must not cost an assembly of gigabytes.

What reads on after a failure goes on at the byte where it was. Longer outages end the step; the loop repeats it later.
"""

import time
from collections.abc import Callable, Iterable, Iterator
from typing import Final, TypeVar

import structlog

from ray_job.contract.job_spec import ObjectStoreLocation
from service.errors import ObjectNotFoundError, ObjectStoreError
from service.ports import ObjectStore, StoredObject

logger = structlog.get_logger(__name__)

_PAUSES_S: Final = (0.05, 0.25, 1.0)

T = TypeVar("T")


class PatientStore:
    """Wraps an object store; each call that fails is repeated up to three times, within a second or two."""

    def __init__(self, store: ObjectStore) -> None:
        self._store = store

    def put(self, key: str, chunks: Iterable[bytes]) -> StoredObject:
        """See ``service.ports.ObjectStore.put``. Repeated only where ``chunks`` can be iterated anew."""
        if iter(chunks) is chunks:
            return self._store.put(key, chunks)
        return _patiently(lambda: self._store.put(key, chunks))

    def read(self, key: str, *, start: int = 0) -> Iterator[bytes]:
        """See ``service.ports.ObjectStore.read``."""
        failures = 0
        chunks: Iterator[bytes] | None = None
        while True:
            try:
                chunks = self._store.read(key, start=start) if chunks is None else chunks
                chunk = next(chunks, None)
            except ObjectStoreError as error:
                failures, chunks = failures + 1, None
                _pause(error, failures)
                continue
            if chunk is None:
                return
            failures, start = 0, start + len(chunk)
            yield chunk

    def keys(self, prefix: str) -> Iterator[str]:
        """See ``service.ports.ObjectStore.keys``."""
        yield from _patiently(lambda: list(self._store.keys(prefix)))

    def delete(self, key: str) -> None:
        """See ``service.ports.ObjectStore.delete``."""
        _patiently(lambda: self._store.delete(key))

    def location(self) -> ObjectStoreLocation:
        """See ``service.ports.ObjectStore.location``."""
        return self._store.location()

    def check(self) -> None:
        """See ``service.ports.ObjectStore.check``; the first failure counts."""
        self._store.check()


def _patiently(call: Callable[[], T]) -> T:
    failures = 0
    while True:
        try:
            return call()
        except ObjectStoreError as error:
            failures += 1
            _pause(error, failures)


def _pause(error: ObjectStoreError, failures: int) -> None:
    """Waits before the next try; raises the error when it is not worth one."""
    if isinstance(error, ObjectNotFoundError) or failures > len(_PAUSES_S):
        raise error
    logger.info("object_store.tried_again", error=str(error), failures=failures)
    time.sleep(_PAUSES_S[failures - 1])
