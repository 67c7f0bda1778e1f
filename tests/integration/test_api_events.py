"""Server-sent events of a batch, read from the socket."""

import asyncio
import itertools
import json
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import httpx
import openai
import pytest
import uvicorn

from service.adapters.memory_object_store import MemoryObjectStore
from service.api.app import Server, create_app
from service.api.watching import Watching
from service.backends import Backends
from service.db import Pool, open_pool, query

REQUEST: dict[str, Any] = {"input_file_id": "file-none", "endpoint": "/v1/completions", "completion_window": "24h"}


@dataclass
class Event:
    type: str = ""
    id: str = ""
    data: dict[str, Any] = field(default_factory=dict)


def parsed(lines: Iterator[str]) -> Iterator[Event]:
    event = Event()
    for line in lines:
        name, _, value = line.partition(": ")
        if not line:
            if event.type:
                yield event
            event = Event()
        elif name == "data":
            event.data = json.loads(value)
        elif name in {"event", "id"}:
            setattr(event, {"event": "type"}.get(name, name), value)


@contextmanager
def watch(http: httpx.Client, batch_id: str, last_event_id: str = "") -> Iterator[Iterator[Event]]:
    headers = {"last-event-id": last_event_id} if last_event_id else {}
    with http.stream("GET", f"/v1/batches/{batch_id}/events", headers=headers, timeout=30) as answer:
        assert answer.status_code == 200
        assert answer.headers["content-type"] == "text/event-stream; charset=utf-8"
        yield parsed(answer.iter_lines())


def move(api_pool: Pool, batch_id: str, status: str, **data: Any) -> None:
    """Change the state and add its event in one transaction, as the reconciler does."""
    with api_pool.connection() as connection:
        connection.execute("UPDATE batches SET status = %s WHERE id = %s", [status, batch_id])
        connection.execute(
            "INSERT INTO batch_events (batch_id, type, data) VALUES (%s, %s, %s)",
            [batch_id, f"batch.{status}", json.dumps(data)],
        )


def commit_line(api_pool: Pool, batch_id: str) -> None:
    """Count a completed line, as the coordinator does when a job commits it."""
    counts = dict.fromkeys(("failed", "input_tokens", "cached_tokens", "output_tokens", "reasoning_tokens"), 0)
    with api_pool.connection() as connection:
        values = {"batch_id": batch_id, "completed": 1, "segments_done": 0, **counts}
        connection.execute(query("record_progress"), values)


@pytest.fixture
def batch_id(client: openai.OpenAI, api_pool: Pool) -> str:
    """A batch in progress."""
    batch = client.batches.create(**REQUEST)
    move(api_pool, batch.id, "in_progress")
    with api_pool.connection() as connection:
        connection.execute("UPDATE batches SET segments_left = 1, total = 9 WHERE id = %s", [batch.id])
    return batch.id


def test_batch_is_watched_from_creation_to_end(http: httpx.Client, api_pool: Pool, batch_id: str) -> None:
    with watch(http, batch_id) as stream:
        first, second, progress = next(stream), next(stream), next(stream)
        assert (first.type, second.type, progress.type) == ("batch.validating", "batch.in_progress", "progress")
        assert int(first.id) < int(second.id)
        assert not progress.id
        move(api_pool, batch_id, "finalizing", before="in_progress")
        move(api_pool, batch_id, "completed")
        finalizing, completed = [event for event in stream if event.type != "progress"]
    assert finalizing.data["data"] == {"before": "in_progress"}
    assert completed.data["at"] == pytest.approx(time.time(), abs=10)
    assert completed.type == "batch.completed"
    assert completed.data["status"] == "completed"
    assert completed.data["request_counts"] == {"total": 9, "completed": 0, "failed": 0}


def test_first_bytes_set_the_reconnection_time(http: httpx.Client, batch_id: str) -> None:
    with http.stream("GET", f"/v1/batches/{batch_id}/events") as answer:
        assert next(answer.iter_lines()) == "retry: 2000"
        assert answer.headers["cache-control"] == "no-store"


def test_progress_is_sent_on_change_at_most_once_a_second(http: httpx.Client, api_pool: Pool, batch_id: str) -> None:
    received: list[tuple[float, int]] = []
    with watch(http, batch_id) as stream:
        threading.Thread(target=lambda: [(commit_line(api_pool, batch_id), time.sleep(0.05)) for _ in range(9)]).start()
        for event in stream:
            if event.type == "progress":
                received.append((time.monotonic(), event.data["request_counts"]["completed"]))
            if received and received[-1][1] == 9:
                break
    assert len(received) <= 3
    assert all(later[0] - earlier[0] > 0.8 for earlier, later in itertools.pairwise(received))


def test_reconnecting_client_gets_missed_events_once(http: httpx.Client, api_pool: Pool, batch_id: str) -> None:
    with watch(http, batch_id) as stream:
        last = [next(stream), next(stream)][-1].id
    move(api_pool, batch_id, "finalizing")
    with watch(http, batch_id, last) as stream:
        missed = next(stream)
        assert missed.type == "batch.finalizing"
        move(api_pool, batch_id, "completed")
        assert [event.type for event in stream if event.id] == ["batch.completed"]
    with watch(http, batch_id, missed.id) as stream:
        assert [event.type for event in stream] == ["batch.completed"]


def test_client_with_all_events_of_an_ended_batch_gets_204(http: httpx.Client, api_pool: Pool, batch_id: str) -> None:
    move(api_pool, batch_id, "cancelled")
    with watch(http, batch_id) as stream:
        seen = list(stream)
    assert [event.type for event in seen] == ["batch.validating", "batch.in_progress", "batch.cancelled"]
    answer = http.get(f"/v1/batches/{batch_id}/events", headers={"last-event-id": seen[-1].id})
    assert (answer.status_code, answer.content) == (204, b"")


@pytest.mark.parametrize("last_event_id", ["x", "-1", "1.5", "9" * 30, "9" * 5_000, "²"])
def test_invalid_last_event_id_is_refused(http: httpx.Client, batch_id: str, last_event_id: str) -> None:
    headers = {"last-event-id": last_event_id.encode()}
    answer = http.get(f"/v1/batches/{batch_id}/events", headers=headers)  # type: ignore[arg-type]
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "Last-Event-ID")


def test_events_are_invisible_to_other_projects(http: httpx.Client, stranger: openai.OpenAI, batch_id: str) -> None:
    answer = http.get(f"/v1/batches/{batch_id}/events", headers={"authorization": f"Bearer {stranger.api_key}"})
    assert answer.status_code == 404
    assert http.get(f"/v1/batches/{batch_id}/events", headers={"authorization": ""}).status_code == 401


def test_lost_listener_is_replaced_without_missing_events(http: httpx.Client, api_pool: Pool, batch_id: str) -> None:
    with watch(http, batch_id) as stream:
        assert [next(stream).type for _ in range(3)][-1] == "progress"
        with api_pool.connection() as connection:
            connection.execute(
                "SELECT pg_terminate_backend(pid) FROM pg_stat_activity"
                " WHERE application_name = 'cloister events' AND datname = current_database()"
            )
        move(api_pool, batch_id, "completed")
        assert [event.type for event in stream if event.id] == ["batch.completed"]


@contextmanager
def client_of(base_url: str, api_key: str) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=base_url, headers={"authorization": f"Bearer {api_key}"}) as opened:
        yield opened


@contextmanager
def serving(api_pool: Pool, **times: float) -> Iterator[tuple[Server, str]]:
    app = create_app(Backends(pool=api_pool, store=MemoryObjectStore()), watching=Watching(api_pool, **times))
    server = Server(
        uvicorn.Config(app, host="127.0.0.1", port=0, log_config=None, access_log=False), app.state.watching
    )
    thread = threading.Thread(target=server.run)
    thread.start()
    while not server.started:
        time.sleep(0.01)
    try:
        yield server, f"http://127.0.0.1:{server.servers[0].sockets[0].getsockname()[1]}"
    finally:
        server.should_exit = True
        thread.join(timeout=10)
        assert not thread.is_alive()


def test_idle_stream_is_kept_alive(api_pool: Pool, batch_id: str, api_key: str) -> None:
    with (
        serving(api_pool, heartbeat_s=0.1) as (_server, base_url),
        client_of(base_url, api_key) as http,
        http.stream("GET", f"/v1/batches/{batch_id}/events") as answer,
    ):
        comments = (line for line in answer.iter_lines() if line.startswith(":"))
        assert [next(comments), next(comments)] == [": ping", ": ping"]


def test_without_a_listener_batches_are_polled(
    postgres_server_url: str, api_pool: Pool, batch_id: str, api_key: str
) -> None:
    with (
        open_pool(str(api_pool.conninfo), max_size=1) as pool,
        serving(pool, fallback_poll_s=0.2) as (_server, base_url),
        client_of(base_url, api_key) as http,
    ):
        pool.wait()
        pool.conninfo = postgres_server_url.replace("/postgres?", "/nothing?")  # no further connection succeeds
        with watch(http, batch_id) as stream:
            assert next(stream)
            move(api_pool, batch_id, "completed")
            assert list(stream)[-1].type == "batch.completed"


def test_stopping_server_ends_its_streams(api_pool: Pool, batch_id: str, api_key: str) -> None:
    with serving(api_pool) as (server, base_url), client_of(base_url, api_key) as http, watch(http, batch_id) as stream:
        assert next(stream)
        started = time.monotonic()
        server.should_exit = True
        assert [event.type for event in stream][-1] == "progress"
        assert time.monotonic() - started < 3


def test_long_stream_ends_so_that_the_key_is_checked_again(api_pool: Pool, batch_id: str, api_key: str) -> None:
    with (
        serving(api_pool, max_stream_s=0.3) as (_server, base_url),
        client_of(base_url, api_key) as http,
        watch(http, batch_id) as stream,
    ):
        assert [event.type for event in stream] == ["batch.validating", "batch.in_progress", "progress"]


async def _types(http: httpx.AsyncClient, batch_id: str, opened: asyncio.Semaphore) -> list[str]:
    async with http.stream("GET", f"/v1/batches/{batch_id}/events") as answer:
        opened.release()
        return [line async for line in answer.aiter_lines() if line.startswith("event: batch.")]


async def _watch_all(base_url: str, api_key: str, batch_id: str, api_pool: Pool) -> list[list[str]]:
    limits, opened = httpx.Limits(max_connections=300), asyncio.Semaphore(0)
    headers = {"authorization": f"Bearer {api_key}"}
    async with httpx.AsyncClient(base_url=base_url, headers=headers, limits=limits, timeout=60) as http:
        watchers = [asyncio.create_task(_types(http, batch_id, opened)) for _ in range(200)]
        for _ in watchers:
            await opened.acquire()
        connections = await asyncio.to_thread(_connections, api_pool)
        assert connections <= api_pool.max_size + 1
        await asyncio.to_thread(move, api_pool, batch_id, "completed")
        return await asyncio.gather(*watchers)


def _connections(api_pool: Pool) -> int:
    with api_pool.connection() as connection:
        row = connection.execute(
            "SELECT count(*) AS n FROM pg_stat_activity WHERE datname = current_database()"
        ).fetchone()
    assert row
    return int(row["n"])


@pytest.mark.slow
def test_two_hundred_watchers_share_few_connections(base_url: str, api_key: str, batch_id: str, api_pool: Pool) -> None:
    threads = threading.active_count()
    seen = asyncio.run(_watch_all(base_url, api_key, batch_id, api_pool))
    expected = [f"event: batch.{status}" for status in ("validating", "in_progress", "completed")]
    assert seen == [expected] * 200
    assert threading.active_count() <= threads + 50
