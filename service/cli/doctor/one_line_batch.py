"""A batch of one line, from upload to output, of which nothing but its Batch object is left."""

import json
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Final

from service.cli.exits import CommandError
from service.cli.following import retrieve, update_of
from service.cli.terminal import batch_progress, duration, note
from service.cli.waiting import listed_errors
from service.transitions import FINAL

if TYPE_CHECKING:
    from openai import OpenAI
    from openai.types import Batch

_CUSTOM_ID: Final = "doctor"
_PAUSE_S: Final = 2.0
_CANCEL_WITHIN_S: Final = 120.0
# Who has pressed Ctrl-C waits for nothing.
_INTERRUPTED_WITHIN_S: Final = 5.0
_MAX_REASON: Final = 500
_BODIES: Final[dict[str, dict[str, Any]]] = {
    "/v1/chat/completions": {"messages": [{"role": "user", "content": "Say yes."}], "max_tokens": 4},
    "/v1/completions": {"prompt": "Say yes.", "max_tokens": 4},
    "/v1/embeddings": {"input": "yes"},
}


@contextmanager
def one_line_batch(client: "OpenAI", model: str, endpoint: str) -> Iterator["OneLineBatch"]:
    """A batch of a model, cleaned up at the end of the context.

    Args:
        client: of the server.
        model: the model's id.
        endpoint: of the line; a model need not offer it.

    Raises:
        CommandError: it has not ended, or its files cannot be deleted. An error from within the context goes first.
    """
    import openai

    tried = OneLineBatch(client, model, endpoint)
    try:
        yield tried
    except BaseException as error:
        try:
            tried.clean_up(hastily=not isinstance(error, Exception))
        except Exception as left:  # noqa: BLE001 - whatever it is, the first error is the one to raise
            note(f"{tried.left}: {left}")
        raise
    try:
        tried.clean_up(hastily=False)
    except (CommandError, openai.OpenAIError) as left:
        raise CommandError(f"{tried.left}: {left}") from left


class OneLineBatch:
    """The batch of a model. Every method raises what the official client raises.

    Args:
        client: of the server.
        model: the model's id.
        endpoint: of the line; a model need not offer it.
    """

    def __init__(self, client: "OpenAI", model: str, endpoint: str) -> None:
        self._client = client
        request = {
            "custom_id": _CUSTOM_ID,
            "method": "POST",
            "url": endpoint,
            "body": {"model": model, **_BODIES[endpoint]},
        }
        file = client.files.create(file=("cloister-doctor.jsonl", json.dumps(request).encode()), purpose="batch")
        self._input_file_id = file.id
        self._endpoint = endpoint
        self.batch: Batch | None = None

    def run(self, *, limit_s: float, quiet: bool) -> "Batch":
        """Starts it and waits; gives it as it is at its end, or after ``limit_s`` seconds."""
        endpoint: Any = self._endpoint
        self.batch = batch = self._client.batches.create(
            input_file_id=self._input_file_id,
            endpoint=endpoint,
            completion_window="24h",
            metadata={"made_by": "cloister doctor"},
        )
        return self._wait(batch, limit_s, quiet=quiet, patiently=True)

    def _wait(self, batch: "Batch", limit_s: float, *, quiet: bool, patiently: bool) -> "Batch":
        give_up_at = time.monotonic() + limit_s
        with batch_progress(quiet=quiet) as progress:
            while batch.status not in FINAL and time.monotonic() < give_up_at:
                progress.show(update_of(batch))
                time.sleep(min(_PAUSE_S, max(0, give_up_at - time.monotonic())))
                self.batch = batch = retrieve(self._client, batch.id, patiently=patiently)
        return batch

    @property
    def is_refused(self) -> bool:
        """Whether the model does not offer the endpoint."""
        return self.batch is not None and any("does not offer" in each.message for each in listed_errors(self.batch))

    @property
    def is_answered(self) -> bool:
        """Whether its output has the line."""
        if self.batch is None or not self.batch.output_file_id:
            return False
        return self._first_line(self.batch.output_file_id).get("custom_id") == _CUSTOM_ID

    def reason(self) -> str:
        """Why the batch, or its line, failed."""
        if self.batch is None or not self.batch.error_file_id:
            return "; ".join(each.message for each in listed_errors(self.batch)) if self.batch else ""
        line = self._first_line(self.batch.error_file_id)
        told = line.get("error") or (line.get("response") or {}).get("body")
        return json.dumps(told, ensure_ascii=False)[:_MAX_REASON]

    def _first_line(self, file_id: str) -> dict[str, Any]:
        lines = self._client.files.content(file_id).content.splitlines()
        line: dict[str, Any] = json.loads(lines[0]) if lines else {}
        return line

    @property
    def left(self) -> str:
        """What is left of it where it cannot be cleaned up."""
        batch = (
            f"the batch {self.batch.id} may still run, and " if self.batch and self.batch.status not in FINAL else ""
        )
        return f"{batch}the file {', '.join(self._file_ids)} is left: cancel and delete by hand"

    @property
    def _file_ids(self) -> list[str]:
        results = (self.batch.output_file_id, self.batch.error_file_id) if self.batch else ()
        return [file_id for file_id in (self._input_file_id, *results) if file_id]

    def clean_up(self, *, hastily: bool) -> None:
        """Cancels the batch where it still runs, and deletes its files.

        Args:
            hastily: a few seconds are enough, and a server that does not answer is not waited for.

        Raises:
            CommandError: it has not ended, so that its files stay.
        """
        if hastily:
            self._client = self._client.with_options(timeout=_INTERRUPTED_WITHIN_S, max_retries=0)
        if self.batch is not None and self.batch.status not in FINAL:
            self._cancel(self.batch.id, hastily=hastily)
        for file_id in self._file_ids:
            self._client.files.delete(file_id)

    def _cancel(self, batch_id: str, *, hastily: bool) -> None:
        import openai

        note(f"cancelling {batch_id}; Ctrl-C leaves it, and its file {self._input_file_id}")
        within_s = _INTERRUPTED_WITHIN_S if hastily else _CANCEL_WITHIN_S
        try:
            # After an outage, and only once the server answers.
            self.batch = retrieve(self._client, batch_id, patiently=not hastily)
            if self.batch.status not in FINAL:
                self.batch = self._client.batches.cancel(batch_id)
        except openai.ConflictError:
            self.batch = retrieve(self._client, batch_id, patiently=not hastily)  # it has ended meanwhile
        batch = self._wait(self.batch, within_s, quiet=True, patiently=not hastily)
        if batch.status not in FINAL:
            raise CommandError(
                f"it is still {batch.status} {duration(within_s)} after it was cancelled. Does a reconciler run?"
            )
