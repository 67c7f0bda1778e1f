"""Pauses and priorities, through the API and the reconciler on real Postgres."""

import dataclasses
from collections.abc import Callable
from typing import Any

import httpx
import openai
import pytest
from openai.types import Batch

from ray_job.contract.job_spec import ModelSpec
from service.backends import Slots
from service.db import Pool
from service.model_catalogue import CatalogueModel
from service.ports import JobState, JobStatus
from service.reconciler.loop import batches_to_advance
from service.reconciler.steps import advance
from tests.integration.reconciler_harness import BATCH, FAILED, SUCCEEDED, Stack, line
from tests.integration.test_api_batches import create, set_status


@pytest.fixture
def change(http: httpx.Client) -> Callable[[str, str], httpx.Response]:
    """Pause or resume a batch."""
    return lambda batch_id, change: http.post(f"/v1/batches/{batch_id}/{change}")


Change = Callable[[str, str], httpx.Response]


def pause(stack: Stack, batch_id: str = BATCH) -> None:
    stack.sql("UPDATE batches SET paused_at = now() WHERE id = %s", batch_id)


def resume(stack: Stack, batch_id: str = BATCH) -> None:
    stack.sql("UPDATE batches SET paused_at = NULL WHERE id = %s", batch_id)


@pytest.mark.parametrize("status", ["validating", "in_progress"])
def test_open_batch_can_be_paused_and_resumed_twice(
    client: openai.OpenAI, api_pool: Pool, change: Change, status: str
) -> None:
    batch = create(client)
    set_status(api_pool, batch, status)
    paused = change(batch.id, "pause").json()
    assert (paused["status"], paused["x_cloister"]["paused_at"] >= batch.created_at) == (status, True)
    assert change(batch.id, "pause").json()["x_cloister"]["paused_at"] == paused["x_cloister"]["paused_at"]
    assert change(batch.id, "resume").json()["x_cloister"]["paused_at"] is None
    assert change(batch.id, "resume").status_code == 200
    with api_pool.connection() as connection:
        events = connection.execute("SELECT type FROM batch_events WHERE batch_id = %s ORDER BY id", [batch.id])
        assert [row["type"] for row in events] == ["batch.validating", "batch.paused", "batch.resumed"]


@pytest.mark.parametrize("status", ["finalizing", "cancelling", "completed", "failed", "expired", "cancelled"])
def test_batch_without_lines_to_run_cannot_be_paused(
    client: openai.OpenAI, api_pool: Pool, change: Change, status: str
) -> None:
    batch = create(client)
    set_status(api_pool, batch, status)
    for name in ("pause", "resume"):
        answer = change(batch.id, name)
        assert (answer.status_code, answer.headers["x-should-retry"]) == (409, "false")
        assert answer.json()["error"]["message"] == f"Cannot {name} a batch with status '{status}'."


def test_cancelled_batch_is_not_shown_as_paused(client: openai.OpenAI, change: Change) -> None:
    batch = create(client)
    change(batch.id, "pause")
    client.batches.cancel(batch.id)
    extension: Any = client.batches.retrieve(batch.id).model_extra
    assert extension["x_cloister"]["paused_at"] is None


def test_batch_of_another_project_cannot_be_paused(client: openai.OpenAI, stranger: openai.OpenAI) -> None:
    batch = create(client)
    for name in ("pause", "resume"):
        with pytest.raises(openai.NotFoundError):
            stranger.post(f"/batches/{batch.id}/{name}", cast_to=Batch)
    assert client.batches.retrieve(batch.id).model_extra["x_cloister"]["paused_at"] is None  # type: ignore[index]


@pytest.mark.parametrize("priority", [-100, 0, 100])
def test_priority_is_shown(client: openai.OpenAI, priority: int) -> None:
    batch = create(client, extra_body={"x_cloister": {"priority": priority}})
    assert client.batches.retrieve(batch.id).model_extra["x_cloister"]["priority"] == priority  # type: ignore[index]


@pytest.mark.parametrize("options", [{"priority": 101}, {"priority": -101}, {"priority": "1"}, {"urgent": True}, 1])
def test_invalid_option_is_refused_by_its_name(client: openai.OpenAI, options: Any) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        create(client, extra_body={"x_cloister": options})
    assert str(caught.value.param).startswith("x_cloister")


def test_lines_of_a_paused_batch_run_after_the_pause(stack: Stack) -> None:
    job = stack.started(line(1), line(2))
    assert job.commit(1)
    pause(stack)
    answer = job.lease()
    assert ([ref.batch_id for ref in answer.lost], answer.leases) == ([BATCH], ())
    assert stack.advance()["status"] == "in_progress"
    resume(stack)
    assert [lease.epoch for lease in job.lease().leases] == [2]
    assert job.commit()
    completed = stack.advance()
    assert (completed["status"], completed["completed"], len(stack.launcher.launched)) == ("completed", 2, 1)


def test_pause_during_a_lease_loses_no_result(stack: Stack) -> None:
    job = stack.started(line(1), line(2))
    pause(stack)
    assert job.commit(1)
    assert stack.batch()["completed"] == 1


def test_new_batch_that_is_paused_is_validated_and_not_launched(stack: Stack) -> None:
    stack.create(line(1))
    pause(stack)
    assert stack.advance()["status"] == "in_progress"
    stack.advance_jobs()
    assert stack.jobs() == []
    resume(stack)
    stack.advance()
    assert len(stack.launcher.launched) == 1


def test_waiting_job_ends_if_all_its_batches_are_paused(stack: Stack) -> None:
    stack.backends = dataclasses.replace(stack.backends, slots=Slots(default=0))
    stack.create(line(1))
    stack.advance()
    pause(stack)
    stack.advance_jobs()
    assert [job["gone_at"] is None for job in stack.jobs()] == [False]
    resume(stack)
    stack.advance_jobs()
    assert [job["gone_at"] is None for job in stack.jobs()] == [False, True]


def test_job_of_a_paused_batch_works_on_others(stack: Stack) -> None:
    job = stack.started(line(1))
    pause(stack)
    stack.create(line(1), batch_id="batch_2")
    stack.advance("batch_2")
    assert [lease.batch_id for lease in job.lease().leases] == ["batch_2"]


def test_job_that_fails_during_a_pause_has_not_failed(stack: Stack) -> None:
    job = stack.started(line(1))
    pause(stack)
    stack.launcher.end(job.id, FAILED)
    stack.advance()
    resume(stack)
    assert stack.sql("SELECT failures FROM domains") == [{"failures": 0}]
    stack.advance()
    stack.job().answer_all()
    assert stack.advance()["status"] == "completed"


def test_job_that_ends_after_a_pause_is_followed_by_another(stack: Stack) -> None:
    job = stack.started(line(1))
    pause(stack)
    job.lease()
    assert job.end()
    stack.launcher.end(job.id, SUCCEEDED)
    stack.advance()
    resume(stack)
    stack.advance()
    assert len(stack.launcher.launched) == 2


def test_paused_batch_expires_and_can_be_cancelled(stack: Stack) -> None:
    for batch_id, change in (
        ("batch_a", "expires_at = now()"),
        ("batch_b", "status = 'cancelling', cancelling_at = now()"),
    ):
        stack.create(line(1), batch_id=batch_id)
        advance(stack.backends, batch_id)
        pause(stack, batch_id)
        stack.sql(f"UPDATE batches SET {change} WHERE id = %s", batch_id)  # noqa: S608 - a constant
        assert batches_to_advance(stack.pool) == [batch_id]
        advance(stack.backends, batch_id)
    assert [stack.batch(batch_id)["status"] for batch_id in ("batch_a", "batch_b")] == ["expired", "cancelled"]


def test_batch_whose_lines_are_all_committed_ends_in_spite_of_a_pause(stack: Stack) -> None:
    job = stack.started(line(1))
    pause(stack)
    assert job.commit()
    assert stack.advance()["status"] == "completed"


def test_stuck_job_of_a_paused_batch_gives_up_nothing(stack: Stack) -> None:
    stack.work = lambda _: JobStatus(state=JobState.PENDING, message="no such image", is_stuck=True)
    stack.create(line(1))
    stack.advance()
    pause(stack)
    stack.advance()
    assert stack.batch()["giving_up_at"] is None


def test_highest_priority_of_a_project_is_leased_first_and_projects_still_take_turns(stack: Stack) -> None:
    model = CatalogueModel(spec=ModelSpec(id="demo", source="x", sharing="stack"))
    stack.backends = dataclasses.replace(stack.backends, catalogue={"demo": model})
    for batch_id in ("a1", "a2", "a3", "b1"):
        stack.create(line(1), batch_id=batch_id, project=batch_id[0])
        advance(stack.backends, batch_id)
    stack.sql("UPDATE segments SET tokens = 60000")
    stack.sql("UPDATE batches SET priority = 50 WHERE id = 'a3'")
    stack.sql("UPDATE batches SET priority = -1 WHERE id = 'a1'")
    stack.advance_jobs()
    assert [lease.batch_id for lease in stack.job().lease().leases] == ["a3", "b1", "a2", "a1"]
