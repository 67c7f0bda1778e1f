"""``cloister results``: download the results of a batch."""

import json
import os
import shutil
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, BinaryIO, Final, Literal

import httpx
import stamina
import typer

from service.cli.options import DEFAULT_DATA_DIR, ClientDataDir
from service.client.connection import open_client
from service.client.exit_codes import CommandError, ExitCode
from service.client.following import Update
from service.client.terminal import note, transfer
from service.transitions import FINAL

if TYPE_CHECKING:
    from openai import OpenAI

_STDOUT: Final = Path("-")
_ATTEMPTS: Final = 3
_CHUNK_BYTES: Final = 1 << 18
_TIMEOUT_S: Final = 60.0


def results(
    batch: Annotated[str, typer.Argument(help="A batch id.", show_default=False)],
    *,
    output: Annotated[Path, typer.Option("--output", "-o", help="The file for the output; - for stdout.")] = _STDOUT,
    errors: Annotated[Path | None, typer.Option(help="The file for the lines that failed.")] = None,
    partial: Annotated[
        bool, typer.Option("--partial", help="Download the lines that have a result, while the batch still runs.")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print the files written, and nothing else.")] = False,
    data_dir: ClientDataDir = DEFAULT_DATA_DIR,
) -> None:
    """Download the results of a batch. A file is written completely or not at all."""
    if as_json and output == _STDOUT:
        raise typer.BadParameter("the output and the JSON would mix on stdout: give --output PATH", param_hint="--json")
    with open_client(data_dir) as client:
        found = client.batches.retrieve(batch)
        is_final = found.status in FINAL
        if not is_final and not partial:
            raise CommandError(
                f"{batch} is {found.status}: `cloister watch {batch}` waits for its end, --partial downloads the "
                "lines that have a result"
            )
        written = []
        kinds: tuple[tuple[Literal["output", "error"], str, Path | None, str | None], ...] = (
            ("output", "output", output, found.output_file_id),
            ("error", "errors", errors, found.error_file_id),
        )
        for kind, name, path, file_id in kinds:
            if path is not None:
                if is_final:
                    size = download(client, file_id, path, quiet=as_json)
                else:
                    size = download_partial(client, batch, kind, path)
                written.append({"kind": name, "path": str(path), "size_bytes": size})
    update = Update.of(found)
    if as_json:
        print(json.dumps({"batch_id": batch, "status": found.status, "is_complete": is_final, "files": written}))
    else:
        for file in written:
            if file["path"] != str(_STDOUT):
                note(f"wrote {file['path']} ({file['size_bytes']:,} bytes)")
        if not is_final:
            note(f"{batch} is {found.status}: {update.done:,} of {update.total:,} lines have a result")
        elif found.error_file_id and errors is None:
            note(f"{update.failed:,} of {update.total:,} lines failed: --errors PATH downloads them")
        elif found.status == "failed":
            note(f"{batch} failed: `cloister status {batch}` shows the reason")
    raise typer.Exit(ExitCode.of_batch(found.status, update.failed) if is_final else ExitCode.OK)


def download(client: "OpenAI", file_id: str | None, path: Path, *, quiet: bool) -> int:
    """Download a file and return its size in bytes. Connections that are cut are retried.

    Args:
        client: the client of the server.
        file_id: the file; None writes an empty file, so that no older results stay.
        path: the file to write; ``-`` for stdout.
        quiet: whether to hide the progress.

    Raises:
        CommandError: the download was cut several times, or the path cannot be written.
    """
    import httpx2
    import openai

    cuts = (openai.APIConnectionError, httpx2.TransportError)
    hide_bar = quiet or path == _STDOUT
    try:
        with open_target(path) as target, transfer(path.name, None, quiet=hide_bar) as show_progress:
            for attempt in stamina.retry_context(on=cuts, attempts=_ATTEMPTS if file_id else 1):
                with attempt:
                    target.seek(0)
                    target.truncate()
                    if file_id:
                        with client.files.with_streaming_response.content(file_id) as answer:
                            for chunk in answer.iter_bytes(_CHUNK_BYTES):
                                target.write(chunk)
                                show_progress(target.tell())
            return target.tell()
    except cuts as error:
        raise CommandError(
            f"the download of {file_id} was cut {_ATTEMPTS} times. Try again; nothing was written.",
            ExitCode.UNREACHABLE,
        ) from error


def download_partial(client: "OpenAI", batch_id: str, kind: Literal["output", "error"], path: Path) -> int:
    """Download the results that a running batch has so far, and return their size in bytes.

    Raises:
        CommandError: the server offers no partial results, the download was cut, or the path cannot be written.
    """
    url = f"{str(client.base_url).rstrip('/')}/batches/{batch_id}/results"
    headers = {"authorization": f"Bearer {client.api_key}"}
    try:
        with (
            httpx.stream("GET", url, params={"kind": kind}, headers=headers, timeout=_TIMEOUT_S) as answer,
            open_target(path) as target,
        ):
            if answer.status_code != httpx.codes.OK:
                raise CommandError(
                    f"the server returned no partial results (HTTP {answer.status_code}). Wait for the batch: "
                    f"`cloister watch {batch_id}`, then `cloister results {batch_id}`"
                )
            for chunk in answer.iter_bytes(_CHUNK_BYTES):
                target.write(chunk)
            return target.tell()
    except httpx.HTTPError as error:
        raise CommandError(
            f"the download of the partial results of {batch_id} failed: {error}. Try again.", ExitCode.UNREACHABLE
        ) from error


@contextmanager
def open_target(path: Path) -> Iterator[BinaryIO]:
    """Open a file that replaces ``path`` when the context ends. After an error ``path`` is unchanged.

    For ``-`` the content goes to stdout when the context ends, so that a reader never receives half of it.

    Raises:
        CommandError: the path is a directory or cannot be written.
    """
    if path == _STDOUT:
        with tempfile.TemporaryFile() as copy:
            yield copy
            copy.seek(0)
            try:
                shutil.copyfileobj(copy, sys.stdout.buffer, _CHUNK_BYTES)
                sys.stdout.buffer.flush()
            except BrokenPipeError:
                # The reader, such as `head`, closed the pipe. Python would print an error for it at exit.
                os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return
    if path.is_dir():
        raise CommandError(f"{path} is a directory: name a file, e.g. {path / 'results.jsonl'}")
    staging = ""
    try:
        descriptor, staging = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.", suffix=".part")
        with os.fdopen(descriptor, "wb") as file:
            yield file
        umask = os.umask(0)
        os.umask(umask)
        Path(staging).chmod(0o666 & ~umask)  # mkstemp creates files that only their owner can read
        Path(staging).replace(path)
    except OSError as error:
        raise CommandError(f"cannot write {path}: {error.strerror}") from error
    finally:
        if staging:
            Path(staging).unlink(missing_ok=True)
