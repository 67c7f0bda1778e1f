"""The job's client of the coordinator, with a real server."""

import asyncio
import logging
from pathlib import Path

import pytest

from ray_job import coordinator as client
from ray_job.contract.leases import (
    TOKEN_FILE_VARIABLE,
    TOKEN_VARIABLE,
    EndRequest,
    PartUrlsRequest,
    SyncRequest,
    SyncResponse,
)
from ray_job.contract.plans import PlanRow
from ray_job.coordinator import HttpCoordinator, take_token
from ray_job.errors import CoordinatorError, JobEndedError
from tests.memory_coordinator import TOKEN, CoordinatorServer

SYNC = SyncRequest(wanted_tokens=1_000, wait_s=0, held=(), engines=0)


@pytest.fixture
def server(tmp_path: Path) -> CoordinatorServer:
    return CoordinatorServer(tmp_path)


async def sync(server: CoordinatorServer, token: str = TOKEN) -> SyncResponse:
    async with HttpCoordinator(server.url, token) as coordinator:
        return await coordinator.sync(SYNC)


def test_requests_reach_the_coordinator(server: CoordinatorServer) -> None:
    server.coordinator.add_batch("batch_1", [PlanRow(line=1, raw=b"{}")], endpoint="/v1/completions")

    async def work() -> None:
        async with HttpCoordinator(server.url, TOKEN) as coordinator:
            (lease,) = (await coordinator.sync(SYNC)).leases
            assert (lease.batch_id, lease.rows, lease.epoch) == ("batch_1", 1, 1)
            assert len((await coordinator.part_urls(PartUrlsRequest(batch_id="batch_1", count=3))).parts) == 3
            assert not (await coordinator.end(EndRequest(engine_s=1, busy_s=1))).ended

    with server.running():
        asyncio.run(work())


def test_unknown_token_ends_the_job(server: CoordinatorServer) -> None:
    with server.running(), pytest.raises(JobEndedError, match="its token is void"):
        asyncio.run(sync(server, "wrong"))


def test_refused_request_names_the_path_and_the_remedy(server: CoordinatorServer) -> None:
    server.status = 400
    with server.running(), pytest.raises(CoordinatorError, match="answered /sync with status 400; check"):
        asyncio.run(sync(server))


def test_unavailable_coordinator_is_asked_until_it_answers(
    server: CoordinatorServer, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(client, "LAST_PAUSE_S", 0.05)
    server.status = 503
    caplog.set_level(logging.INFO)

    async def work() -> None:
        asking = asyncio.create_task(sync(server))
        while server.requests < 4:  # noqa: ASYNC110 - another thread counts them
            await asyncio.sleep(0.01)
        server.status = 0
        await asyncio.wait_for(asking, 10)

    with server.running():
        asyncio.run(work())
    messages = [record.message for record in caplog.records if record.name == client.logger.name]
    assert [message.split(server.url)[1] for message in messages] == [
        " does not answer (status 503); trying again",
        " answers again",
    ]


def test_token_is_removed_from_the_environment(tmp_path: Path) -> None:
    (tmp_path / "token").write_text("from-file\n")
    environment = {TOKEN_VARIABLE: "given", "HOME": "/"}
    assert (take_token(environment), environment) == ("given", {"HOME": "/"})
    environment = {TOKEN_VARIABLE: "", TOKEN_FILE_VARIABLE: str(tmp_path / "token")}
    assert (take_token(environment), environment) == ("from-file", {})


@pytest.mark.parametrize(
    ("environment", "message"),
    [
        ({}, "no token; set CLOISTER_JOB_TOKEN or CLOISTER_JOB_TOKEN_FILE"),
        ({TOKEN_FILE_VARIABLE: "/nonexistent/token"}, "token in /nonexistent/token is unreadable"),
    ],
)
def test_missing_token_is_reported(environment: dict[str, str], message: str) -> None:
    with pytest.raises(CoordinatorError, match=message):
        take_token(environment)
