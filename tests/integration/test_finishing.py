"""Ends of batches: results of the recorded parts, measurements of jobs, and deletion of what is left."""

from datetime import UTC, datetime
from threading import Event
from typing import Any

import pytest
from tokenizers import Tokenizer, models

from ray_job.contract.object_keys import (
    batch_prefix,
    job_prompt_rules_key,
    part_key,
    parts_prefix,
    plan_key,
    prompt_rules_key,
)
from ray_job.contract.prompt_rules import PromptRules
from service.reconciler.finishing import finish
from service.reconciler.records import record
from service.reconciler.retention import sweep
from tests.integration.reconciler_harness import BATCH, Stack, line
from tests.integration.recorded_work import JOB, KEY, accept, add_job, add_part, batch, end, write_part


def delete_parts(stack: Stack) -> None:
    """Record that the parts were deleted, as the reconciler does after it has deleted them."""
    for key in list(stack.store.keys(batch_prefix(BATCH))):
        stack.store.delete(key)
    with stack.pool.connection() as connection:
        record(connection, "record_parts_deleted", batch(stack), datetime.now(UTC))


def measurements(stack: Stack) -> list[dict[str, Any]]:
    return stack.sql("SELECT * FROM measurements ORDER BY id")


def test_only_recorded_rows_are_in_the_output(stack: Stack) -> None:
    accept(stack, *map(line, (1, 2, 3)))
    add_job(stack)
    add_part(stack, 1, 2, refused=[2])
    add_part(stack, 2, 3)
    write_part(stack.store, BATCH, 1, 2, 3)
    row = end(stack)
    assert (row["status"], row["completed"], row["input_tokens"]) == ("completed", 3, 30)
    assert [each["custom_id"] for each in stack.file(row["output_file_id"])] == ["id-1", "id-2", "id-3"]
    assert stack.errors() == []


def test_recorded_part_that_is_missing_fails_the_batch_and_the_rest_is_delivered(stack: Stack) -> None:
    accept(stack, line(1), line(2))
    add_job(stack)
    add_part(stack, 1)
    lost = add_part(stack, 2)
    stack.store.delete(lost)
    row = end(stack)
    assert (row["status"], row["completed"]) == ("failed", 1)
    [error] = stack.errors()
    assert f"part {lost} does not exist" in error["message"]


def test_line_in_two_recorded_parts_counts_once(stack: Stack) -> None:
    accept(stack, line(1), line(2))
    add_job(stack)
    add_part(stack, 1)
    add_part(stack, 1, 2)
    row = end(stack)
    assert (row["status"], row["completed"], row["input_tokens"]) == ("completed", 2, 20)


def test_work_of_one_job_is_measured(stack: Stack) -> None:
    accept(stack, line(1), line(2))
    add_job(stack, gpus=1)
    add_part(stack, 1)
    add_part(stack, 2)
    end(stack)
    [row] = measurements(stack)
    assert (row["model_key"], row["rows"], row["input_tokens"], row["output_tokens"]) == (KEY, 2, 20, 4)
    assert (row["engines"], row["busy_s"], row["engine_s"]) == (2, pytest.approx(30, abs=1), pytest.approx(60, abs=2))
    # 2 s of validation, 15 s from the launch to the first lease, 10 s after the last commit.
    assert row["other_s"] == pytest.approx(27, abs=2)
    assert row["job_other_s"] == pytest.approx(14, abs=2)
    assert row["output_share"] is None


def test_wait_for_a_job_that_was_busy_is_not_measured(stack: Stack) -> None:
    accept(stack, line(1))
    add_job(stack, gpus=1, launched_s_ago=500)
    add_part(stack, 1)
    end(stack)
    [row] = measurements(stack)
    assert row["other_s"] == pytest.approx(12, abs=2)
    assert row["job_other_s"] == 0


def test_batch_of_several_jobs_is_not_measured(stack: Stack) -> None:
    accept(stack, line(1), line(2), line(3))
    add_job(stack)
    add_job(stack, "job-2")
    add_part(stack, 1)
    add_part(stack, 2, job_id="job-2")
    assert end(stack)["status"] == "failed"
    add_part(stack, 3)
    stack.sql("UPDATE batches SET status = 'in_progress'")
    stack.sql("DELETE FROM batch_errors")
    stack.sql("DELETE FROM files WHERE purpose = 'batch_output'")
    assert end(stack)["status"] == "completed"
    assert measurements(stack) == []


def test_batch_with_parts_of_an_earlier_version_is_not_measured(stack: Stack) -> None:
    accept(stack, line(1), line(2))
    add_job(stack)
    add_part(stack, 1, job_id=None)
    add_part(stack, 2)
    assert end(stack)["status"] == "completed"
    assert measurements(stack) == []


@pytest.mark.parametrize(("shift", "count"), [("0 s", 0), ("20 s", 0), ("31 s", 1)])
def test_batch_that_shared_its_job_is_not_measured(stack: Stack, shift: str, count: int) -> None:
    accept(stack, line(1))
    add_job(stack)
    add_part(stack, 1)
    accept(stack, line(1), batch_id="batch_2")
    add_part(stack, 1, batch_id="batch_2")
    stack.sql(
        "UPDATE batches SET first_leased_at = first_leased_at + %s::interval, "
        "last_commit_at = last_commit_at + %s::interval WHERE id = 'batch_2'",
        shift,
        shift,
    )
    end(stack)
    assert len(measurements(stack)) == count


def test_lines_that_share_an_answer_are_measured_as_one_if_most_do(stack: Stack) -> None:
    same = [line(number).replace(b'"messages"', b'"seed":1,"messages"') for number in range(1, 5)]
    accept(stack, *same)
    add_job(stack)
    add_part(stack, 1, 2, 3, 4)
    end(stack)
    [row] = measurements(stack)
    assert (row["rows"], row["input_tokens"], row["output_tokens"]) == (1, 10, 2)


def test_prompt_rules_of_the_job_are_adopted(stack: Stack) -> None:
    tokenizer = Tokenizer(models.WordLevel({"?": 0}, unk_token="?")).to_str()
    rules = PromptRules(max_prompt_tokens=50, max_model_len=64, tokenizer=tokenizer).to_json()
    stack.store.put(job_prompt_rules_key(JOB), [rules])
    accept(stack, line(1))
    add_job(stack)
    add_part(stack, 1)
    end(stack)
    assert b"".join(stack.store.read(prompt_rules_key(KEY))) == rules
    assert list(stack.store.keys("jobs/")) == []


def test_wrong_prompt_rules_and_those_of_other_settings_are_ignored(stack: Stack) -> None:
    stack.store.put(job_prompt_rules_key(JOB), [b"{}"])
    stack.store.put(job_prompt_rules_key("job-2"), [b"{}"])
    accept(stack, line(1), line(2))
    add_job(stack)
    add_job(stack, "job-2")
    stack.sql("UPDATE jobs SET model_key = 'other' WHERE id = 'job-2'")
    add_part(stack, 1)
    add_part(stack, 2, job_id="job-2")
    assert end(stack)["status"] == "completed"
    assert list(stack.store.keys("prompt_rules/")) == []


def test_parts_that_a_job_writes_after_the_end_are_deleted_an_hour_later(stack: Stack) -> None:
    accept(stack, line(1))
    add_job(stack)
    add_part(stack, 1)
    end(stack)
    delete_parts(stack)
    assert stack.sql("SELECT * FROM segments") == stack.sql("SELECT * FROM parts") == []
    write_part(stack.store, BATCH, 1)
    sweep(stack.backends, Event())
    assert list(stack.store.keys(parts_prefix(BATCH))) == [part_key(BATCH, [1])]
    stack.sql("UPDATE batches SET leftovers_due_at = leftovers_due_at - interval '1 h'")
    sweep(stack.backends, Event())
    assert list(stack.store.keys(parts_prefix(BATCH))) == []
    assert stack.batch()["leftovers_due_at"] is None


def test_plan_that_another_reconciler_writes_after_the_end_is_deleted_an_hour_later(stack: Stack) -> None:
    accept(stack, line(1))
    stack.sql("UPDATE batches SET status = 'cancelling', cancelling_at = now()")
    finish(stack.backends, batch(stack))
    delete_parts(stack)
    stack.store.put(plan_key(BATCH), [b"late"])
    stack.sql("UPDATE batches SET leftovers_due_at = leftovers_due_at - interval '1 h'")
    sweep(stack.backends, Event())
    assert list(stack.store.keys(batch_prefix(BATCH))) == []


def test_batch_stays_until_its_leftovers_are_deleted(stack: Stack) -> None:
    accept(stack, line(1))
    add_job(stack)
    add_part(stack, 1)
    end(stack)
    delete_parts(stack)
    stack.sql("UPDATE batches SET completed_at = now() - interval '40 days'")
    sweep(stack.backends, Event())
    assert len(stack.sql("SELECT id FROM batches")) == 1
    stack.sql("UPDATE batches SET leftovers_due_at = now()")
    sweep(stack.backends, Event())
    assert stack.sql("SELECT id FROM batches") == []
