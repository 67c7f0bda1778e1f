"""``cloister validate`` and ``cloister submit``: check an input file, upload it and create a batch."""

import contextlib
import dataclasses
import io
import json
import os
import shutil
import stat
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, BinaryIO, Final

import orjson
import typer

from ray_job.contract.input_lines import split_lines
from ray_job.contract.lines import ENDPOINTS
from service.cli.batches import report_end, wait
from service.cli.options import DEFAULT_DATA_DIR, ClientDataDir
from service.cli.preflight import Preflight, print_estimate
from service.cli.results import download
from service.client.connection import open_client
from service.client.exit_codes import CommandError, ExitCode
from service.client.following import Update
from service.client.terminal import console, counted, note, print_errors, transfer
from service.input_file import read_input_file
from service.model_catalogue import ModelLimits, load_catalogue
from service.prompts import FileCount

if TYPE_CHECKING:
    from openai import OpenAI
    from openai.types import Batch

_MAX_PAIRS: Final = 16
_CHUNK_BYTES: Final = 1 << 20

RequestFile = Annotated[Path, typer.Argument(help="A JSONL file of requests; - for stdin.", show_default=False)]
Endpoint = Annotated[
    str, typer.Option(help="The endpoint of the batch; by default the url of the first request.", show_default=False)
]


def validate(
    file: RequestFile,
    *,
    endpoint: Endpoint = "",
    models: Annotated[
        Path | None, typer.Option(help="The server's models.yaml. Without it, any model name is accepted.")
    ] = None,
    should_estimate: Annotated[
        bool,
        typer.Option("--estimate", help="Estimate tokens, duration and GPU seconds by what the server measured."),
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object and nothing else.")] = False,
    data_dir: ClientDataDir = DEFAULT_DATA_DIR,
) -> None:
    """Check an input file for errors, as the server does. Nothing of the file is sent anywhere."""
    if endpoint and endpoint not in ENDPOINTS:
        raise typer.BadParameter(f"must be one of {', '.join(ENDPOINTS)}", param_hint="--endpoint")
    catalogue = load_catalogue(models) if models else None
    with open_input(file) as source, contextlib.ExitStack() as opened:
        endpoint = endpoint or first_endpoint(source.chunks()) or ENDPOINTS[0]
        preflight = Preflight(opened.enter_context(open_client(data_dir))) if should_estimate else None
        count = None
        if preflight:
            count = FileCount(
                find_counter=preflight.find_counter,
                endpoint=endpoint,
                size_bytes=source.size_bytes,
                line_count=sum(chunk.count(b"\n") for chunk in source.chunks()),
            )
        with transfer(source.name, source.size_bytes, quiet=as_json) as show_progress:
            chunks = (show_progress(source.tell()) or chunk for chunk in source.chunks())
            facts = read_input_file(chunks, endpoint=endpoint, models=catalogue, file_count=count)
    estimate = preflight.estimate(facts) if preflight and not facts.error_count else None
    if as_json:
        result = {
            "file": str(file),
            "endpoint": endpoint,
            "is_valid": facts.error_count == 0,
            "requests": facts.total,
            "model": facts.model,
            "error_count": facts.error_count,
            "errors": [dataclasses.asdict(error) for error in facts.errors],
        }
        if should_estimate:
            result["estimate"] = estimate
        print(json.dumps(result, ensure_ascii=False))
    elif facts.error_count:
        print_errors(console(), facts.errors, facts.error_count)
        print(f"{file}: {counted(facts.error_count, 'error')} in {counted(facts.total, 'request')} for {endpoint}")
    else:
        print(f"{file}: {counted(facts.total, 'request')} for {endpoint}, model {facts.model}, no errors")
        if estimate:
            print_estimate(estimate, facts.total)
    raise typer.Exit(ExitCode.FILE_INVALID if facts.error_count else ExitCode.OK)


def submit(
    file: RequestFile,
    *,
    endpoint: Endpoint = "",
    metadata: Annotated[
        list[str] | None, typer.Option(metavar="KEY=VALUE", help="Metadata of the batch. May be repeated.")
    ] = None,
    priority: Annotated[
        int,
        typer.Option(min=-100, max=100, help="Of the batches of a project, the highest priority is launched first."),
    ] = 0,
    validate: Annotated[
        bool, typer.Option(help="Check the file before the upload. The server checks it in any case.")
    ] = True,
    should_wait: Annotated[
        bool, typer.Option("--wait", help="Wait until the batch has ended, then write the results.")
    ] = False,
    output: Annotated[
        Path | None, typer.Option(help="With --wait: the file for the output. Default: BATCH_output.jsonl.")
    ] = None,
    errors: Annotated[
        Path | None, typer.Option(help="With --wait: the file for the lines that failed. Default: BATCH_errors.jsonl.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the Batch object and nothing else.")] = False,
    data_dir: ClientDataDir = DEFAULT_DATA_DIR,
) -> None:
    """Upload a file and create a batch."""
    if not should_wait and (output or errors):
        raise typer.BadParameter("--output and --errors need the end of the batch: give --wait too")
    if endpoint and endpoint not in ENDPOINTS:
        raise typer.BadParameter(f"must be one of {', '.join(ENDPOINTS)}", param_hint="--endpoint")
    for pair in metadata or []:
        if "=" not in pair or pair.startswith("="):
            raise typer.BadParameter(f"{pair!r} must look like KEY=VALUE", param_hint="--metadata")
    pairs = dict(pair.split("=", 1) for pair in metadata or [])
    if len(pairs) > _MAX_PAIRS:
        raise typer.BadParameter(f"a batch has at most {_MAX_PAIRS} pairs", param_hint="--metadata")
    with open_client(data_dir) as client:
        options: dict[str, Any] = {"metadata": pairs} if pairs else {}
        if priority:
            options["extra_body"] = {"x_cloister": {"priority": priority}}
        batch = _create_batch(client, file, endpoint, options, validate=validate, quiet=as_json)
        if not should_wait:
            print(batch.to_json(indent=None) if as_json else batch.id)
            if not as_json:
                note(f"`cloister watch {batch.id}` shows its progress, `cloister results {batch.id}` its results.")
            return
        batch = wait(client, batch.id, quiet=as_json)
        for path, file_id, name in (
            (output, batch.output_file_id, f"{batch.id}_output.jsonl"),
            (errors, batch.error_file_id, f"{batch.id}_errors.jsonl"),
        ):
            if path or file_id:
                size = download(client, file_id, path or Path(name), quiet=as_json)
                if not as_json:
                    note(f"wrote {path or name} ({size:,} bytes)")
    print(batch.to_json(indent=None)) if as_json else report_end(batch)
    raise typer.Exit(ExitCode.of_batch(batch.status, Update.of(batch).failed))


def _create_batch(
    client: "OpenAI", path: Path, endpoint: str, options: dict[str, Any], *, validate: bool, quiet: bool
) -> "Batch":
    """Upload a file and create its batch.

    Raises:
        CommandError: the file is invalid, or changed during the upload; then the uploaded copy is deleted.
        openai.APIError: the server is unreachable or refused the file.
    """
    import openai

    with open_input(path) as source:
        found = endpoint or first_endpoint(source.chunks())
        # Without an endpoint the file is invalid: validation finds the reason.
        if validate or found is None:
            facts = read_input_file(source.chunks(), endpoint=found or ENDPOINTS[0], models=None)
            if facts.error_count:
                print_errors(console(is_stderr=True), facts.errors, facts.error_count)
                raise CommandError(
                    f"{source.name} has {counted(facts.error_count, 'error')}, so nothing was uploaded. Correct the "
                    "file; `cloister validate` checks it again.",
                    ExitCode.FILE_INVALID,
                )
        changed = CommandError(
            f"{source.name} changed during the upload, so no batch was created. Try again when the file is complete."
        )
        reader: Any = source  # the client's types only accept files with a name
        try:
            with transfer(source.name, source.size_bytes, quiet=quiet) as show_progress:
                source.on_read = show_progress
                source.seek(0)
                try:
                    stored = client.files.create(file=(source.name, reader), purpose="batch")
                except openai.APIConnectionError as error:
                    if source.has_changed():
                        raise changed from error
                    raise
                if source.has_changed():
                    client.files.delete(stored.id)
                    raise changed
        except KeyboardInterrupt:
            raise CommandError("interrupted during the upload: no batch was created", ExitCode.INTERRUPTED) from None
    return client.batches.create(
        input_file_id=stored.id,
        endpoint=found or ENDPOINTS[0],  # type: ignore[arg-type]
        completion_window="24h",
        **options,
    )


class InputFile(io.RawIOBase):
    """An open input file. The client reads it to its size when it was opened, although it may have grown since.

    It has no ``fileno``, because the client would take the length from it.

    Args:
        name: its name on the server and in messages.
        file: the file.

    Attributes:
        size_bytes: its size when it was opened.
        on_read: called with the position after each read of the client.
    """

    def __init__(self, name: str, file: BinaryIO) -> None:
        status = os.fstat(file.fileno())
        self.name = name
        self.size_bytes = status.st_size
        self.on_read: Callable[[int], None] = lambda _position: None
        self._file = file
        self._modified_ns = status.st_mtime_ns

    def chunks(self) -> Iterator[bytes]:
        """Yield the whole content from the start."""
        self._file.seek(0)
        while chunk := self._file.read(_CHUNK_BYTES):
            yield chunk

    def has_changed(self) -> bool:
        """Return whether the file was modified after it was opened."""
        now = os.fstat(self._file.fileno())
        return (now.st_size, now.st_mtime_ns) != (self.size_bytes, self._modified_ns)

    def readable(self) -> bool:
        """See ``io.RawIOBase``."""
        return True

    def seekable(self) -> bool:
        """See ``io.RawIOBase``."""
        return True

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        """Move to a position. The end is where the file ended when it was opened."""
        if whence == io.SEEK_END:
            offset, whence = self.size_bytes + offset, io.SEEK_SET
        return self._file.seek(offset, whence)

    def tell(self) -> int:
        """Return the position."""
        return self._file.tell()

    def read(self, size: int = -1) -> bytes:
        """Read up to ``size`` bytes, or to where the file ended when it was opened, and call ``on_read``."""
        left = max(0, self.size_bytes - self.tell())
        data = self._file.read(left if size < 0 else min(size, left))
        self.on_read(self.tell())
        return data


@contextmanager
def open_input(path: Path) -> Iterator[InputFile]:
    """Open an input file. For ``-``, stdin is first copied to disk.

    Raises:
        CommandError: the file cannot be read, is not a regular file, or is empty.
    """
    is_stdin = str(path) == "-"
    try:
        file: Any = tempfile.TemporaryFile() if is_stdin else path.open("rb")  # noqa: SIM115 - closed below
    except IsADirectoryError as error:
        raise CommandError(f"{path} is a directory: name a JSONL file, or - for stdin") from error
    except OSError as error:
        raise CommandError(f"cannot read {path}: {error.strerror}") from error
    with file:
        if is_stdin:
            shutil.copyfileobj(sys.stdin.buffer, file, _CHUNK_BYTES)
            file.flush()
        source = InputFile("stdin.jsonl" if is_stdin else path.name, file)
        if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
            raise CommandError(f"{path} is not a regular file: give - and pass the content on stdin")
        if source.size_bytes == 0:
            raise CommandError(
                f"{source.name} is empty. Write one JSON object per line, each with custom_id, method, url and body.",
                ExitCode.FILE_INVALID,
            )
        yield source


def first_endpoint(chunks: Iterator[bytes]) -> str | None:
    """Return the endpoint of the first request; None if it cannot be read or has no url.

    Raises:
        CommandError: a batch cannot have this endpoint.
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
                f"line {line.number} has the url {url[:100]!r}. A batch supports one of: {', '.join(ENDPOINTS)}",
                ExitCode.FILE_INVALID,
            )
        return None
    return None
