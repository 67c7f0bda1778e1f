"""An object store that retries: a short network failure must not cost an assembly of gigabytes.

Longer outages end the step; the loop repeats it later.
"""

from collections.abc import Iterable, Iterator
from datetime import datetime
from typing import Final

import stamina

from ray_job.contract.job_spec import ObjectStoreLocation
from service.errors import ObjectNotFoundError, ObjectStoreError, ObjectVersionsError
from service.ports import ListedObject, ObjectStore, StoredObject

# Four attempts, with pauses of 0.05, 0.25 and 1 s.
_RETRYING: Final = stamina.RetryingCaller(
    attempts=4, timeout=None, wait_initial=0.05, wait_exp_base=5, wait_max=1.0, wait_jitter=0
).on(
    lambda error: (
        isinstance(error, ObjectStoreError) and not isinstance(error, ObjectNotFoundError | ObjectVersionsError)
    )
)


class RetryingStore:
    """Wraps an object store. Each call that fails is repeated up to three times, within one or two seconds."""

    def __init__(self, store: ObjectStore) -> None:
        self._store = store

    def put(self, key: str, chunks: Iterable[bytes]) -> StoredObject:
        """See ``service.ports.ObjectStore.put``. Retries only if ``chunks`` can be iterated more than once."""
        if iter(chunks) is chunks:
            return self._store.put(key, chunks)
        return _RETRYING(lambda: self._store.put(key, chunks))

    def read(self, key: str, *, start: int = 0) -> Iterator[bytes]:
        """See ``service.ports.ObjectStore.read``. After a failure, continues at the byte that it had reached."""
        chunks: Iterator[bytes] | None = None

        def next_chunk() -> bytes | None:
            nonlocal chunks
            try:
                chunks = self._store.read(key, start=start) if chunks is None else chunks
                return next(chunks, None)
            except ObjectStoreError:
                chunks = None
                raise

        while (chunk := _RETRYING(next_chunk)) is not None:
            start += len(chunk)
            yield chunk

    def keys(self, prefix: str) -> Iterator[str]:
        """See ``service.ports.ObjectStore.keys``."""
        yield from _RETRYING(lambda: list(self._store.keys(prefix)))

    def objects(self, prefix: str, *, after: str = "") -> Iterator[ListedObject]:
        """See ``service.ports.ObjectStore.objects``. Does not retry: the caller continues after the last key."""
        return self._store.objects(prefix, after=after)

    def delete(self, key: str) -> tuple[str, ...]:
        """See ``service.ports.ObjectStore.delete``."""
        return _RETRYING(lambda: self._store.delete(key))

    def abort_uploads(self, prefix: str, *, before: datetime) -> int:
        """See ``service.ports.ObjectStore.abort_uploads``. Does not retry."""
        return self._store.abort_uploads(prefix, before=before)

    def location(self) -> ObjectStoreLocation:
        """See ``service.ports.ObjectStore.location``."""
        return self._store.location()

    def read_url(self, key: str, *, expires_s: int) -> str:
        """See ``service.ports.ObjectStore.read_url``. Nothing is asked of the store."""
        return self._store.read_url(key, expires_s=expires_s)

    def write_url(self, key: str, *, expires_s: int) -> str:
        """See ``service.ports.ObjectStore.write_url``. Nothing is asked of the store."""
        return self._store.write_url(key, expires_s=expires_s)

    def check(self) -> None:
        """See ``service.ports.ObjectStore.check``. Does not retry."""
        self._store.check()
