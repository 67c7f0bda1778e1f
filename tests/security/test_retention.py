"""No client keeps content longer than its project allows."""

from threading import Event

import openai
import pytest

from service.db import Pool
from service.projects import Project, set_project
from service.reconciler.retention import sweep
from tests.integration.reconciler_harness import Stack, line

DAY_S = 24 * 3600


@pytest.mark.parametrize("purpose", ["batch", "user_data"])
def test_client_cannot_keep_an_upload_longer_than_the_retention(
    client: openai.OpenAI, api_pool: Pool, project: Project, purpose: str
) -> None:
    set_project(api_pool, project, {"retention_s": DAY_S})
    file = client.files.create(
        file=("a.jsonl", b"{}"),
        purpose=purpose,  # type: ignore[arg-type]
        expires_after={"anchor": "created_at", "seconds": 30 * DAY_S},
    )
    assert file.expires_at == file.created_at + DAY_S
    assert client.files.retrieve(file.id).expires_at == file.expires_at


def test_client_cannot_keep_an_output_longer_than_the_retention(stack: Stack) -> None:
    job = stack.started(line(1))
    stack.sql("UPDATE projects SET retention_s = %s", DAY_S)
    stack.sql("UPDATE batches SET output_expires_after_s = %s", 30 * DAY_S)
    job.commit()
    while stack.advance()["status"] != "completed":
        pass
    (output,) = stack.sql("SELECT * FROM files WHERE purpose = 'batch_output'")
    assert (output["expires_at"] - output["created_at"]).total_seconds() == DAY_S


def test_client_can_keep_an_output_shorter_than_the_retention(stack: Stack) -> None:
    job = stack.started(line(1))
    stack.sql("UPDATE batches SET output_expires_after_s = %s", DAY_S)
    job.commit()
    while stack.advance()["status"] != "completed":
        pass
    (output,) = stack.sql("SELECT * FROM files WHERE purpose = 'batch_output'")
    assert (output["expires_at"] - output["created_at"]).total_seconds() == DAY_S


def kept_days(stack: Stack) -> list[float]:
    """Return the days for which each file of a stack is kept, after a sweep."""
    sweep(stack.backends, Event())
    rows = stack.sql("SELECT extract(epoch FROM expires_at - created_at)::float / 86400 AS days FROM files ORDER BY id")
    return [row["days"] for row in rows]


def test_lower_retention_applies_to_files_that_exist(stack: Stack) -> None:
    stack.create(line(1), batch_id="batch_1", project="p")
    stack.create(line(1), batch_id="batch_2", project="other")
    stack.sql("UPDATE files SET expires_at = created_at + interval '30 days'")
    assert kept_days(stack) == [30, 30]
    set_project(stack.pool, Project(id="p", name="p"), {"retention_s": 2 * DAY_S})
    assert kept_days(stack) == [2, 30]
    set_project(stack.pool, Project(id="p", name="p"), {"retention_s": 90 * DAY_S})
    assert kept_days(stack) == [2, 30]


def test_file_beyond_a_lower_retention_is_deleted(stack: Stack) -> None:
    stack.create(line(1))
    stack.sql("DELETE FROM batches")
    stack.sql("UPDATE files SET created_at = now() - interval '3 days', expires_at = now() + interval '27 days'")
    set_project(stack.pool, Project(id="p", name="p"), {"retention_s": 2 * DAY_S})
    assert kept_days(stack) == []
