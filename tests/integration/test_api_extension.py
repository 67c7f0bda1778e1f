"""The extension ``x_cloister`` of a retrieved batch."""

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
        "deadline_risk": "low", "gpu_seconds": 0.0, "input_tokens": 0, "cached_tokens": 0, "enqueued_tokens": 0,
        "attempt": 0, "failed_attempts": 0, "last_job_message": None, "estimate": None,
    }  # fmt: skip


def test_only_retrieval_has_the_extension(client: openai.OpenAI, http: httpx.Client) -> None:
    batch = client.batches.create(**REQUEST)
    assert "x_cloister" not in http.get("/v1/batches").json()["data"][0]
    assert "x_cloister" not in http.post(f"/v1/batches/{batch.id}/cancel").json()
    assert client.batches.retrieve(batch.id).to_dict()["x_cloister"]


def test_waiting_batches_report_their_queue_position(client: openai.OpenAI, http: httpx.Client, api_pool: Pool) -> None:
    with api_pool.connection() as connection:
        connection.execute("UPDATE batches SET status = 'failed'")
    ids = [client.batches.create(**REQUEST).id for _ in range(3)]
    for batch_id in ids:
        change(api_pool, batch_id, "status = 'in_progress', attempt = 1, launch_after = now()")
    assert [extension(http, batch_id)["queue_position"] for batch_id in ids] == [1, 2, 3]
    change(api_pool, ids[0], "launch_after = NULL")
    assert [extension(http, batch_id)["queue_position"] for batch_id in ids] == [None, 1, 2]


def test_running_batch_reports_rate_and_forecast(client: openai.OpenAI, http: httpx.Client, api_pool: Pool) -> None:
    batch = client.batches.create(**REQUEST)
    change(
        api_pool,
        batch.id,
        "status = 'in_progress', attempt = 2, failed_attempts = 1, total = 100, completed = 40, rows_per_s = 2,"
        " progress_at = now(), gpus = 4, gpu_seconds = 10, job_running_since = now() - interval '5 seconds',"
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
    assert fields["gpu_seconds"] == pytest.approx(30, abs=4)
    assert (fields["attempt"], fields["failed_attempts"], fields["last_job_message"]) == (2, 1, "second")
    expected = batch.created_at + timedelta(seconds=30).total_seconds()
    assert fields["estimated_completion_at"] == pytest.approx(expected, abs=5)
