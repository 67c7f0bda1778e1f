"""Turns of projects that have work for several models."""

from typing import Final

import pytest

from ray_job.contract.leases import SyncRequest
from service.adapters.memory_object_store import MemoryObjectStore
from service.coordinator.leasing import sync
from service.db import Pool

DOMAIN: Final = "stack"
TOKENS: Final = 60_000


@pytest.fixture
def two_projects(pool: Pool) -> Pool:
    """Two projects with a batch of 20 segments each for the model ``new``, and a job that serves it."""
    with pool.connection() as connection:
        for model in ("new", "old"):
            connection.execute("INSERT INTO domains (model, domain) VALUES (%s, %s)", [model, DOMAIN])
        connection.execute(
            "INSERT INTO jobs (id, model, domain, model_key, token_sha256) VALUES ('job', 'new', %s, 'key', '')",
            [DOMAIN],
        )
        for project in ("a", "b"):
            connection.execute("INSERT INTO projects (id, name) VALUES (%s, %s)", [project, project])
            connection.execute(
                "INSERT INTO batches (id, project_id, endpoint, input_file_id, completion_window, request_sha256, "
                "expires_at, status, model, domain, segments_left, total) "
                "VALUES (%s, %s, '/v1/chat/completions', 'f', '24h', '', now() + interval '1 day', 'in_progress', "
                "'new', %s, 20, 20)",
                [f"batch_{project}", project, DOMAIN],
            )
            connection.execute(
                "INSERT INTO segments (batch_id, number, start_byte, end_byte, rows, tokens) "
                "SELECT %s, number, number, number + 1, 1, %s FROM generate_series(0, 19) AS number",
                [f"batch_{project}", TOKENS],
            )
    return pool


def leased_batches(pool: Pool) -> list[str]:
    request = SyncRequest(wanted_tokens=4 * TOKENS, wait_s=0, held=(), engines=1)
    return sorted(lease.batch_id for lease in sync(pool, MemoryObjectStore(), "job", request).leases)


def test_projects_get_equal_shares(two_projects: Pool) -> None:
    assert leased_batches(two_projects) == ["batch_a", "batch_a", "batch_b", "batch_b"]


def test_use_of_another_model_does_not_count(two_projects: Pool) -> None:
    with two_projects.connection() as connection:
        connection.execute("INSERT INTO turns VALUES ('new', %s, 'a', 0), ('old', %s, 'a', 1e9)", [DOMAIN, DOMAIN])
    assert leased_batches(two_projects) == ["batch_a", "batch_a", "batch_b", "batch_b"]
