"""Images by the id of an uploaded file: no request reads a file of another project, or one that is no image."""

import asyncio
import base64
import json
from collections.abc import Sequence
from typing import Any

import aiohttp
import pytest
from aiohttp import web

from ray_job.contract.job_spec import JobSpec, ModelSpec
from ray_job.contract.leases import Failure, Lease, PartUrl
from ray_job.contract.media import MAX_FILE_BYTES, MAX_FILES
from ray_job.contract.object_keys import file_key, new_part_key
from ray_job.engines.direct import SEND_ROWS, DirectEngine
from ray_job.engines.http import EndpointSession
from ray_job.engines.part_buffer import PartBuffer
from ray_job.engines.row_window import RowWindow
from ray_job.rounds import RoundsJob, refusal_table, write_parts
from ray_job.rows import FinishedRow, LeasedRow, Request
from ray_job.serving import DirectJob
from service.adapters.directory_object_store import DirectoryObjectStore
from service.coordinator.commits import commit
from service.input_file import read_input_file
from tests.integration.reconciler_harness import BATCH, CHAT, Stack, line

PNG = b"\x89PNG\r\n\x1a\n" + b"canary" * 100
MODEL = ModelSpec(id="demo", source="x", engine="http", base_url="http://127.0.0.1:1/v1")
DATA_URL = f"data:image/png;base64,{base64.b64encode(PNG).decode()}"
OWN, OTHER = "file-own", "file-other"


def image(file_id: Any, **fields: Any) -> dict[str, Any]:
    return {"type": "image_url", "image_url": {"file_id": file_id, **fields}}


def line_with(*parts: dict[str, Any], number: int = 1) -> bytes:
    request = json.loads(line(number))
    request["body"]["messages"] = [{"role": "user", "content": [{"type": "text", "text": "look"}, *parts]}]
    return json.dumps(request).encode()


def upload(
    stack: Stack, file_id: str, *, project: str = "p", purpose: str = "vision", content: bytes = PNG, size: int = 0
) -> None:
    stack.store.put(file_key(file_id), [content])
    stack.sql("INSERT INTO projects (id, name) VALUES (%s, %s) ON CONFLICT DO NOTHING", project, project)
    stack.sql(
        "INSERT INTO files (id, project_id, purpose, filename, size_bytes, sha256) VALUES (%s, %s, %s, 'a', %s, '')",
        file_id,
        project,
        purpose,
        size or len(content),
    )


def refusals(stack: Stack, *lines: bytes) -> list[tuple[str, str, int]]:
    """Return code, place and line of each error of a batch with these lines."""
    stack.create(*lines)
    stack.advance()
    return [(error["code"], error["param"], error["line"]) for error in stack.errors()]


@pytest.mark.parametrize(
    "file_id", [OTHER, f"file-{BATCH}", "file-unknown", "../files/file-own", "file-own\0", "", "file-" + "a" * 10_000]
)
def test_id_that_is_no_image_of_the_project_is_refused_like_one_that_does_not_exist(stack: Stack, file_id: str) -> None:
    upload(stack, OWN)
    upload(stack, OTHER, project="q")
    # The first line names the model, so that the second one may take the short way.
    found = refusals(stack, line(1), line_with(image(file_id), number=2), line_with(image("file-none"), number=3))
    place = "body.messages[0].content[1].image_url.file_id"
    assert found == [("media_file_not_found", place, 2), ("media_file_not_found", place, 3)]
    messages = {error["message"] for error in stack.errors()}
    assert len(messages) == 1
    assert "purpose 'vision'" in messages.pop()
    assert stack.launcher.launched == []


@pytest.mark.parametrize("column", ["deleted_at", "expires_at"])
def test_deleted_or_expired_file_is_refused(stack: Stack, column: str) -> None:
    upload(stack, OWN)
    stack.sql(f"UPDATE files SET {column} = now()")  # noqa: S608 - the tests' own text
    assert [code for code, _, _ in refusals(stack, line_with(image(OWN)))] == ["media_file_not_found"]


def test_hundreds_of_ids_and_too_many_bytes_in_one_line_are_refused(stack: Stack) -> None:
    upload(stack, OWN, size=MAX_FILE_BYTES)
    upload(stack, "file-large", size=MAX_FILE_BYTES + 1)
    many = line_with(*[image(OWN)] * (MAX_FILES + 1))
    heavy = line_with(*[image(OWN)] * 4, number=2)
    assert refusals(stack, many, heavy, line_with(image("file-large"), number=3)) == [
        ("too_many_media_files", "body.messages", 1),
        ("media_files_too_large", "body.messages", 2),
        ("media_files_too_large", "body.messages[0].content[1].image_url.file_id", 3),
    ]


@pytest.mark.parametrize(
    ("part", "code"),
    [
        (image(OWN, url="data:image/png;base64,AAAA"), "invalid_request"),
        (image([OWN]), "media_file_unsupported"),
        (image(OWN, more={"file_id": OWN}), "media_file_unsupported"),
        ({"image_url": {"file_id": OWN}}, "media_file_unsupported"),
        ({"type": "text", "text": "a", "image_url": {"file_id": OWN}}, "media_file_unsupported"),
        ({"type": "x", "content": [image(OWN)]}, "media_file_unsupported"),
    ],
)
def test_id_elsewhere_or_beside_a_url_is_refused(part: dict[str, Any], code: str) -> None:
    facts = read_input_file([line_with(part)], endpoint=CHAT, models=None)
    assert [error.code for error in facts.errors] == [code]


class FailureRecorder:
    """The request of a coordinator that a job makes when it cannot read a segment."""

    def __init__(self) -> None:
        self.failures: list[Failure] = []

    async def fail(self, failure: Failure) -> None:
        self.failures.append(failure)


def resolved(leases: Sequence[Lease]) -> list[Request]:
    """Return the requests that a job reads from leases."""
    recorder = FailureRecorder()
    job = RoundsJob(JobSpec(job_id="j", coordinator_url="", model=MODEL), recorder)  # type: ignore[arg-type]

    async def read() -> list[Request]:
        async with aiohttp.ClientSession() as session:
            return [request for lease in leases for request in await job._read(session, lease)]

    requests = asyncio.run(read())
    assert recorder.failures == []
    return requests


def received_by_endpoint(requests: Sequence[Request], port: int) -> list[Any]:
    """Send requests as the http engine does, and return what the endpoint receives."""
    received: list[Any] = []

    async def answer(request: web.Request) -> web.Response:
        received.append(await request.json())
        return web.json_response({})

    async def run() -> None:
        app = web.Application(client_max_size=1 << 30)
        app.router.add_post(CHAT, answer)
        runner = web.AppRunner(app)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", port).start()
        try:
            async with EndpointSession(f"http://127.0.0.1:{port}/v1", 5) as session:
                for each in requests:
                    await session.post("", headers={}, data=json.dumps({"path": each.url, "body": each.body.decode()}))
        finally:
            await runner.cleanup()

    asyncio.run(run())
    return received


def test_engine_receives_the_image_as_a_data_url(stack: Stack, free_tcp_port: int) -> None:
    assert isinstance(stack.store, DirectoryObjectStore)
    upload(stack, OWN)
    stack.started(line(1), line_with(image(OWN, detail="low"), image(OWN), number=2))
    leases = list(stack.job().leases.values())
    assert [file.id for lease in leases for file in lease.files] == [OWN]
    bodies = received_by_endpoint(resolved(leases), free_tcp_port)
    _, *images = next(body["messages"][0]["content"] for body in bodies if body["messages"][0]["content"] != "hi")
    assert [part["image_url"] for part in images] == [{"detail": "low", "url": DATA_URL}, {"url": DATA_URL}]


def test_direct_engine_gets_the_image_as_a_data_url_and_its_bytes_are_counted(stack: Stack) -> None:
    upload(stack, OWN)
    stack.started(line_with(image(OWN)))
    (lease,) = stack.job().leases.values()

    async def read() -> tuple[LeasedRow | None, int]:
        job = DirectJob(JobSpec(job_id="j", coordinator_url="", model=MODEL), FailureRecorder())  # type: ignore[arg-type]
        job._shares.add_engine(0)
        job._unread[lease.ref] = lease
        async with aiohttp.ClientSession() as job._session:
            await job._read(lease)
        return job._shares.take(0, 0, can_lease=False), job._unsent_bytes

    row, unsent_bytes = asyncio.run(read())
    assert row is not None
    assert DATA_URL.encode() in row.raw
    assert unsent_bytes == len(row.raw)
    assert len(DATA_URL) <= lease.media_bytes < len(row.raw)


@pytest.mark.parametrize("is_row_gone", [False, True])
def test_file_that_is_gone_fails_its_line_alone(stack: Stack, *, is_row_gone: bool) -> None:
    upload(stack, OWN)
    stack.create(line(1), line_with(image(OWN), number=2))
    stack.advance()
    stack.store.delete(file_key(OWN))
    if is_row_gone:
        stack.sql("DELETE FROM files WHERE id = %s", OWN)
    job = stack.job()
    requests = {request.line: request for lease in job.lease().leases for request in resolved([lease])}
    assert requests[1].refusal == ""
    key = new_part_key(BATCH, job.id)
    place = PartUrl(key=key, url=stack.store.write_url(key, expires_s=60))
    (record,) = write_parts(refusal_table([requests[2]]), {BATCH: place})
    assert commit(stack.pool, job.id, record).accepted == (True,)
    assert job.commit(1)
    batch = stack.advance()
    assert (batch["status"], batch["completed"], batch["failed"]) == ("completed", 1, 1)
    (failed,) = stack.file(batch["error_file_id"])
    assert failed["error"]["code"] == "media_file_unavailable"
    assert "body.messages[0].content[1].image_url.file_id" in failed["error"]["message"]


def test_refused_row_is_finished_without_the_direct_engine(stack: Stack) -> None:
    upload(stack, OWN, content=b"<script>canary</script>")
    stack.started(line_with(image(OWN)))
    (request,) = resolved(list(stack.job().leases.values()))
    row = LeasedRow(segment=request.segment, row=0, line=1, raw=line(1), refusal=request.refusal)

    async def finish() -> tuple[str, list[FinishedRow]]:
        engine = DirectEngine(MODEL)
        engine._buffer = PartBuffer(MODEL.part_rows)
        engine._window = RowWindow(engine, engine._finish, rows=1, sequences=1, ahead=SEND_ROWS)
        assert await engine.add([row], settled={BATCH}, engines=1) == ()
        return await engine._buffer.take()

    (finished,) = asyncio.run(finish())[1]
    assert json.loads(finished.results[0].data)["error"]["code"] == "media_file_unavailable"


def test_file_that_is_no_image_does_not_reach_the_engine(stack: Stack) -> None:
    upload(stack, OWN, content=b"<script>canary</script>")
    stack.started(line_with(image(OWN)))
    (request,) = resolved(list(stack.job().leases.values()))
    assert "PNG" in request.refusal


def test_lease_names_no_file_that_another_project_owns_by_now(stack: Stack) -> None:
    upload(stack, OWN)
    stack.create(line_with(image(OWN)))
    stack.advance()
    stack.sql("INSERT INTO projects (id, name) VALUES ('q', 'q')")
    stack.sql("UPDATE files SET project_id = 'q' WHERE id = %s", OWN)
    (lease,) = stack.job().lease().leases
    assert [(file.id, file.url) for file in lease.files] == [(OWN, "")]
