"""An object store in a directory of this machine: each object is a file whose path is its key.

An object is written to a temporary file in the same file system, synced and renamed. So it exists completely or not at
all, even after a power failure. Names that start with a dot are never objects.
"""

import contextlib
import hashlib
import heapq
import os
import secrets
from collections.abc import Iterable, Iterator
from datetime import UTC, datetime
from pathlib import Path

from ray_job.contract.job_spec import ObjectStoreLocation
from service.errors import ObjectNotFoundError, ObjectStoreError
from service.ports import ListedObject, StoredObject

_CHUNK_BYTES = 1 << 20
_STAGING = ".staging"
# Names of a directory that are in memory at a time. A directory with more of them is read several times.
_NAMES = 100_000
_NO_SUCH_OBJECT = (FileNotFoundError, IsADirectoryError, NotADirectoryError)


def check_key(key: str) -> None:
    """Refuse a key that cannot be a path below a directory. All object stores apply this rule.

    Raises:
        ObjectStoreError: a segment is empty or starts with a dot, or the key has a NUL.
    """
    if "\0" in key or any(not segment or segment.startswith(".") for segment in key.split("/")):
        raise ObjectStoreError(
            f"the object key {key!r} is not allowed: no segment may be empty or start with a dot, and no NUL is allowed"
        )


@contextlib.contextmanager
def _translated(doing: str) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        kind = ObjectNotFoundError if isinstance(error, _NO_SUCH_OBJECT) else ObjectStoreError
        raise kind(f"cannot {doing}: {error.strerror}") from error


def _sync_directory(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _make_directories(path: Path) -> None:
    """Create a directory and its missing parents, and sync each into its parent."""
    if not path.is_dir():
        _make_directories(path.parent)
        path.mkdir(mode=0o700, exist_ok=True)
        _sync_directory(path.parent)


class DirectoryObjectStore:
    """Keeps objects below a directory, which is created if it is missing.

    Raises:
        ObjectStoreError: the directory cannot be created.
    """

    def __init__(self, root: Path) -> None:
        self._root = root.absolute()
        with _translated(f"use the object store directory {self._root}"):
            _make_directories(self._root / _STAGING)

    def put(self, key: str, chunks: Iterable[bytes]) -> StoredObject:
        """See ``service.ports.ObjectStore.put``."""
        check_key(key)
        target = self._root / key
        doing = f"write the object {key!r}"
        temporary = self._root / _STAGING / secrets.token_hex(16)
        try:
            digest = hashlib.sha256()
            size_bytes = 0
            with _translated(doing):
                descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode=0o600)
            with os.fdopen(descriptor, "wb", buffering=0) as file:
                # Errors of the caller's stream are not translated.
                for chunk in chunks:
                    rest = memoryview(chunk)
                    while rest:
                        with _translated(doing):
                            rest = rest[file.write(rest) :]
                    digest.update(chunk)
                    size_bytes += len(chunk)
                with _translated(doing):
                    os.fsync(file.fileno())
            with _translated(doing):
                _make_directories(target.parent)
                temporary.rename(target)
                _sync_directory(target.parent)
        finally:
            temporary.unlink(missing_ok=True)
        return StoredObject(size_bytes=size_bytes, sha256=digest.digest())

    def read(self, key: str, *, start: int = 0) -> Iterator[bytes]:
        """See ``service.ports.ObjectStore.read``."""
        check_key(key)
        doing = f"read the object {key!r}"
        with _translated(doing):
            file = (self._root / key).open("rb")
        with file:
            while True:
                with _translated(doing):
                    chunk = os.pread(file.fileno(), _CHUNK_BYTES, start)
                if not chunk:
                    return
                start += len(chunk)
                yield chunk

    def keys(self, prefix: str) -> Iterator[str]:
        """See ``service.ports.ObjectStore.keys``. Reads only the directories that can hold such keys."""
        yield from self._keys_after(prefix, "")

    def objects(self, prefix: str, *, after: str = "") -> Iterator[ListedObject]:
        """See ``service.ports.ObjectStore.objects``."""
        for key in self._keys_after(prefix, after):
            with contextlib.suppress(ObjectNotFoundError), _translated(f"list the object {key!r}"):
                modified_s = (self._root / key).stat().st_mtime
                yield ListedObject(key=key, modified_at=datetime.fromtimestamp(modified_s, UTC))

    def _keys_after(self, prefix: str, after: str) -> Iterator[str]:
        parent, _, start = prefix.rpartition("/")
        if parent:
            check_key(parent)
        base = f"{parent}/" if parent else ""
        for name in self._names(parent, start, after.removeprefix(base) if after.startswith(base) else ""):
            if name.endswith("/"):
                yield from self._keys_after(base + name, after)
            elif base + name > after:
                yield base + name

    def _names(self, parent: str, start: str, after: str) -> Iterator[str]:
        """Yield the names in a directory from ``after`` on, in order, those of directories with a slash."""
        last = ""
        while True:
            try:
                with _translated(f"list the objects below {parent!r}"), os.scandir(self._root / parent) as entries:
                    # A directory sorts with its slash, so that "a.b" comes before "a/b", as in S3.
                    found = (
                        entry.name + ("/" if entry.is_dir() else "")
                        for entry in entries
                        if entry.name.startswith(start) and not entry.name.startswith(".")
                    )
                    names = heapq.nsmallest(
                        _NAMES, (name for name in found if name > last and (name >= after or after.startswith(name)))
                    )
            except ObjectNotFoundError:
                return
            yield from names
            if len(names) < _NAMES:
                return
            last = names[-1]

    def delete(self, key: str) -> tuple[str, ...]:
        """See ``service.ports.ObjectStore.delete``."""
        check_key(key)
        with contextlib.suppress(ObjectNotFoundError), _translated(f"delete the object {key!r}"):
            (self._root / key).unlink()
        return ()

    def abort_uploads(self, prefix: str, *, before: datetime) -> int:
        """Delete old files that never became objects: those of this class, and those of jobs below the prefix."""
        aborted = 0
        for parent in (self._root / _STAGING, self._root / prefix):
            for directory, _, names in os.walk(parent):
                for path in (Path(directory, name) for name in names if parent.name == _STAGING or name[0] == "."):
                    with contextlib.suppress(ObjectNotFoundError), _translated(f"delete the unfinished {path.name}"):
                        if path.stat().st_mtime < before.timestamp():
                            path.unlink()
                            aborted += 1
        return aborted

    def read_url(self, key: str, *, expires_s: int) -> str:
        """See ``service.ports.ObjectStore.read_url``."""
        del expires_s
        check_key(key)
        return (self._root / key).as_uri()

    def write_url(self, key: str, *, expires_s: int) -> str:
        """Return the ``file://`` URL of an object, which does not expire. The directories above it may be missing."""
        return self.read_url(key, expires_s=expires_s)

    def location(self) -> ObjectStoreLocation:
        """Return the directory, for jobs on the same machine or on a shared file system."""
        return ObjectStoreLocation(kind="directory", root=str(self._root))

    def check(self) -> None:
        """See ``service.ports.ObjectStore.check``."""
        if not os.access(self._root / _STAGING, os.W_OK | os.X_OK):
            raise ObjectStoreError(f"the object store directory {self._root} is gone or cannot be written to")
