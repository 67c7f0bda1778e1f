"""Limits of uploads and partial results: the room that they take on disk, and how many a key may have at a time."""

import contextlib
import errno
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from threading import Lock
from typing import Final

from service.errors import RateLimitError
from service.workspace import Workspace

# A smaller upload stays in memory.
_SMALL_BYTES: Final = 1 << 20
_RETRY_AFTER_S: Final = 30
_NO_ROOM: Final = frozenset({errno.ENOSPC, errno.EDQUOT})


@dataclass(slots=True, kw_only=True)
class Transfer:
    """A request whose content goes through the disk of this process.

    Attributes:
        key_id: the API key that it came with.
        take_slot: counts a transfer of the key; raises RateLimitError if it has too many.
        claim_room: claims bytes of the workspace; raises OSError if it has no room for them.
        closing: closes what the request has opened, after its answer.
        size_bytes: what it has claimed.
        has_slot: whether it is counted.
    """

    key_id: str
    take_slot: Callable[[str], None]
    claim_room: Callable[[int], None]
    closing: contextlib.ExitStack
    size_bytes: int = 0
    has_slot: bool = False

    def claim(self, size_bytes: int) -> None:
        """Claim room for more bytes before they are written.

        Raises:
            OSError: the workspace has no room for them.
            RateLimitError: the key has too many large transfers.
        """
        self.claim_room(size_bytes)
        self.size_bytes += size_bytes
        if self.size_bytes > _SMALL_BYTES and not self.has_slot:
            self.take_slot(self.key_id)
            self.has_slot = True


class Transfers:
    """The transfers of this process. It is safe to use from several threads.

    Args:
        workspace: the disk for all of them.
        max_per_key: the most transfers of more than 1 MiB that a key may have at a time.
    """

    def __init__(self, workspace: Workspace, *, max_per_key: int) -> None:
        self._workspace = workspace
        self._max_per_key = max_per_key
        self._by_key: Counter[str] = Counter()
        self._lock = Lock()

    @contextlib.contextmanager
    def begin(self, key_id: str, *, expected_bytes: int = 0) -> Iterator[Transfer]:
        """Begin a transfer of a key; its room is free again when the context ends.

        Args:
            key_id: the key.
            expected_bytes: its size, if known. It is not claimed yet, or a client could take room without sending.

        Raises:
            RateLimitError: there is no room for the expected bytes.
        """
        if not self._workspace.has_room(expected_bytes):
            raise _no_room()
        with self._workspace.claims() as claim_room, contextlib.ExitStack() as closing:
            transfer = Transfer(key_id=key_id, take_slot=self._take_slot, claim_room=claim_room, closing=closing)
            try:
                yield transfer
            finally:
                if transfer.has_slot:
                    with self._lock:
                        self._by_key[key_id] -= 1
                        if not self._by_key[key_id]:
                            del self._by_key[key_id]

    def _take_slot(self, key_id: str) -> None:
        with self._lock:
            if self._by_key[key_id] >= self._max_per_key:
                raise RateLimitError(
                    f"The API key has {self._max_per_key} large uploads and partial results in progress, which is the "
                    "most. Try again after one of them has ended.",
                    code="rate_limit_exceeded",
                    headers={"retry-after": str(_RETRY_AFTER_S)},
                )
            self._by_key[key_id] += 1


@contextlib.contextmanager
def full_disk_reported() -> Iterator[None]:
    """Report a workspace or disk without room to the client.

    Raises:
        RateLimitError: there is no room.
    """
    try:
        yield
    except OSError as error:
        if error.errno in _NO_ROOM:
            raise _no_room() from error
        raise


def _no_room() -> RateLimitError:
    return RateLimitError(
        "The server has no room on its disk for another upload or partial result of this size now. Try again after "
        "others have ended, or send less; an operator can raise workspace_gib of the stack.",
        code="rate_limit_exceeded",
        headers={"retry-after": str(_RETRY_AFTER_S)},
    )
