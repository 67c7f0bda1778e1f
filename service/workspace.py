"""The disk for uploads and partial results, and for plans and results of batches, shared by all work of a process.

A node evicts a pod that uses more disk than its volume has, and the next pod that tries the same. So room is claimed
before anything is written. If the workspace is full, the claim fails, which affects no other work.
"""

import errno
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from threading import Lock
from typing import BinaryIO


class Workspace:
    """A directory on disk.

    Args:
        directory: the directory of the files; that for temporary files if None.
        size_bytes: the limit of all files together; None for no limit but the disk's.
    """

    def __init__(self, directory: Path | None = None, size_bytes: int | None = None) -> None:
        self._directory = directory
        self._size_bytes = size_bytes
        self._claimed = 0
        self._lock = Lock()

    @property
    def size_bytes(self) -> int | None:
        """The limit of all files together; None for no limit but the disk's."""
        return self._size_bytes

    @property
    def claimed_bytes(self) -> int:
        """The room that is claimed now."""
        return self._claimed

    def has_room(self, size_bytes: int) -> bool:
        """Return whether a claim of so many bytes would succeed now."""
        with self._lock:
            return self._size_bytes is None or self._claimed + size_bytes <= self._size_bytes

    @contextmanager
    def claims(self) -> Iterator[Callable[[int], None]]:
        """Release the claimed room when the context ends.

        Yields:
            A function that claims room for more bytes, before they are written. It raises OSError (ENOSPC) if the
            workspace has no room for them.
        """
        claimed_bytes = 0

        def claim(size_bytes: int) -> None:
            nonlocal claimed_bytes
            self._claim(size_bytes)
            claimed_bytes += size_bytes

        try:
            yield claim
        finally:
            self._claim(-claimed_bytes)

    @contextmanager
    def open(self) -> Iterator[tuple[BinaryIO, Callable[[int], None]]]:
        """Open a new file, and delete it and release its room when the context ends.

        Yields:
            The file, open for reading and writing; and the function that ``claims`` yields.

        Raises:
            OSError: the directory cannot be written.
        """
        with self.claims() as claim, tempfile.TemporaryFile(dir=self._directory) as file:
            yield file, claim

    def _claim(self, size_bytes: int) -> None:
        """Claim room, or release it if the size is negative."""
        with self._lock:
            claimed = self._claimed + size_bytes
            if self._size_bytes is not None and claimed > self._size_bytes and size_bytes > 0:
                raise OSError(
                    errno.ENOSPC,
                    "the batches that are planned or assembled at the same time need more than the "
                    f"{self._size_bytes:,} bytes of the workspace: raise workspace_gib of the stack "
                    "(CLOISTER_WORKSPACE_GIB)",
                )
            self._claimed = claimed
