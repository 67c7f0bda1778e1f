"""Following a batch to its end: by the server's events if it offers them, else by polling."""

import json
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final, Self

import httpx
import stamina
from httpx_sse import connect_sse

from service.client.exit_codes import CommandError, ExitCode
from service.input_file import InputError
from service.transitions import FINAL

if TYPE_CHECKING:
    from openai import OpenAI
    from openai.types import Batch

# The server sends at least a comment every 15 s.
_SILENCE_S: Final = 60.0
_FIRST_PAUSE_S: Final = 0.5
_MAX_PAUSE_S: Final = 15.0
_BACKOFF: Final = 1.5
# A wait of hours survives a restart of the server and a network outage of this length.
_MAX_OUTAGE_S: Final = 300.0
_SERVER_ERRORS: Final = 500


@dataclass(frozen=True, slots=True, kw_only=True)
class Update:
    """State of a batch at one moment. Unknown values are None; unknown counts are 0."""

    batch_id: str
    status: str
    total: int = 0
    completed: int = 0
    failed: int = 0
    rate_rows_per_second: float | None = None
    eta_s: float | None = None
    queue_position: int | None = None

    @classmethod
    def of(cls, batch: "Batch") -> Self:
        """Return the state in a Batch object."""
        counts, extension = batch.request_counts, (batch.model_extra or {}).get("x_cloister") or {}
        return cls(
            batch_id=batch.id,
            status=batch.status,
            total=counts.total if counts else 0,
            completed=counts.completed if counts else 0,
            failed=counts.failed if counts else 0,
            rate_rows_per_second=extension.get("rate_rows_per_second"),
            eta_s=extension.get("eta_seconds"),
            queue_position=extension.get("queue_position"),
        )

    @classmethod
    def of_event(cls, batch_id: str, event: Mapping[str, Any]) -> Self:
        """Return the state in the JSON object of a server-sent event."""
        counts = event.get("request_counts") or {}
        return cls(
            batch_id=batch_id,
            status=str(event.get("status")),
            total=counts.get("total", 0),
            completed=counts.get("completed", 0),
            failed=counts.get("failed", 0),
            rate_rows_per_second=event.get("rate_rows_per_second"),
            eta_s=event.get("eta_seconds"),
        )

    @property
    def done(self) -> int:
        """Number of lines with a result."""
        return self.completed + self.failed

    @property
    def is_final(self) -> bool:
        """True if the state is final."""
        return self.status in FINAL


class EventStream:
    """The server's events of one batch. A new connection continues after the last event that was received.

    Attributes:
        is_supported: False once the server has answered without an event stream.
        has_ended: whether an event carried a final state.
    """

    def __init__(self, client: "OpenAI", batch_id: str) -> None:
        self.is_supported = True
        self.has_ended = False
        self._batch_id = batch_id
        self._url = f"{str(client.base_url).rstrip('/')}/batches/{batch_id}/events"
        self._headers = {"authorization": f"Bearer {client.api_key}"}

    def updates(self) -> Iterator[Update]:
        """Yield updates until the connection ends. Network errors end it too; the caller then polls."""
        if not self.is_supported:
            return
        try:
            with (
                httpx.Client(timeout=_SILENCE_S) as http,
                connect_sse(http, "GET", self._url, headers=self._headers) as source,
            ):
                status = source.response.status_code
                is_stream = source.response.headers.get("content-type", "").startswith("text/event-stream")
                if status != httpx.codes.OK or not is_stream:
                    self.is_supported = status >= _SERVER_ERRORS or status == httpx.codes.NO_CONTENT
                    return
                for event in source.iter_sse():
                    if event.id:
                        self._headers["last-event-id"] = event.id
                    if event.data:
                        update = Update.of_event(self._batch_id, json.loads(event.data))
                        self.has_ended = update.is_final
                        yield update
        except (httpx.HTTPError, ValueError):
            return  # the connection was cut, or a proxy answered something else than events


def follow(client: "OpenAI", batch_id: str, show: Callable[[Update], None]) -> "Batch":
    """Call ``show`` with every change of a batch until its state is final, and return the batch.

    Raises:
        CommandError: the server did not answer for five minutes.
        openai.APIError: the batch does not exist, or the key is refused.
    """
    events, pause_s = EventStream(client, batch_id), _FIRST_PAUSE_S
    # A server that fails before the wait has begun is reported at once.
    batch = retrieve(client, batch_id, patiently=False)
    show(Update.of(batch))
    while batch.status not in FINAL:
        for update in events.updates():
            show(update)
            pause_s = _FIRST_PAUSE_S
        if not events.has_ended:
            time.sleep(pause_s)
            pause_s = min(_MAX_PAUSE_S, pause_s * _BACKOFF)
        batch = retrieve(client, batch_id, patiently=True)
        show(Update.of(batch))
    return batch


def retrieve(client: "OpenAI", batch_id: str, *, patiently: bool) -> "Batch":
    """Return a batch as it is now.

    Args:
        client: the client of the server.
        batch_id: the batch.
        patiently: whether to retry for five minutes while the server is unreachable or fails.

    Raises:
        CommandError: the server did not answer for five minutes.
        openai.APIError: the batch does not exist, the key is refused, or the server fails and ``patiently`` is False.
    """
    import openai

    def is_outage(error: Exception) -> bool:
        return isinstance(error, openai.APIConnectionError) or (
            isinstance(error, openai.APIStatusError) and error.status_code >= _SERVER_ERRORS
        )

    if not patiently:
        return client.batches.retrieve(batch_id)
    retrying = stamina.RetryingCaller(
        attempts=None,
        timeout=_MAX_OUTAGE_S,
        wait_initial=_FIRST_PAUSE_S,
        wait_max=_MAX_PAUSE_S,
        wait_exp_base=_BACKOFF,
        wait_jitter=_FIRST_PAUSE_S,
    )
    try:
        return retrying(is_outage, client.batches.retrieve, batch_id)
    except openai.APIError as error:
        if not is_outage(error):
            raise
        raise CommandError(
            f"the server did not answer for {_MAX_OUTAGE_S:.0f} s ({error}). The batch is not affected: continue with "
            f"`cloister watch {batch_id}`",
            ExitCode.UNREACHABLE,
        ) from error


def listed_errors(batch: "Batch") -> list[InputError]:
    """Return the errors of the input file that the Batch object lists."""
    listed = (batch.errors.data if batch.errors else None) or []
    return [
        InputError(code=error.code or "", message=error.message or "", param=error.param, line=error.line)
        for error in listed
    ]
