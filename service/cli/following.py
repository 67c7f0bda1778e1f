"""Follows a batch to its end: by the server's events where it has them, by asking again and again where not."""

import itertools
import json
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

import httpx

from service.cli.exits import CommandError, ExitCode
from service.transitions import FINAL

if TYPE_CHECKING:
    from openai import OpenAI
    from openai.types import Batch

# The server sends at least a comment every 15 s.
_SILENCE_S: Final = 60.0
_FIRST_PAUSE_S: Final = 0.5
_MAX_PAUSE_S: Final = 15.0
# A server that is restarted, or a network that is away, ends no wait of hours.
_MAX_OUTAGE_S: Final = 300.0
_SERVER_ERRORS: Final = 500


@dataclass(frozen=True, slots=True, kw_only=True)
class Update:
    """The state of a batch at one moment. What is not known is None, or 0 for counts."""

    batch_id: str
    status: str
    total: int = 0
    completed: int = 0
    failed: int = 0
    rate_rows_per_second: float | None = None
    eta_s: float | None = None
    queue_position: int | None = None

    @property
    def done(self) -> int:
        """Lines that have a result."""
        return self.completed + self.failed

    @property
    def is_final(self) -> bool:
        """Whether nothing will follow."""
        return self.status in FINAL


def update_of(batch: "Batch") -> Update:
    """What a Batch object tells."""
    counts, extension = batch.request_counts, (batch.model_extra or {}).get("x_cloister") or {}
    return Update(
        batch_id=batch.id,
        status=batch.status,
        total=counts.total if counts else 0,
        completed=counts.completed if counts else 0,
        failed=counts.failed if counts else 0,
        rate_rows_per_second=extension.get("rate_rows_per_second"),
        eta_s=extension.get("eta_seconds"),
        queue_position=extension.get("queue_position"),
    )


def follow(client: "OpenAI", batch_id: str, show: Callable[[Update], None]) -> "Batch":
    """Shows every change of a batch until it is in a final state, and returns it then.

    Raises:
        CommandError: the server did not answer for five minutes.
        openai.APIError: there is no such batch, or the key is refused.
    """
    listener = _Listener(client, batch_id)
    pauses = _pauses()
    while True:
        batch = retrieve(client, batch_id, patiently=listener.has_begun)
        show(update_of(batch))
        if batch.status in FINAL:
            return batch
        for update in listener.updates():
            show(update)
            pauses = _pauses()  # events come, so there is no need to ask seldom once they stop
        if not listener.has_ended:
            time.sleep(next(pauses))


def _pauses() -> Iterator[float]:
    return (min(_MAX_PAUSE_S, _FIRST_PAUSE_S * 1.5**number) for number in itertools.count())


def retrieve(client: "OpenAI", batch_id: str, *, patiently: bool) -> "Batch":
    """A batch as it is now.

    Args:
        client: of the server.
        batch_id: the batch.
        patiently: ask again and again while the server does not answer or does not work.

    Raises:
        CommandError: that took five minutes.
        openai.APIError: it is not to be had patiently, or there is no such batch, or the key is refused.
    """
    import openai

    give_up_at, pauses = time.monotonic() + _MAX_OUTAGE_S, _pauses()
    while True:
        try:
            return client.batches.retrieve(batch_id)
        except openai.APIError as error:
            is_outage = isinstance(error, openai.APIConnectionError) or (
                isinstance(error, openai.APIStatusError) and error.status_code >= _SERVER_ERRORS
            )
            if not (patiently and is_outage):
                raise
            if time.monotonic() > give_up_at:
                raise CommandError(
                    f"the server did not answer for {_MAX_OUTAGE_S:.0f} s ({error}). The batch is not affected: go on "
                    f"with `cloister watch {batch_id}`",
                    ExitCode.UNREACHABLE,
                ) from error
        time.sleep(next(pauses))


class _Listener:
    """Reads the server's events; every reconnection goes on after the last event that was seen."""

    def __init__(self, client: "OpenAI", batch_id: str) -> None:
        self.has_begun = False
        self.has_ended = False
        self._batch_id = batch_id
        self._url = f"{str(client.base_url).rstrip('/')}/batches/{batch_id}/events"
        self._headers = {"authorization": f"Bearer {client.api_key}", "accept": "text/event-stream"}
        self._is_offered = True

    def updates(self) -> Iterator[Update]:
        """Until the stream ends, or at once where the server has none. Never raises for the network."""
        self.has_begun = True
        if not self._is_offered:
            return
        try:
            with httpx.stream("GET", self._url, headers=self._headers, timeout=_SILENCE_S) as answer:
                is_stream = answer.headers.get("content-type", "").startswith("text/event-stream")
                if answer.status_code == httpx.codes.OK and is_stream:
                    yield from self._read(answer.iter_lines())
                elif answer.status_code < _SERVER_ERRORS and answer.status_code != httpx.codes.NO_CONTENT:
                    self._is_offered = False
        except (httpx.HTTPError, ValueError):
            return  # a cut, or something between that speaks another language: the caller asks instead

    def _read(self, lines: Iterator[str]) -> Iterator[Update]:
        data: list[str] = []
        for line in lines:
            name, _, value = line.partition(":")
            if name == "data":
                data.append(value.removeprefix(" "))
            elif name == "id":
                self._headers["last-event-id"] = value.removeprefix(" ")
            elif not line and data:
                update = _update_of_event(self._batch_id, json.loads("\n".join(data)))
                self.has_ended = update.is_final
                data = []
                yield update


def _update_of_event(batch_id: str, told: Mapping[str, Any]) -> Update:
    counts = told.get("request_counts") or {}
    return Update(
        batch_id=batch_id,
        status=str(told.get("status")),
        total=counts.get("total", 0),
        completed=counts.get("completed", 0),
        failed=counts.get("failed", 0),
        rate_rows_per_second=told.get("rate_rows_per_second"),
        eta_s=told.get("eta_seconds"),
    )
