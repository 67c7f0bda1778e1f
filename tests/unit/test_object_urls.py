"""Objects by URLs: files, and a real HTTP server."""

import asyncio
import stat
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import TypeVar

import aiohttp
import pytest
from aiohttp import web

from ray_job import object_urls
from ray_job.errors import ObjectError, ObjectMissingError, UrlRefusedError
from ray_job.object_urls import put_object, read_range

T = TypeVar("T")


def with_session(work: Callable[[aiohttp.ClientSession], Awaitable[T]]) -> T:
    async def run() -> T:
        async with aiohttp.ClientSession() as session:
            return await work(session)

    return asyncio.run(run())


class Store:
    """An object store that answers as the tests set it."""

    def __init__(self) -> None:
        self.statuses: list[int] = []
        self.data = b"0123456789"
        self.urls: list[str] = []

    async def answer(self, request: web.Request) -> web.Response:
        self.urls.append(request.raw_path)
        if self.statuses:
            return web.Response(status=self.statuses.pop(0))
        if request.method == "PUT":
            self.data = await request.read()
            return web.Response()
        part = request.http_range
        return web.Response(status=206, body=self.data[part])

    def run(self, work: Callable[[aiohttp.ClientSession, str], Awaitable[T]]) -> T:
        async def with_server() -> T:
            app = web.Application()
            app.router.add_route("*", "/{path:.*}", self.answer)
            runner = web.AppRunner(app)
            await runner.setup()
            await web.TCPSite(runner, "127.0.0.1", 0).start()
            host, port = runner.addresses[0][:2]
            try:
                async with aiohttp.ClientSession() as session:
                    return await work(session, f"http://{host}:{port}/b/batch%2F1?X-Amz-Signature=secret%2B")
            finally:
                await runner.cleanup()

        return asyncio.run(with_server())


@pytest.fixture
def store(monkeypatch: pytest.MonkeyPatch) -> Store:
    monkeypatch.setattr(object_urls, "FIRST_PAUSE_S", 0.001)
    return Store()


def test_range_of_a_file_is_read(tmp_path: Path) -> None:
    (tmp_path / "a plan").write_bytes(b"0123456789")
    url = (tmp_path / "a plan").as_uri()
    assert with_session(lambda session: read_range(session, url, 2, 5)) == b"234"


@pytest.mark.parametrize("name", ["missing", "short"])
def test_file_without_the_range_is_reported(tmp_path: Path, name: str) -> None:
    (tmp_path / "short").write_bytes(b"0")
    with pytest.raises(ObjectMissingError, match=name):
        with_session(lambda session: read_range(session, (tmp_path / name).as_uri(), 0, 5))


def test_file_is_written_into_private_directories_and_leaves_no_other(tmp_path: Path) -> None:
    path = tmp_path / "batches" / "batch_1" / "parts" / "1.part"
    for data in (b"first", b"second"):
        with_session(lambda session, data=data: put_object(session, path.as_uri(), data))
    assert path.read_bytes() == b"second"
    assert list(path.parent.iterdir()) == [path]
    assert {stat.S_IMODE(parent.stat().st_mode) for parent in list(path.parents)[:3]} == {0o700}


def test_range_of_an_object_is_read_with_the_url_as_it_is_signed(store: Store) -> None:
    assert store.run(lambda session, url: read_range(session, url, 2, 5)) == b"234"
    assert store.urls == ["/b/batch%2F1?X-Amz-Signature=secret%2B"]


def test_write_is_tried_again_while_the_store_is_away(store: Store) -> None:
    store.statuses = [503, 500, 429]
    store.run(lambda session, url: put_object(session, url, b"new"))
    assert (store.data, len(store.urls)) == (b"new", 4)


@pytest.mark.parametrize(("status", "error"), [(403, UrlRefusedError), (404, ObjectMissingError)])
def test_refusal_names_the_object_without_its_signature(store: Store, status: int, error: type[ObjectError]) -> None:
    store.statuses = [status]
    with pytest.raises(error, match=rf"b/batch%2F1 with status {status}") as caught:
        store.run(lambda session, url: read_range(session, url, 0, 1))
    assert "secret" not in str(caught.value)


def test_store_that_stays_away_ends_the_job(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(object_urls, "RETRY_FOR_S", 0.01)
    store.statuses = [503] * 100
    with pytest.raises(ObjectError, match=r"did not answer PUT .* \(status 503\); see"):
        store.run(lambda session, url: put_object(session, url, b"new"))
