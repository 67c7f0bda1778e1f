"""API keys and related headers."""

import asyncio

import httpx
import openai
import pytest

from tests.conformance.target import Target
from tests.conformance.test_batches import REQUEST

pytestmark = pytest.mark.point("A1")

WRONG_KEY = "sk-this-key-is-wrong-and-long-enough-to-be-recognised"
ROUTES = {
    "list files": ("GET", "files"),
    "upload": ("POST", "files"),
    "a file": ("GET", "files/file-none"),
    "content": ("GET", "files/file-none/content"),
    "deletion": ("DELETE", "files/file-none"),
    "list batches": ("GET", "batches"),
    "creation": ("POST", "batches"),
    "a batch": ("GET", "batches/batch_none"),
    "cancel": ("POST", "batches/batch_none/cancel"),
    "list models": ("GET", "models"),
    "a model": ("GET", "models/none"),
}


@pytest.mark.parametrize("route", ROUTES)
def test_a_missing_key_is_a_401_without_a_code(target: Target, route: str) -> None:
    method, path = ROUTES[route]
    answer = httpx.request(method, f"{target.base_url}/{path}", json=REQUEST if route == "creation" else None)
    assert answer.status_code == 401
    assert (answer.json()["error"]["code"], answer.json()["error"]["type"]) == (None, "invalid_request_error")


@pytest.mark.parametrize("route", ROUTES)
def test_a_wrong_key_is_a_401_with_a_code(target: Target, route: str) -> None:
    method, path = ROUTES[route]
    with target.http(authorization=f"Bearer {WRONG_KEY}") as http:
        answer = http.request(method, path, json=REQUEST if route == "creation" else None)
    assert answer.status_code == 401
    assert answer.json()["error"]["code"] == "invalid_api_key"


@pytest.mark.parametrize("value", ["Basic c2VjcmV0OnNlY3JldA==", "Bearer"], ids=["Basic", "Bearer alone"])
def test_another_authorization_scheme_is_a_401(target: Target, value: str) -> None:
    assert httpx.get(f"{target.base_url}/files", headers={"authorization": value}).status_code == 401


def test_the_client_raises_an_authentication_error(target: Target) -> None:
    with target.client(api_key=WRONG_KEY) as client, pytest.raises(openai.AuthenticationError) as caught:
        client.files.list()
    assert (caught.value.code, caught.value.request_id in {None, ""}) == ("invalid_api_key", False)


def test_the_async_client_raises_an_authentication_error(target: Target) -> None:
    async def look() -> None:
        async with target.async_client(api_key=WRONG_KEY) as client:
            await client.batches.list()

    with pytest.raises(openai.AuthenticationError):
        asyncio.run(look())


def test_a_wrong_key_is_not_repeated_in_full(target: Target) -> None:
    with target.http(authorization=f"Bearer {WRONG_KEY}") as http:
        assert WRONG_KEY not in http.get("files").text


def test_a_wrong_key_is_reported_before_a_wrong_request(target: Target) -> None:
    with target.http(authorization=f"Bearer {WRONG_KEY}") as http:
        assert http.post("batches", json={}).status_code == 401


@pytest.mark.point("A2")
def test_organization_and_project_headers_are_accepted(target: Target) -> None:
    with target.client(organization="org-x", project="proj_x") as client:
        assert len(client.batches.list(limit=1).data) == 1


@pytest.mark.point("A2")
def test_headers_of_other_clients_are_accepted(target: Target) -> None:
    with target.http(**{"openai-beta": "assistants=v2", "openai-version": "2020-10-01"}) as http:
        assert http.get("models").status_code == 200
