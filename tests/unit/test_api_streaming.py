"""Downloads from an unreliable object store."""

from collections.abc import Iterator

import pytest

from service.adapters.memory_object_store import MemoryObjectStore
from service.api.routes.files import resumable
from service.errors import ObjectNotFoundError, ObjectStoreError

CONTENT = bytes(range(256)) * 4


class FailingStore(MemoryObjectStore):
    """A store that returns ten bytes at a time. ``failing`` maps a read to the number of chunks before it fails."""

    def __init__(self, failing: dict[int, int]) -> None:
        super().__init__()
        self.put("a", [CONTENT])
        self.failing = failing
        self.reads = 0

    def read(self, key: str, *, start: int = 0) -> Iterator[bytes]:
        self.reads += 1
        allowed = self.failing.get(self.reads)
        content = b"".join(super().read(key, start=start))
        for number, offset in enumerate(range(0, len(content), 10)):
            if number == allowed:
                raise ObjectStoreError("broken")
            yield content[offset : offset + 10]


@pytest.mark.parametrize("failing", [{}, {1: 3}, {1: 0}, {1: 2, 2: 1, 3: 1, 4: 1, 5: 7}, {1: 1, 2: 0}])
def test_broken_read_resumes_where_it_stopped(failing: dict[int, int]) -> None:
    store = FailingStore(failing)
    assert b"".join(resumable(store, "a")) == CONTENT
    assert store.reads == len(failing) + 1


def test_persistent_store_failure_is_raised() -> None:
    store = FailingStore({1: 2, 2: 0, 3: 0, 4: 0})
    chunks = resumable(store, "a")
    assert [next(chunks), next(chunks)] == [CONTENT[:10], CONTENT[10:20]]
    with pytest.raises(ObjectStoreError, match="broken"):
        next(chunks)


def test_missing_object_is_not_retried() -> None:
    store = FailingStore({})
    with pytest.raises(ObjectNotFoundError):
        next(resumable(store, "b"))
    assert store.reads == 1
