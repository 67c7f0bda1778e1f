"""Many batches, files and concurrent clients."""

import asyncio
import json
from typing import Any

import httpx
import openai
import psycopg
import pytest
from psycopg.rows import dict_row

from service.db import Pool, query
from service.projects import create_project
from tests.conftest import as_owner

pytestmark = pytest.mark.slow

COUNT = 20_000
NEWEST = (1 << 63) - 1
FILES = """
    INSERT INTO files (id, project_id, purpose, filename, size_bytes, sha256, expires_at)
    SELECT 'file-' || n, %(project_id)s, 'batch', 'a', 9, '', now() + interval '1 day'
    FROM generate_series(1, %(count)s) AS n
"""
BATCHES = """
    INSERT INTO batches (id, project_id, endpoint, input_file_id, completion_window, request_sha256, expires_at)
    SELECT 'batch_' || n, %(project_id)s, '/v1/completions', 'file-' || n, '24h', '', now() + interval '1 day'
    FROM generate_series(1, %(count)s) AS n
"""


@pytest.fixture(scope="module")
def large_project_id(api_pool: Pool) -> str:
    """A project with very many files and batches, for which Postgres has no statistics yet."""
    project_id = create_project(api_pool, "large").id
    with api_pool.connection() as connection:
        for statement in (FILES, BATCHES):
            connection.execute(statement, {"project_id": project_id, "count": COUNT})
    return project_id


def scan(pool: Pool, name: str, values: dict[str, Any], *, analyze: bool) -> dict[str, Any]:
    """Return how Postgres reads a page: the plan node below the limit."""
    with psycopg.connect(as_owner(pool), row_factory=dict_row) as connection:
        if analyze:
            connection.execute("ANALYZE files, batches")
        connection.execute(query("read_in_index_order"))
        row = connection.execute("EXPLAIN (ANALYZE, FORMAT JSON) " + query(name), values).fetchone()
        connection.rollback()  # and discard the statistics
    assert row is not None
    plan = row["QUERY PLAN"]
    root = (json.loads(plan) if isinstance(plan, str) else plan)[0]["Plan"]
    node: dict[str, Any] = root["Plans"][0]
    return node


@pytest.mark.parametrize("analyze", [False, True])
@pytest.mark.parametrize("place", [1, 0.5, 0.001])
@pytest.mark.parametrize("name", ["list_files_desc", "list_files_asc", "list_batches"])
def test_page_reads_only_its_own_rows(
    api_pool: Pool, large_project_id: str, name: str, place: float, *, analyze: bool
) -> None:
    table = "batches" if name == "list_batches" else "files"
    with api_pool.connection() as connection:
        row = connection.execute(f"SELECT min(seq), max(seq) FROM {table}").fetchone()  # type: ignore[arg-type] # noqa: S608
    assert row is not None
    cursor = row["min"] + int((row["max"] - row["min"]) * place)
    values = {"project_id": large_project_id, "purpose": None, "cursor": cursor, "newest": NEWEST, "limit": 21}
    node = scan(api_pool, name, values, analyze=analyze)
    assert (node["Node Type"], node["Index Name"]) == ("Index Scan", f"{table}_by_project")
    assert node["Actual Rows"] <= 21
    assert node.get("Rows Removed by Filter", 0) == 0


@pytest.mark.usefixtures("large_project_id")
def test_large_project_does_not_slow_a_small_one(client: openai.OpenAI) -> None:
    batch = client.batches.create(input_file_id="file-1", endpoint="/v1/completions", completion_window="24h")
    assert [listed.id for listed in client.batches.list(limit=1)] == [batch.id]


@pytest.fixture
def many(base_url: str, api_key: str) -> httpx.AsyncClient:
    """A client with a connection for each request."""
    headers = {"authorization": f"Bearer {api_key}"}
    return httpx.AsyncClient(base_url=base_url, headers=headers, timeout=60, limits=httpx.Limits(max_connections=None))


def test_two_hundred_concurrent_uploads_and_lists_succeed(many: httpx.AsyncClient) -> None:
    async def one(number: int) -> int:
        if number % 2:
            files = {"file": ("a.jsonl", b'{"custom_id":"a"}\n' * 5_000)}
            return (await many.post("/v1/files", data={"purpose": "batch"}, files=files)).status_code
        return (await many.get("/v1/batches" if number % 4 else "/v1/files")).status_code

    async def all_at_once() -> list[int]:
        async with many:
            statuses = await asyncio.gather(*(one(number) for number in range(200)))
            assert len((await many.get("/v1/files")).json()["data"]) == 100
            return statuses

    assert set(asyncio.run(all_at_once())) == {200}
