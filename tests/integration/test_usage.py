"""Usage and costs by day: they equal what jobs held, outlive batches, and are listed by ``cloister usage``."""

import csv
import dataclasses
import io
from datetime import UTC, datetime, timedelta
from pathlib import Path
from threading import Event
from typing import Any

import pytest
from typer.testing import CliRunner

from ray_job.contract.job_spec import ModelSpec
from service.adapters.directory_object_store import DirectoryObjectStore
from service.cli.app import app
from service.db import Pool
from service.model_catalogue import CatalogueModel, PriceSection
from service.ports import JobState, JobStatus
from service.projects import Project, erase_project
from service.reconciler.jobs import split_gpu_seconds
from service.reconciler.retention import sweep
from tests.integration.reconciler_harness import FAILED, SUCCEEDED, Job, Stack, line

MODEL = ModelSpec(id="demo", source="x", accelerator="a10g", tensor_parallel_size=2, concurrency=3, sharing="stack")
PRICE = PriceSection(per_gpu_hour=3.6, currency="USD")
TODAY = datetime.now(UTC).date()
HOUR_S = 3_600


@pytest.fixture
def on_gpus(pool: Pool, tmp_path: Path) -> Stack:
    """A stack whose projects share jobs on six GPUs, of which each costs 3.60 USD per hour."""
    stack = Stack(pool, DirectoryObjectStore(tmp_path / "objects"), tmp_path)
    stack.backends = dataclasses.replace(stack.backends, catalogue={"demo": CatalogueModel(spec=MODEL, price=PRICE)})
    return stack


def pass_time(stack: Stack, hours: int) -> None:
    """Let the jobs that run have run for so much longer, and look at them. The seconds of a test hardly count."""
    shift = "- make_interval(hours => %s)"
    stack.sql(
        f"UPDATE jobs SET running_since = running_since {shift}, split_at = split_at {shift} "  # noqa: S608 - a constant
        "WHERE gone_at IS NULL",
        hours,
        hours,
    )
    stack.advance_jobs()


def add_batch(stack: Stack, batch_id: str, lines: int, project: str = "p") -> Job:
    """Add a batch, and return the job of the stack, which has leased it."""
    job = stack.started(*map(line, range(1, lines + 1)), batch_id=batch_id, project=project)
    stack.advance_jobs()
    return job


def end_job(stack: Stack, status: JobStatus = SUCCEEDED) -> None:
    stack.launcher.end(stack.job().id, status)
    stack.advance_jobs()
    stack.advance_jobs()
    stack.forget_backoff()


def two_batches_and_idle_time(stack: Stack) -> None:
    job = add_batch(stack, "batch_1", 2)
    add_batch(stack, "batch_2", 6, project="q")
    pass_time(stack, 100)  # start
    job.answer_all()
    for batch_id in ("batch_1", "batch_2"):
        stack.advance(batch_id)
    pass_time(stack, 400)  # warm
    add_batch(stack, "batch_3", 4, project="q")
    pass_time(stack, 50)
    job.commit(batch_id="batch_3")
    stack.advance("batch_3")
    pass_time(stack, 30)
    job.end()
    end_job(stack)


def restarted_engine(stack: Stack) -> None:
    job = add_batch(stack, "batch_1", 4)
    pass_time(stack, 60)
    job.commit(1)
    pass_time(stack, 200)  # the engine dies, and its leases run out
    stack.sql("UPDATE segments SET leased_until = now() - interval '1 s' WHERE NOT is_done")
    job.leases.clear()
    job.lease()
    pass_time(stack, 80)
    job.commit()
    stack.advance("batch_1")
    job.end()
    end_job(stack)


def killed_job(stack: Stack) -> None:
    job = add_batch(stack, "batch_1", 4)
    add_batch(stack, "batch_2", 2, project="q")
    pass_time(stack, 60)
    job.commit(1)
    pass_time(stack, 300)
    end_job(stack, FAILED)
    stack.advance("batch_1")
    again = stack.job()
    assert again.id != job.id
    again.lease()
    pass_time(stack, 90)
    again.answer_all()
    for batch_id in ("batch_1", "batch_2"):
        stack.advance(batch_id)
    again.end()
    end_job(stack)


def job_without_work(stack: Stack) -> None:
    add_batch(stack, "batch_1", 4)
    stack.cancel()
    stack.advance("batch_1")
    pass_time(stack, 70)
    end_job(stack, JobStatus(state=JobState.MISSING))


@pytest.mark.parametrize("history", [two_batches_and_idle_time, restarted_engine, killed_job, job_without_work])
def test_usage_of_all_days_is_what_the_jobs_held(on_gpus: Stack, history: Any) -> None:
    history(on_gpus)
    jobs = on_gpus.jobs()
    assert all(job["gone_at"] for job in jobs)
    # The seconds are split a moment after the time at which the job was seen to be gone.
    held_s = sum(
        job["gpus"] * (max(job["gone_at"], job["split_at"]) - job["running_since"]).total_seconds() for job in jobs
    )
    [days] = on_gpus.sql(
        "SELECT sum(gpu_seconds + overhead_gpu_seconds) AS seconds, sum(cost + overhead_cost)::float AS cost, "
        "sum(gpu_seconds) AS used FROM daily_usage"
    )
    assert held_s > 400 * HOUR_S
    assert days["seconds"] == pytest.approx(held_s, rel=0.02)
    assert days["cost"] == pytest.approx(held_s / 1000, rel=0.02)
    batches = on_gpus.sql("SELECT sum(gpu_seconds) AS seconds, sum(cost)::float AS cost FROM batches")[0]
    assert batches["seconds"] == pytest.approx(days["used"])


def test_overhead_is_split_by_the_tokens_of_the_batches_that_the_job_served(on_gpus: Stack) -> None:
    two_batches_and_idle_time(on_gpus)
    found = {row["project_id"]: row for row in on_gpus.sql("SELECT * FROM daily_usage")}
    assert found.keys() == {"p", "q"}
    # 400 hours after 2 and 6 lines; then 30 hours after 2 and 10 lines.
    assert found["p"]["overhead_gpu_seconds"] == pytest.approx(6 * (400 / 4 + 30 / 6) * HOUR_S, rel=0.02)
    assert found["q"]["overhead_gpu_seconds"] == pytest.approx(6 * (400 * 3 / 4 + 30 * 5 / 6) * HOUR_S, rel=0.02)
    assert (found["p"]["batches"], found["q"]["batches"], found["q"]["completed"]) == (1, 2, 10)


def test_overhead_of_a_job_that_served_nothing_is_that_of_the_stack(on_gpus: Stack) -> None:
    job_without_work(on_gpus)
    [of_stack] = on_gpus.sql("SELECT * FROM daily_usage WHERE project_id = ''")
    assert (of_stack["gpu_seconds"], of_stack["overhead_gpu_seconds"]) == (0, pytest.approx(420 * HOUR_S, rel=0.02))
    [of_batch] = on_gpus.sql("SELECT * FROM daily_usage WHERE project_id = 'p'")
    assert (of_batch["batches"], of_batch["gpu_seconds"]) == (1, 0)


def test_end_that_is_looked_at_twice_counts_once(on_gpus: Stack) -> None:
    """The reconciler may die between the last split and the record of the end."""
    add_batch(on_gpus, "batch_1", 1)
    pass_time(on_gpus, 100)
    for _ in range(2):
        with on_gpus.pool.connection() as connection:
            split_gpu_seconds(connection, [on_gpus.job().id], is_last=True)
    [days] = on_gpus.sql("SELECT sum(overhead_gpu_seconds) AS seconds FROM daily_usage")
    assert days["seconds"] == pytest.approx(600 * HOUR_S, rel=0.02)


def test_price_of_a_job_is_that_of_its_creation(on_gpus: Stack) -> None:
    job = add_batch(on_gpus, "batch_1", 1)
    dearer = CatalogueModel(spec=MODEL, price=PriceSection(per_gpu_hour=36, currency="EUR"))
    on_gpus.backends = dataclasses.replace(on_gpus.backends, catalogue={"demo": dearer})
    pass_time(on_gpus, 100)
    job.commit()
    done = on_gpus.advance()
    assert float(done["cost"]) == pytest.approx(600 * 3.6, rel=0.02)
    assert done["currency"] == "USD"


def test_usage_outlives_batches_and_is_kept_for_its_own_time(on_gpus: Stack) -> None:
    two_batches_and_idle_time(on_gpus)
    before = on_gpus.sql("SELECT * FROM daily_usage ORDER BY project_id")
    on_gpus.sql("UPDATE batches SET completed_at = now() - interval '31 d', leftovers_due_at = NULL")
    on_gpus.sql("UPDATE batches SET parts_deleted_at = now()")
    sweep(on_gpus.backends, Event())
    assert on_gpus.sql("SELECT id FROM batches") == []
    assert on_gpus.sql("SELECT * FROM daily_usage ORDER BY project_id") == before
    on_gpus.sql("UPDATE daily_usage SET day = day - 1096 WHERE project_id = 'p'")
    sweep(on_gpus.backends, Event())
    assert [row["project_id"] for row in on_gpus.sql("SELECT * FROM daily_usage")] == ["q"]


def usage(database_url: str, monkeypatch: pytest.MonkeyPatch, *arguments: str) -> list[dict[str, str]]:
    monkeypatch.setenv("CLOISTER_DATABASE_URL", database_url)
    result = CliRunner().invoke(app, ["usage", "--csv", *arguments], catch_exceptions=False)
    assert result.exit_code == 0, result.output
    return list(csv.DictReader(io.StringIO(result.output)))


@pytest.mark.parametrize("by", ["project", "model", "day", "batch"])
def test_every_grouping_has_the_same_sum(
    on_gpus: Stack, database_url: str, monkeypatch: pytest.MonkeyPatch, by: str
) -> None:
    two_batches_and_idle_time(on_gpus)
    on_gpus.sql("DELETE FROM batches WHERE id = 'batch_2'")
    since = (TODAY - timedelta(days=1)).isoformat()
    rows = usage(database_url, monkeypatch, "--since", since, "--by", by)
    seconds = [float(row["gpu_seconds"]) + float(row["overhead_gpu_seconds"]) for row in rows]
    assert sum(seconds) == pytest.approx(6 * 580 * HOUR_S, rel=0.02)
    assert sum(float(row["cost"]) for row in rows) == pytest.approx(6 * 580 * 3.6, rel=0.02)
    assert sum(int(row["completed"]) for row in rows) == 12
    names = {"project": ["p", "q"], "model": ["demo"], "day": [TODAY.isoformat()],
             "batch": ["(overhead)", "batch_1", "(deleted batches)", "(overhead)", "batch_3"]}  # fmt: skip
    assert [row[by] for row in rows] == names[by]


def test_usage_is_a_table_with_a_total(on_gpus: Stack, database_url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    two_batches_and_idle_time(on_gpus)
    monkeypatch.setenv("CLOISTER_DATABASE_URL", database_url)
    tomorrow = (TODAY + timedelta(days=1)).isoformat()
    run = ["usage", "--since", "7d", "--until", tomorrow]
    output = CliRunner().invoke(app, run, catch_exceptions=False).output.splitlines()
    assert [row.split("\t")[0] for row in output] == ["project", "p", "q", "total"]
    assert output[0].split("\t")[-1] == "cost"
    amount, currency = output[-1].split("\t")[-1].split()
    assert float(amount.replace(",", "")) == pytest.approx(6 * 580 * 3.6, rel=0.02)
    assert currency == "USD"
    nothing = ["usage", "--since", "2020-01-01", "--until", "2020-02-01"]
    assert len(CliRunner().invoke(app, nothing, catch_exceptions=False).output.splitlines()) == 1


@pytest.mark.parametrize("arguments", [["--since", "soon"], ["--since", "2026-02-01", "--until", "2026-01-01"]])
def test_wrong_days_are_refused(database_url: str, monkeypatch: pytest.MonkeyPatch, arguments: list[str]) -> None:
    monkeypatch.setenv("CLOISTER_DATABASE_URL", database_url)
    assert CliRunner().invoke(app, ["usage", *arguments]).exit_code == 2


def test_usage_of_an_erased_project_is_that_of_the_stack(on_gpus: Stack) -> None:
    two_batches_and_idle_time(on_gpus)
    before = on_gpus.sql("SELECT sum(gpu_seconds + overhead_gpu_seconds) AS s FROM daily_usage")
    on_gpus.sql("UPDATE batches SET parts_deleted_at = now(), leftovers_due_at = NULL")
    erase_project(on_gpus.pool, Project(id="p", name="p"))
    sweep(on_gpus.backends, Event())
    assert on_gpus.sql("SELECT id FROM projects WHERE id = 'p'") == []
    assert [row["project_id"] for row in on_gpus.sql("SELECT * FROM daily_usage ORDER BY 2")] == ["", "q"]
    after = on_gpus.sql("SELECT sum(gpu_seconds + overhead_gpu_seconds) AS s FROM daily_usage")
    assert after[0]["s"] == pytest.approx(before[0]["s"])
