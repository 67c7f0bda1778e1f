import itertools
from collections.abc import Callable, Iterable, Iterator

import pytest

from service.adapters.memory_object_store import MemoryObjectStore
from service.errors import ObjectNotFoundError, ObjectStoreError
from service.ports import StoredObject
from service.reconciler.retrying_store import RetryingStore


class Broken(MemoryObjectStore):
    """Fails at the calls, or chunks read, whose numbers (from 1) ``fails`` selects; counts all of them."""

    def __init__(self, fails: Callable[[int], bool]) -> None:
        super().__init__()
        self.fails = fails
        self.calls = itertools.count(1)
        self.starts: list[int] = []

    def _call(self) -> None:
        if self.fails(next(self.calls)):
            raise ObjectStoreError("the line is bad")

    def put(self, key: str, chunks: Iterable[bytes]) -> StoredObject:
        stored = super().put(key, chunks)
        self._call()
        return stored

    def read(self, key: str, *, start: int = 0) -> Iterator[bytes]:
        self.starts.append(start)
        for chunk in super().read(key, start=start):
            for offset in range(0, len(chunk), 2):
                self._call()
                yield chunk[offset : offset + 2]

    def keys(self, prefix: str) -> Iterator[str]:
        yield from super().keys(prefix)
        self._call()

    def delete(self, key: str) -> tuple[str, ...]:
        deleted = super().delete(key)
        self._call()
        return deleted


def holding(content: bytes, fails: Callable[[int], bool]) -> tuple[RetryingStore, Broken]:
    broken = Broken(lambda _: False)
    broken.put("key", [content])
    broken.fails, broken.calls = fails, itertools.count(1)
    return RetryingStore(broken), broken


def test_read_continues_at_the_byte_where_it_failed() -> None:
    store, broken = holding(b"abcdefg", lambda call: call in {2, 4})
    assert b"".join(store.read("key")) == b"abcdefg"
    assert broken.starts == [0, 2, 4]


def test_read_from_an_offset_continues_where_it_failed() -> None:
    store, broken = holding(b"abcdefg", lambda call: call == 2)
    assert b"".join(store.read("key", start=3)) == b"defg"
    assert broken.starts == [3, 5]


def test_single_failures_are_retried() -> None:
    store, _ = holding(b"abcdefghijkl", lambda call: call % 3 == 0)
    assert b"".join(store.read("key")) == b"abcdefghijkl"
    for _ in range(3):
        assert list(store.keys("k")) == ["key"]
        assert store.put("other", [b"x"]).size_bytes == 1
        store.delete("other")


def test_fourth_failure_in_a_row_is_raised() -> None:
    store, broken = holding(b"abc", lambda _: True)
    with pytest.raises(ObjectStoreError, match="the line is bad"):
        store.delete("key")
    assert next(broken.calls) == 5


def test_put_of_an_iterator_is_not_retried() -> None:
    store, broken = holding(b"", lambda call: call == 1)
    with pytest.raises(ObjectStoreError):
        store.put("key", iter([b"x"]))
    assert next(broken.calls) == 2


def test_missing_object_is_not_retried() -> None:
    store, broken = holding(b"", lambda _: False)
    with pytest.raises(ObjectNotFoundError):
        next(store.read("none"))
    assert broken.starts == [0]
