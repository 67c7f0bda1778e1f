"""The extension ``x_cloister`` of a retrieved batch."""

import time
from datetime import timedelta
from typing import Any

import httpx
import openai
import pytest

from service.db import Pool

REQUEST: dict[str, Any] = {"input_file_id": "file-none", "endpoint": "/v1/completions", "completion_window": "24h"}


def change(api_pool: Pool, batch_id: str, assignments: str) -> None:
    with api_pool.connection() as connection:
        connection.execute(f"UPDATE batches SET {assignments} WHERE id = %s", [batch_id])  # type: ignore[arg-type] # noqa: S608


def extension(http: httpx.Client, batch_id: str) -> dict[str, Any]:
    fields: dict[str, Any] = http.get(f"/v1/batches/{batch_id}").json()["x_cloister"]
    return fields


def test_new_batch_has_an_extension_without_values(client: openai.OpenAI, http: httpx.Client) -> None:
    fields = extension(http, client.batches.create(**REQUEST).id)
    assert fields == {
        "priority": 0, "paused_at": None,
        "queue_position": None, "rate_rows_per_second": None, "eta_seconds": None, "estimated_completion_at": None,
        "deadline_risk": "low", "gpu_seconds": 0.0, "cost": None, "input_tokens": 0, "cached_tokens": 0,
        "output_tokens": 0, "enqueued_tokens": 0,
        "job_id": None, "failed_jobs": 0, "last_job_message": None, "estimate": None,
    }  # fmt: skip


def test_only_retrieval_has_the_extension(client: openai.OpenAI, http: httpx.Client) -> None:
    batch = client.batches.create(**REQUEST)
    assert "x_cloister" not in http.get("/v1/batches").json()["data"][0]
    assert "x_cloister" not in http.post(f"/v1/batches/{batch.id}/cancel").json()
    assert client.batches.retrieve(batch.id).to_dict()["x_cloister"]


def add_job(api_pool: Pool, batch_id: str, *, failures: int = 0) -> str:
    """Accept a batch whose own job waits for its launch, and return the job's id."""
    change(api_pool, batch_id, "status = 'in_progress', model = 'demo/small', domain = id, segments_left = 1")
    with api_pool.connection() as connection:
        connection.execute(
            "INSERT INTO domains (model, domain, failures) VALUES ('demo/small', %s, %s)", [batch_id, failures]
        )
        connection.execute(
            "INSERT INTO jobs (id, model, domain, model_key, project_id, token_sha256, launch_after) "
            "SELECT 'job-' || id, model, domain, '', project_id, id::bytea, now() FROM batches WHERE id = %s",
            [batch_id],
        )
    return f"job-{batch_id}"


def test_waiting_batches_report_the_queue_position_of_their_job(
    client: openai.OpenAI, http: httpx.Client, api_pool: Pool
) -> None:
    ids = [client.batches.create(**REQUEST).id for _ in range(3)]
    jobs = [add_job(api_pool, batch_id) for batch_id in ids]
    assert [extension(http, batch_id)["queue_position"] for batch_id in ids] == [1, 2, 3]
    with api_pool.connection() as connection:
        connection.execute("UPDATE jobs SET launch_after = NULL WHERE id = %s", [jobs[0]])
    time.sleep(0.2)  # a short queue is read again after a few milliseconds
    assert [extension(http, batch_id)["queue_position"] for batch_id in ids] == [None, 1, 2]
    assert [extension(http, batch_id)["job_id"] for batch_id in ids] == jobs
    with api_pool.connection() as connection:
        connection.execute("UPDATE jobs SET gone_at = now(), ended_at = now(), launch_after = NULL")


def test_paused_batch_and_one_whose_job_is_draining_have_no_job(
    client: openai.OpenAI, http: httpx.Client, api_pool: Pool
) -> None:
    paused, draining = [client.batches.create(**REQUEST).id for _ in range(2)]
    for batch_id in (paused, draining):
        add_job(api_pool, batch_id)
    change(api_pool, paused, "paused_at = now()")
    with api_pool.connection() as connection:
        connection.execute("UPDATE jobs SET draining_at = now() WHERE domain = %s", [draining])
    for batch_id in (paused, draining):
        fields = extension(http, batch_id)
        assert (fields["job_id"], fields["queue_position"]) == (None, None)


def test_running_batch_reports_rate_and_forecast(client: openai.OpenAI, http: httpx.Client, api_pool: Pool) -> None:
    batch = client.batches.create(**REQUEST)
    job_id = add_job(api_pool, batch.id, failures=1)
    change(
        api_pool,
        batch.id,
        "total = 100, completed = 40, rows_per_s = 2, progress_at = now(), gpu_seconds = 30,"
        " expires_at = now() + interval '40 seconds'",
    )
    with api_pool.connection() as connection:
        for reason in ("first", "second"):
            connection.execute(
                "INSERT INTO batch_events (batch_id, type, data) VALUES (%s, 'job.ended', jsonb_build_object("
                "'reason', %s::text))",
                [batch.id, reason],
            )
    fields = extension(http, batch.id)
    assert (fields["rate_rows_per_second"], fields["eta_seconds"], fields["deadline_risk"]) == (2.0, 30, "medium")
    assert fields["gpu_seconds"] == 30
    assert (fields["job_id"], fields["failed_jobs"], fields["last_job_message"]) == (job_id, 1, "second")
    expected = batch.created_at + timedelta(seconds=30).total_seconds()
    assert fields["estimated_completion_at"] == pytest.approx(expected, abs=5)
