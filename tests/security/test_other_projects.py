"""A project learns nothing about the work of others, also when they share a job."""

import secrets
from typing import Any

import httpx
import pytest

from service.api_keys import Scope, create_api_key
from service.db import Pool
from service.projects import Project, create_project


def add_work(api_pool: Pool, project_id: str, *, segments: int, rows_per_s: float, leased_s_ago: int) -> None:
    """Add a running batch of a project, whose segments the job of the stack leases."""
    batch_id = f"batch_of_{project_id}"
    with api_pool.connection() as connection:
        connection.execute(
            "INSERT INTO batches (id, project_id, endpoint, input_file_id, completion_window, request_sha256, status, "
            "expires_at, model, domain, segments_left, rows_per_s, progress_at) VALUES "
            "(%s, %s, '/v1/completions', 'f', '24h', '', 'in_progress', now() + interval '1 h', 'demo', 'stack', %s, "
            "%s, now())",
            [batch_id, project_id, segments, rows_per_s],
        )
        for number in range(segments):
            connection.execute(
                "INSERT INTO segments "
                "(batch_id, number, start_byte, end_byte, rows, tokens, job_id, leased_at, leased_until) "
                "VALUES (%s, %s, 0, 1, 1, 1, 'job-shared', now() - make_interval(secs => %s), now() + interval '9 s')",
                [batch_id, number, leased_s_ago],
            )


@pytest.fixture
def shared_job(api_pool: Pool, project: Project, http: httpx.Client) -> dict[str, Any]:
    """The job of the stack, as a project with 2 segments sees it while another project has 5."""
    other = create_project(api_pool, f"other than {project.id}")
    with api_pool.connection() as connection:
        connection.execute("INSERT INTO domains (model, domain) VALUES ('demo', 'stack') ON CONFLICT DO NOTHING")
        connection.execute("DELETE FROM segments")
        connection.execute("DELETE FROM jobs")
        connection.execute(
            "INSERT INTO jobs (id, model, domain, model_key, token_sha256, engines) "
            "VALUES ('job-shared', 'demo', 'stack', 'k', 'x', 1)"
        )
    add_work(api_pool, project.id, segments=2, rows_per_s=4, leased_s_ago=7)
    add_work(api_pool, other.id, segments=5, rows_per_s=30, leased_s_ago=90)
    (job,) = http.get("/v1/jobs").json()["data"]
    return dict(job)


def test_shared_job_shows_only_the_segments_and_rates_of_the_project(shared_job: dict[str, Any]) -> None:
    figures = ("leased_segments", "leased_batches", "segments_left", "rate_rows_per_second")
    assert [shared_job[name] for name in figures] == [2, 1, 2, 4.0]
    assert shared_job["oldest_lease_seconds"] == pytest.approx(7, abs=3)


@pytest.mark.usefixtures("shared_job")
def test_shared_job_of_other_projects_shows_no_figures(api_pool: Pool, base_url: str, project: Project) -> None:
    idle = create_api_key(api_pool, project_id=create_project(api_pool, f"idle beside {project.id}").id, name="idle")
    answer = httpx.get(f"{base_url}/v1/jobs", headers={"authorization": f"Bearer {idle}"})
    (job,) = answer.json()["data"]
    assert (job["leased_segments"], job["leased_batches"], job["segments_left"]) == (0, 0, 0)
    assert (job["rate_rows_per_second"], job["oldest_lease_seconds"]) == (0, None)
    assert project.id not in answer.text
    assert "batch_of_" not in answer.text


def test_idempotency_key_of_another_project_has_no_effect(
    http: httpx.Client, api_pool: Pool, base_url: str, project: Project
) -> None:
    other = create_api_key(api_pool, project_id=create_project(api_pool, f"guesser {project.id}").id, name="other")
    body = {"input_file_id": "file-none", "endpoint": "/v1/completions", "completion_window": "24h"}
    headers = {"idempotency-key": "guessable-1"}
    mine = http.post("/v1/batches", json=body, headers=headers).json()
    with httpx.Client(base_url=base_url, headers={"authorization": f"Bearer {other}", **headers}) as guesser:
        same = guesser.post("/v1/batches", json=body)
        assert same.status_code == 200
        assert same.json()["id"] != mine["id"]
        retried = guesser.post(
            "/v1/batches", json={**body, "metadata": {"a": "b"}}, headers={"idempotency-key": "guessable-2"}
        )
        assert mine["id"] not in retried.text


def test_webhook_endpoints_and_audit_logs_of_another_project_are_not_listed(
    api_pool: Pool, base_url: str, admin_key: str, project: Project
) -> None:
    other_id = create_project(api_pool, f"auditor {secrets.token_hex(4)}").id
    other = create_api_key(api_pool, project_id=other_id, name="other", scopes=[Scope.ADMIN])
    with httpx.Client(base_url=base_url, headers={"authorization": f"Bearer {admin_key}"}) as owner:
        made = owner.post(
            "/v1/webhook_endpoints",
            json={"name": "mine", "url": "https://hooks.example.com/x", "event_types": ["batch.completed"]},
        )
        assert made.status_code == 200, made.text
    with httpx.Client(base_url=base_url, headers={"authorization": f"Bearer {other}"}) as stranger:
        assert stranger.get("/v1/webhook_endpoints").json()["data"] == []
        log = stranger.get("/v1/organization/audit_logs?limit=100")
        assert log.json()["data"]
        assert made.json()["id"] not in log.text
        assert project.id not in log.text
        assert stranger.get(f"/v1/organization/audit_logs?after={made.json()['id']}").text.count(project.id) == 0
