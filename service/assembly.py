"""Makes a batch's output and error file of its parts, in input order.

All parts are copied once into a temporary file; in memory stay some 60 bytes per row. Then both files are streamed to
the object store. Doing it twice gives the same objects, so a process that dies in between does it again.
"""

import hashlib
import os
from array import array
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import BinaryIO, Final

import orjson

from ray_job.contract.input_lines import split_lines
from ray_job.contract.lines import BATCH_EXPIRED, Outcome, error_line
from ray_job.contract.object_keys import parts_prefix
from ray_job.contract.parts import PartError, PartHeader, Usage, decode_header
from service.ports import ObjectStore, StoredObject
from service.workspace import Workspace

_CHUNK_BYTES: Final = 1 << 18
_MAX_HEADER_BYTES: Final = 1 << 26


class AssemblyError(ValueError):
    """A part is damaged, or holds lines that the input does not have. The message says which."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Assembled:
    """What was written. A file that would be empty is None and was not written.

    Attributes:
        output: the output file.
        error: the error file.
        completed: rows in the output file.
        failed: rows in the error file, those that expired among them.
        expired: rows in the error file that never ran.
        usage: tokens of all rows.
        damaged: for each part that could not be read, and was left out, what is wrong with it.
    """

    output: StoredObject | None
    error: StoredObject | None
    completed: int
    failed: int
    expired: int
    usage: Usage
    damaged: list[str]

    @property
    def found(self) -> int:
        """How many lines have a result."""
        return self.completed + self.failed - self.expired


@dataclass(slots=True, kw_only=True)
class _Spool:
    """The rows of all parts in one file, and where each stands. Rows of a line found twice are left out."""

    file: BinaryIO
    claim: Callable[[int], None] = lambda _: None
    lines: "array[int]" = field(default_factory=lambda: array("Q"))
    offsets: "array[int]" = field(default_factory=lambda: array("Q"))
    lengths: "array[int]" = field(default_factory=lambda: array("Q"))
    is_failed: bytearray = field(default_factory=bytearray)
    seen: set[int] = field(default_factory=set)
    usage: Usage = field(default_factory=Usage)

    def add(self, header: PartHeader, start: int) -> None:
        """Notes a part's rows; its first row stands at ``start``."""
        for offset, line, length, outcome, usage in zip(
            header.offsets(), header.lines, header.lengths, header.outcomes, header.usage, strict=True
        ):
            if line in self.seen:
                continue
            self.seen.add(line)
            self.lines.append(line)
            self.offsets.append(start + offset - header.size_bytes)
            self.lengths.append(length + 1)
            self.is_failed.append(outcome == "failed")
            self.usage += usage

    def in_input_order(self) -> Iterator[int]:
        """The indexes of the rows, by line number."""
        return iter(sorted(range(len(self.lines)), key=self.lines.__getitem__))

    def row(self, index: int) -> bytes:
        """A finished line with its line break."""
        return os.pread(self.file.fileno(), self.lengths[index], self.offsets[index])

    def rows(self, outcome: Outcome) -> Iterator[bytes]:
        """The rows of one outcome in input order."""
        for index in self.in_input_order():
            if bool(self.is_failed[index]) == (outcome == "failed"):
                yield self.row(index)


def committed_lines(store: ObjectStore, batch_id: str) -> int:
    """How many lines have a result, by the headers of the parts.

    Raises:
        AssemblyError: a part has no readable header.
        ObjectStoreError: the store cannot be reached.
    """
    lines: set[int] = set()
    for key in store.keys(parts_prefix(batch_id)):
        header, _ = _read_header(store.read(key), key, batch_id)
        lines.update(header.lines)
    return len(lines)


@dataclass(frozen=True, slots=True, kw_only=True)
class CommittedRows:
    """Rows of one outcome in input order: their number, their size with line breaks, and their bytes in chunks."""

    count: int
    size_bytes: int
    chunks: Iterator[bytes]


def committed_rows(store: ObjectStore, *, batch_id: str, outcome: Outcome, file: BinaryIO) -> CommittedRows:
    """Copies the parts that are there now to a file on disk, and gives their rows from it.

    Args:
        store: where the parts are.
        batch_id: the batch.
        outcome: which rows; parts that have none of them are not copied.
        file: an empty file; it stays open until the last chunk was taken.

    Raises:
        AssemblyError: a part is damaged.
        ObjectNotFoundError: a part went away meanwhile.
        ObjectStoreError: the store cannot be reached.
    """
    spool = _Spool(file=file)
    for key in store.keys(parts_prefix(batch_id)):
        _add_part(spool, store, key, batch_id, only=outcome)
    file.flush()
    lengths = [length for length, failed in zip(spool.lengths, spool.is_failed, strict=True)
               if bool(failed) == (outcome == "failed")]  # fmt: skip
    rows = spool.rows(outcome)
    first = next(rows, None)
    chunks = iter(()) if first is None else _chunks(first, rows)
    return CommittedRows(count=len(lengths), size_bytes=sum(lengths), chunks=chunks)


def assemble(
    store: ObjectStore,
    *,
    batch_id: str,
    output_key: str,
    error_key: str,
    workspace: Workspace,
    expire_lines_of: Iterable[bytes] | None = None,
    before_writing: Callable[[], None] = lambda: None,
) -> Assembled:
    """Writes the output and the error file of a batch, from all parts that can be read.

    Args:
        store: where parts are and files go.
        batch_id: the batch.
        output_key: the key of the output file.
        error_key: the key of the error file.
        workspace: where all parts are copied to; nothing stays in it.
        expire_lines_of: the input file, to be read more than once; each request in it without a result gets a
            ``batch_expired`` line.
        before_writing: called once all parts are read and before a file is written; what it raises ends the assembly.

    Raises:
        AssemblyError: a part holds a line that ``expire_lines_of`` does not have.
        ObjectStoreError: the store cannot be reached.
        OSError: the workspace has no room.
    """
    damaged: list[str] = []
    with workspace.open() as opened:
        spool = _Spool(file=opened.file, claim=opened.claim)
        for key in store.keys(parts_prefix(batch_id)):
            try:
                _add_part(spool, store, key, batch_id)
            except AssemblyError as problem:
                damaged.append(str(problem))
        spool.file.flush()
        before_writing()
        rows_failed = sum(spool.is_failed)
        counter = _Counter()

        def errors() -> Iterator[bytes]:
            if expire_lines_of is None:
                return spool.rows("failed")
            return _with_expired(spool, batch_id, expire_lines_of, counter)

        output = _put(store, output_key, lambda: spool.rows("completed"))
        error = _put(store, error_key, errors)
        return Assembled(
            output=output,
            error=error,
            completed=len(spool.lines) - rows_failed,
            failed=rows_failed + counter.expired,
            expired=counter.expired,
            usage=spool.usage,
            damaged=damaged,
        )


@dataclass(slots=True)
class _Counter:
    expired: int = 0


def _with_expired(spool: _Spool, batch_id: str, content: Iterable[bytes], counter: _Counter) -> Iterator[bytes]:
    """Failed rows, and a ``batch_expired`` line for each request without a row, in input order."""
    counter.expired = 0
    order = spool.in_input_order()
    index = next(order, None)
    for line in split_lines(content):
        if line.is_blank or line.content is None:
            continue
        if index is not None and spool.lines[index] == line.number:
            if spool.is_failed[index]:
                yield spool.row(index)
            index = next(order, None)
            continue
        counter.expired += 1
        custom_id = orjson.loads(line.content)["custom_id"]
        yield error_line(batch_id, line.number, custom_id, BATCH_EXPIRED) + b"\n"
    if index is not None:
        raise AssemblyError(f"a part of {batch_id} holds line {spool.lines[index]}, which is no request of the input")


def _put(store: ObjectStore, key: str, rows: Callable[[], Iterator[bytes]]) -> StoredObject | None:
    """Streams rows to an object; with no rows, makes sure that there is none."""
    if next(rows(), None) is None:
        store.delete(key)
        return None
    return store.put(key, _Chunks(rows))


@dataclass(frozen=True, slots=True)
class _Chunks:
    """Rows in larger pieces, from the first one anew each time: a store may have to begin again."""

    rows: Callable[[], Iterator[bytes]]

    def __iter__(self) -> Iterator[bytes]:
        rows = self.rows()
        return _chunks(next(rows, b""), rows)


def _chunks(first: bytes, rows: Iterator[bytes]) -> Iterator[bytes]:
    chunk = bytearray(first)
    for row in rows:
        if len(chunk) >= _CHUNK_BYTES:
            yield bytes(chunk)
            chunk.clear()
        chunk += row
    yield bytes(chunk)


def _read_header(chunks: Iterator[bytes], key: str, batch_id: str) -> tuple[PartHeader, bytes]:
    """A part's header, and what was read beyond it."""
    held = bytearray()
    for chunk in chunks:
        held += chunk
        if (end := held.find(b"\n")) >= 0:
            break
        if len(held) > _MAX_HEADER_BYTES:
            raise AssemblyError(f"part {key} has no header in its first {_MAX_HEADER_BYTES:,} bytes")
    else:
        raise AssemblyError(f"part {key} ends before its header does")
    try:
        header = decode_header(bytes(held[: end + 1]), key)
    except PartError as error:
        raise AssemblyError(str(error)) from error
    if header.batch_id != batch_id:
        raise AssemblyError(f"part {key} belongs to {header.batch_id}, not to {batch_id}")
    return header, bytes(held[end + 1 :])


def _add_part(spool: _Spool, store: ObjectStore, key: str, batch_id: str, *, only: Outcome | None = None) -> None:
    """Copies a part to the spool; with ``only``, leaves out a part that has no row of that outcome."""
    chunks = store.read(key)
    header, rest = _read_header(chunks, key, batch_id)
    if only is not None and only not in header.outcomes:
        return
    expected_bytes = sum(header.lengths) + len(header.lengths)
    spool.claim(expected_bytes)
    start = spool.file.seek(0, os.SEEK_END)
    digest = hashlib.sha256(rest)
    size_bytes = spool.file.write(rest)
    for chunk in chunks:
        digest.update(chunk)
        size_bytes += spool.file.write(chunk)
    if digest.hexdigest() != header.sha256:
        raise AssemblyError(f"part {key} is damaged: its SHA-256 is not the one in its header")
    if size_bytes != expected_bytes:
        raise AssemblyError(f"part {key} is damaged: its rows do not have the lengths in its header")
    spool.add(header, start)
