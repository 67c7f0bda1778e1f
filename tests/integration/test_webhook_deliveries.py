"""Webhooks, from the end of a batch to a receiver, over real HTTP."""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Event, Thread
from typing import Any

import openai
import pytest

from service.audit.log import OPERATOR
from service.reconciler.webhooks import keep_delivering
from service.webhooks import EventType, create_endpoint
from tests.integration.reconciler_harness import BATCH, KEYS, Stack, eventually, line, looping


@dataclass(slots=True)
class Receiver:
    """A local HTTP server: the requests it received, and its answers by the number of the request, from 1."""

    url: str = ""
    got: list[tuple[dict[str, str], bytes]] = field(default_factory=list)
    answer: Callable[[int], int] = lambda _: 200
    pause_s: float = 0


@contextmanager
def receiving() -> Iterator[Receiver]:
    receiver = Receiver()

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            content = self.rfile.read(int(self.headers["content-length"]))
            receiver.got.append(({key.lower(): value for key, value in self.headers.items()}, content))
            time.sleep(receiver.pause_s)
            self.send_response(receiver.answer(len(receiver.got)))
            self.send_header("location", receiver.url)
            self.send_header("content-length", "0")
            self.end_headers()

        def log_message(self, *_: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    receiver.url = f"http://localhost:{server.server_address[1]}/hook"
    thread = Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02})
    thread.start()
    yield receiver
    server.shutdown()
    thread.join()
    server.server_close()


@pytest.fixture
def receiver() -> Iterator[Receiver]:
    with receiving() as opened:
        yield opened


@contextmanager
def delivering(stack: Stack) -> Iterator[None]:
    over = Event()
    thread = Thread(target=keep_delivering, args=(stack.backends, over))
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()


def subscribe(stack: Stack, url: str, *events: EventType) -> str:
    stack.sql("INSERT INTO projects (id, name) VALUES ('p', 'p') ON CONFLICT DO NOTHING")
    _, secret = create_endpoint(
        stack.pool, KEYS, project_id="p", url=url, events=events or list(EventType), name="", actor=OPERATOR
    )
    return secret


def cancel_one(stack: Stack, batch_id: str = BATCH) -> None:
    stack.create(line(1), batch_id=batch_id)
    stack.sql("UPDATE batches SET status = 'cancelled', cancelled_at = now() WHERE id = %s", batch_id)


def deliveries(stack: Stack) -> list[dict[str, Any]]:
    return stack.sql("SELECT * FROM webhook_deliveries ORDER BY created_at")


def test_end_of_a_batch_is_delivered_and_verified_by_the_official_client(
    stack: Stack, receiver: Receiver, database_url: str
) -> None:
    secret = subscribe(stack, receiver.url)
    with looping(stack.backends, database_url):
        stack.create(line(1, model="none"))
        eventually(lambda: len(receiver.got) == 1)
        eventually(lambda: deliveries(stack)[0]["delivered_at"] is not None)
    [(headers, content)] = receiver.got
    event = openai.OpenAI(api_key="x").webhooks.unwrap(content, headers, secret=secret)
    assert (event.type, event.data.id) == ("batch.failed", BATCH)
    assert (event.id, headers["webhook-id"]) == (deliveries(stack)[0]["event_id"],) * 2
    assert headers["host"] == receiver.url.split("/")[2]
    assert stack.sql("SELECT leader FROM reconciler_heartbeat") != []


def test_only_subscribed_events_are_delivered(stack: Stack, receiver: Receiver) -> None:
    subscribe(stack, receiver.url, EventType.COMPLETED)
    cancel_one(stack)
    assert deliveries(stack) == []


@pytest.mark.parametrize(("status", "problem"), [(500, "answered 500"), (302, "answered 302"), (404, "answered 404")])
def test_delivery_answered_with_an_error_is_retried_with_the_same_id(
    stack: Stack, receiver: Receiver, status: int, problem: str
) -> None:
    receiver.answer = lambda number: status if number == 1 else 204
    subscribe(stack, receiver.url)
    cancel_one(stack)
    with delivering(stack):
        eventually(lambda: deliveries(stack)[0]["last_error"] == problem)
        waiting = deliveries(stack)[0]
        assert (waiting["due_at"] - waiting["created_at"]).total_seconds() > 3
        stack.sql("UPDATE webhook_deliveries SET due_at = now()")
        eventually(lambda: deliveries(stack)[0]["delivered_at"] is not None)
    assert (deliveries(stack)[0]["attempts"], deliveries(stack)[0]["due_at"]) == (2, None)
    assert len({headers["webhook-id"] for headers, _ in receiver.got}) == 1
    assert len(receiver.got) == 2


def test_delivery_is_given_up_after_72_hours_with_the_reason(stack: Stack, receiver: Receiver) -> None:
    receiver.answer = lambda _: 503
    subscribe(stack, receiver.url)
    cancel_one(stack)
    stack.sql("UPDATE webhook_deliveries SET created_at = now() - interval '72 h'")
    with delivering(stack):
        eventually(lambda: deliveries(stack)[0]["due_at"] is None)
    row = deliveries(stack)[0]
    assert (row["delivered_at"], row["last_error"]) == (None, "answered 503")
    assert (
        stack.backends.metrics.registry.get_sample_value("cloister_webhook_deliveries_total", {"outcome": "given_up"})
        == 1
    )


def test_unrecorded_delivery_is_repeated_with_the_same_id(stack: Stack, receiver: Receiver) -> None:
    subscribe(stack, receiver.url)
    cancel_one(stack)
    # As after a crash between claiming and sending the delivery, and recording it.
    stack.sql("UPDATE webhook_deliveries SET attempts = 1, due_at = now() + interval '1 s'")
    event_id = deliveries(stack)[0]["event_id"]
    with delivering(stack):
        eventually(lambda: len(receiver.got) == 1)
    assert receiver.got[0][0]["webhook-id"] == event_id


def test_two_deliverers_send_each_delivery_once(stack: Stack, receiver: Receiver) -> None:
    subscribe(stack, receiver.url)
    for number in range(10):
        cancel_one(stack, f"b{number}")
    with delivering(stack), delivering(stack):
        eventually(lambda: all(row["delivered_at"] for row in deliveries(stack)))
    assert len(receiver.got) == len({headers["webhook-id"] for headers, _ in receiver.got}) == 10


def test_slow_receiver_does_not_delay_others(stack: Stack, receiver: Receiver) -> None:
    with receiving() as slow:
        slow.pause_s = 1.5
        subscribe(stack, slow.url)
        for number in range(20):
            cancel_one(stack, f"b{number}")
        subscribe(stack, receiver.url)
        cancel_one(stack)
        with delivering(stack):
            began = time.monotonic()
            eventually(lambda: len(receiver.got) == 1)
            assert time.monotonic() - began < 1.5
        assert len(slow.got) <= 2


@pytest.mark.parametrize(
    ("url", "problem"),
    [
        ("http://127.0.0.1:9/", "All connection attempts failed"),
        ("http://169.254.169.254/latest", "is link-local"),
        (f"http://{'x' * 70}.invalid/", ""),
    ],
)
def test_unreachable_or_forbidden_url_is_recorded_as_error(stack: Stack, url: str, problem: str) -> None:
    subscribe(stack, "http://receiver/")
    stack.sql("UPDATE webhook_endpoints SET url = %s", url)
    cancel_one(stack)
    with delivering(stack):
        eventually(lambda: deliveries(stack)[0]["last_error"] is not None)
    assert problem in deliveries(stack)[0]["last_error"]


def test_proxy_of_the_environment_is_not_used(
    stack: Stack, receiver: Receiver, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("HTTP_PROXY", "http_proxy", "ALL_PROXY"):
        monkeypatch.setenv(name, "http://127.0.0.1:9")
    subscribe(stack, receiver.url)
    cancel_one(stack)
    with delivering(stack):
        eventually(lambda: len(receiver.got) == 1)
