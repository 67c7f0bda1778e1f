"""Usage and costs by day, and the capacity of the stack, through the real API."""

from collections.abc import Iterator
from datetime import UTC, date, datetime, timedelta
from typing import Any

import httpx
import openai
import pytest
import structlog
from typer.testing import CliRunner

from service.api_keys import create_api_key
from service.cli.app import app
from service.db import Pool
from service.projects import Project
from service.scopes import Scope
from tests.integration.test_api_extension import REQUEST, add_job

DAY = 24 * 3600
FIRST = date(2026, 3, 1)
START = int(datetime(2026, 3, 1, tzinfo=UTC).timestamp())
END = START + 3 * DAY
COLUMNS = "day, project_id, model, currency, batches, completed, failed, input_tokens, cached_tokens, output_tokens"


@pytest.fixture
def other_id(api_pool: Pool, project: Project) -> str:
    """Another project; both have usage, and so has the stack itself."""
    other = f"{project.id}-other"
    rows = [
        (0, project.id, "m", "USD", 100.0, 20.0, 1, 0.2),
        (0, project.id, "n", "USD", 10.0, 0.0, 0.1, 0),
        (2, project.id, "m", "", 50.0, 0.0, 0, 0),
        (0, other, "m", "EUR", 1_000.0, 0.0, 9, 0),
        (0, "", "m", "USD", 0.0, 30.0, 0, 0.3),
    ]
    with api_pool.connection() as connection:
        connection.execute("DELETE FROM daily_usage")
        for day, owner, model, currency, gpu_s, overhead_s, cost, overhead_cost in rows:
            connection.execute(
                f"INSERT INTO daily_usage ({COLUMNS}, gpu_seconds, overhead_gpu_seconds, cost, overhead_cost) "  # noqa: S608
                "VALUES (%s, %s, %s, %s, 2, 30, 3, 700, 100, 50, %s, %s, %s, %s)",
                [FIRST + timedelta(days=day), owner, model, currency, gpu_s, overhead_s, cost, overhead_cost],
            )
    return other


@pytest.fixture
def operator(api_pool: Pool, project: Project, base_url: str) -> Iterator[httpx.Client]:
    """A client whose key sees the whole stack, and no files or batches."""
    key = create_api_key(api_pool, project_id=project.id, name="operator", scopes=[Scope.OPERATOR])
    with httpx.Client(base_url=base_url, headers={"Authorization": f"Bearer {key}"}) as opened:
        yield opened


def results(client: httpx.Client, path: str, **params: Any) -> list[list[dict[str, Any]]]:
    """The results of each bucket of three days."""
    answer = client.get(f"/v1/organization/{path}", params={"start_time": START, "end_time": END, **params})
    assert answer.status_code == 200, answer.text
    return [bucket["results"] for bucket in answer.json()["data"]]


@pytest.mark.usefixtures("other_id")
def test_usage_of_the_own_project_is_added_up_by_day(http: httpx.Client) -> None:
    first, second, third = results(http, "usage/completions")
    assert first == [
        {
            "object": "organization.usage.completions.result", "input_tokens": 1_400, "input_cached_tokens": 200,
            "output_tokens": 100, "num_model_requests": 60, "project_id": None, "model": None, "batch": None,
            "user_id": None, "api_key_id": None,
            "x_cloister": {"gpu_seconds": 110.0, "overhead_gpu_seconds": 20.0, "batches": 4, "failed_requests": 6},
        }
    ]  # fmt: skip
    assert (second, len(third)) == ([], 1)


@pytest.mark.usefixtures("other_id")
@pytest.mark.parametrize("brackets", ["", "[]"])
def test_usage_is_grouped_and_filtered(http: httpx.Client, project: Project, brackets: str) -> None:
    found = results(http, "usage/completions", **{f"group_by{brackets}": ["project_id", "model", "batch"]})
    assert [(each["project_id"], each["model"], each["batch"]) for each in found[0]] == [
        (project.id, "m", True),
        (project.id, "n", True),
    ]
    only = results(http, "usage/completions", **{f"models{brackets}": ["n"]})
    assert [each["x_cloister"]["gpu_seconds"] for each in only[0]] == [10.0]
    assert results(http, "usage/completions", batch=False) == [[], [], []]


@pytest.mark.usefixtures("other_id")
def test_costs_are_listed_by_line_item(http: httpx.Client) -> None:
    found = results(http, "costs", group_by=["line_item"])
    assert [(each["line_item"], each["amount"], each["x_cloister"]["gpu_seconds"]) for each in found[0]] == [
        ("m, batches", {"value": 1.0, "currency": "usd"}, 100.0),
        ("m, overhead", {"value": 0.2, "currency": "usd"}, 20.0),
        ("n, batches", {"value": 0.1, "currency": "usd"}, 10.0),
    ]
    assert [each["amount"]["value"] for each in results(http, "costs")[0]] == [1.3]
    assert found[2] == []  # seconds without a price


def test_operator_sees_all_projects_and_the_stack(operator: httpx.Client, project: Project, other_id: str) -> None:
    found = results(operator, "costs", group_by=["project_id"])[0]
    assert [(each["project_id"], each["amount"]["currency"]) for each in found] == [
        ("", "usd"),
        (project.id, "usd"),
        (other_id, "eur"),
    ]
    only = results(operator, "usage/completions", project_ids=[other_id])
    assert [each["x_cloister"]["gpu_seconds"] for each in only[0]] == [1_000.0]
    assert operator.get("/v1/batches").status_code == 403


@pytest.mark.parametrize("path", ["usage/completions", "costs"])
def test_key_of_a_project_sees_no_usage_of_another(http: httpx.Client, other_id: str, path: str) -> None:
    assert results(http, path, project_ids=[other_id]) == [[], [], []]


@pytest.mark.usefixtures("other_id")
def test_official_client_reads_usage_and_costs_page_by_page(base_url: str, api_key: str) -> None:
    with openai.OpenAI(base_url=f"{base_url}/v1", admin_api_key=api_key) as client:
        usage = client.admin.organization.usage
        first = usage.completions(start_time=START, end_time=END - 1, limit=2, group_by=["model"])
        last = usage.completions(start_time=START, end_time=END - 1, limit=2, page=first.next_page or "")
        found = [(bucket.start_time, len(bucket.results)) for bucket in (*first.data, *last.data)]
        assert found == [(START, 2), (START + DAY, 0), (START + 2 * DAY, 1)]
        assert (first.has_more, last.has_more, last.next_page) == (True, False, None)
        [cost] = usage.costs(start_time=START, limit=1).data[0].results
    assert cost.object == "organization.costs.result"
    assert cost.amount is not None
    assert (cost.amount.value, cost.amount.currency) == (1.3, "usd")


def test_usage_ends_with_today(http: httpx.Client) -> None:
    now = int(datetime.now(UTC).timestamp())
    answer = http.get("/v1/organization/costs", params={"start_time": now - DAY, "limit": 180}).json()
    assert (len(answer["data"]), answer["has_more"]) == (2, False)
    assert answer["data"][-1]["end_time"] > now
    for nothing in ({"start_time": now + 9 * DAY}, {"start_time": now, "end_time": now}):
        assert http.get("/v1/organization/costs", params=nothing).json()["data"] == []


@pytest.mark.parametrize(
    "params",
    [
        {},
        {"start_time": -1},
        {"start_time": START, "bucket_width": "1h"},
        {"start_time": START, "limit": 32},
        {"start_time": START, "group_by": "api_key_id"},
        {"start_time": START, "user_ids": "u"},
        {"start_time": START, "page": "x"},
    ],
)
def test_parameters_that_do_not_exist_here_are_refused(http: httpx.Client, params: dict[str, Any]) -> None:
    answer = http.get("/v1/organization/usage/completions", params=params)
    assert (answer.status_code, answer.json()["error"]["type"]) == (400, "invalid_request_error")


def test_capacity_counts_slots_and_queues(operator: httpx.Client, client: openai.OpenAI, api_pool: Pool) -> None:
    batch = client.batches.create(**REQUEST)
    add_job(api_pool, batch.id)
    with api_pool.connection() as connection:
        connection.execute(
            "UPDATE batches SET total = 10, completed = 4, enqueued_tokens = 100 WHERE id = %s", [batch.id]
        )
    found = operator.get("/v1/capacity").json()
    assert found["accelerators"] == [
        {
            "accelerator": "cpu",
            "jobs": {"slots": 2, "running": 0, "queued": 1, "free": 2},
            "gpus": {"total": 0, "used": 0, "free": 0},
        }
    ]
    [model] = found["models"]
    assert (model["queued_batches"], model["queued_rows"], model["queued_tokens"]) == (1, 6, 60)
    assert model["expected_start_seconds"] is None
    client.batches.cancel(batch.id)


def test_capacity_needs_the_scope_of_operators(http: httpx.Client) -> None:
    answer = http.get("/v1/capacity")
    assert (answer.status_code, answer.json()["error"]["code"]) == (403, "missing_scope")


def test_capacity_is_printed(operator: httpx.Client, base_url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CLOISTER_BASE_URL", base_url)
    monkeypatch.setenv("CLOISTER_API_KEY", operator.headers["Authorization"].removeprefix("Bearer "))
    with structlog.testing.capture_logs():  # keeps the service's log out of the command's output
        output = CliRunner().invoke(app, ["capacity"], catch_exceptions=False).output
    accelerators, models = output.split("\n\n")
    assert accelerators.splitlines()[0].split("\t") == [
        "accelerator", "slots", "running", "queued", "GPUs", "used", "free",
    ]  # fmt: skip
    assert accelerators.splitlines()[1].split("\t")[:2] == ["cpu", "2"]
    assert models.splitlines()[1].split("\t")[:2] == ["demo/small", "cpu"]
