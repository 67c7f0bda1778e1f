"""Listings and paging."""

import asyncio
import itertools
from typing import Any, Literal

import httpx
import openai
import pytest

from tests.conformance.prepared import Prepared
from tests.conformance.target import Target

pytestmark = pytest.mark.point("L3")

COUNT = 5
# Other clients may use the project at the same time: a few of their objects appear between those of the suite. A
# server that ignores ``after`` returns pages without end.
MOST_FOUND = 200
Order = Literal["asc", "desc"]


@pytest.fixture(scope="module")
def file_ids(client: openai.OpenAI) -> list[str]:
    """Files uploaded in quick succession, so that some share a second; the oldest first."""
    return [client.files.create(file=(f"{n}.jsonl", b"{}"), purpose="batch").id for n in range(COUNT)]


@pytest.fixture(scope="module")
def batch_ids(prepared: Prepared) -> list[str]:
    """Batches that the suite created, the oldest first."""
    return [watched.id for watched in prepared.batches.values()]


def listed(http: httpx.Client, path: str, **query: Any) -> dict[str, Any]:
    answer = http.get(path, params=query)
    assert answer.status_code == 200
    page: dict[str, Any] = answer.json()
    return page


@pytest.mark.point("L1")
@pytest.mark.parametrize("path", ["files", "batches"])
def test_a_listing_is_a_list_object(http: httpx.Client, path: str) -> None:
    page = listed(http, path, limit=2)
    assert (page["object"], len(page["data"])) == ("list", 2)


@pytest.mark.point("L1")
@pytest.mark.parametrize("path", ["files", "batches"])
def test_a_page_has_its_first_and_last_id(http: httpx.Client, path: str) -> None:
    page = listed(http, path, limit=3)
    assert (page["first_id"], page["last_id"]) == (page["data"][0]["id"], page["data"][-1]["id"])


@pytest.mark.point("L1")
@pytest.mark.parametrize("path", ["files", "batches"])
def test_has_more_is_true_before_the_last_page(http: httpx.Client, path: str) -> None:
    assert listed(http, path, limit=1)["has_more"] is True


@pytest.mark.point("L1")
@pytest.mark.usefixtures("file_ids")
def test_has_more_is_false_on_the_last_page(http: httpx.Client) -> None:
    newest = listed(http, "files", limit=1)["data"][0]["id"]
    page = listed(http, "files", order="asc", after=newest)
    assert (page["data"], page["has_more"]) == ([], False)


@pytest.mark.point("L2")
def test_files_are_listed_newest_first(client: openai.OpenAI, file_ids: list[str]) -> None:
    ids = [file.id for file in client.files.list(limit=1000).data if file.id in file_ids]
    assert ids == file_ids[::-1]


@pytest.mark.parametrize("order", ["asc", "desc"])
def test_paging_files_of_the_same_second_drops_none(client: openai.OpenAI, file_ids: list[str], order: Order) -> None:
    expected = file_ids if order == "asc" else file_ids[::-1]
    found = expected[:1]
    while expected[-1] not in found and len(found) < MOST_FOUND:
        page = client.files.list(limit=2, order=order, after=found[-1])
        assert len(page.data) > 0
        found += [file.id for file in page.data]
    assert [file_id for file_id in found if file_id in expected] == expected


@pytest.mark.point("L5")
def test_the_client_pages_through_files(client: openai.OpenAI, file_ids: list[str]) -> None:
    found: list[str] = []
    for file in itertools.islice(client.files.list(limit=2), MOST_FOUND):
        found.append(file.id)
        if file.id == file_ids[0]:
            break
    assert [file_id for file_id in found if file_id in file_ids] == file_ids[::-1]
    assert len(set(found)) == len(found)


@pytest.mark.point("L5")
def test_the_async_client_pages_through_files(target: Target, file_ids: list[str]) -> None:
    async def page() -> list[str]:
        found = []
        async with target.async_client() as client:
            async for file in client.files.list(limit=2):
                found.append(file.id)
                if file.id == file_ids[0] or len(found) == MOST_FOUND:
                    break
        return found

    assert [file_id for file_id in asyncio.run(page()) if file_id in file_ids] == file_ids[::-1]


@pytest.mark.point("L2")
def test_files_can_be_listed_by_purpose(client: openai.OpenAI, file_ids: list[str]) -> None:
    files = client.files.list(purpose="batch", limit=100).data
    assert {file.purpose for file in files} == {"batch"}
    assert file_ids[-1] in {file.id for file in files}


@pytest.mark.point("L2")
def test_files_of_another_purpose_are_not_listed(client: openai.OpenAI, file_ids: list[str]) -> None:
    assert file_ids[-1] not in {file.id for file in client.files.list(purpose="fine-tune", limit=100).data}


@pytest.mark.point("L2")
@pytest.mark.parametrize(
    ("query", "code"),
    [
        ("limit=0", "integer_below_min_value"),
        ("limit=-1", "integer_below_min_value"),
        ("limit=10001", "integer_above_max_value"),
        ("limit=x", None),
        ("limit=1.5", None),
        ("order=up", "invalid_value"),
    ],
)
def test_a_wrong_parameter_for_files_is_refused(http: httpx.Client, query: str, code: str | None) -> None:
    _assert_refused(http.get(f"files?{query}"), query.partition("=")[0], code)


def _assert_refused(answer: httpx.Response, param: str, code: str | None) -> None:
    assert answer.status_code == 400
    error = answer.json()["error"]
    assert error["param"] == param
    if code is not None:
        assert error["code"] == code


@pytest.mark.point("L2")
@pytest.mark.parametrize("limit", [1, 10_000])
def test_a_listing_of_files_accepts_the_limit(http: httpx.Client, limit: int) -> None:
    assert 1 <= len(listed(http, "files", limit=limit)["data"]) <= limit


@pytest.mark.parametrize("path", ["files", "batches"])
@pytest.mark.parametrize("after", ["file-none", "17"])
def test_an_unknown_cursor_is_refused(http: httpx.Client, path: str, after: str) -> None:
    answer = http.get(path, params={"after": after})
    assert answer.status_code in {400, 404}
    assert answer.json()["error"]["type"] == "invalid_request_error"


@pytest.mark.point("L4")
def test_batches_are_listed_newest_first(http: httpx.Client, batch_ids: list[str]) -> None:
    ids = [batch["id"] for batch in listed(http, "batches", limit=100)["data"] if batch["id"] in batch_ids]
    assert ids == batch_ids[::-1]


@pytest.mark.point("L4")
def test_a_page_of_batches_has_20_by_default(http: httpx.Client, batch_ids: list[str]) -> None:
    assert len(batch_ids) > 20
    assert len(listed(http, "batches")["data"]) == 20


@pytest.mark.point("L4")
def test_a_limit_of_0_returns_an_empty_list_of_batches(http: httpx.Client) -> None:
    page = listed(http, "batches", limit=0)
    assert (page["object"], page["data"]) == ("list", [])


@pytest.mark.point("L4")
@pytest.mark.parametrize(
    ("query", "code"),
    [
        ("limit=101", "integer_above_max_value"),
        ("limit=10000", "integer_above_max_value"),
        ("limit=-1", "integer_below_min_value"),
        ("limit=x", None),
        ("limit=1.5", None),
    ],
)
def test_a_wrong_parameter_for_batches_is_refused(http: httpx.Client, query: str, code: str | None) -> None:
    _assert_refused(http.get(f"batches?{query}"), "limit", code)


def test_paging_batches_drops_none(client: openai.OpenAI, batch_ids: list[str]) -> None:
    expected = batch_ids[:-11:-1]
    found = expected[:1]
    while expected[-1] not in found and len(found) < MOST_FOUND:
        page = client.batches.list(limit=3, after=found[-1])
        assert len(page.data) > 0
        found += [batch.id for batch in page.data]
    assert [batch_id for batch_id in found if batch_id in expected] == expected


@pytest.mark.point("L5")
def test_the_client_pages_through_batches(client: openai.OpenAI, batch_ids: list[str]) -> None:
    found: list[str] = []
    for batch in itertools.islice(client.batches.list(limit=10), MOST_FOUND):
        found.append(batch.id)
        if batch.id == batch_ids[0]:
            break
    assert [batch_id for batch_id in found if batch_id in batch_ids] == batch_ids[::-1]


@pytest.mark.point("L5")
def test_the_async_client_pages_through_batches(target: Target, batch_ids: list[str]) -> None:
    async def page() -> list[str]:
        found = []
        async with target.async_client() as client:
            async for batch in client.batches.list(limit=10):
                found.append(batch.id)
                if batch.id == batch_ids[0] or len(found) == MOST_FOUND:
                    break
        return found

    assert [batch_id for batch_id in asyncio.run(page()) if batch_id in batch_ids] == batch_ids[::-1]


@pytest.mark.point("L5")
def test_a_page_after_the_last_batch_is_empty(http: httpx.Client, client: openai.OpenAI) -> None:
    page = client.batches.list(limit=100)
    for _ in range(100):
        if not page.has_next_page():
            break
        page = page.get_next_page()
    oldest = page.data[-1].id
    assert listed(http, "batches", after=oldest)["data"] == []
