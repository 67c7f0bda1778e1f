"""Records of a batch's jobs: start, waiting, end and GPU seconds."""

import dataclasses
from datetime import datetime
from pathlib import Path
from typing import Any

import pytest

from ray_job.contract.job_spec import ModelSpec
from service.adapters.directory_object_store import DirectoryObjectStore
from service.db import Pool
from service.model_catalogue import CatalogueModel
from service.ports import JobState, JobStatus
from tests.integration.reconciler_harness import BATCH, FAILED, Stack, commit, line

MODEL = ModelSpec(id="demo", source="x", accelerator="a10g", tensor_parallel_size=2, concurrency=3)


@pytest.fixture
def on_gpus(pool: Pool, tmp_path: Path) -> Stack:
    """A batch whose job has run on six GPUs for ten seconds."""
    stack = Stack(pool, DirectoryObjectStore(tmp_path / "objects"), tmp_path)
    catalogue = {"demo": CatalogueModel(spec=MODEL)}
    stack.backends = dataclasses.replace(stack.backends, catalogue=catalogue)
    stack.create(line(1), line(2))
    stack.advance()
    stack.advance()
    stack.sql("UPDATE batches SET job_running_since = job_running_since - interval '10 s'")
    return stack


def totals(stack: Stack) -> dict[str, Any]:
    return stack.sql("SELECT * FROM usage_totals WHERE project_id = 'p' AND model = 'demo'")[0]


@pytest.mark.parametrize(
    ("model", "gpus"),
    [
        (MODEL, 6),
        (dataclasses.replace(MODEL, pipeline_parallel_size=2), 12),
        (dataclasses.replace(MODEL, accelerator="cpu"), 0),
        (dataclasses.replace(MODEL, engine="http", base_url="http://x/v1"), 0),
    ],
)
def test_job_reserves_the_gpus_of_all_its_engines(stack: Stack, model: ModelSpec, gpus: int) -> None:
    stack.backends = dataclasses.replace(stack.backends, catalogue={"demo": CatalogueModel(spec=model)})
    stack.create(line(1))
    assert stack.advance()["gpus"] == gpus


def test_stuck_job_is_stopped_and_its_batch_fails_with_its_results(on_gpus: Stack) -> None:
    commit(on_gpus.store, BATCH, 2)
    (job,) = on_gpus.launcher.launched
    on_gpus.launcher.end(job.job_id, JobStatus(state=JobState.RUNNING, message="no such image", is_stuck=True))
    on_gpus.advance()
    batch = on_gpus.advance()
    assert (batch["status"], batch["completed"]) == ("failed", 1)
    assert [error["code"] for error in on_gpus.errors()] == ["job_failed"]
    assert "no such image" in on_gpus.errors()[0]["message"]
    assert on_gpus.launcher.status(job.job_id).state is JobState.STOPPED
    assert totals(on_gpus)["gpu_seconds"] >= 60


def test_start_of_a_job_is_recorded_once(on_gpus: Stack) -> None:
    before = on_gpus.batch()
    assert isinstance(before["job_running_since"], datetime)
    assert (before["gpus"], before["gpu_seconds"]) == (6, 0)
    assert on_gpus.advance() == before
    assert [row["type"] for row in on_gpus.sql("SELECT type FROM batch_events ORDER BY id")] == [
        "batch.in_progress",
        "job.launched",
        "job.running",
    ]


def test_reason_for_waiting_is_an_event_once(stack: Stack) -> None:
    stack.work = lambda _: JobStatus(state=JobState.RUNNING, message="v100 pod: 1 Insufficient nvidia.com/gpu")
    stack.create(line(1))
    stack.advance()
    stack.advance()
    stack.launcher.end(
        "batch_1-1", JobStatus(state=JobState.RUNNING, message="v100 pod: 2 Insufficient nvidia.com/gpu")
    )
    stack.advance()
    (event,) = stack.sql("SELECT data FROM batch_events WHERE type = 'job.waiting'")
    assert event["data"] == {"job_id": "batch_1-1", "reason": "v100 pod: 1 Insufficient nvidia.com/gpu"}


@pytest.mark.parametrize(("reason", "events"), [("no such image", 1), ("1 Insufficient nvidia.com/gpu", 2)])
def test_another_reason_for_waiting_is_an_event_after_ten_minutes(stack: Stack, reason: str, events: int) -> None:
    stack.work = lambda _: JobStatus(state=JobState.PENDING, message="no such image")
    stack.create(line(1))
    stack.advance()
    stack.advance()
    stack.sql("UPDATE batch_events SET at = at - interval '10 min'")
    stack.launcher.end("batch_1-1", JobStatus(state=JobState.PENDING, message=reason))
    stack.advance()
    assert len(stack.sql("SELECT id FROM batch_events WHERE type = 'job.waiting'")) == events


@pytest.mark.parametrize(
    "waiting", [JobStatus(state=JobState.PENDING), JobStatus(state=JobState.RUNNING, is_working=False)]
)
def test_job_that_waits_for_its_gpus_holds_none(stack: Stack, waiting: JobStatus) -> None:
    stack.work = lambda _: waiting
    stack.create(line(1))
    stack.advance()
    assert stack.advance()["job_running_since"] is None


def test_completed_batch_adds_its_gpu_seconds_to_the_totals(on_gpus: Stack) -> None:
    on_gpus.end_job(1, 2)
    done = on_gpus.advance()
    assert (done["status"], done["job_running_since"]) == ("completed", None)
    assert done["gpu_seconds"] == pytest.approx(60, abs=30)
    assert totals(on_gpus)["gpu_seconds"] == done["gpu_seconds"]
    assert (totals(on_gpus)["batches"], totals(on_gpus)["completed"], totals(on_gpus)["jobs_launched"]) == (1, 2, 1)


def test_cancelled_batch_adds_its_gpu_seconds_to_the_totals(on_gpus: Stack) -> None:
    on_gpus.cancel()
    on_gpus.advance()
    assert on_gpus.advance()["status"] == "cancelled"
    assert totals(on_gpus)["gpu_seconds"] == pytest.approx(60, abs=30)


def test_gpu_seconds_of_a_job_that_does_not_stop_count_until_the_grace_is_over(on_gpus: Stack) -> None:
    on_gpus.cancel()
    on_gpus.sql("UPDATE batches SET cancelling_at = now() - interval '6 min'")
    assert on_gpus.advance()["status"] == "cancelled"
    assert totals(on_gpus)["gpu_seconds"] == pytest.approx(60, abs=30)


def test_gpu_seconds_of_failed_attempts_add_up_and_a_retry_starts_without_a_rate(on_gpus: Stack) -> None:
    on_gpus.sql("UPDATE batches SET rows_per_s = 5, progress_at = now()")
    on_gpus.launcher.end(f"{BATCH}-1", FAILED)
    waiting = on_gpus.advance()
    assert waiting["gpu_seconds"] == pytest.approx(60, abs=30)
    assert (waiting["job_running_since"], waiting["rows_per_s"], waiting["progress_at"]) == (None, None, None)
    on_gpus.forget_backoff()
    on_gpus.advance()
    on_gpus.advance()
    on_gpus.sql("UPDATE batches SET job_running_since = now() - interval '100 s'")
    on_gpus.end_job(1, 2)
    assert on_gpus.advance()["gpu_seconds"] == pytest.approx(660, abs=60)
    assert totals(on_gpus)["jobs_launched"] == 2


def test_accepted_batch_counts_its_requests_towards_the_limit(stack: Stack) -> None:
    stack.create(line(1), b"", line(3))
    stack.sql("UPDATE batches SET enqueued_requests = 99")
    assert stack.advance()["enqueued_requests"] == 2
