"""An object store in memory, for tests."""

import hashlib
from collections.abc import Iterable, Iterator
from datetime import UTC, datetime
from threading import Lock
from urllib.parse import quote

from ray_job.contract.job_spec import ObjectStoreLocation
from service.adapters.directory_object_store import check_key
from service.errors import ObjectNotFoundError
from service.ports import ListedObject, StoredObject

_CHUNK_BYTES = 1 << 20


class MemoryObjectStore:
    """Keeps objects in a dict, which no Ray job can reach."""

    def __init__(self) -> None:
        self._objects: dict[str, bytes] = {}
        self._modified_at: dict[str, datetime] = {}
        self._lock = Lock()

    def put(self, key: str, chunks: Iterable[bytes]) -> StoredObject:
        """See ``service.ports.ObjectStore.put``."""
        check_key(key)
        content = b"".join(chunks)
        with self._lock:
            self._objects[key] = content
            self._modified_at[key] = datetime.now(UTC)
        return StoredObject(size_bytes=len(content), sha256=hashlib.sha256(content).digest())

    def read(self, key: str, *, start: int = 0) -> Iterator[bytes]:
        """See ``service.ports.ObjectStore.read``."""
        check_key(key)
        with self._lock:
            content = self._objects.get(key)
        if content is None:
            raise ObjectNotFoundError(f"no object has the key {key!r}")
        for offset in range(start, len(content), _CHUNK_BYTES):
            yield content[offset : offset + _CHUNK_BYTES]

    def keys(self, prefix: str) -> Iterator[str]:
        """See ``service.ports.ObjectStore.keys``."""
        with self._lock:
            found = sorted(key for key in self._objects if key.startswith(prefix))
        yield from found

    def objects(self, prefix: str, *, after: str = "") -> Iterator[ListedObject]:
        """See ``service.ports.ObjectStore.objects``."""
        for key in self.keys(prefix):
            if key > after:
                yield ListedObject(key=key, modified_at=self._modified_at[key])

    def delete(self, key: str) -> tuple[str, ...]:
        """See ``service.ports.ObjectStore.delete``."""
        check_key(key)
        with self._lock:
            self._objects.pop(key, None)
        return ()

    def abort_uploads(self, prefix: str, *, before: datetime) -> int:
        """Return 0: an object is written at once."""
        del prefix, before
        return 0

    def read_url(self, key: str, *, expires_s: int) -> str:
        """Return ``memory:///`` and the quoted key, which only tests can read."""
        del expires_s
        check_key(key)
        return f"memory:///{quote(key)}"

    def write_url(self, key: str, *, expires_s: int) -> str:
        """Return ``memory:///`` and the quoted key, which only tests can write."""
        return self.read_url(key, expires_s=expires_s)

    def location(self) -> ObjectStoreLocation:
        """Return a directory that does not exist: the objects are in this process only."""
        return ObjectStoreLocation(kind="directory", root="/nonexistent/memory")

    def check(self) -> None:
        """Do nothing: memory is always available."""
