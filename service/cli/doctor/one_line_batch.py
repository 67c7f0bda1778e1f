"""A batch of one line, from upload to output, of which nothing but its Batch object is left."""

import json
import time
from typing import TYPE_CHECKING, Any, Final

from service.cli.exits import CommandError
from service.cli.following import update_of
from service.cli.terminal import batch_progress, duration
from service.cli.waiting import listed_errors
from service.transitions import FINAL

if TYPE_CHECKING:
    from openai import OpenAI
    from openai.types import Batch

_CUSTOM_ID: Final = "doctor"
_PAUSE_S: Final = 2.0
_CANCEL_WITHIN_S: Final = 120.0
_MAX_REASON: Final = 500
_BODIES: Final[dict[str, dict[str, Any]]] = {
    "/v1/chat/completions": {"messages": [{"role": "user", "content": "Say yes."}], "max_tokens": 4},
    "/v1/completions": {"prompt": "Say yes.", "max_tokens": 4},
    "/v1/embeddings": {"input": "yes"},
}


class OneLineBatch:
    """The batch of a model. Whoever makes one cleans it up.

    Every method raises what the official client raises.

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
        return self._wait(batch, limit_s, quiet=quiet)

    def _wait(self, batch: "Batch", limit_s: float, *, quiet: bool) -> "Batch":
        give_up_at = time.monotonic() + limit_s
        with batch_progress(quiet=quiet) as progress:
            while batch.status not in FINAL and time.monotonic() < give_up_at:
                progress.show(update_of(batch))
                time.sleep(min(_PAUSE_S, max(0, give_up_at - time.monotonic())))
                self.batch = batch = self._client.batches.retrieve(batch.id)
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
        line: dict[str, Any] = json.loads(self._client.files.content(file_id).content.splitlines()[0])
        return line

    def clean_up(self) -> None:
        """Cancels the batch where it still runs, and deletes its files.

        Raises:
            CommandError: it has not ended, so that its files stay.
        """
        if self.batch is not None and self.batch.status not in FINAL:
            self.batch = batch = self._client.batches.cancel(self.batch.id)
            batch = self._wait(batch, _CANCEL_WITHIN_S, quiet=True)
            if batch.status not in FINAL:
                raise CommandError(
                    f"{batch.id} is still {batch.status} {duration(_CANCEL_WITHIN_S)} after it was cancelled: does a "
                    f"reconciler run? Its file {self._input_file_id} stays; delete it once the batch has ended"
                )
        results = (self.batch.output_file_id, self.batch.error_file_id) if self.batch else ()
        for file_id in (self._input_file_id, *results):
            if file_id:
                self._client.files.delete(file_id)
