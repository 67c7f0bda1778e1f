"""Order of batches and jobs: projects take turns, live jobs rotate, and each job is launched once."""

import dataclasses
import hashlib
import time
from collections import Counter
from collections.abc import Collection
from datetime import UTC, datetime
from threading import Event

import psycopg
import pytest

from ray_job.contract.job_spec import JobSpec, ModelSpec
from ray_job.contract.leases import SyncRequest
from service.adapters.memory_launcher import MemoryLauncher
from service.backends import Slots
from service.coordinator.errors import JobEndedError
from service.coordinator.leasing import authenticate, sync
from service.errors import LauncherError
from service.estimates import model_key
from service.model_catalogue import CatalogueModel
from service.ports import JobStatus
from service.reconciler.backends import Backends
from service.reconciler.jobs import advance_job, create_jobs, jobs_to_advance
from service.reconciler.loop import Workers, batches_to_advance
from service.reconciler.steps import advance
from tests.conftest import as_owner
from tests.integration.reconciler_harness import CHAT, RUNNING, SUCCEEDED, Stack, eventually, line, looping

# In the order of their creation.
QUEUED = ["a1", "a2", "a3", "a4", "b1", "b2", "c1"]
OWN_JOBS = {"demo": CatalogueModel(spec=ModelSpec(id="demo", source="x", sharing="batch"))}


@pytest.fixture
def queued(stack: Stack) -> Stack:
    """Seven accepted batches of three projects, each with its own job, which waits for a slot."""
    stack.backends = dataclasses.replace(stack.backends, catalogue=OWN_JOBS, slots=Slots(default=0))
    for batch_id in QUEUED:
        stack.create(line(1), batch_id=batch_id, project=batch_id[0])
        advance(stack.backends, batch_id)
        create_jobs(stack.backends)
    return stack


def with_slots(stack: Stack, slots: int) -> Backends:
    return dataclasses.replace(stack.backends, slots=Slots(default=slots))


def domain(stack: Stack, job_id: str) -> str:
    return str(stack.sql("SELECT domain FROM jobs WHERE id = %s", job_id)[0]["domain"])


def job_of(stack: Stack, domain: str) -> str:
    return str(stack.sql("SELECT id FROM jobs WHERE domain = %s", domain)[0]["id"])


def to_advance(stack: Stack, slots: int = 2, excluded: Collection[str] = ()) -> list[str]:
    """The domains of the jobs that a step can advance."""
    due = jobs_to_advance(with_slots(stack, slots), excluded=[job_of(stack, each) for each in excluded])
    return [domain(stack, job["id"]) for job in due]


def launched(stack: Stack) -> list[str]:
    return [domain(stack, spec.job_id) for spec in stack.launcher.launched]


def insert_many(stack: Stack, project: str, count: int, status: str = "validating", *, own: bool = False) -> None:
    """Insert batches; those in progress are in one domain, or each in its own."""
    values = {"project": project, "count": count, "endpoint": CHAT, "status": status, "own": own}
    with stack.pool.connection() as connection:
        connection.execute("INSERT INTO projects (id, name) VALUES (%(project)s, %(project)s)", values)
        connection.execute(
            "INSERT INTO batches (id, project_id, endpoint, input_file_id, completion_window, request_sha256, "
            "expires_at, status, model, domain, segments_left) "
            "SELECT %(project)s || n, %(project)s, %(endpoint)s, 'file-none', '24h', '', now() + interval '1 day', "
            "%(status)s, 'demo', CASE WHEN %(own)s THEN %(project)s || n ELSE %(project)s END, 1 "
            "FROM generate_series(1, %(count)s) AS n",
            values,
        )
        connection.execute(
            "INSERT INTO domains (model, domain) SELECT DISTINCT model, domain FROM batches ON CONFLICT DO NOTHING"
        )
        connection.execute(
            "INSERT INTO segments (batch_id, number, start_byte, end_byte, rows, tokens) "
            "SELECT id, 0, 0, 0, 1, 9 FROM batches WHERE project_id = %(project)s AND status = 'in_progress'",
            values,
        )


def insert_live_jobs(stack: Stack, count: int) -> None:
    """Insert jobs that run, without batches."""
    stack.sql("INSERT INTO domains (model, domain) SELECT 'demo', 'live' || n FROM generate_series(1, %s) AS n", count)
    stack.sql(
        "INSERT INTO jobs (id, model, domain, model_key, token_sha256, launched_at, seen_at) "
        "SELECT 'job-' || n, 'demo', 'live' || n, 'k', n::text::bytea, now(), now() FROM generate_series(1, %s) AS n",
        count,
    )
    for number in range(1, count + 1):
        stack.launcher.end(f"job-{number}", RUNNING)


def test_projects_take_turns_in_launching_jobs(queued: Stack) -> None:
    queued.work = lambda spec: queued.job(spec.job_id).serve()
    with Workers(with_slots(queued, 1)) as workers:
        while queued.sql("SELECT id FROM batches WHERE status <> 'completed'"):
            workers.run_pass(until=time.monotonic() + 1)
    assert launched(queued) == ["a1", "b1", "c1", "a2", "b2", "a3", "a4"]


def test_running_job_counts_as_a_turn(queued: Stack) -> None:
    for each in ("a1", "b1"):
        advance_job(with_slots(queued, 2), job_of(queued, each))
    queued.job(job_of(queued, "a1")).serve()
    queued.launcher.end(job_of(queued, "a1"), SUCCEEDED)
    advance_job(queued.backends, job_of(queued, "a1"))
    # A job of b runs, and c never had one.
    queue = queued.sql("SELECT domain FROM job_queue JOIN jobs USING (id) ORDER BY position")
    assert [row["domain"] for row in queue] == ["c1", "a2", "a3", "b2", "a4"]


def test_position_of_one_job_is_that_in_the_queue(queued: Stack) -> None:
    queued.sql("INSERT INTO domains (model, domain) VALUES ('demo', 'stack')")
    queued.sql(
        "INSERT INTO jobs (id, model, domain, model_key, token_sha256, launch_after) "
        "VALUES ('job-s', 'demo', 'stack', 'k', 's', now())"
    )
    for slots in range(1, 6):
        positions = queued.sql("SELECT position, queue_position(id) AS found FROM job_queue ORDER BY position")
        assert [row["found"] for row in positions] == list(range(1, 10 - slots))
        assert queued.sql("SELECT queue_position(id) AS found FROM jobs WHERE launch_after IS NULL") == [
            {"found": None}
        ] * (slots - 1)
        first = queued.sql("SELECT domain FROM job_queue JOIN jobs USING (id) ORDER BY position")[0]["domain"]
        advance_job(with_slots(queued, slots), job_of(queued, first))


def test_only_queued_jobs_with_a_free_slot_need_a_step(queued: Stack) -> None:
    assert to_advance(queued, 0) == []
    assert to_advance(queued, 3) == ["a1", "b1", "c1"]
    assert to_advance(queued, 3, excluded=["b1"]) == ["a1", "c1"]


def test_queued_job_without_work_needs_a_step(queued: Stack) -> None:
    queued.sql("UPDATE batches SET paused_at = now() WHERE id = 'a4'")
    create_jobs(queued.backends)
    assert to_advance(queued, 0) == ["a4"]


def test_postponed_launch_does_not_delay_others(queued: Stack) -> None:
    queued.sql("UPDATE jobs SET launch_after = now() + interval '1 h' WHERE domain = 'a1'")
    assert to_advance(queued, 2) == ["a2", "b1"]


def test_slots_are_limited_for_each_accelerator(stack: Stack) -> None:
    models = [ModelSpec(id="demo", source="x"), ModelSpec(id="large", source="x", accelerator="a10g")]
    catalogue = {model.id: CatalogueModel(spec=model) for model in models}
    slots = Slots(default=1, by_accelerator={"a10g": 2})
    stack.backends = dataclasses.replace(stack.backends, catalogue=catalogue, slots=slots)
    for model in catalogue:
        for project in ("p", "q", "r"):
            batch_id = f"{project}-{model}"
            stack.create(line(1, model=model), batch_id=batch_id, project=project)
            advance(stack.backends, batch_id)
    for _ in range(3):
        stack.advance_jobs()
    assert Counter(spec.model.id for spec in stack.launcher.launched) == {"demo": 1, "large": 2}


@pytest.mark.parametrize(("age_s", "pause_s"), [(0, 0.25), (4, 2), (3_600, 5)])
def test_launch_is_tried_again_sooner_for_a_new_job(queued: Stack, age_s: float, pause_s: float) -> None:
    def work(_: JobSpec) -> JobStatus:
        raise LauncherError("Ray is starting")

    queued.work = work
    job_id = job_of(queued, "a1")
    queued.sql("UPDATE jobs SET created_at = now() - make_interval(secs => %s) WHERE id = %s", age_s, job_id)
    advance_job(dataclasses.replace(with_slots(queued, 1), first_pause_s=1.0), job_id)
    [job] = queued.sql("SELECT launch_after FROM jobs WHERE id = %s", job_id)
    assert pause_s - 0.5 < (job["launch_after"] - datetime.now(UTC)).total_seconds() <= pause_s + 0.5


def test_failed_launch_does_not_delay_others(queued: Stack) -> None:
    def work(spec: JobSpec) -> JobStatus:
        if domain(queued, spec.job_id) == "a1":
            raise RuntimeError("refused")
        return RUNNING

    queued.work = work
    only_one = dataclasses.replace(with_slots(queued, 1), first_pause_s=60)
    advance_job(only_one, job_of(queued, "a1"))
    [following] = to_advance(queued, 1)
    advance_job(only_one, job_of(queued, following))
    assert launched(queued)[-1] == following != "a1"


def test_each_launch_has_its_own_token_and_an_earlier_one_is_void(stack: Stack) -> None:
    stack.create(line(1))
    stack.advance()
    [job] = stack.jobs()
    token = stack.launcher.tokens[job["id"]]
    assert job["token_sha256"] == hashlib.sha256(token.encode()).digest()
    assert authenticate(stack.pool, token).id == job["id"]
    stack.sql("UPDATE jobs SET launch_after = now()")  # as if killed between launching and recording it
    stack.launcher.forget()
    stack.advance()
    assert authenticate(stack.pool, stack.launcher.tokens[job["id"]]).id == job["id"]
    with pytest.raises(JobEndedError):
        authenticate(stack.pool, token)


def test_project_with_thousands_of_new_batches_does_not_delay_others(stack: Stack) -> None:
    insert_many(stack, "many", 2_000)
    insert_many(stack, "few", 2)
    assert batches_to_advance(stack.pool)[:4] == ["many1", "few1", "many2", "few2"]


def test_project_with_thousands_of_jobs_does_not_delay_others(stack: Stack) -> None:
    stack.backends = dataclasses.replace(stack.backends, catalogue=OWN_JOBS)
    insert_many(stack, "many", 2_000, "in_progress", own=True)
    insert_many(stack, "single", 1, "in_progress", own=True)
    with Workers(stack.backends) as workers:
        workers.run_pass(until=time.monotonic() + 30)
        workers.run_pass(until=time.monotonic() + 30)
    assert sorted(launched(stack)) == ["many1", "single1"]


def test_job_of_the_stack_leases_thousands_of_batches_and_others_in_turn(stack: Stack) -> None:
    insert_many(stack, "many", 2_000, "in_progress")
    insert_many(stack, "few", 1, "in_progress")
    stack.sql("INSERT INTO domains (model, domain) VALUES ('demo', 'stack')")
    stack.sql("UPDATE batches SET domain = 'stack'")
    stack.sql("UPDATE segments SET tokens = 60000")
    stack.advance_jobs()
    request = SyncRequest(wanted_tokens=120_000, wait_s=0, held=(), engines=1)
    answer = sync(stack.pool, stack.store, stack.job().id, request)
    assert [lease.batch_id for lease in answer.leases] == ["many1", "few1"]


@pytest.mark.parametrize("own", [False, True])
def test_pass_over_thousands_of_waiting_batches_is_fast(stack: Stack, *, own: bool) -> None:
    if own:
        stack.backends = dataclasses.replace(stack.backends, catalogue=OWN_JOBS)
    insert_many(stack, "many", 10_000, "in_progress", own=own)
    insert_many(stack, "few", 1, "in_progress", own=own)
    with psycopg.connect(as_owner(stack.pool)) as owner:
        owner.execute("ANALYZE")
    if own:  # as after many passes
        stack.sql(
            "INSERT INTO jobs (id, model, domain, model_key, project_id, token_sha256, launch_after) "
            "SELECT 'job-' || id, model, domain, 'k', project_id, id::bytea, now() FROM batches"
        )
        stack.sql("UPDATE jobs SET model_key = %s", model_key(OWN_JOBS["demo"].spec))
    with Workers(stack.backends) as workers:
        for _ in range(2):
            workers.run_pass(until=time.monotonic() + 30)
    assert len(stack.launcher.launched) == 2
    with Workers(stack.backends) as workers:
        began = time.monotonic()
        workers.run_pass(until=time.monotonic() + 30)
    assert time.monotonic() - began < 0.5


def test_two_reconcilers_launch_each_job_once_and_keep_to_the_limit(stack: Stack, database_url: str) -> None:
    most = 0

    def work(spec: JobSpec) -> JobStatus:
        nonlocal most
        [running] = stack.sql("SELECT count(*) FROM jobs WHERE launch_after IS NULL AND gone_at IS NULL")
        most = max(most, running["count"] + 1)
        return stack.job(spec.job_id).serve()

    stack.work = work
    stack.backends = dataclasses.replace(stack.backends, catalogue=OWN_JOBS)
    other = dataclasses.replace(stack.backends, stopping=Event())
    with looping(stack.backends, database_url), looping(other, database_url):
        for number in range(12):
            stack.create(line(1), batch_id=f"b{number}", project=f"p{number % 3}")
        # The leader loses its lock in between.
        stack.sql(
            "SELECT pg_terminate_backend(pid) FROM pg_locks WHERE locktype = 'advisory' AND objid = 7203002 AND granted"
        )
        eventually(lambda: len(stack.sql("SELECT id FROM batches WHERE status = 'completed'")) == 12)
    assert Counter(launched(stack)) == {f"b{number}": 1 for number in range(12)}
    assert most <= 2
    assert stack.sql("SELECT sum(jobs_launched) FROM usage_totals")[0]["sum"] == 12


def test_each_live_job_gets_its_step_however_many_there_are(stack: Stack) -> None:
    insert_live_jobs(stack, 451)
    for last in ("job-450", "job-451"):
        stack.launcher.end(last, SUCCEEDED)
    with Workers(with_slots(stack, 1_000), looks_per_s=1_000) as workers:
        for _ in range(4):
            workers.run_pass(until=time.monotonic() + 30)
    assert [row["id"] for row in stack.sql("SELECT id FROM jobs WHERE gone_at IS NOT NULL ORDER BY seq")] == [
        "job-450",
        "job-451",
    ]


class SlowLauncher(MemoryLauncher):
    """Takes its time to report a status."""

    def status(self, job_id: str) -> JobStatus:
        """See ``service.ports.Launcher.status``."""
        time.sleep(0.05)
        return super().status(job_id)


def test_many_live_jobs_do_not_delay_a_new_batch(stack: Stack) -> None:
    insert_live_jobs(stack, 200)
    stack.create(line(1))
    with Workers(dataclasses.replace(stack.backends, launcher=SlowLauncher())) as workers:
        workers.run_pass(until=time.monotonic() + 0.3)
    assert stack.batch()["status"] == "in_progress"


def test_rotation_continues_after_the_last_job_that_had_a_step(stack: Stack) -> None:
    insert_live_jobs(stack, 3)
    (_, second, _) = jobs_to_advance(stack.backends)
    following = jobs_to_advance(stack.backends, after_running=second["seq"])
    assert [job["id"] for job in following] == ["job-3", "job-1", "job-2"]


def test_looks_at_running_jobs_are_limited(stack: Stack) -> None:
    insert_live_jobs(stack, 30)
    stack.sql("UPDATE jobs SET ended_at = now() WHERE seq > (SELECT max(seq) - 3 FROM jobs)")
    jobs = jobs_to_advance(stack.backends, looks=2)
    assert [job["id"] for job in jobs if job["kind"] == "ending"] == ["job-28", "job-29", "job-30"]
    assert [job["id"] for job in jobs if job["kind"] == "running"] == ["job-1", "job-2"]


def test_pass_returns_at_most_its_limit_however_many_jobs_are_present(stack: Stack) -> None:
    insert_live_jobs(stack, 450)
    assert len(jobs_to_advance(stack.backends)) == 200


def test_idle_job_is_looked_at_less_often_until_it_is_drained(stack: Stack) -> None:
    insert_live_jobs(stack, 2)
    stack.sql("UPDATE jobs SET idle_since = now() WHERE id = 'job-1'")
    assert [job["id"] for job in jobs_to_advance(stack.backends, excluded_if_idle=["job-1", "job-2"])] == ["job-2"]
    stack.sql("UPDATE jobs SET draining_at = now()")
    assert len(jobs_to_advance(stack.backends, excluded_if_idle=["job-1", "job-2"])) == 2
