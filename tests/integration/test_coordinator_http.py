"""The coordinator over HTTP: its answers, long polls, and Postgres away for a while."""

import functools
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import psycopg
import pytest
import uvicorn
from prometheus_client import CollectorRegistry, generate_latest

from ray_job.contract.leases import (
    COMMITS_PATH,
    END_PATH,
    FAILURES_PATH,
    PART_URLS_PATH,
    SYNC_PATH,
    Commit,
    CommitResponse,
    EndRequest,
    EndResponse,
    Failure,
    Message,
    PartUrls,
    PartUrlsRequest,
    SegmentRef,
    SyncRequest,
    SyncResponse,
)
from service.backends import Backends
from service.coordinator.app import MAX_BODY_BYTES, MAX_ENGINE_RESTARTS, Server, create_app
from service.db import Pool
from service.local.ray_head import free_ports
from tests.integration.coordinator_harness import STOPPED, TOKENS, Coordinated, FakeJob, committed

PATHS = [SYNC_PATH, PART_URLS_PATH, COMMITS_PATH, FAILURES_PATH, END_PATH]
END = EndRequest(engine_s=0, busy_s=0)


def sync_request(
    tokens: int = 10**9, *, wait_s: float = 0, held: tuple[SegmentRef, ...] = (), engines: int = 1
) -> SyncRequest:
    return SyncRequest(wanted_tokens=tokens, wait_s=wait_s, held=held, engines=engines)


@dataclass
class Served:
    """A coordinator that serves, and its rows."""

    stack: Coordinated
    server: Server
    client: httpx.Client
    metrics: CollectorRegistry

    def post(self, path: str, message: Message | bytes, token: str, **options: Any) -> httpx.Response:
        body = message if isinstance(message, bytes) else message.to_json()
        return self.client.post(path, content=body, headers={"authorization": f"Bearer {token}"}, **options)

    def sync(self, job: FakeJob, tokens: int = 10**9, **fields: Any) -> SyncResponse:
        answer = self.post(SYNC_PATH, sync_request(tokens, **fields), job.token)
        assert answer.status_code == 200
        return SyncResponse.from_json(answer.content)


@contextmanager
def serving(pool: Pool) -> Iterator[Served]:
    pool.timeout = 0.5
    stack = Coordinated(pool)
    app = create_app(Backends(pool=pool, store=stack.store))
    config = uvicorn.Config(app, host="127.0.0.1", port=0, log_config=None, access_log=False, ws="none")
    server = Server(config, app.state.waiting)
    thread = threading.Thread(target=server.run, daemon=True)
    thread.start()
    while not (server.started and app.state.waiting.is_listening):
        assert thread.is_alive()
        time.sleep(0.01)
    port = server.servers[0].sockets[0].getsockname()[1]
    with httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=30) as client:
        yield Served(stack, server, client, app.state.metrics)
    server.should_exit = True
    thread.join(timeout=10)
    assert not thread.is_alive()


@pytest.fixture
def served(pool: Pool) -> Iterator[Served]:
    """A coordinator with its own database."""
    with serving(pool) as opened:
        yield opened


@pytest.fixture(scope="module")
def shared(api_pool: Pool) -> Iterator[Served]:
    """A coordinator for requests that change nothing."""
    with serving(api_pool) as opened:
        yield opened


def test_job_leases_commits_and_ends(served: Served) -> None:
    served.stack.add()
    job = served.stack.start_job()
    (lease,) = served.sync(job).leases
    answer = served.post(PART_URLS_PATH, PartUrlsRequest(batch_id="b", count=1), job.token)
    (part,) = PartUrls.from_json(answer.content).parts
    record = Commit(batch_id="b", key=part.key, segments=(committed(lease),))
    answer = served.post(COMMITS_PATH, record, job.token)
    assert CommitResponse.from_json(answer.content).accepted == (True,)
    answer = served.post(END_PATH, END, job.token)
    assert EndResponse.from_json(answer.content).ended
    assert answer.headers["content-type"] == "application/json"


def test_segment_is_given_back(served: Served) -> None:
    served.stack.add()
    job = served.stack.start_job()
    (lease,) = served.sync(job).leases
    failure = Failure(batch_id="b", segment=0, epoch=lease.epoch, reason="PlanError")
    answer = served.post(FAILURES_PATH, failure, job.token)
    assert (answer.status_code, answer.json()) == (200, {})
    assert served.stack.segment()["failures"] == 1


# Refusals


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("authorization", ["", "Bearer", "Bearer unknown", "Basic dTpw", "Bearer t\xe9"])
def test_unknown_and_missing_tokens_are_refused(shared: Served, path: str, authorization: str) -> None:
    shared.stack.start_job()
    headers = {"authorization": authorization.encode("latin-1")}
    answer = shared.client.post(path, content=b"{}", headers=headers)  # type: ignore[arg-type]
    assert answer.status_code == 401
    assert "token" in answer.json()["error"]


@pytest.mark.parametrize("path", PATHS)
def test_token_of_an_ended_job_is_refused(served: Served, path: str) -> None:
    job = served.stack.start_job()
    assert served.post(END_PATH, END, job.token).status_code == 200
    assert served.post(path, b"{}", job.token).status_code == 401


def test_scheme_of_the_token_has_any_case(shared: Served) -> None:
    job = shared.stack.start_job()
    headers = {"authorization": f"bearer  {job.token}"}
    assert shared.client.post(SYNC_PATH, content=sync_request().to_json(), headers=headers).status_code == 200


def test_part_urls_of_a_batch_that_was_never_leased_are_not_found(served: Served) -> None:
    served.stack.add()
    job = served.stack.start_job()
    for batch_id in ("b", "none"):
        answer = served.post(PART_URLS_PATH, PartUrlsRequest(batch_id=batch_id, count=1), job.token)
        assert (answer.status_code, batch_id in answer.json()["error"]) == (404, True)


def changed(message: Message, **fields: Any) -> bytes:
    return json.dumps(json.loads(message.to_json()) | fields).encode()


REF = SegmentRef(batch_id="b", segment=0, epoch=1)
FAILURE = Failure(batch_id="b", segment=0, epoch=1, reason="x")
COMMIT = Commit(batch_id="b", key="k", segments=(committed(REF),))
ENTRY = json.loads(COMMIT.to_json())["segments"][0]
MALFORMED: list[tuple[str, bytes, str]] = [
    (SYNC_PATH, b"confidential", "not JSON"),
    (SYNC_PATH, b"\xff", "not JSON"),
    (SYNC_PATH, b"[" * 100_000, "not JSON"),
    (SYNC_PATH, b"", "not JSON"),
    (SYNC_PATH, b'"confidential"', "SyncRequest must be an object"),
    (SYNC_PATH, changed(sync_request(), confidence=1), "'confidence'"),
    (SYNC_PATH, b'{"wanted_tokens":1}', "'wait_s'"),
    (SYNC_PATH, changed(sync_request(), wanted_tokens="confidential"), "SyncRequest.wanted_tokens"),
    (SYNC_PATH, changed(sync_request(), wanted_tokens=True), "SyncRequest.wanted_tokens"),
    (SYNC_PATH, changed(sync_request(), wanted_tokens=-77), "SyncRequest.wanted_tokens"),
    (SYNC_PATH, changed(sync_request(), wanted_tokens=2**63), "SyncRequest.wanted_tokens"),
    (SYNC_PATH, changed(sync_request(), wait_s=float("nan")), "SyncRequest.wait_s"),
    (SYNC_PATH, changed(sync_request(), wait_s=10**400), "SyncRequest.wait_s"),
    (SYNC_PATH, changed(sync_request(), held={}), "SyncRequest.held"),
    (SYNC_PATH, changed(sync_request(), held=[{"batch_id": "confidential"}]), "SyncRequest.held[0]"),
    (SYNC_PATH, changed(sync_request(), engines=2**40), "SyncRequest"),
    (PART_URLS_PATH, changed(PartUrlsRequest(batch_id="b", count=1), batch_id="confidential\0"), "batch_id"),
    (PART_URLS_PATH, changed(PartUrlsRequest(batch_id="b", count=1), count=65), "count"),
    (COMMITS_PATH, changed(COMMIT, segments=[ENTRY | {"lines": ["confidential"]}]), "Commit.segments[0].lines[0]"),
    (COMMITS_PATH, changed(COMMIT, segments=[ENTRY | {"usage": "confidential"}]), "Commit.segments[0].usage"),
    (COMMITS_PATH, changed(COMMIT, key="confidential"), "key"),
    (FAILURES_PATH, changed(FAILURE, reason=["confidential"]), "Failure.reason"),
    (FAILURES_PATH, changed(FAILURE, reason="confidential \ud800"), "Failure.reason"),
    (END_PATH, changed(END, busy_s=None), "EndRequest.busy_s"),
]


@pytest.mark.parametrize(("path", "body", "field"), MALFORMED, ids=range(len(MALFORMED)))
def test_malformed_body_is_refused_with_its_field_and_without_its_value(
    shared: Served, path: str, body: bytes, field: str
) -> None:
    job = shared.stack.start_job()
    answer = shared.post(path, body, job.token)
    assert (answer.status_code, field in answer.json()["error"]) == (400, True)
    assert not any(value in answer.text for value in ("confidential", "77", str(2**40), str(2**63)))


def test_totals_that_the_database_cannot_store_are_refused(served: Served) -> None:
    served.stack.add()
    job = served.stack.start_job()
    (lease,) = served.sync(job).leases
    entry = json.loads(COMMIT.to_json())["segments"][0] | {"epoch": lease.epoch}
    entry["usage"] |= {"input_tokens": 2**63 - 1, "output_tokens": 2**63 - 1}
    body = changed(COMMIT, key=job.part_key("b"), segments=[entry])
    assert served.post(COMMITS_PATH, body, job.token).status_code == 400
    assert served.stack.batch()["completed"] == 0


def test_large_body_is_refused(shared: Served) -> None:
    job = shared.stack.start_job()
    assert shared.post(SYNC_PATH, b" " * (MAX_BODY_BYTES + 1), job.token).status_code == 413
    assert shared.post(SYNC_PATH, sync_request().to_json().ljust(MAX_BODY_BYTES), job.token).status_code == 200


@pytest.mark.parametrize(("method", "path", "status_code"), [("GET", SYNC_PATH, 405), ("POST", "/none", 404)])
def test_other_methods_and_paths_are_refused(shared: Served, method: str, path: str, status_code: int) -> None:
    assert shared.client.request(method, path).status_code == status_code


# Long polls


@pytest.fixture
def executor() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(12) as opened:
        yield opened


def waiting_sync(
    served: Served, executor: ThreadPoolExecutor, job: FakeJob, **fields: Any
) -> Future[tuple[SyncResponse, float]]:
    """Start a sync that waits; it returns its answer and the time at which that came."""

    def sync() -> tuple[SyncResponse, float]:
        answer = served.sync(job, wait_s=25, **fields)
        return answer, time.monotonic()

    seen = served.stack.sql("SELECT seen_at FROM jobs WHERE id = %s", job.id)
    future = executor.submit(sync)
    while served.stack.sql("SELECT seen_at FROM jobs WHERE id = %s", job.id) == seen:
        assert not future.done()
        time.sleep(0.01)
    time.sleep(0.1)
    assert not future.done()
    return future


def delay_s(
    served: Served, executor: ThreadPoolExecutor, job: FakeJob, change: Callable[[], object], **fields: Any
) -> tuple[SyncResponse, float]:
    """Return what a waiting sync answers to a change, and after how many seconds."""
    future = waiting_sync(served, executor, job, **fields)
    change()
    changed_at = time.monotonic()
    answer, answered_at = future.result(timeout=20)
    return answer, answered_at - changed_at


def accept(stack: Coordinated, batch_id: str) -> None:
    """Accept a batch as the reconciler does: its status changes with its segments."""
    stack.add(batch_id)
    stack.change(batch_id, "status = 'validating'")
    stack.change(batch_id, "status = 'in_progress'")


def test_waiting_job_gets_new_work_within_300_ms(served: Served, executor: ThreadPoolExecutor) -> None:
    job = served.stack.start_job()
    delays = []
    for number in range(3):
        answer, delay = delay_s(served, executor, job, functools.partial(accept, served.stack, f"b{number}"))
        assert [lease.batch_id for lease in answer.leases] == [f"b{number}"]
        delays.append(delay)
    assert min(delays) < 0.3


@pytest.mark.parametrize("columns", [STOPPED[name] for name in ("paused", "cancelled", "given up")])
def test_waiting_job_learns_of_a_stopped_batch_within_300_ms(
    served: Served, executor: ThreadPoolExecutor, columns: str
) -> None:
    job = served.stack.start_job()
    delays = []
    for number in range(3):
        served.stack.add(f"b{number}")
        (lease,) = job.lease()
        stop = functools.partial(served.stack.change, lease.batch_id, columns)
        answer, delay = delay_s(served, executor, job, stop, held=(lease.ref,))
        assert (answer.lost, answer.leases) == ((lease.ref,), ())
        delays.append(delay)
    assert min(delays) < 0.3


def test_waiting_job_learns_of_its_drain_within_300_ms(served: Served, executor: ThreadPoolExecutor) -> None:
    delays = []
    for _ in range(3):
        job = served.stack.start_job()
        drain = functools.partial(served.stack.sql, "UPDATE jobs SET draining_at = now()")
        answer, delay = delay_s(served, executor, job, drain)
        assert answer.drain
        delays.append(delay)
    assert min(delays) < 0.3


def test_waiting_job_learns_of_its_end(served: Served, executor: ThreadPoolExecutor) -> None:
    job = served.stack.start_job()
    waiting = executor.submit(served.post, SYNC_PATH, sync_request(wait_s=25), job.token)
    time.sleep(0.5)
    served.stack.sql("UPDATE jobs SET ended_at = now()")
    assert waiting.result(timeout=5).status_code == 401


def test_segment_that_is_given_back_wakes_a_waiting_job(served: Served, executor: ThreadPoolExecutor) -> None:
    served.stack.add()
    failing = served.stack.start_job()
    (lease,) = failing.lease()
    job = served.stack.start_job()
    answer, delay = delay_s(served, executor, job, lambda: failing.give_back(lease))
    assert (len(answer.leases), delay < 5) == (1, True)


def test_work_of_another_domain_does_not_wake(served: Served, executor: ThreadPoolExecutor) -> None:
    future = waiting_sync(served, executor, served.stack.start_job("p"))
    accept(served.stack, "b")
    time.sleep(0.3)
    assert not future.done()
    served.stack.sql("UPDATE jobs SET draining_at = now()")
    assert future.result()[0].drain


def test_waiting_jobs_hold_no_connections(served: Served, executor: ThreadPoolExecutor) -> None:
    futures = [waiting_sync(served, executor, served.stack.start_job(f"d{number}")) for number in range(10)]
    stats = served.stack.pool.get_stats()
    assert stats["pool_max"] < len(futures)
    assert (stats["pool_available"], stats.get("requests_waiting", 0)) == (stats["pool_size"], 0)
    served.stack.sql("UPDATE jobs SET draining_at = now()")
    assert all(future.result()[0].drain for future in futures)


def test_wait_ends_after_the_time_that_the_job_asks_for(served: Served) -> None:
    job = served.stack.start_job()
    begin = time.monotonic()
    answer = served.sync(job, wait_s=0.4)
    assert answer.leases == ()
    assert 0.4 <= time.monotonic() - begin < 5


def test_job_that_hung_up_gets_no_leases(served: Served) -> None:
    job = served.stack.start_job()
    with pytest.raises(httpx.ReadTimeout):
        served.post(SYNC_PATH, sync_request(wait_s=25), job.token, timeout=0.5)
    time.sleep(0.2)
    accept(served.stack, "b")
    time.sleep(0.5)
    assert served.stack.segment()["job_id"] is None
    assert len(served.sync(job).leases) == 1


def test_waiting_jobs_are_answered_on_shutdown(served: Served, executor: ThreadPoolExecutor) -> None:
    future = waiting_sync(served, executor, served.stack.start_job())
    begin = time.monotonic()
    served.server.should_exit = True
    answer, answered_at = future.result(timeout=20)
    assert answer.leases == ()
    assert answered_at - begin < 3


# Postgres away


@contextmanager
def postgres_away(database_url: str, postgres_server_url: str) -> Iterator[None]:
    """Cut all connections to the database, and refuse new ones."""
    name = psycopg.conninfo.conninfo_to_dict(database_url)["dbname"]
    with psycopg.connect(postgres_server_url, autocommit=True) as connection:
        connection.execute(f"ALTER DATABASE {name} ALLOW_CONNECTIONS false")
        connection.execute("SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE datname = %s", [name])
        try:
            yield
        finally:
            connection.execute(f"ALTER DATABASE {name} ALLOW_CONNECTIONS true")


def recovered(served: Served, path: str, message: Message, token: str) -> httpx.Response:
    """Repeat a request until it is answered, as a driver does."""
    end = time.monotonic() + 30
    while (answer := served.post(path, message, token)).status_code == 503:
        assert time.monotonic() < end
        time.sleep(0.1)
    return answer


def test_requests_get_503_while_postgres_is_away_and_work_afterwards(
    served: Served, database_url: str, postgres_server_url: str
) -> None:
    served.stack.add()
    job = served.stack.start_job()
    (lease,) = served.sync(job).leases
    record = Commit(batch_id="b", key=job.part_key("b"), segments=(committed(lease),))
    with postgres_away(database_url, postgres_server_url):
        for path, message in ((SYNC_PATH, sync_request()), (COMMITS_PATH, record), (END_PATH, END)):
            answer = served.post(path, message, job.token)
            assert (answer.status_code, answer.headers["retry-after"]) == (503, "1")
        assert served.client.get("/healthz").status_code == 200
    answer = recovered(served, COMMITS_PATH, record, job.token)
    assert CommitResponse.from_json(answer.content).accepted == (True,)
    assert EndResponse.from_json(recovered(served, END_PATH, END, job.token).content).ended


def test_waiting_job_gets_503_or_new_work_after_its_connections_were_cut(
    served: Served, executor: ThreadPoolExecutor, database_url: str, postgres_server_url: str
) -> None:
    job = served.stack.start_job()
    request = sync_request(wait_s=25)
    waiting = executor.submit(recovered, served, SYNC_PATH, request, job.token)
    time.sleep(0.3)
    with postgres_away(database_url, postgres_server_url):
        time.sleep(0.5)
    for attempt in range(100):
        try:
            accept(served.stack, f"b{attempt}")
            break
        except psycopg.OperationalError:
            time.sleep(0.1)
    answer = SyncResponse.from_json(waiting.result(timeout=20).content)
    assert len(answer.leases) == 1


def test_readiness_follows_postgres(served: Served, database_url: str, postgres_server_url: str) -> None:
    assert served.client.get("/readyz").json() == {"status": "ready"}
    with postgres_away(database_url, postgres_server_url):
        assert served.client.get("/readyz").status_code == 503
    end = time.monotonic() + 30
    while served.client.get("/readyz").status_code != 200:
        assert time.monotonic() < end


# Logs


def test_tokens_and_prompts_are_never_logged(
    served: Served, database_url: str, postgres_server_url: str, capfd: pytest.CaptureFixture[str]
) -> None:
    served.stack.add(tokens=[TOKENS] * 4)
    job = served.stack.start_job()
    secret = "confidential prompt"
    for path, body, _ in MALFORMED:
        served.post(path, body, job.token)
        served.post(path, body, "unknown-token")
    served.post(SYNC_PATH, secret.encode() * 100_000, job.token)
    (lease, *_) = served.sync(job).leases
    failure = Failure(batch_id="b", segment=lease.segment, epoch=lease.epoch, reason=secret)
    served.post(FAILURES_PATH, failure, job.token)
    with postgres_away(database_url, postgres_server_url):
        served.post(FAILURES_PATH, failure, job.token)
    output = "".join(capfd.readouterr())
    assert "coordinator.unavailable" in output
    assert "coordinator.refused" in output
    assert not any(word in output for word in (job.token, "unknown-token", "confidential"))


# The process


def test_requests_are_counted_without_ids_and_jobs_cannot_read_the_counts(served: Served) -> None:
    job = served.stack.start_job()
    served.sync(job)
    served.post(SYNC_PATH, sync_request(), "wrong")
    registry = served.metrics
    name, path = "cloister_coordinator_requests_total", SYNC_PATH
    assert registry.get_sample_value(name, {"path": path, "status": "200"}) == 1
    assert registry.get_sample_value(name, {"path": path, "status": "401"}) == 1
    assert job.id not in generate_latest(registry).decode()
    assert served.client.get("/metrics").status_code == 404


def test_restarts_of_engines_are_counted_by_model_and_a_job_cannot_choose_the_counter(served: Served) -> None:
    job = served.stack.start_job()

    def restarts() -> float | None:
        return served.metrics.get_sample_value("cloister_engine_restarts_total", {"model": "demo"})

    served.post(SYNC_PATH, changed(sync_request(), engine_restarts=2), job.token)
    assert restarts() == 2
    served.post(END_PATH, changed(END, engine_restarts=2**62), job.token)
    assert restarts() == 2 + MAX_ENGINE_RESTARTS
    served.post(SYNC_PATH, changed(sync_request(), engine_restarts=2), "wrong")
    assert restarts() == 2 + MAX_ENGINE_RESTARTS


@pytest.mark.slow
def test_process_serves_and_stops_at_once_although_a_job_waits(
    pool: Pool, database_url: str, tmp_path: Path, executor: ThreadPoolExecutor
) -> None:
    (tmp_path / "models.yaml").write_text("models:\n  - id: demo\n    source: /models/demo\n")
    port, metrics_port = free_ports(2)
    environment = {
        **os.environ,
        "CLOISTER_DATABASE_URL": database_url,
        "CLOISTER_OBJECT_STORE": f"file://{tmp_path}/objects",
        "CLOISTER_MODELS": str(tmp_path / "models.yaml"),
        "CLOISTER_HOST": "::",
        "CLOISTER_COORDINATOR_PORT": str(port),
        "CLOISTER_COORDINATOR_METRICS_PORT": str(metrics_port),
    }
    job = Coordinated(pool).start_job()
    process = subprocess.Popen(
        [sys.executable, "-m", "service.coordinator"], env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
    )
    with httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=60) as client:
        for _ in range(300):
            try:
                if client.get("/readyz").status_code == 200:
                    break
            except httpx.ConnectError:
                time.sleep(0.1)
        assert httpx.get(f"http://[::1]:{port}/readyz").status_code == 200
        headers = {"authorization": f"Bearer {job.token}"}
        body = sync_request(wait_s=50).to_json()
        waiting = executor.submit(client.post, SYNC_PATH, content=body, headers=headers)
        time.sleep(2)
        begin = time.monotonic()
        metrics = httpx.get(f"http://127.0.0.1:{metrics_port}/metrics").text
        assert 'cloister_build_info{component="coordinator"' in metrics
        assert "cloister_coordinator_listening 1.0" in metrics
        process.send_signal(signal.SIGTERM)
        assert waiting.result().status_code == 200
        output, _ = process.communicate(timeout=30)
    assert (process.returncode, time.monotonic() - begin < 5) == (-signal.SIGTERM, True)  # uvicorn raises it again
    assert job.token.encode() not in output
