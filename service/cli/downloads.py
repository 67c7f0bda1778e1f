"""Result files on their way from the server: whole or not at all."""

import os
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, BinaryIO, Final, Literal

import httpx

from service.cli.exits import CommandError, ExitCode

if TYPE_CHECKING:
    from openai import OpenAI

_TRIES: Final = 3
_CHUNK_BYTES: Final = 1 << 18


@contextmanager
def replacing(path: Path) -> Iterator[BinaryIO]:
    """A file that takes the place of ``path`` once all went well; else nothing is left of it.

    Raises:
        CommandError: the directory is missing or cannot be written to.
    """
    if path.is_dir():
        raise CommandError(f"{path} is a directory: name the file to write, e.g. {path / 'results.jsonl'}")
    staging = ""
    try:
        descriptor, staging = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.", suffix=".part")
        with os.fdopen(descriptor, "wb") as file:
            yield file
        umask = os.umask(0)
        os.umask(umask)
        Path(staging).chmod(0o666 & ~umask)  # mkstemp's are for their owner only
        Path(staging).replace(path)
    except OSError as error:
        raise CommandError(f"cannot write {path}: {error.strerror}") from error
    finally:
        if staging:
            Path(staging).unlink(missing_ok=True)


def save(client: "OpenAI", file_id: str | None, path: Path, tell: Callable[[int], None]) -> int:
    """Writes a file of the server, or an empty one where there is none, so that no older results stay. Its bytes."""
    with replacing(path) as target:
        return _copy_file(client, file_id, target, tell) if file_id else 0


def send_to_stdout(client: "OpenAI", file_id: str | None) -> int:
    """Writes a file of the server to stdout, once it is here in full: a program that reads it sees no half."""
    if file_id is None:
        return 0
    with tempfile.TemporaryFile() as copy:
        size = _copy_file(client, file_id, copy, lambda _: None)
        copy.seek(0)
        _to_stdout(copy)
    return size


def _to_stdout(source: BinaryIO) -> None:
    try:
        while chunk := source.read(_CHUNK_BYTES):
            sys.stdout.buffer.write(chunk)
        sys.stdout.buffer.flush()
    except BrokenPipeError:
        # Who reads has enough (head); Python must not complain at its end either.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _copy_file(client: "OpenAI", file_id: str, target: BinaryIO, tell: Callable[[int], None]) -> int:
    import httpx2
    import openai

    for attempt in range(1, _TRIES + 1):
        target.seek(0)
        target.truncate()
        try:
            with client.files.with_streaming_response.content(file_id) as answer:
                return _copy(answer.iter_bytes(_CHUNK_BYTES), target, tell)
        except (openai.APIConnectionError, httpx2.TransportError) as error:
            if attempt == _TRIES:
                raise _cut(file_id) from error
    raise AssertionError


def _copy(chunks: Iterator[bytes], target: BinaryIO, tell: Callable[[int], None]) -> int:
    size = 0
    for chunk in chunks:
        target.write(chunk)
        size += len(chunk)
        tell(size)
    return size


def _cut(what: str) -> CommandError:
    return CommandError(
        f"the download of {what} was cut {_TRIES} times. Try again; nothing was written.", ExitCode.UNREACHABLE
    )


def save_partial(client: "OpenAI", batch_id: str, kind: Literal["output", "error"], target: BinaryIO) -> bool:
    """Writes what a batch has so far, and tells whether that is all of it.

    Raises:
        CommandError: the server offers no partial results, or the download was cut.
    """
    url = f"{str(client.base_url).rstrip('/')}/batches/{batch_id}/results"
    headers = {"authorization": f"Bearer {client.api_key}"}
    try:
        with httpx.stream("GET", url, params={"kind": kind}, headers=headers, timeout=60) as answer:
            if answer.status_code != httpx.codes.OK:
                raise CommandError(
                    f"the server gave no partial results (HTTP {answer.status_code}). Wait for the batch: "
                    f"`cloister watch {batch_id}`, then `cloister results {batch_id}`"
                )
            _copy(answer.iter_bytes(_CHUNK_BYTES), target, lambda _: None)
            return bool(answer.headers.get("x-cloister-complete") == "true")
    except httpx.HTTPError as error:
        raise CommandError(
            f"the download of the partial results of {batch_id} failed: {error}. Try again.", ExitCode.UNREACHABLE
        ) from error
