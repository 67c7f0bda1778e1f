"""What ``submit --wait``, ``watch`` and ``cancel --wait`` share: following a batch, and telling how it ended."""

import dataclasses
import json
from collections.abc import Callable
from typing import TYPE_CHECKING

from service.cli.exits import CommandError, ExitCode
from service.cli.following import Update, follow, update_of
from service.cli.terminal import batch_progress, note, print_errors, progress_text, stderr
from service.input_file import InputError

if TYPE_CHECKING:
    from openai import OpenAI
    from openai.types import Batch


def wait(client: "OpenAI", batch_id: str, *, quiet: bool, tell: Callable[[Update], None] | None = None) -> "Batch":
    """Shows the progress of a batch until it ends.

    Args:
        client: of the server.
        batch_id: the batch.
        quiet: show nothing on stderr.
        tell: hears every update too.

    Raises:
        CommandError: interrupted by Ctrl-C; the message says how to go on.
    """
    try:
        with batch_progress(quiet=quiet) as progress:

            def show(update: Update) -> None:
                progress.show(update)
                if tell is not None:
                    tell(update)

            return follow(client, batch_id, show)
    except KeyboardInterrupt:
        raise CommandError(
            f"interrupted. The batch goes on: `cloister watch {batch_id}` follows it, `cloister results {batch_id}` "
            f"fetches what it has, `cloister cancel {batch_id}` ends it.",
            ExitCode.INTERRUPTED,
        ) from None


def update_json(kind: str, update: Update) -> str:
    """An update as one line of JSON."""
    return json.dumps({"type": kind, **dataclasses.asdict(update)})


def batch_json(batch: "Batch") -> str:
    """A Batch object as the API answered it."""
    return json.dumps(batch.to_dict(mode="json"), ensure_ascii=False)


def tell_end(batch: "Batch") -> None:
    """Says on stderr how a batch ended, and why where it failed."""
    note(f"{batch.id}  {batch.status}  {progress_text(update_of(batch))}".rstrip())
    if errors := listed_errors(batch):
        print_errors(stderr(), errors, len(errors))


def listed_errors(batch: "Batch") -> list[InputError]:
    """Why a batch failed, as far as the server lists it."""
    listed = (batch.errors.data if batch.errors else None) or []
    return [
        InputError(code=error.code or "", message=error.message or "", param=error.param, line=error.line)
        for error in listed
    ]
