"""Liveness and readiness probes."""

import asyncio
import threading
import time
from collections.abc import Iterator
from typing import Any

import httpx
import psycopg
import pytest

from service.adapters.memory_object_store import MemoryObjectStore
from service.api.app import create_app
from service.backends import Backends
from service.db import Pool, open_pool
from service.errors import ObjectStoreError


class WeakStore(MemoryObjectStore):
    """A store whose check can fail or hang."""

    def __init__(self) -> None:
        super().__init__()
        self.error: Exception | None = None
        self.hangs = threading.Event()
        self.hangs.set()
        self.checks = 0

    def check(self) -> None:
        self.checks += 1
        self.hangs.wait(timeout=20)
        if self.error:
            raise self.error


@pytest.fixture
def weak_store() -> Iterator[WeakStore]:
    store = WeakStore()
    yield store
    store.hangs.set()


def probe(pool: Pool, store: MemoryObjectStore, *, times: int = 1) -> list[httpx.Response]:
    """Probe a new service several times concurrently."""

    async def ask() -> list[httpx.Response]:
        app = create_app(Backends(pool=pool, store=store))
        transport = httpx.ASGITransport(app=app)
        async with httpx.AsyncClient(transport=transport, base_url="http://test") as client:
            return await asyncio.gather(*(client.get("/readyz") for _ in range(times)))

    return asyncio.run(ask())


def beat(pool: Pool, age: str) -> None:
    with pool.connection() as connection:
        connection.execute(
            "INSERT INTO reconciler_heartbeat (leader, beat_at) VALUES ('a', now() - %s::interval)"
            " ON CONFLICT (only_row) DO UPDATE SET beat_at = EXCLUDED.beat_at",
            [age],
        )


def test_service_with_all_backends_is_ready(pool: Pool, weak_store: WeakStore) -> None:
    beat(pool, "3 seconds")
    (answer,) = probe(pool, weak_store)
    fine = {"status": "ok", "message": None}
    names = ("database", "schema", "object_store", "reconciler")
    assert (answer.status_code, answer.json()) == (200, {"status": "ready", "checks": dict.fromkeys(names, fine)})


@pytest.mark.parametrize(
    ("age", "words"), [(None, "No reconciler has ever led"), ("61 seconds", "No reconciler has led for")]
)
def test_service_without_a_reconciler_is_ready_but_degraded(
    pool: Pool, weak_store: WeakStore, age: str | None, words: str
) -> None:
    if age:
        beat(pool, age)
    (answer,) = probe(pool, weak_store)
    assert answer.status_code == 200
    assert answer.json()["checks"]["reconciler"]["status"] == "degraded"
    assert words in answer.json()["checks"]["reconciler"]["message"]


def test_unreachable_store_is_reported_with_its_reason(pool: Pool, weak_store: WeakStore) -> None:
    weak_store.error = ObjectStoreError("the bucket 'b' is gone")
    (answer,) = probe(pool, weak_store)
    assert answer.status_code == 503
    assert answer.headers["retry-after"] == "2"
    assert answer.json()["error"]["code"] == "not_ready"
    assert answer.json()["checks"]["object_store"]["message"] == (
        "The object store is not usable: the bucket 'b' is gone."
    )
    assert answer.json()["checks"]["database"]["status"] == "ok"


def test_unreachable_database_is_reported_without_its_address() -> None:
    with open_pool("postgresql://somebody:secret@127.0.0.1:9/none?connect_timeout=1") as pool:
        (answer,) = probe(pool, MemoryObjectStore())
    assert answer.status_code == 503
    statuses = {name: check["status"] for name, check in answer.json()["checks"].items()}
    assert statuses == {"database": "failed", "schema": "failed", "object_store": "ok", "reconciler": "degraded"}
    assert "secret" not in answer.text
    assert "somebody" not in answer.text


def test_missing_migrations_are_reported(pool: Pool, weak_store: WeakStore, database_url: str) -> None:
    with psycopg.connect(database_url) as connection:
        connection.execute("DELETE FROM migrations WHERE name LIKE '0002%'")
    (answer,) = probe(pool, weak_store)
    assert answer.status_code == 503
    assert "lacks the migrations 0002_" in answer.json()["checks"]["schema"]["message"]


def test_hanging_check_times_out_and_is_not_started_twice(pool: Pool, weak_store: WeakStore) -> None:
    weak_store.hangs.clear()
    started = time.monotonic()
    answers = probe(pool, weak_store, times=20)
    assert time.monotonic() - started < 10  # the check hangs for 20 s
    assert {answer.status_code for answer in answers} == {503}
    assert weak_store.checks == 1
    assert "No answer within 2 s" in answers[0].json()["checks"]["object_store"]["message"]


def test_concurrent_probes_share_one_round_of_checks(pool: Pool, weak_store: WeakStore) -> None:
    assert {answer.status_code for answer in probe(pool, weak_store, times=20)} == {200}
    assert weak_store.checks == 1


def test_liveness_needs_no_backend(base_url: str) -> None:
    answer: Any = httpx.get(f"{base_url}/healthz")
    assert (answer.status_code, answer.json()) == (200, {"status": "ok"})
