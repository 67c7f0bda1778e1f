"""Records of jobs: start, waiting, end and GPU seconds."""

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
from tests.integration.reconciler_harness import FAILED, SUCCEEDED, Stack, line

MODEL = ModelSpec(id="demo", source="x", accelerator="a10g", tensor_parallel_size=2, concurrency=3)


@pytest.fixture
def on_gpus(pool: Pool, tmp_path: Path) -> Stack:
    """A batch whose job has leased it, and has run on six GPUs for ten seconds."""
    stack = Stack(pool, DirectoryObjectStore(tmp_path / "objects"), tmp_path)
    stack.backends = dataclasses.replace(stack.backends, catalogue={"demo": CatalogueModel(spec=MODEL)})
    stack.started(line(1), line(2))
    stack.advance()
    pass_time(stack, 10)
    return stack


def pass_time(stack: Stack, seconds: int) -> None:
    """Let running jobs have run for so much longer."""
    shift = "- make_interval(secs => %s)"
    stack.sql(
        f"UPDATE jobs SET running_since = running_since {shift}, split_at = split_at {shift}",  # noqa: S608 - a constant
        seconds,
        seconds,
    )


def total_gpu_seconds(stack: Stack) -> float:
    """The GPU seconds that belong to no open batch."""
    return float(stack.sql("SELECT coalesce(sum(gpu_seconds), 0) AS s FROM usage_totals")[0]["s"])


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
    stack.advance()
    assert stack.jobs()[0]["gpus"] == gpus


def test_start_of_a_job_is_recorded_once(on_gpus: Stack) -> None:
    [before] = on_gpus.jobs()
    assert isinstance(before["running_since"], datetime)
    on_gpus.advance_jobs()
    assert on_gpus.jobs() == [before]
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
    other = JobStatus(state=JobState.RUNNING, message="v100 pod: 2 Insufficient nvidia.com/gpu")
    stack.launcher.end(stack.job().id, other)
    stack.advance()
    (event,) = stack.sql("SELECT data FROM batch_events WHERE type = 'job.waiting'")
    assert event["data"] == {"job_id": stack.job().id, "reason": "v100 pod: 1 Insufficient nvidia.com/gpu"}


@pytest.mark.parametrize(("reason", "events"), [("no such image", 1), ("1 Insufficient nvidia.com/gpu", 2)])
def test_another_reason_for_waiting_is_an_event_after_ten_minutes(stack: Stack, reason: str, events: int) -> None:
    stack.work = lambda _: JobStatus(state=JobState.PENDING, message="no such image")
    stack.create(line(1))
    stack.advance()
    stack.advance()
    stack.sql("UPDATE batch_events SET at = at - interval '10 min'")
    stack.launcher.end(stack.job().id, JobStatus(state=JobState.PENDING, message=reason))
    stack.advance()
    assert len(stack.sql("SELECT id FROM batch_events WHERE type = 'job.waiting'")) == events


@pytest.mark.parametrize(
    "waiting", [JobStatus(state=JobState.PENDING), JobStatus(state=JobState.RUNNING, is_working=False)]
)
def test_job_that_waits_for_its_gpus_holds_none(stack: Stack, waiting: JobStatus) -> None:
    stack.work = lambda _: waiting
    stack.create(line(1))
    stack.advance()
    stack.advance()
    assert stack.jobs()[0]["running_since"] is None


def test_batch_that_waits_for_its_job_gives_no_reason_after_its_first_lease(stack: Stack) -> None:
    job = stack.started(line(1))
    stack.launcher.end(job.id, JobStatus(state=JobState.RUNNING, message="1 Insufficient nvidia.com/gpu"))
    stack.advance()
    assert stack.sql("SELECT id FROM batch_events WHERE type = 'job.waiting'") == []


def test_completed_batch_has_the_gpu_seconds_of_its_job(on_gpus: Stack) -> None:
    on_gpus.job().commit()
    done = on_gpus.advance()
    assert (done["status"], done["gpu_seconds"]) == ("completed", pytest.approx(60, abs=30))
    assert totals(on_gpus)["gpu_seconds"] == pytest.approx(done["gpu_seconds"], abs=30)
    assert (totals(on_gpus)["batches"], totals(on_gpus)["completed"], totals(on_gpus)["jobs_launched"]) == (1, 2, 1)


def test_gpu_seconds_without_a_commit_wait_for_the_next_one(on_gpus: Stack) -> None:
    on_gpus.advance()
    assert (on_gpus.batch()["gpu_seconds"], total_gpu_seconds(on_gpus)) == (0, 0)
    on_gpus.job().commit(1)
    assert on_gpus.advance()["gpu_seconds"] == pytest.approx(60, abs=30)


def test_gpu_seconds_are_split_by_tokens_between_the_batches_of_a_job(on_gpus: Stack) -> None:
    on_gpus.create(*map(line, range(1, 7)), batch_id="batch_2")
    on_gpus.advance("batch_2")
    job = on_gpus.job()
    job.answer_all()
    on_gpus.advance()
    first, second = on_gpus.advance()["gpu_seconds"], on_gpus.advance("batch_2")["gpu_seconds"]
    assert second == pytest.approx(3 * first)
    assert first + second == pytest.approx(60, abs=30)
    assert total_gpu_seconds(on_gpus) == pytest.approx(first + second, abs=30)


def test_gpu_seconds_go_to_the_batch_that_was_worked_on_meanwhile(on_gpus: Stack) -> None:
    job = on_gpus.job()
    job.commit()
    first = on_gpus.advance()["gpu_seconds"]
    on_gpus.create(line(1), batch_id="batch_2")
    on_gpus.advance("batch_2")
    job.lease()
    pass_time(on_gpus, 100)
    job.commit(batch_id="batch_2")
    assert on_gpus.advance("batch_2")["gpu_seconds"] == pytest.approx(600, abs=60)
    assert on_gpus.batch()["gpu_seconds"] == first


def test_gpu_seconds_of_an_idle_job_go_to_the_totals_only(on_gpus: Stack) -> None:
    on_gpus.job().commit()
    done = on_gpus.advance()["gpu_seconds"]
    pass_time(on_gpus, 100)
    on_gpus.advance_jobs()
    assert total_gpu_seconds(on_gpus) == pytest.approx(done + 600, abs=60)
    assert on_gpus.batch()["gpu_seconds"] == done


@pytest.mark.parametrize("end", [FAILED, SUCCEEDED, JobStatus(state=JobState.MISSING)])
def test_gpu_seconds_of_a_job_without_a_commit_go_to_the_totals(on_gpus: Stack, end: JobStatus) -> None:
    on_gpus.launcher.end(on_gpus.job().id, end)
    on_gpus.advance()
    assert on_gpus.batch()["gpu_seconds"] == 0
    assert total_gpu_seconds(on_gpus) == pytest.approx(60, abs=30)


def test_gpu_seconds_of_several_jobs_add_up(on_gpus: Stack) -> None:
    first = on_gpus.job()
    first.commit(1)
    on_gpus.launcher.end(first.id, FAILED)
    assert on_gpus.advance()["gpu_seconds"] == pytest.approx(60, abs=30)
    on_gpus.forget_backoff()
    on_gpus.advance()
    second = on_gpus.job()
    second.lease()
    on_gpus.advance()
    on_gpus.sql("UPDATE jobs SET split_at = now() - interval '100 s' WHERE id = %s", second.id)
    second.commit()
    assert on_gpus.advance()["gpu_seconds"] == pytest.approx(660, abs=60)
    assert totals(on_gpus)["jobs_launched"] == 2


def test_cancelled_batch_has_the_gpu_seconds_of_its_commits(on_gpus: Stack) -> None:
    on_gpus.job().commit(1)
    on_gpus.cancel()
    cancelled = on_gpus.advance()
    assert (cancelled["status"], cancelled["gpu_seconds"]) == ("cancelled", pytest.approx(60, abs=30))
    assert total_gpu_seconds(on_gpus) == pytest.approx(cancelled["gpu_seconds"], abs=30)


def test_accepted_batch_counts_its_requests_towards_the_limit(stack: Stack) -> None:
    stack.create(line(1), b"", line(3))
    stack.sql("UPDATE batches SET enqueued_requests = 99")
    assert stack.advance()["enqueued_requests"] == 2
