"""Guessed keys cost no query each, and a revoked key ends its event streams."""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime, timedelta
from typing import Any

import httpx
import openai
import pytest

from service.adapters.memory_object_store import MemoryObjectStore
from service.api.app import create_app
from service.api.wrong_keys import WrongKeys
from service.api_keys import Scope, create_api_key, list_api_keys, revoke_api_key, valid_readers
from service.backends import Backends
from service.db import Pool
from service.projects import Project, archive_project
from tests.security.serving import served


@pytest.fixture
def url(api_pool: Pool) -> Iterator[str]:
    """A new API process has counted no wrong key yet."""
    with served(create_app(Backends(pool=api_pool, store=MemoryObjectStore()))) as opened:
        yield opened


@contextmanager
def served_anew(pool: Pool, **settings: Any) -> Iterator[str]:
    with served(create_app(Backends(pool=pool, store=MemoryObjectStore(), **settings))) as opened:
        yield opened


def status(url: str, key: str, **headers: str) -> httpx.Response:
    return httpx.get(f"{url}/v1/batches", headers={"authorization": f"Bearer {key}", **headers})


def guess(url: str, count: int = 25) -> list[httpx.Response]:
    return [status(url, f"sk-cloister-guess-{number}") for number in range(count)]


def test_guessed_keys_are_refused_after_a_while_without_a_query_for_each(url: str, api_pool: Pool) -> None:
    answers = guess(url, 40)
    assert [answer.status_code for answer in answers] == [401] * 20 + [429] * 20
    assert 1 <= int(answers[-1].headers["retry-after"]) <= 60
    assert "API key" in answers[-1].json()["error"]["message"]
    before = api_pool.get_stats()["requests_num"]
    assert {answer.status_code for answer in guess(url, 100)} == {429}
    # The digests of valid keys are read once a second meanwhile.
    assert api_pool.get_stats()["requests_num"] - before < 30


def test_valid_keys_work_from_an_address_that_guesses(url: str, api_pool: Pool, project: Project, api_key: str) -> None:
    guess(url)
    assert status(url, api_key).status_code == 200
    time.sleep(1.1)  # valid keys are read again after a second
    assert status(url, create_api_key(api_pool, project_id=project.id, name="new")).status_code == 200


def test_revoked_key_is_refused_at_once_by_an_api_that_limits_guesses(
    url: str, api_pool: Pool, project: Project, api_key: str
) -> None:
    guess(url)
    assert status(url, api_key).status_code == 200
    (key,) = list_api_keys(api_pool, project_id=project.id)
    revoke_api_key(api_pool, key.id)
    assert status(url, api_key).status_code == 401


def test_expired_key_is_refused_on_time_with_the_error_of_openai(url: str, api_pool: Pool, project: Project) -> None:
    key = create_api_key(
        api_pool, project_id=project.id, name="short", expires_at=datetime.now(UTC) + timedelta(seconds=0.5)
    )
    assert status(url, key).status_code == 200
    guess(url)  # valid keys are now cached for a second
    time.sleep(0.6)
    assert status(url, key).status_code in {401, 429}
    with openai.OpenAI(base_url=f"{url}/v1", api_key=key, max_retries=0) as client, served_anew(api_pool) as fresh:
        client.base_url = httpx.URL(f"{fresh}/v1")
        with pytest.raises(openai.AuthenticationError, match="expired") as raised:
            client.batches.list()
    assert (raised.value.code, raised.value.type) == ("invalid_api_key", "invalid_request_error")


def test_maximum_lifetime_ends_keys_that_were_created_before_it(api_pool: Pool, project: Project, api_key: str) -> None:
    later = create_api_key(
        api_pool, project_id=project.id, name="later", expires_at=datetime.now(UTC) + timedelta(days=999)
    )
    with api_pool.connection() as connection:
        connection.execute("UPDATE api_keys SET created_at = now() - interval '91 days'")
    new = create_api_key(api_pool, project_id=project.id, name="new")
    with served_anew(api_pool, max_key_lifetime=timedelta(days=90)) as url:
        assert [status(url, key).status_code for key in (api_key, later, new)] == [401, 401, 200]
        guess(url)
        assert [status(url, key).status_code for key in (api_key, later, new)] == [429, 429, 200]
    ids = [key.id for key in list_api_keys(api_pool, project_id=project.id)]
    assert len(valid_readers(api_pool, ids, timedelta(days=90))) == 1


def test_use_of_a_key_is_recorded_once_a_minute(url: str, api_pool: Pool, project: Project, api_key: str) -> None:
    def used_at() -> datetime | None:
        (key,) = list_api_keys(api_pool, project_id=project.id)
        return key.last_used_at

    assert used_at() is None
    status(url, api_key)
    first = used_at()
    assert first is not None
    for _ in range(5):
        status(url, api_key)
    assert used_at() == first
    with api_pool.connection() as connection:
        connection.execute("UPDATE api_keys SET last_used_at = now() - interval '61 s'")
    status(url, api_key)
    assert (used_at() or first) > first


@pytest.mark.parametrize(
    ("address", "is_refused"),
    [("2001:db8::1", True), ("2001:db8::ffff", True), ("2001:db8:0:1::1", False), ("203.0.113.9", False)],
)
def test_guesses_of_an_ipv6_network_count_together(api_pool: Pool, address: str, *, is_refused: bool) -> None:
    wrong_keys = WrongKeys(api_pool)
    for number in range(20):
        wrong_keys.count(f"2001:db8::{number:x}")
    assert (wrong_keys.refusal(address, "sk-wrong") is not None) is is_refused


def test_address_is_forgotten_after_a_minute_and_many_addresses_take_bounded_memory(api_pool: Pool) -> None:
    now = 0.0
    wrong_keys = WrongKeys(api_pool, clock=lambda: now)
    for _ in range(20):
        wrong_keys.count("203.0.113.9")
    assert wrong_keys.refusal("203.0.113.9", "sk-wrong")
    now = 61.0
    assert not wrong_keys.refusal("203.0.113.9", "sk-wrong")
    for number in range(10_100):
        wrong_keys.count(f"10.0.{number // 256}.{number % 256}")
    assert len(wrong_keys._counts) == 10_000


@contextmanager
def event_stream(url: str, key: str, batch_id: str) -> Iterator[Iterator[str]]:
    headers = {"authorization": f"Bearer {key}"}
    with httpx.stream("GET", f"{url}/v1/batches/{batch_id}/events", headers=headers, timeout=15) as answer:
        assert answer.status_code == 200
        yield answer.iter_lines()


@pytest.mark.slow
def test_revoked_key_ends_its_event_streams_but_no_others(
    base_url: str, client: openai.OpenAI, api_pool: Pool, project: Project, api_key: str
) -> None:
    batch = client.batches.create(input_file_id="file-none", endpoint="/v1/completions", completion_window="24h")
    doomed = create_api_key(api_pool, project_id=project.id, name="doomed", scopes=[Scope.READ])
    (key_id,) = [key.id for key in list_api_keys(api_pool, project_id=project.id) if key.name == "doomed"]
    with event_stream(base_url, doomed, batch.id) as ended, event_stream(base_url, api_key, batch.id) as going_on:
        assert next(ended).startswith("retry:")
        assert next(going_on).startswith("retry:")
        revoke_api_key(api_pool, key_id)
        revoked_at = time.monotonic()
        list(ended)
        assert time.monotonic() - revoked_at < 10
        with api_pool.connection() as connection:
            connection.execute(
                "INSERT INTO batch_events (batch_id, type, data) VALUES (%s, 'batch.in_progress', '{}')", [batch.id]
            )
        assert any(line == "event: batch.in_progress" for line in going_on)


@pytest.mark.slow
def test_expired_key_ends_its_event_streams(
    base_url: str, client: openai.OpenAI, api_pool: Pool, project: Project
) -> None:
    batch = client.batches.create(input_file_id="file-none", endpoint="/v1/completions", completion_window="24h")
    expires_at = datetime.now(UTC) + timedelta(seconds=1)
    short = create_api_key(api_pool, project_id=project.id, name="short", scopes=[Scope.READ], expires_at=expires_at)
    with event_stream(base_url, short, batch.id) as ended:
        next(ended)
        list(ended)
    assert (datetime.now(UTC) - expires_at).total_seconds() < 10


@pytest.mark.slow
def test_archived_project_ends_its_event_streams(
    base_url: str, client: openai.OpenAI, api_pool: Pool, project: Project, api_key: str
) -> None:
    batch = client.batches.create(input_file_id="file-none", endpoint="/v1/completions", completion_window="24h")
    with event_stream(base_url, api_key, batch.id) as ended:
        next(ended)
        archive_project(api_pool, project)
        archived_at = time.monotonic()
        list(ended)
        assert time.monotonic() - archived_at < 10
