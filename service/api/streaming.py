"""Streams objects to clients over a store that fails now and then."""

import time
from collections.abc import Iterator
from typing import Final

import structlog

from service.errors import ObjectNotFoundError, ObjectStoreError
from service.ports import ObjectStore

_log = structlog.get_logger(__name__)

# Before the second and the third try: a store that restarts is away for longer, a connection that broke is not.
_PAUSES_S: Final = (0.05, 0.5)


def resumable(store: ObjectStore, key: str) -> Iterator[bytes]:
    """An object's content. A read that breaks is taken up again behind the last byte that came.

    Raises:
        ObjectNotFoundError: there is no such object (any more).
        ObjectStoreError: the store failed three times without a byte between them.
    """
    position, failures = 0, 0
    while True:
        try:
            for chunk in store.read(key, start=position):
                position += len(chunk)
                failures = 0
                yield chunk
        except ObjectNotFoundError:
            raise
        except ObjectStoreError as error:
            failures += 1
            if failures > len(_PAUSES_S):
                raise
            _log.warning("download resumed", error=str(error), at_byte=position)
            time.sleep(_PAUSES_S[failures - 1])
        else:
            return
