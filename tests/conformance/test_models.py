"""Models."""

import asyncio
from typing import Any

import httpx
import openai
import pytest

from tests.conformance.target import Target

pytestmark = pytest.mark.point("M1")


@pytest.fixture(scope="module")
def listed(http: httpx.Client) -> dict[str, Any]:
    """Listing of models."""
    answer: dict[str, Any] = http.get("models").raise_for_status().json()
    return answer


def test_models_are_a_list_object(listed: dict[str, Any]) -> None:
    assert (listed["object"], type(listed["data"])) == ("list", list)


def test_the_model_under_check_is_listed(target: Target, listed: dict[str, Any]) -> None:
    assert target.model in [model["id"] for model in listed["data"]]


@pytest.mark.parametrize(
    ("field", "kind"), [("id", str), ("created", int), ("owned_by", str)], ids=["id", "created", "owned_by"]
)
def test_every_model_has(listed: dict[str, Any], field: str, kind: type) -> None:
    assert {type(model[field]) for model in listed["data"]} == {kind}


def test_every_model_is_a_model_object(listed: dict[str, Any]) -> None:
    assert {model["object"] for model in listed["data"]} == {"model"}


def test_a_model_is_retrieved_as_listed(target: Target, client: openai.OpenAI, listed: dict[str, Any]) -> None:
    assert client.models.retrieve(target.model).to_dict() in listed["data"]


def test_the_async_client_lists_models(target: Target) -> None:
    async def ids() -> list[str]:
        async with target.async_client() as client:
            return [model.id async for model in client.models.list()]

    assert target.model in asyncio.run(ids())


def test_an_unknown_model_is_a_404(client: openai.OpenAI) -> None:
    with pytest.raises(openai.NotFoundError) as caught:
        client.models.retrieve("no-such-model")
    assert (caught.value.code, caught.value.type) == ("model_not_found", "invalid_request_error")
