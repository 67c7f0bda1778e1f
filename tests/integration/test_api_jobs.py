"""The list of jobs, and ``cloister top``."""

from typing import Any

import httpx
import openai
import pytest
from rich.console import Console

from service.cli.top import look, picture
from service.db import Pool


@pytest.fixture
def jobs(api_pool: Pool, http: httpx.Client, client: openai.OpenAI) -> list[dict[str, Any]]:
    """A job of the project that works, one of the stack that is queued, and one of another project."""
    batch = client.batches.create(
        input_file_id="file-none", endpoint="/v1/completions", completion_window="24h", metadata={"for": "jobs"}
    )
    with api_pool.connection() as connection:
        project = connection.execute("SELECT project_id FROM batches WHERE id = %s", [batch.id]).fetchone()
        assert project is not None
        domains = {"job-a": project["project_id"], "job-b": "stack", "job-c": "proj_other"}
        for number, (job_id, domain) in enumerate(domains.items()):
            connection.execute(
                "INSERT INTO domains (model, domain) VALUES ('demo', %s) ON CONFLICT DO NOTHING", [domain]
            )
            connection.execute(
                "INSERT INTO jobs (id, model, domain, model_key, token_sha256, launch_after, engines) "
                "VALUES (%s, 'demo', %s, 'k', %s, CASE WHEN %s THEN now() END, %s)",
                [job_id, domain, bytes([number]), job_id == "job-b", 2 if job_id == "job-a" else 0],
            )
        connection.execute(
            "UPDATE batches SET status = 'in_progress', model = 'demo', domain = %s, segments_left = 2, total = 9, "
            "rows_per_s = 4, progress_at = now() WHERE id = %s",
            [project["project_id"], batch.id],
        )
        connection.execute(
            "INSERT INTO segments "
            "(batch_id, number, start_byte, end_byte, rows, tokens, job_id, leased_at, leased_until) "
            "VALUES (%s, 0, 0, 1, 1, 1, 'job-a', now() - interval '7 s', now() + interval '53 s')",
            [batch.id],
        )
    return list(http.get("/v1/jobs").json()["data"])


def test_jobs_that_can_run_batches_of_the_project_are_listed(jobs: list[dict[str, Any]], client: openai.OpenAI) -> None:
    assert [(job["id"], job["status"], job["queue_position"]) for job in jobs] == [
        ("job-a", "working", None),
        ("job-b", "queued", 1),
    ]
    working = jobs[0]
    assert (working["engines"], working["leased_segments"], working["leased_batches"]) == (2, 1, 1)
    assert (working["segments_left"], working["rate_rows_per_second"]) == (2, 4.0)
    assert working["oldest_lease_seconds"] == pytest.approx(7, abs=2)
    target = Console(width=160, record=True, force_terminal=False)
    target.print(picture(*look(client)))
    text = target.export_text()
    assert "1 jobs, 1 queued, 2 engines, 4.0 lines/s" in text
    assert all(job["id"] in text for job in jobs)
    assert "queued (1)" in text
