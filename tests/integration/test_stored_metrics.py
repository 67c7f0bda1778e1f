"""Metrics by project, model and accelerator, from the work of a real database."""

import dataclasses
from collections.abc import Callable

import pytest
from prometheus_client import CollectorRegistry

from service.audit.chain import seal_entries
from service.db import open_pool
from service.reconciler.stored_metrics import StoredMetrics
from tests.integration.reconciler_harness import FAILED, Stack, line

Value = Callable[..., float | None]


@pytest.fixture
def registry(stack: Stack) -> CollectorRegistry:
    registry = CollectorRegistry()
    registry.register(StoredMetrics(stack.backends, cached_for_s=0))
    registry.register(stack.backends.metrics.registry)
    return registry


@pytest.fixture
def value(registry: CollectorRegistry) -> Value:
    def read(name: str, **labels: str) -> float | None:
        return registry.get_sample_value(f"cloister_{name}", labels)

    return read


def test_tokens_and_lines_are_counted_by_project_and_model(stack: Stack, value: Value) -> None:
    job = stack.started(line(1), line(2), line(3), project="p1")
    job.commit(1, 2)
    job.commit(3, fails=True)
    labels = {"project_id": "p1", "model": "demo"}
    assert value("project_lines_total", **labels, outcome="completed") == 2
    assert value("project_lines_total", **labels, outcome="failed") == 1
    assert value("project_tokens_total", **labels, kind="input") == 30
    assert value("project_tokens_total", **labels, kind="output") == 6
    assert value("project_gpu_seconds_total", **labels) == 0
    stack.advance()
    assert stack.advance()["status"] == "completed"
    assert value("project_tokens_total", **labels, kind="input") == 30


def test_waiting_work_is_counted_by_model_until_it_is_leased(stack: Stack, value: Value) -> None:
    stack.create(line(1))
    stack.advance()
    stack.sql("UPDATE batches SET in_progress_at = now() - interval '90 s', expires_at = now() + interval '1 min'")
    assert value("waiting_batches", model="demo") == 1
    assert value("open_segments", model="demo") == 1
    assert value("batches_at_risk", model="demo") == 1
    assert value("model_queue_age_seconds", model="demo") == pytest.approx(90, abs=5)
    stack.job().lease()
    assert value("engines", model="demo") == 1
    assert value("waiting_batches", model="demo") == value("model_queue_age_seconds", model="demo") == 0
    stack.job().commit()
    assert value("open_segments", model="demo") == 0


def test_failed_jobs_are_counted_by_model_and_reason(stack: Stack, value: Value) -> None:
    stack.work = lambda _: FAILED
    stack.create(line(1))
    for failures in (1, 2):
        stack.forget_backoff()
        stack.advance()
        stack.advance()
        assert value("job_failures_in_a_row", model="demo") == failures
    assert value("job_failures_total", model="demo", reason="failed") == 2


def test_queue_is_shown_beside_the_slots(stack: Stack, value: Value) -> None:
    assert value("job_slots", accelerator="cpu") == 2
    for number in range(3):
        stack.create(line(1), batch_id=f"b{number}", project=f"p{number}")
        stack.advance(f"b{number}")
    stack.sql("UPDATE jobs SET created_at = now() - interval '70 s'")
    assert value("job_slots_used", accelerator="cpu") == 2
    assert value("job_queue_age_seconds", accelerator="cpu") == pytest.approx(70, abs=5)


def test_lag_of_audit_log_and_retention_is_the_age_of_the_oldest(stack: Stack, value: Value) -> None:
    assert value("audit_lag_seconds") == value("retention_lag_seconds") == 0
    stack.sql(
        "INSERT INTO audit_log (at, project_id, actor, type, object_id)"
        " VALUES (now() - interval '2 min', 'p', 'a', 't', 'o')"
    )
    stack.create(line(1))
    stack.sql("UPDATE files SET expires_at = now() - interval '3 min'")
    assert value("audit_lag_seconds") == pytest.approx(120, abs=5)
    assert value("retention_lag_seconds") == 0  # its batch reads the file
    stack.cancel()
    while stack.advance()["status"] != "cancelled":
        pass
    assert value("retention_lag_seconds") == pytest.approx(180, abs=5)
    seal_entries(stack.pool)
    assert value("audit_lag_seconds") == 0


def test_clients_create_no_label(stack: Stack, registry: CollectorRegistry) -> None:
    stack.create(line(1, model="sk-secret"))
    assert stack.advance()["status"] == "failed"
    labels = {each for family in registry.collect() for sample in family.samples for each in sample.labels.values()}
    assert not any("secret" in each for each in labels)


def test_nothing_is_reported_without_the_database(stack: Stack) -> None:
    with open_pool("postgresql://nobody@127.0.0.1:9/none?connect_timeout=1") as pool:
        backends = dataclasses.replace(stack.backends, pool=pool)
        assert list(StoredMetrics(backends).collect()) == []
