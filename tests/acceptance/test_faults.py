"""Faults around a batch: wrong clocks, a store that hangs, two reconcilers, a stolen token. Each line counts once."""

import os
import subprocess
import sys
import time
import urllib.parse
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, LiteralString

import httpx
import psutil
import psycopg
import pytest
from openai.types import Batch

from ray_job.contract.leases import (
    COMMITS_PATH,
    END_PATH,
    FAILURES_PATH,
    PART_URLS_PATH,
    SYNC_PATH,
    TOKEN_VARIABLE,
    Commit,
    CommittedRows,
    EndRequest,
    Failure,
    Message,
    PartUrl,
    PartUrls,
    PartUrlsRequest,
    SegmentRef,
    SyncRequest,
)
from ray_job.contract.parts import Usage
from ray_job.contract.plans import bitmap
from service.coordinator.leasing import URL_EXPIRES_S
from service.local.ray_head import free_ports
from tests.acceptance.fault_stack import RECONCILERS, STORE, FaultStack, wrong_clock
from tests.acceptance.interruptions import (
    assert_every_line_once,
    completed,
    create,
    in_the_middle,
    kill,
    processes,
    stop_for,
    wait,
)
from tests.acceptance.local_stack import started
from tests.s3_server import signing_time

pytestmark = pytest.mark.ray

LINES = 192
SKEW_S = 600
AWAY_S = 60


@pytest.fixture(scope="module")
def stack(tmp_path_factory: pytest.TempPathFactory) -> Iterator[FaultStack]:
    with started(FaultStack, tmp_path_factory.mktemp("stack")) as stack:
        yield stack


def sql(stack: FaultStack, statement: LiteralString) -> list[tuple[Any, ...]]:
    with psycopg.connect(stack.layout.database_url("cloister")) as connection:
        return connection.execute(statement).fetchall()


def leader(stack: FaultStack) -> psutil.Process:
    [(name,)] = sql(stack, "SELECT leader FROM reconciler_heartbeat")
    return psutil.Process(int(name.rpartition(":")[2]))


def test_second_reconciler_takes_over_and_no_second_job_runs(stack: FaultStack) -> None:
    batch_id = create(stack, LINES)
    deadline = time.monotonic() + 60
    while not stack.jobs():
        assert time.monotonic() < deadline
        time.sleep(0.05)
    # Perhaps before it records the launch: then the job has a token that its successor does not know, and ends.
    first = leader(stack)
    first.kill()
    wait(stack, batch_id, in_the_middle)
    second = leader(stack)
    assert second != first
    second.kill()
    assert_every_line_once(stack, batch_id, LINES)
    assert list(stack.jobs().values()).count("RUNNING") == 1
    assert sql(stack, "SELECT count(*) FROM jobs WHERE committed_at IS NOT NULL") == [(1,)]


@dataclass(frozen=True, kw_only=True)
class Theft:
    """What someone took from a job in the middle of a batch that another job completes.

    Attributes:
        batch: the batch in its middle.
        token: the token of the job, from the environment of its driver.
        part: a place that the coordinator gave for the token.
        taken_at: when it gave it.
    """

    batch: Batch
    token: str
    part: PartUrl
    taken_at: datetime


def call(stack: FaultStack, token: str, path: str, message: Message) -> httpx.Response:
    headers = {"authorization": f"Bearer {token}"}
    return httpx.post(stack.coordinator_url + path, content=message.to_json(), headers=headers, trust_env=False)


def restart_services(stack: FaultStack) -> None:
    for name in (*RECONCILERS, "coordinator"):
        stack.child(name).kill()
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
        with suppress(httpx.HTTPError):
            if httpx.get(f"{stack.coordinator_url}/readyz", trust_env=False).is_success:
                return
        time.sleep(0.1)
    pytest.fail(f"the coordinator does not answer; logs: {stack.layout.logs}")


@pytest.fixture(scope="module")
def theft(stack: FaultStack) -> Theft:
    """A batch with wrong clocks. In its middle they all jump by 20 minutes, and its processes start again."""
    kill(stack, "driver")
    stack.set_clocks(SKEW_S, -SKEW_S)
    restart_services(stack)
    batch = wait(stack, create(stack, LINES), in_the_middle)
    token = next(filter(None, (each.environ().get(TOKEN_VARIABLE) for each in processes(stack, "driver"))))
    taken_at = datetime.now(UTC)
    answer = call(stack, token, PART_URLS_PATH, PartUrlsRequest(batch_id=batch.id, count=1))
    (part,) = PartUrls.from_json(answer.content).parts
    stack.set_clocks(-SKEW_S, SKEW_S)
    assert kill(stack, "driver")
    restart_services(stack)
    return Theft(batch=batch, token=token, part=part, taken_at=taken_at)


def test_batch_completes_while_clocks_are_wrong(stack: FaultStack, theft: Theft) -> None:
    assert_every_line_once(stack, theft.batch.id, LINES)
    assert theft.batch.in_progress_at is not None
    query = dict(urllib.parse.parse_qsl(urllib.parse.urlsplit(theft.part.url).query))
    skews = (
        theft.batch.in_progress_at - theft.batch.created_at,
        (signing_time(query["X-Amz-Date"]) - theft.taken_at).total_seconds(),
    )
    assert [abs(skew) for skew in skews] == pytest.approx([SKEW_S, SKEW_S], abs=30)
    assert sql(stack, "SELECT id FROM jobs WHERE launched_at NOT BETWEEN created_at AND now()") == []


def test_stolen_token_of_an_ended_job_is_refused(stack: FaultStack, theft: Theft) -> None:
    batch_id = completed(stack, theft.batch.id).id
    ref = SegmentRef(batch_id=batch_id, segment=0, epoch=1)
    rows = CommittedRows(segment=0, epoch=1, rows=bitmap([0]), lines=(1,), completed=1, failed=0, usage=Usage())
    forbidden: list[tuple[str, Message]] = [
        (SYNC_PATH, SyncRequest(wanted_tokens=10**6, wait_s=0, held=(), engines=1)),
        (SYNC_PATH, SyncRequest(wanted_tokens=0, wait_s=0, held=(ref,), engines=1)),
        (PART_URLS_PATH, PartUrlsRequest(batch_id=batch_id, count=1)),
        (COMMITS_PATH, Commit(batch_id=batch_id, key=theft.part.key, segments=(rows,))),
        (FAILURES_PATH, Failure(batch_id=batch_id, segment=0, epoch=1, reason="x")),
        (END_PATH, EndRequest(engine_s=0, busy_s=0)),
    ]
    assert [call(stack, theft.token, *each).status_code for each in forbidden] == [401] * len(forbidden)


def test_stolen_url_writes_no_answer_and_is_refused_after_its_expiry(
    stack: FaultStack, theft: Theft, tmp_path: Path
) -> None:
    completed(stack, theft.batch.id)
    assert httpx.put(theft.part.url, content=b"forged", trust_env=False).status_code == 200
    assert_every_line_once(stack, theft.batch.id, LINES)
    clock = tmp_path / "clock"
    clock.write_text(str(URL_EXPIRES_S))
    (port,) = free_ports(1)
    program = [sys.executable, "-m", "tests.s3_server", str(port)]
    address = urllib.parse.urlsplit(theft.part.url)
    late = address._replace(netloc=f"127.0.0.1:{port}").geturl()
    with subprocess.Popen(program, env=os.environ | wrong_clock(clock)) as server:
        try:
            transport = httpx.HTTPTransport(retries=8)  # until it listens
            with httpx.Client(transport=transport, headers={"host": address.netloc}) as client:
                answer = client.put(late, content=b"forged")
        finally:
            server.terminate()
    assert (answer.status_code, "AccessDenied" in answer.text) == (403, True)


def test_batch_completes_after_the_object_store_did_not_answer_for_a_minute(stack: FaultStack) -> None:
    batch_id = create(stack, LINES)
    wait(stack, batch_id, in_the_middle)
    jobs = stack.jobs()
    stop_for(AWAY_S, [stack.child(STORE)])
    assert_every_line_once(stack, batch_id, LINES)
    assert stack.jobs() == jobs
