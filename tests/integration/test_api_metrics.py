"""Metrics and the request log."""

import json
import time

import httpx
import openai
import pytest
from prometheus_client.parser import text_string_to_metric_families
from structlog.testing import capture_logs

from service.api.routes.metrics import StackCollector
from service.db import Pool, open_pool
from service.scrapes import CACHED_FOR_S

Samples = dict[tuple[str, frozenset[tuple[str, str]]], float]


def samples(base_url: str) -> Samples:
    answer = httpx.get(f"{base_url}/metrics")
    assert answer.headers["content-type"].startswith("text/plain")
    return {
        (sample.name, frozenset(sample.labels.items())): sample.value
        for family in text_string_to_metric_families(answer.text)
        for sample in family.samples
    }


def requests(found: Samples, **labels: str) -> float:
    return found.get(("cloister_http_requests_total", frozenset(labels.items())), 0)


def collected(collector: StackCollector) -> Samples:
    return {
        (sample.name, frozenset(sample.labels.items())): sample.value
        for family in collector.collect()
        for sample in family.samples
    }


def value(found: Samples, name: str, **labels: str) -> float:
    return found[name, frozenset(labels.items())]


def test_requests_are_counted_by_route_template(http: httpx.Client, base_url: str) -> None:
    labels = {"method": "GET", "route": "/v1/batches/{batch_id}", "status": "404"}
    before = requests(samples(base_url), **labels)
    http.get("/v1/batches/batch_1")
    http.get("/v1/batches/batch_2")
    after = samples(base_url)
    assert requests(after, **labels) == before + 2
    count = ("cloister_http_request_duration_seconds_count", frozenset({("method", "GET"), ("route", labels["route"])}))
    assert after[count] == before + 2


def test_checks_version_and_workspace_are_reported(base_url: str) -> None:
    found = samples(base_url)
    assert value(found, "cloister_check_ok", check="database") == 1
    assert value(found, "cloister_check_ok", check="object_store") == 1
    assert value(found, "cloister_check_ok", check="reconciler") == 0  # none has ever led here
    assert value(found, "cloister_workspace_claimed_bytes") == 0
    assert [dict(labels)["component"] for name, labels in found if name == "cloister_build_info"] == ["api"]


def test_api_names_no_project(http: httpx.Client, base_url: str) -> None:
    http.get("/v1/files")
    assert "proj_" not in httpx.get(f"{base_url}/metrics").text


def test_client_input_creates_no_label(http: httpx.Client, base_url: str) -> None:
    for path in ("/v1/sk-secret", "/wp-admin", "/v1/batches/x/sk-secret"):
        http.request("MKCOL", path)
    http.request("MKCOL", "/v1/batches")
    text = httpx.get(f"{base_url}/metrics").text
    assert 'method="other",route="unknown",status="404"' in text
    assert 'method="other",route="/v1/batches",status="405"' in text
    assert "MKCOL" not in text
    assert "secret" not in text


def test_bytes_are_counted_in_both_directions(http: httpx.Client, base_url: str) -> None:
    route = frozenset({("route", "/v1/files")})
    before = samples(base_url).get(("cloister_http_request_bytes_total", route), 0)
    answer = http.post("/v1/files", data={"purpose": "user_data"}, files={"file": ("a", b"x" * 5_000)})
    after = samples(base_url)
    assert after["cloister_http_request_bytes_total", route] >= before + 5_000
    assert after["cloister_http_response_bytes_total", route] >= len(answer.content)
    assert value(after, "cloister_uploads_in_flight") == 0


@pytest.fixture
def batches(pool: Pool) -> Pool:
    """A completed batch, and a running one with 3 + 1 lines that has waited for its first lease for 42 s."""
    with pool.connection() as connection:
        connection.execute("INSERT INTO projects (id, name) VALUES ('proj_secret', 'p')")
        connection.execute("INSERT INTO usage_totals VALUES ('proj_secret', 'm', 1, 10, 2, 100, 40, 50, 5, 60.0, 2)")
        for batch_id, status in (("a", "completed"), ("b", "in_progress")):
            connection.execute(
                "INSERT INTO batches (id, project_id, endpoint, input_file_id, completion_window, request_sha256,"
                " status, model, completed, failed, input_tokens, gpu_seconds, segments_left, in_progress_at,"
                " expires_at)"
                " VALUES (%s, 'proj_secret', 'e', 'f', '24h', '', %s, 'm', 3, 1, 7, 20, 1,"
                " now() - interval '42 seconds', now())",
                [batch_id, status],
            )
        connection.execute("INSERT INTO reconciler_heartbeat (leader, beat_at) VALUES ('l', now() - interval '3 s')")
    return pool


def test_stack_metrics_add_totals_and_open_batches(batches: Pool) -> None:
    found = collected(StackCollector(batches))
    assert value(found, "cloister_database_up") == 1
    assert value(found, "cloister_batches", status="in_progress") == 1
    assert value(found, "cloister_batches", status="cancelled") == 0
    assert value(found, "cloister_lines_total", outcome="completed") == 13
    assert value(found, "cloister_lines_total", outcome="failed") == 3
    assert value(found, "cloister_tokens_total", kind="input") == 107
    assert value(found, "cloister_tokens_total", kind="reasoning") == 5
    assert value(found, "cloister_jobs_launched_total") == 2
    assert value(found, "cloister_gpu_seconds_total") == 80
    assert value(found, "cloister_queue_age_seconds") == pytest.approx(42, abs=3)
    assert value(found, "cloister_reconcile_lag_seconds") == pytest.approx(3, abs=3)
    assert not any("secret" in repr(key) for key in found)


def test_counter_does_not_fall_when_a_batch_ends(batches: Pool) -> None:
    before = collected(StackCollector(batches))
    with batches.connection() as connection:
        connection.execute("UPDATE batches SET status = 'completed' WHERE id = 'b'")
    after = collected(StackCollector(batches))
    for name in ("completed", "failed"):
        key = ("cloister_lines_total", frozenset({("outcome", name)}))
        assert after[key] == before[key]
    assert value(after, "cloister_queue_age_seconds") == 0


def test_counter_does_not_fall_when_a_batch_loses_results(batches: Pool) -> None:
    collector = StackCollector(batches, cached_for_s=0)
    before = collected(collector)
    with batches.connection() as connection:
        connection.execute("UPDATE batches SET completed = 0 WHERE id = 'b'")
    assert collected(collector)["cloister_lines_total", frozenset({("outcome", "completed")})] == value(
        before, "cloister_lines_total", outcome="completed"
    )


def test_concurrent_scrapes_query_the_database_once(batches: Pool) -> None:
    collector = StackCollector(batches)
    collected(collector)
    with batches.connection() as connection:
        connection.execute("DELETE FROM batches")
    assert value(collected(collector), "cloister_batches", status="in_progress") == 1
    assert CACHED_FOR_S >= 5


def test_process_metrics_work_without_the_database() -> None:
    with open_pool("postgresql://nobody@127.0.0.1:9/none?connect_timeout=1") as pool:
        started = time.monotonic()
        assert collected(StackCollector(pool)) == {("cloister_database_up", frozenset()): 0}
        assert time.monotonic() - started < 4


def test_request_is_logged_without_content(client: openai.OpenAI, base_url: str) -> None:
    with capture_logs() as logs:
        file = client.files.create(file=("a.jsonl", b'{"prompt":"confidential"}'), purpose="batch")
        client.files.content(file.id)
        httpx.get(f"{base_url}/sk-secret?key=sk-secret")
        httpx.get(f"{base_url}/metrics")
        # A line is written after its answer.
        until = time.monotonic() + 10
        while len(lines := [line for line in logs if line["event"] == "request"]) < 4 and time.monotonic() < until:
            time.sleep(0.02)
    order = ("/v1/files", "/v1/files/{file_id}/content", None, "/metrics")  # they may be written in another one
    upload, download, unknown, scrape = sorted(lines, key=lambda line: order.index(line["route"]))
    assert (upload["route"], upload["method"], upload["status"]) == ("/v1/files", "POST", 200)
    assert upload["key_id"].startswith("key_")
    assert upload["project_id"].startswith("proj_")
    assert upload["bytes_in"] > 25
    assert (download["route"], download["bytes_out"]) == ("/v1/files/{file_id}/content", 25)
    assert (unknown["route"], unknown["path"], unknown["status"]) == (None, None, 404)
    assert (scrape["log_level"], upload["log_level"]) == ("debug", "info")
    assert not any(word in json.dumps(lines) for word in ("confidential", "sk-secret", client.api_key))
