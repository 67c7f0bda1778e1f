"""The client's address behind a proxy: only proxies that the operator names may state it."""

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from functools import cache

import httpx
import pytest

from service.adapters.memory_object_store import MemoryObjectStore
from service.api.app import create_app
from service.backends import Backends
from service.db import Pool
from tests.security.serving import served

PEER = "127.0.0.1"
PROXY = (f"{PEER}/32",)
CHAIN = (f"{PEER}/32", "10.0.0.0/8", "fd12::/16")


@pytest.fixture(scope="module")
def served_behind(api_pool: Pool) -> Iterator[Callable[..., str]]:
    """Return the URL of an API that trusts these proxies."""
    with ExitStack() as servers:

        @cache
        def start(*proxies: str) -> str:
            app = create_app(Backends(pool=api_pool, store=MemoryObjectStore()))
            return servers.enter_context(served(app, trusted_proxies=proxies))

        yield start


def recorded_address(pool: Pool, url: str, key: str, *forwarded: str) -> str | None:
    """Upload a file with these X-Forwarded-For headers, and return the client's address in the audit log."""
    headers = [("authorization", f"Bearer {key}"), *(("x-forwarded-for", value) for value in forwarded)]
    answer = httpx.post(f"{url}/v1/files", headers=headers, files={"file": b"{}\n"}, data={"purpose": "batch"})
    assert answer.status_code == 200, answer.text
    with pool.connection() as connection:
        statement = "SELECT client_address FROM audit_log WHERE type = 'file.created' AND object_id = %s"
        row = connection.execute(statement, [answer.json()["id"]]).fetchone()
    assert row
    address: str | None = row["client_address"]
    return address


@pytest.mark.parametrize("proxies", [(), ("10.0.0.0/8", "::1/128")])
def test_client_that_is_no_trusted_proxy_cannot_choose_its_address(
    served_behind: Callable[..., str], api_pool: Pool, api_key: str, proxies: tuple[str, ...]
) -> None:
    for forged in ("203.0.113.9", "10.0.0.1", "203.0.113.9, 10.0.0.1"):
        assert recorded_address(api_pool, served_behind(*proxies), api_key, forged) == PEER


@pytest.mark.parametrize(
    ("proxies", "forwarded", "address"),
    [
        (PROXY, ["203.0.113.9"], "203.0.113.9"),
        (PROXY, ["203.0.113.9:4711"], "203.0.113.9"),
        (PROXY, ["2001:db8::7"], "2001:db8::7"),
        (PROXY, ["[2001:db8::7]:4711"], "2001:db8::7"),
        (PROXY, ["198.51.100.1, 10.0.0.1, 203.0.113.9"], "203.0.113.9"),  # a client wrote all but the last one
        (PROXY, ["198.51.100.1", "203.0.113.9"], "203.0.113.9"),
        (CHAIN, ["198.51.100.1, 203.0.113.9, 10.1.2.3"], "203.0.113.9"),
        (CHAIN, ["198.51.100.1, 2001:db8::7, fd12::9, 10.1.2.3"], "2001:db8::7"),
        (CHAIN, [", ".join(["198.51.100.1"] * 500 + ["203.0.113.9", "10.1.2.3"])], "203.0.113.9"),
        (CHAIN, ["10.1.2.3"], "10.1.2.3"),
        (PROXY, [], PEER),
        (PROXY, [""], PEER),
        (PROXY, ["203.0.113.9,"], PEER),
        (PROXY, ["203.0.113.9, unknown"], None),
        (PROXY, ["<script>"], None),
        (PROXY, ["sk-cloister-secret"], None),
        (PROXY, ["fe80::1%sk-cloister-secret"], "fe80::1"),
        (PROXY, ["9" * 5_000], None),
    ],
)
def test_right_most_address_that_is_no_proxy_is_the_client(
    *,
    served_behind: Callable[..., str],
    api_pool: Pool,
    api_key: str,
    proxies: tuple[str, ...],
    forwarded: list[str],
    address: str | None,
) -> None:
    assert recorded_address(api_pool, served_behind(*proxies), api_key, *forwarded) == address


def guess(url: str, forwarded: str) -> int:
    headers = {"authorization": "Bearer sk-cloister-guess", "x-forwarded-for": forwarded}
    return httpx.get(f"{url}/v1/batches", headers=headers).status_code


def test_forwarded_addresses_do_not_hide_guesses(served_behind: Callable[..., str]) -> None:
    url = served_behind()
    assert [guess(url, f"10.0.0.{number}") for number in range(21)][-1] == 429


def test_clients_behind_a_proxy_are_limited_apart(served_behind: Callable[..., str]) -> None:
    url = served_behind(*PROXY)
    assert [guess(url, f"10.0.0.{number}, 203.0.113.9") for number in range(21)][-1] == 429
    assert guess(url, "203.0.113.10") == 401
