"""Input files on their way to the server: found, looked at before, counted while they go."""

import io
import os
import shutil
import stat
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO, Final

import orjson

from ray_job.contract.input_lines import split_lines
from ray_job.contract.lines import ENDPOINTS
from service.cli.exits import CommandError, ExitCode
from service.model_catalogue import ModelLimits

if TYPE_CHECKING:
    from openai import OpenAI

_CHUNK_BYTES: Final = 1 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class InputFile:
    """An open input file; ``name`` is what the server and messages call it."""

    name: str
    file: BinaryIO
    size_bytes: int
    changed_ns: int

    def chunks(self) -> Iterator[bytes]:
        """Its content, from the start."""
        self.file.seek(0)
        while chunk := self.file.read(_CHUNK_BYTES):
            yield chunk

    def has_changed(self) -> bool:
        """Whether it was written to since it was opened."""
        now = os.fstat(self.file.fileno())
        return (now.st_size, now.st_mtime_ns) != (self.size_bytes, self.changed_ns)


@contextmanager
def open_input(path: Path) -> Iterator[InputFile]:
    """Opens an input file; ``-`` is stdin, which is copied to disk first.

    Raises:
        CommandError: it cannot be read, is no file, or is empty.
    """
    if str(path) == "-":
        with tempfile.TemporaryFile() as copy:
            shutil.copyfileobj(sys.stdin.buffer, copy, _CHUNK_BYTES)
            copy.flush()
            yield _checked("stdin.jsonl", copy)
        return
    try:
        file = path.open("rb")
    except IsADirectoryError as error:
        raise CommandError(f"{path} is a directory: name the JSONL file to submit, or - for stdin") from error
    except OSError as error:
        raise CommandError(f"cannot read {path}: {error.strerror}") from error
    with file:
        if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
            raise CommandError(f"{path} is no ordinary file: give - and let it come by stdin")
        yield _checked(path.name, file)


def _checked(name: str, file: BinaryIO) -> InputFile:
    status = os.fstat(file.fileno())
    if status.st_size == 0:
        raise CommandError(
            f"{name} is empty. Write one JSON object per line, each with custom_id, method, url and body.",
            ExitCode.FILE_INVALID,
        )
    return InputFile(name=name, file=file, size_bytes=status.st_size, changed_ns=status.st_mtime_ns)


def first_endpoint(chunks: Iterator[bytes]) -> str | None:
    """The endpoint that the first request names; None where it names none, or cannot be read.

    Raises:
        CommandError: it names one that no batch can have.
    """
    for line in split_lines(chunks, max_line_bytes=ModelLimits().max_line_bytes):
        if line.is_blank:
            continue
        try:
            request: Any = orjson.loads(line.content or b"")
        except orjson.JSONDecodeError:
            return None
        url = request.get("url") if isinstance(request, dict) else None
        if url in ENDPOINTS:
            return str(url)
        if isinstance(url, str) and not any(url.rstrip("/").endswith(endpoint) for endpoint in ENDPOINTS):
            raise CommandError(
                f"line {line.number} names the url {url[:100]!r}. A batch can have one of: {', '.join(ENDPOINTS)}",
                ExitCode.FILE_INVALID,
            )
        return None
    return None


class _Counted(io.RawIOBase):
    """The file as it was when it was opened: never more bytes than then. Tells how far it was read.

    It has no ``fileno`` on purpose: the client would take the length from there, which may have grown since.
    """

    def __init__(self, source: InputFile, tell: Callable[[int], None]) -> None:
        self._source, self._tell = source, tell
        source.file.seek(0)

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        if whence == io.SEEK_END:
            offset, whence = self._source.size_bytes + offset, io.SEEK_SET
        return self._source.file.seek(offset, whence)

    def tell(self) -> int:
        return self._source.file.tell()

    def read(self, size: int = -1) -> bytes:
        left = max(0, self._source.size_bytes - self.tell())
        data = self._source.file.read(left if size < 0 else min(size, left))
        self._tell(self.tell())
        return data


def upload(client: "OpenAI", source: InputFile, tell: Callable[[int], None]) -> str:
    """Streams a file to the server and returns its id there. ``tell`` hears how many bytes are sent.

    Raises:
        CommandError: the file was written to meanwhile; what was uploaded is deleted again.
        openai.APIError: the server refused it, or cannot be reached.
    """
    import openai

    changed = CommandError(
        f"{source.name} was changed while it was uploaded, so no batch was made. Try again once it is written."
    )
    try:
        # The types of the client know only files that it could ask for a name.
        stored = client.files.create(file=(source.name, _Counted(source, tell)), purpose="batch")  # type: ignore[arg-type]
    except openai.APIConnectionError as error:
        if source.has_changed():
            raise changed from error
        raise
    if source.has_changed():
        client.files.delete(stored.id)
        raise changed
    return stored.id
