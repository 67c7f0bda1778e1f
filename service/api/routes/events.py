"""``GET /v1/batches/{id}/events``: the events of a batch, as server-sent events.

Source of the format: https://html.spec.whatwg.org/multipage/server-sent-events.html.
"""

import asyncio
import math
import re
import time
from collections.abc import AsyncIterator
from datetime import UTC, datetime, timedelta
from typing import Annotated, Final

import orjson
from fastapi import APIRouter, Depends, Header, Request
from fastapi.responses import Response, StreamingResponse
from fastapi.sse import KEEPALIVE_COMMENT, format_sse_event

from service.api.dependencies import BackendsDependency, ReadAccess
from service.api.openapi import WITH_KEY, Responses, described
from service.api.routes.batches import NO_BATCH, BatchId, batch_not_found
from service.api.watching import Feed, Watching
from service.api_keys import Access
from service.db.rows import fetch_value
from service.errors import InvalidRequestError

router = APIRouter(prefix="/v1/batches", tags=["Batches"], responses=WITH_KEY)

PROGRESS_INTERVAL_S: Final = 1.0
# The pause before a client reconnects.
RETRY: Final = timedelta(seconds=2)
_EVENT_ID: Final = re.compile(r"[0-9]{1,18}")
_EVENT_SCHEMA: Final = {
    "type": "object",
    "description": "One event of the stream.",
    "required": ["event", "data"],
    "properties": {
        "id": {"type": "string", "pattern": "^[0-9]+$"},
        "event": {"type": "string", "pattern": r"^(progress|(batch|job)\.[a-z_]+)$"},
        "data": {"type": "string", "contentMediaType": "application/json"},
        "retry": {"type": "integer", "description": "Milliseconds to wait before reconnecting."},
    },
}
_RESPONSES: Final[Responses] = described(
    {400: "`Last-Event-ID` is not the id of an event, or the id of the batch is invalid.", 404: NO_BATCH},
    description="Server-sent events. Each has `event`, one of `batch.*`, `job.*` and `progress`, and `data`, a JSON "
    "object with the current `status`, `request_counts`, `rate_rows_per_second` and `eta_seconds` of the batch. All "
    "but `progress` also have an `id`, and `at` (Unix seconds) and `data` in their `data`.",
    content={"text/event-stream": {"schema": _EVENT_SCHEMA}},
)
_ENDED: Final = "The batch has ended and the client has all of its events."


def _last_event_id(
    backends: BackendsDependency,
    access: ReadAccess,
    batch_id: BatchId,
    last_event_id: Annotated[
        str | None,
        Header(
            alias="Last-Event-ID",
            description="The `id` of the last event that the client received. The stream starts after it.",
            examples=["17"],
        ),
    ] = None,
) -> int:
    """Check that the client may watch the batch; return the last of its events that the client has, or 0."""
    parameters = {"id": batch_id, "project_id": access.project.id}
    with backends.pool.connection() as connection:
        if fetch_value(connection, "watched_batch", parameters) is None:
            raise batch_not_found(batch_id)
    after = last_event_id or "0"
    if not _EVENT_ID.fullmatch(after):
        raise InvalidRequestError(
            "Invalid 'Last-Event-ID': it is not the id of an event. Send the id of the last event that you received, "
            "or omit the header to get all events.",
            param="Last-Event-ID",
            code="invalid_value",
        )
    return int(after)


@router.get(
    "/{batch_id}/events",
    operation_id="watchBatch",
    summary="Watch a batch",
    description="Stream a batch's events from the first, or after `Last-Event-ID`, until its final state.\n\n"
    "Between them, `progress` events report finished requests, at most one per second. They have no id: a client that "
    "reconnects gets the newest progress anyway. When a batch has ended and the client has all of its events, the "
    "answer is 204, which stops an `EventSource` from reconnecting.",
    response_class=StreamingResponse,
    responses={**_RESPONSES, 204: described(description=_ENDED)[200]},
)
async def watch_batch(
    request: Request, access: ReadAccess, batch_id: BatchId, last_event_id: Annotated[int, Depends(_last_event_id)]
) -> Response:
    """Stream a batch's events until its final state; 204 if the client already has all of them."""
    watching: Watching = request.app.state.watching
    feed = await watching.open(batch_id)
    if feed.is_finished(last_event_id):
        return Response(status_code=204)
    return StreamingResponse(
        _stream(watching, feed, last_event_id, access),
        media_type="text/event-stream",
        # nginx and other proxies buffer slow answers unless this header forbids it.
        headers={"cache-control": "no-store", "x-accel-buffering": "no"},
    )


async def _stream(watching: Watching, feed: Feed, last_id: int, access: Access) -> AsyncIterator[bytes]:
    """Yield the events after ``last_id``. A client that reads slowly delays only itself: nothing is queued for it."""
    sent_progress: tuple[int, ...] = ()
    progress_due = 0.0
    left_s = (access.expires_at - datetime.now(UTC)).total_seconds() if access.expires_at else math.inf
    ends_at = time.monotonic() + min(watching.max_stream_s, left_s)
    with watching.stream(access.key_id):
        yield f"retry: {RETRY // timedelta(milliseconds=1)}\n\n".encode()
        while True:
            changed = feed.changed
            for event in feed.after(last_id):
                last_id = event["id"]
                data = orjson.dumps({"at": round(event["at"], 3), "data": event["data"], **feed.state})
                yield format_sse_event(id=str(last_id), event=event["type"], data_str=data.decode())
            if feed.is_finished(last_id) or watching.must_end(access.key_id) or time.monotonic() >= ends_at:
                return
            now = time.monotonic()
            is_new = feed.progress != sent_progress
            if is_new and now >= progress_due:
                sent_progress, progress_due = feed.progress, now + PROGRESS_INTERVAL_S
                yield format_sse_event(event="progress", data_str=orjson.dumps(feed.state).decode())
                continue
            wait_s = min(progress_due - now if is_new else watching.heartbeat_s, ends_at - now)
            try:
                await asyncio.wait_for(changed.wait(), wait_s)
            except TimeoutError:
                if not is_new:
                    yield KEEPALIVE_COMMENT
