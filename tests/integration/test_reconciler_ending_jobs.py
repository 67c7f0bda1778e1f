"""Ends of jobs: drained for others, silent, lingering, and followed by another of their domain."""

import dataclasses

import pytest

from ray_job.contract.job_spec import ModelSpec
from service.backends import Slots
from service.coordinator.errors import JobEndedError
from service.model_catalogue import CatalogueModel
from service.ports import JobState
from tests.integration.reconciler_harness import (
    BATCH,
    FAILED,
    SUCCEEDED,
    Job,
    Stack,
    eventually,
    line,
    looping,
)


@pytest.fixture
def stack(stack: Stack) -> Stack:
    """A reconciler with one slot."""
    stack.backends = dataclasses.replace(stack.backends, slots=Slots(default=1))
    return stack


@pytest.fixture
def job(stack: Stack) -> Job:
    """The job of a batch with two lines, which has leased both."""
    return stack.started(line(1), line(2))


def create_waiting(stack: Stack) -> None:
    """Create a batch of another domain, whose job waits for the slot."""
    stack.create(line(1), batch_id="other", project="q")
    stack.advance("other")


def launched_domains(stack: Stack) -> list[str]:
    jobs = {row["id"]: row["domain"] for row in stack.jobs()}
    return [jobs[spec.job_id] for spec in stack.launcher.launched]


def gone(stack: Stack, job: Job) -> bool:
    return stack.sql("SELECT gone_at FROM jobs WHERE id = %s", job.id)[0]["gone_at"] is not None


def pass_time(stack: Stack, minutes: int) -> None:
    """Let the present jobs be older, and silent for longer."""
    stack.sql(
        "UPDATE jobs SET launched_at = launched_at - %(past)s::interval, seen_at = seen_at - %(past)s::interval, "
        "idle_since = idle_since - %(past)s::interval, draining_at = draining_at - %(past)s::interval, "
        "ended_at = ended_at - %(past)s::interval".replace("%(past)s", f"'{minutes} min'")
    )


def test_idle_job_is_kept_while_nobody_waits(stack: Stack, job: Job) -> None:
    job.commit()
    pass_time(stack, 5)
    stack.advance()
    assert (job.lease().drain, stack.launcher.status(job.id).state) == (False, JobState.RUNNING)


def test_idle_job_takes_the_next_batch_of_its_domain(stack: Stack, job: Job) -> None:
    job.commit()
    stack.advance()
    stack.create(line(1), batch_id="next")
    stack.advance("next")
    job.answer_all()
    assert (stack.advance("next")["status"], len(stack.launcher.launched)) == ("completed", 1)


def test_idle_job_is_drained_when_another_waits_for_its_slot(stack: Stack, job: Job) -> None:
    job.commit()
    stack.advance()
    create_waiting(stack)
    stack.advance_jobs()
    assert job.lease().drain
    assert launched_domains(stack) == ["p"]
    assert job.end()
    stack.launcher.end(job.id, SUCCEEDED)
    stack.advance_jobs()
    stack.advance_jobs()
    assert (gone(stack, job), launched_domains(stack)) == (True, ["p", "q"])


def test_busy_job_is_drained_after_its_turn_when_another_waits(stack: Stack, job: Job) -> None:
    create_waiting(stack)
    stack.advance_jobs()
    assert not job.lease().drain
    pass_time(stack, 5)
    stack.advance_jobs()
    assert job.lease().drain
    assert job.commit()
    assert stack.advance()["status"] == "completed"


def test_job_that_is_about_to_lease_is_not_drained_for_another(stack: Stack) -> None:
    stack.create(line(1))
    stack.advance()
    job = stack.job()
    job.lease(tokens=0)
    create_waiting(stack)
    stack.advance_jobs()
    assert not job.lease().drain


def test_only_one_job_is_drained_for_a_waiting_one(stack: Stack) -> None:
    stack.backends = dataclasses.replace(stack.backends, slots=Slots(default=2))
    for project in ("p", "r"):
        stack.started(line(1), batch_id=f"batch_{project}", project=project).commit(batch_id=f"batch_{project}")
        stack.advance(f"batch_{project}")
    create_waiting(stack)
    for _ in range(3):
        stack.advance_jobs()
    assert [row["draining_at"] is None for row in stack.jobs()] == [False, True, True]


def test_job_of_another_accelerator_is_not_drained(stack: Stack, job: Job) -> None:
    job.commit()
    stack.advance()
    models = [ModelSpec(id="demo", source="x"), ModelSpec(id="large", source="x", accelerator="a10g")]
    catalogue = {model.id: CatalogueModel(spec=model) for model in models}
    slots = Slots(default=1, by_accelerator={"a10g": 0})
    stack.backends = dataclasses.replace(stack.backends, catalogue=catalogue, slots=slots)
    stack.create(line(1, model="large"), batch_id="other", project="q")
    stack.advance("other")
    stack.advance_jobs()
    assert not job.lease().drain


def test_next_job_of_a_domain_is_created_while_the_first_is_draining(stack: Stack, job: Job) -> None:
    stack.backends = dataclasses.replace(stack.backends, slots=Slots(default=2))
    stack.sql("UPDATE jobs SET draining_at = now()")
    stack.create(line(1), batch_id="next")
    stack.advance("next")
    following = stack.job()
    assert following.id != job.id
    assert [lease.batch_id for lease in following.lease().leases] == ["next"]
    assert job.commit()
    assert following.commit(batch_id="next")
    assert [stack.advance(each)["status"] for each in (BATCH, "next")] == ["completed"] * 2


def test_job_of_a_changed_model_is_drained_and_replaced(stack: Stack, job: Job) -> None:
    changed = CatalogueModel(spec=ModelSpec(id="demo", source="y"))
    stack.backends = dataclasses.replace(stack.backends, catalogue={"demo": changed}, slots=Slots(default=2))
    job.commit(1)
    stack.advance_jobs()
    assert job.lease().drain
    assert job.end()
    stack.launcher.end(job.id, SUCCEEDED)
    stack.advance_jobs()
    assert stack.launcher.launched[-1].model.source == "y"
    stack.job().answer_all()
    assert (stack.advance()["status"], stack.sql("SELECT failures FROM domains")) == ("completed", [{"failures": 0}])


def test_batches_of_a_removed_model_are_given_up(stack: Stack, job: Job) -> None:
    stack.backends = dataclasses.replace(stack.backends, catalogue={})
    stack.advance_jobs()
    assert job.lease().drain
    assert stack.advance()["status"] == "failed"
    assert stack.errors()[0]["code"] == "model_not_found"


def test_waiting_job_of_a_removed_model_ends(stack: Stack, job: Job) -> None:
    del job
    create_waiting(stack)
    stack.backends = dataclasses.replace(stack.backends, catalogue={})
    stack.advance_jobs()
    assert len([row for row in stack.jobs() if row["gone_at"]]) == 1
    assert len(stack.launcher.launched) == 1


def test_silent_job_is_stopped_and_replaced(stack: Stack, job: Job) -> None:
    job.commit(1)
    pass_time(stack, 9)
    stack.advance_jobs()
    assert stack.launcher.status(job.id).state is JobState.RUNNING
    pass_time(stack, 1)
    stack.advance_jobs()
    assert stack.launcher.status(job.id).state is JobState.STOPPED
    stack.advance_jobs()
    (event,) = stack.sql("SELECT data ->> 'reason' AS reason FROM batch_events WHERE type = 'job.ended'")
    assert event["reason"] == "the job was stopped after 10 minutes of silence"
    stack.forget_backoff()
    stack.advance_jobs()
    with pytest.raises(JobEndedError):
        job.commit(2)
    stack.job().answer_all()
    batch = stack.advance()
    assert (batch["status"], batch["completed"], stack.job().id == job.id) == ("completed", 2, False)


def test_job_that_ended_but_stays_is_stopped_after_a_minute(stack: Stack, job: Job) -> None:
    job.commit()
    stack.advance()
    assert job.end()
    stack.advance_jobs()
    assert stack.launcher.status(job.id).state is JobState.RUNNING
    pass_time(stack, 1)
    stack.advance_jobs()
    assert (stack.launcher.status(job.id).state, gone(stack, job)) == (JobState.STOPPED, False)
    stack.advance_jobs()
    assert gone(stack, job)


def test_drained_job_that_is_idle_and_does_not_end_is_stopped(stack: Stack, job: Job) -> None:
    job.commit()
    stack.advance()
    stack.sql("UPDATE jobs SET draining_at = now()")
    pass_time(stack, 1)
    stack.advance_jobs()
    assert stack.launcher.status(job.id).state is JobState.STOPPED


def test_job_that_fails_after_its_last_commit_has_not_failed(stack: Stack, job: Job) -> None:
    job.commit()
    stack.launcher.end(job.id, FAILED)
    assert stack.advance()["status"] == "completed"
    assert (gone(stack, job), stack.sql("SELECT failures FROM domains")) == (True, [{"failures": 0}])


def test_work_that_arrives_while_a_job_ends_gets_another(stack: Stack, job: Job) -> None:
    job.commit()
    stack.advance()
    assert job.end()
    stack.create(line(1), batch_id="next")
    stack.advance("next")
    assert len(stack.launcher.launched) == 1
    stack.launcher.end(job.id, SUCCEEDED)
    stack.advance_jobs()
    stack.advance_jobs()
    stack.job().answer_all()
    assert (stack.advance("next")["status"], len(stack.launcher.launched)) == ("completed", 2)


def test_job_does_not_end_while_its_domain_has_work(stack: Stack, job: Job) -> None:
    job.commit()
    stack.create(line(1), batch_id="next")
    stack.advance("next")
    assert not job.end()
    assert [lease.batch_id for lease in job.lease().leases] == ["next"]


def test_last_commit_wakes_the_loop_and_the_slot_of_an_idle_job_is_handed_on(
    stack: Stack, job: Job, database_url: str
) -> None:
    create_waiting(stack)
    with looping(stack.backends, database_url):
        job.commit()
        eventually(lambda: stack.batch()["status"] == "completed")
        eventually(lambda: job.lease().drain)
        assert job.end()
        stack.launcher.end(job.id, SUCCEEDED)
        eventually(lambda: launched_domains(stack) == ["p", "q"])
