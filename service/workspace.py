"""The disk on which results are put together, shared by all that do so at the same time.

A pod that takes more than its volume has is evicted by its node, and so is the next one that tries the same. So what is
to be written is claimed before, and refused where there is no room: a full disk that hurts nobody else.
"""

import errno
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from threading import Lock
from typing import BinaryIO


class WorkspaceFile:
    """A file of its own for one user, empty at first and gone at the end.

    Attributes:
        file: what is written and read.
    """

    def __init__(self, workspace: "Workspace", file: BinaryIO) -> None:
        self._workspace = workspace
        self.file = file
        self.claimed = 0

    def claim(self, size_bytes: int) -> None:
        """Says that so many bytes more will be written.

        Raises:
            OSError: there is no room for them (ENOSPC).
        """
        self._workspace.claim(size_bytes)
        self.claimed += size_bytes


class Workspace:
    """A directory on disk.

    Args:
        directory: where the files are.
        size_bytes: how much all of them may have together; None for as much as the disk has.
    """

    def __init__(self, directory: Path, size_bytes: int | None = None) -> None:
        self._directory = directory
        self._size_bytes = size_bytes
        self._claimed = 0
        self._lock = Lock()

    @contextmanager
    def open(self) -> Iterator[WorkspaceFile]:
        """A new file.

        Raises:
            OSError: the directory cannot be written.
        """
        with tempfile.TemporaryFile(dir=self._directory) as file:
            opened = WorkspaceFile(self, file)
            try:
                yield opened
            finally:
                self.claim(-opened.claimed)

    def claim(self, size_bytes: int) -> None:
        """Takes room, or with a negative size gives it back; see ``WorkspaceFile.claim``."""
        with self._lock:
            claimed = self._claimed + size_bytes
            if self._size_bytes is not None and claimed > self._size_bytes and size_bytes > 0:
                raise OSError(
                    errno.ENOSPC,
                    f"the results of all batches that end at the same time take more than the {self._size_bytes:,} "
                    "bytes of the workspace: raise workspace_gib of the stack (CLOISTER_WORKSPACE_GIB)",
                )
            self._claimed = claimed
