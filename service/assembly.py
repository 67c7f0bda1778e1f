"""Assembles the output and error file of a batch from its parts, in input order.

The parts that count are those that Postgres has a record of. All of them are copied once into a temporary file; about
60 bytes per row stay in memory. Then both files are streamed to the object store. A repeated assembly writes the same
objects, so it can be repeated after a crash.
"""

import hashlib
import itertools
import os
from array import array
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import BinaryIO, Final, NamedTuple

import orjson
import structlog

from ray_job.contract.input_lines import split_lines
from ray_job.contract.lines import BATCH_EXPIRED, Outcome, error_line
from ray_job.contract.parts import PartError, PartHeader, Usage, decode_header
from service.errors import ObjectNotFoundError
from service.ports import ObjectStore, StoredObject
from service.row_chunks import RowChunks
from service.workspace import Workspace

logger = structlog.get_logger(__name__)

_MAX_HEADER_BYTES: Final = 1 << 26
# Parts that are opened at the same time; each holds at most one chunk of 1 MiB.
_READERS: Final = 16


@dataclass(frozen=True, slots=True, kw_only=True)
class PartRecord:
    """A part that counts.

    Attributes:
        key: its key.
        refused_lines: numbers of lines that it holds although they do not count.
    """

    key: str
    refused_lines: Sequence[int] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Assembled:
    """Result of an assembly.

    Attributes:
        output: the output file; None if it has no rows, in which case it is not written.
        error: the error file, likewise.
        completed: number of rows in the output file.
        failed: number of rows in the error file, including expired ones.
        expired: number of rows in the error file whose requests did not run.
        usage: tokens of all rows.
        damaged: the problem of each part that could not be read and was left out, and of each part with lines that an
            earlier part has too, which count once.
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
        """Number of lines with a result."""
        return self.completed + self.failed - self.expired


@dataclass(slots=True, kw_only=True)
class _Spool:
    """The rows of all parts in one file, with their places. Only the first row of each line is kept."""

    batch_id: str
    file: BinaryIO
    claim: Callable[[int], None] = lambda _: None
    lines: "array[int]" = field(default_factory=lambda: array("Q"))
    offsets: "array[int]" = field(default_factory=lambda: array("Q"))
    lengths: "array[int]" = field(default_factory=lambda: array("Q"))
    is_failed: bytearray = field(default_factory=bytearray)
    seen: set[int] = field(default_factory=set)
    usage: Usage = field(default_factory=Usage)
    expired: int = 0
    damaged: list[str] = field(default_factory=list)

    def add(self, part: PartRecord, chunks: Iterator[bytes], *, only: Outcome | None = None) -> None:
        """Copy the rows of a part that count; with ``only``, skip a part without rows of that outcome."""
        key = part.key
        header, rest = _read_header(chunks, key, self.batch_id)
        if only is not None and only not in header.outcomes:
            return
        expected_bytes = sum(header.lengths) + len(header.lengths)
        self.claim(expected_bytes)
        start = self.file.seek(0, os.SEEK_END)
        digest = hashlib.sha256(rest)
        size_bytes = self.file.write(rest)
        for chunk in chunks:
            digest.update(chunk)
            # A job may write more than it states. Only what is claimed may reach the disk.
            if size_bytes + len(chunk) > expected_bytes:
                raise PartError(f"part {key} is damaged: it is longer than its header states")
            size_bytes += self.file.write(chunk)
        if digest.hexdigest() != header.sha256:
            raise PartError(f"part {key} is damaged: its SHA-256 differs from the one in its header")
        if size_bytes != expected_bytes:
            raise PartError(f"part {key} is damaged: the lengths of its rows differ from those in its header")
        refused = frozenset(part.refused_lines)
        repeated = 0
        for offset, line, length, outcome, usage in zip(
            header.offsets(), header.lines, header.lengths, header.outcomes, header.usage, strict=True
        ):
            if line in refused:
                continue
            if line in self.seen:
                repeated += 1
                continue
            self.seen.add(line)
            self.lines.append(line)
            self.offsets.append(start + offset - header.size_bytes)
            self.lengths.append(length + 1)
            self.is_failed.append(outcome == "failed")
            self.usage += usage
        if repeated:
            self.damaged.append(f"part {key} has {repeated:,} lines that an earlier part has too")

    def in_input_order(self) -> Iterator[int]:
        """Return the indexes of the rows, sorted by line number."""
        return iter(sorted(range(len(self.lines)), key=self.lines.__getitem__))

    def row(self, index: int) -> bytes:
        """Return a row with its line break."""
        return os.pread(self.file.fileno(), self.lengths[index], self.offsets[index])

    def rows(self, outcome: Outcome) -> Iterator[bytes]:
        """Yield the rows of one outcome in input order."""
        for index in self.in_input_order():
            if bool(self.is_failed[index]) == (outcome == "failed"):
                yield self.row(index)

    def rows_and_expired(self, content: Iterable[bytes]) -> Iterator[bytes]:
        """Yield the failed rows, and a ``batch_expired`` line for each request without a row, in input order."""
        self.expired = 0
        order = self.in_input_order()
        index = next(order, None)
        for line in split_lines(content):
            if line.is_blank or line.content is None:
                continue
            if index is not None and self.lines[index] == line.number:
                if self.is_failed[index]:
                    yield self.row(index)
                index = next(order, None)
                continue
            self.expired += 1
            custom_id = orjson.loads(line.content)["custom_id"]
            yield error_line(self.batch_id, line.number, custom_id, BATCH_EXPIRED) + b"\n"
        if index is not None:
            raise PartError(
                f"a part of {self.batch_id} has line {self.lines[index]}, which is not a request of the input file"
            )


def read_headers(store: ObjectStore, keys: Iterable[str], batch_id: str) -> Iterator[tuple[str, PartHeader]]:
    """Yield the key and the header of each part, without those that cannot be read.

    Raises:
        ObjectStoreError: the store cannot be reached, or a part does not exist.
    """
    for part, opened in _opened(store, (PartRecord(key=key) for key in keys)):
        try:
            header, _ = _read_header(opened.result(), part.key, batch_id)
        except PartError as error:
            logger.warning("part.damaged", batch_id=batch_id, error=str(error))
            continue
        yield part.key, header


class CommittedRows(NamedTuple):
    """Rows of one outcome in input order: their number, their size with line breaks, and their content in chunks."""

    lines: int
    size_bytes: int
    chunks: Iterator[bytes]


def committed_rows(
    store: ObjectStore,
    parts: Iterable[PartRecord],
    *,
    batch_id: str,
    outcome: Outcome,
    file: BinaryIO,
    claim: Callable[[int], None] = lambda _: None,
) -> CommittedRows:
    """Copy parts to a file on disk, and return their rows of one outcome from it.

    Args:
        store: the object store with the parts.
        parts: the records of the batch's parts.
        batch_id: the batch.
        outcome: the outcome of the rows. Parts without such rows are not copied.
        file: an empty file. The caller keeps it open until it has read the last chunk.
        claim: called with the size of each part before it is written; what it raises is passed on.

    Raises:
        PartError: a part is damaged.
        ObjectNotFoundError: a part was deleted meanwhile.
        ObjectStoreError: the store cannot be reached.
    """
    spool = _Spool(batch_id=batch_id, file=file, claim=claim)
    for part, opened in _opened(store, parts):
        spool.add(part, opened.result(), only=outcome)
    file.flush()
    wants_failed = outcome == "failed"
    lengths = [
        length
        for length, is_failed in zip(spool.lengths, spool.is_failed, strict=True)
        if bool(is_failed) == wants_failed
    ]
    chunks = iter(RowChunks(lambda: spool.rows(outcome)))
    return CommittedRows(lines=len(lengths), size_bytes=sum(lengths), chunks=chunks)


def assemble(
    store: ObjectStore,
    parts: Iterable[PartRecord],
    *,
    batch_id: str,
    output_key: str,
    error_key: str,
    workspace: Workspace,
    expire_lines_of: Callable[[], Iterable[bytes]] | None = None,
    may_write: Callable[[], bool] = lambda: True,
) -> Assembled | None:
    """Write the output and the error file of a batch from all readable parts; return None if they were not written.

    Args:
        store: the object store of the parts and files.
        parts: the records of the batch's parts. If two hold the same line, the first one counts.
        batch_id: the batch.
        output_key: the key of the output file.
        error_key: the key of the error file.
        workspace: holds a copy of all parts during the assembly.
        expire_lines_of: returns the content of the input file; called more than once. Each of its requests without a
            result gets a ``batch_expired`` line.
        may_write: called after all parts are read; no file is written if it returns False.

    Raises:
        PartError: a part has a line that ``expire_lines_of`` lacks.
        ObjectStoreError: the store cannot be reached.
        OSError: the workspace has no room.
    """
    with workspace.open() as (file, claim):
        spool = _Spool(batch_id=batch_id, file=file, claim=claim)
        for part, opened in _opened(store, parts):
            try:
                spool.add(part, opened.result())
            except PartError as problem:
                spool.damaged.append(str(problem))
            except ObjectNotFoundError:
                spool.damaged.append(f"part {part.key} does not exist")
        spool.file.flush()
        if not may_write():
            return None

        def error_rows() -> Iterator[bytes]:
            return spool.rows("failed") if expire_lines_of is None else spool.rows_and_expired(expire_lines_of())

        def put(key: str, rows: Callable[[], Iterator[bytes]]) -> StoredObject | None:
            if next(rows(), None) is None:
                store.delete(key)
                return None
            return store.put(key, RowChunks(rows))

        output = put(output_key, lambda: spool.rows("completed"))
        error = put(error_key, error_rows)
        rows_failed = sum(spool.is_failed)
        return Assembled(
            output=output,
            error=error,
            completed=len(spool.lines) - rows_failed,
            failed=rows_failed + spool.expired,
            expired=spool.expired,
            usage=spool.usage,
            damaged=spool.damaged,
        )


def _opened(store: ObjectStore, parts: Iterable[PartRecord]) -> Iterator[tuple[PartRecord, Future[Iterator[bytes]]]]:
    """Yield each part with its content. The next parts are opened meanwhile, to hide the store's latency."""

    def open_part(key: str) -> Iterator[bytes]:
        chunks = store.read(key)
        return itertools.chain((next(chunks, b""),), chunks)

    with ThreadPoolExecutor(_READERS, thread_name_prefix="parts") as readers:
        opened: deque[tuple[PartRecord, Future[Iterator[bytes]]]] = deque()
        for part in parts:
            opened.append((part, readers.submit(open_part, part.key)))
            if len(opened) > _READERS:
                yield opened.popleft()
        yield from opened


def _read_header(chunks: Iterator[bytes], key: str, batch_id: str) -> tuple[PartHeader, bytes]:
    """Return the header of a part, and the bytes that were read beyond it."""
    held = bytearray()
    for chunk in chunks:
        held += chunk
        if (end := held.find(b"\n")) >= 0:
            break
        if len(held) > _MAX_HEADER_BYTES:
            raise PartError(f"part {key} has no header in its first {_MAX_HEADER_BYTES:,} bytes")
    else:
        raise PartError(f"part {key} ends within its header")
    header = decode_header(bytes(held[: end + 1]), key)
    if header.batch_id != batch_id:
        raise PartError(f"part {key} belongs to {header.batch_id}, not to {batch_id}")
    return header, bytes(held[end + 1 :])
