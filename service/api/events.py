"""``GET /v1/batches/{id}/events``: what happens to a batch, as server-sent events.

Source of the format: https://html.spec.whatwg.org/multipage/server-sent-events.html.
"""

import asyncio
import re
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass
from datetime import timedelta
from typing import Annotated, Any, Final

import orjson
from fastapi import APIRouter, Depends, Header, Request
from fastapi.responses import Response, StreamingResponse
from fastapi.sse import KEEPALIVE_COMMENT, format_sse_event

from service.api.authentication import ReadAccess
from service.api.extension import no_such_batch
from service.api.parts import PartsDependency
from service.api.schemas import Text
from service.api.watching import Feed, Watching
from service.db import query
from service.errors import InvalidRequestError

router = APIRouter(prefix="/v1/batches")

PROGRESS_INTERVAL_S: Final = 1.0
# How long a client waits before it connects again.
RETRY: Final = timedelta(seconds=2)
_EVENT_ID: Final = re.compile(r"[0-9]{1,18}")


@dataclass(frozen=True, slots=True, kw_only=True)
class _Watch:
    """A batch that may be watched, and the last event that the client has of it."""

    batch_id: str
    last_event_id: int


def _checked_watch(
    parts: PartsDependency,
    access: ReadAccess,
    batch_id: Text,
    last_event_id: Annotated[str | None, Header()] = None,
) -> _Watch:
    with parts.pool.connection() as connection:
        row = connection.execute(query("watched_batch"), {"id": batch_id, "project_id": access.project.id}).fetchone()
    if row is None:
        raise no_such_batch(batch_id)
    after = last_event_id or "0"
    if not _EVENT_ID.fullmatch(after):
        raise InvalidRequestError(
            "Invalid 'Last-Event-ID': it is not the id of an event. Send the id of the last event that you got, or "
            "none to get all.",
            param="Last-Event-ID",
            code="invalid_value",
        )
    return _Watch(batch_id=batch_id, last_event_id=int(after))


@router.get("/{batch_id}/events")
async def watch_batch(request: Request, watch: Annotated[_Watch, Depends(_checked_watch)]) -> Response:
    """Streams a batch's events from the first, or from the one after ``Last-Event-ID``, until its final state.

    Between them, ``progress`` events tell of finished requests, at most one a second. They have no id of their own: a
    client that connects again gets the newest progress anyway. Once a batch has ended and the client has all of its
    events, the answer is 204, which tells an ``EventSource`` not to come back.
    """
    watching: Watching = request.app.state.watching
    feed = await watching.open(watch.batch_id)
    if feed.is_told(watch.last_event_id):
        return Response(status_code=204)
    return StreamingResponse(
        _stream(watching, feed, watch.last_event_id),
        media_type="text/event-stream",
        # nginx and others hold back an answer that grows slowly, unless they are told not to.
        headers={"cache-control": "no-store", "x-accel-buffering": "no"},
    )


async def _stream(watching: Watching, feed: Feed, last_id: int) -> AsyncIterator[bytes]:
    """A client that reads slowly holds back only itself: what it has not read is not kept for it."""
    told_progress: tuple[int, ...] = ()
    progress_due = 0.0
    ends_at = time.monotonic() + watching.times.max_stream_s
    watching.watchers += 1
    try:
        yield f"retry: {RETRY // timedelta(milliseconds=1)}\n\n".encode()
        while True:
            changed = feed.changed
            for event in feed.after(last_id):
                last_id = event["id"]
                yield _event(feed, event)
            if feed.is_told(last_id) or watching.is_stopping or time.monotonic() >= ends_at:
                return
            now = time.monotonic()
            is_new = feed.progress != told_progress
            if is_new and now >= progress_due:
                told_progress, progress_due = feed.progress, now + PROGRESS_INTERVAL_S
                yield format_sse_event(event="progress", data_str=_data({}, feed))
                continue
            wait_s = min(progress_due - now if is_new else watching.times.heartbeat_s, ends_at - now)
            try:
                await asyncio.wait_for(changed.wait(), wait_s)
            except TimeoutError:
                if not is_new:
                    yield KEEPALIVE_COMMENT
    finally:
        watching.watchers -= 1


def _event(feed: Feed, event: dict[str, Any]) -> bytes:
    told = {"at": round(event["at"], 3), "data": event["data"]}
    return format_sse_event(id=str(event["id"]), event=event["type"], data_str=_data(told, feed))


def _data(told: dict[str, Any], feed: Feed) -> str:
    return orjson.dumps({**told, **feed.state}).decode()
