"""Commands that use the API, over a socket. A reconciler runs their batches as jobs in memory."""

import io
import itertools
import json
import os
import re
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import openai
import pytest
import structlog
import uvicorn

from ray_job.contract.job_spec import JobSpec, ModelSpec
from service.api.app import Server, create_app
from service.api_keys import create_api_key
from service.backends import Backends
from service.cli.app import main
from service.client.following import EventStream
from service.model_catalogue import CatalogueModel
from service.ports import JobStatus
from service.projects import create_project
from tests.integration.reconciler_harness import CHAT, Stack, eventually, line, looping

Command = Callable[..., "Ended"]


class Ended:
    """Exit code and output of a command."""

    def __init__(self, code: int, out: str, err: str) -> None:
        self.code, self.out, self.err = code, out, err

    @property
    def json(self) -> Any:
        return json.loads(self.out)


@contextmanager
def serving(stack: Stack, wrap: Callable[[Any], Any] = lambda app: app) -> Iterator[str]:
    catalogue = {"demo": CatalogueModel(spec=ModelSpec(id="demo", source="x"))}
    app = create_app(Backends(pool=stack.pool, store=stack.store, catalogue=catalogue))
    config = uvicorn.Config(wrap(app), host="127.0.0.1", port=0, log_config=None, access_log=False, ws="none")
    served = Server(config, app.state.watching)
    thread = threading.Thread(target=served.run, daemon=True)
    thread.start()
    eventually(lambda: served.started)
    with structlog.testing.capture_logs():  # keeps the service's log out of the command's output
        yield f"http://127.0.0.1:{served.servers[0].sockets[0].getsockname()[1]}"
    served.should_exit = True
    thread.join()


@pytest.fixture
def server(stack: Stack) -> Iterator[str]:
    with serving(stack) as base_url:
        yield base_url


def without_events(app: Any) -> Any:
    """Wrap a server so that it has no events route."""

    async def answer(scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] == "http" and scope["path"].endswith("/events"):
            scope = scope | {"path": "/none", "raw_path": b"/none"}
        await app(scope, receive, send)

    return answer


@pytest.fixture
def environment(server: str, stack: Stack, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, str]:
    """Set the variables that name the server, in an empty directory."""
    key = create_api_key(stack.pool, project_id=create_project(stack.pool, "cli").id, name="cli")
    names = {"CLOISTER_BASE_URL": server, "CLOISTER_API_KEY": key}
    for name, value in names.items():
        monkeypatch.setenv(name, value)
    directory = tmp_path / "shell"
    directory.mkdir()
    monkeypatch.chdir(directory)
    return {**os.environ, **names}


@pytest.fixture
def cloister(environment: dict[str, str], capsys: pytest.CaptureFixture[str]) -> Command:
    """Run a command in this process."""
    del environment

    def run(*arguments: str) -> Ended:
        with pytest.raises(SystemExit) as ended:
            main(arguments)
        return Ended(int(ended.value.code or 0), *capsys.readouterr())

    return run


@pytest.fixture
def client(environment: dict[str, str]) -> Iterator[openai.OpenAI]:
    base_url, api_key = f"{environment['CLOISTER_BASE_URL']}/v1", environment["CLOISTER_API_KEY"]
    with openai.OpenAI(base_url=base_url, api_key=api_key) as opened:
        yield opened


def works(stack: Stack, *, failing: tuple[int, ...] = ()) -> Callable[[JobSpec], JobStatus]:
    """Return a job that answers every line at once, and ends."""

    def work(spec: JobSpec) -> JobStatus:
        job = stack.job(spec.job_id)
        for batch_id in {lease.batch_id for lease in job.lease().leases}:
            if failing:
                job.commit(*failing, batch_id=batch_id, fails=True)
        return job.serve()

    return work


@pytest.fixture
def reconciler(stack: Stack, database_url: str) -> Iterator[Stack]:
    stack.work = works(stack)
    with looping(stack.backends, database_url):
        yield stack


@pytest.fixture
def requests() -> Path:
    path = Path("requests.jsonl").absolute()
    path.write_bytes(b"\n".join(line(number) for number in (1, 2, 3)) + b"\n")
    return path


@pytest.fixture
def batch_id(cloister: Command, requests: Path) -> str:
    return cloister("submit", str(requests)).out.strip()


def custom_ids(path: str | Path) -> list[str]:
    return [json.loads(row)["custom_id"] for row in Path(path).read_text().splitlines()]


def test_submit_uploads_a_file_and_prints_the_batch_id(
    cloister: Command, requests: Path, client: openai.OpenAI
) -> None:
    ended = cloister("submit", str(requests), "--metadata", "team=a", "--metadata", "run=1=2", "--metadata", "note=")
    assert ended.code == 0
    batch = client.batches.retrieve(ended.out.strip())
    assert (batch.endpoint, batch.metadata) == (CHAT, {"team": "a", "run": "1=2", "note": ""})
    assert client.files.content(batch.input_file_id).content == requests.read_bytes()
    assert client.files.retrieve(batch.input_file_id).filename == "requests.jsonl"


@pytest.mark.usefixtures("reconciler")
def test_submit_with_wait_writes_the_results(cloister: Command, requests: Path) -> None:
    ended = cloister("submit", str(requests), "--wait", "--output", "answers.jsonl")
    assert (ended.code, ended.out) == (0, "")
    assert custom_ids("answers.jsonl") == ["id-1", "id-2", "id-3"]
    assert "completed  3 of 3 lines" in ended.err
    assert sorted(path.name for path in Path().iterdir()) == ["answers.jsonl", "requests.jsonl"]


def test_failed_lines_have_their_exit_code_and_file(cloister: Command, reconciler: Stack, requests: Path) -> None:
    reconciler.work = works(reconciler, failing=(2,))
    ended = cloister("submit", str(requests), "--wait", "--json")
    assert (ended.code, ended.err) == (6, "")
    batch = ended.json
    assert (batch["status"], batch["request_counts"]["failed"]) == ("completed", 1)
    assert custom_ids(f"{batch['id']}_output.jsonl") == ["id-1", "id-3"]
    assert custom_ids(f"{batch['id']}_errors.jsonl") == ["id-2"]


def test_older_results_are_replaced_even_if_there_are_no_new_ones(
    cloister: Command, reconciler: Stack, requests: Path
) -> None:
    reconciler.work = works(reconciler, failing=(1, 2, 3))
    Path("answers.jsonl").write_text("old")
    assert cloister("submit", str(requests), "--wait", "--output", "answers.jsonl").code == 6
    assert Path("answers.jsonl").read_bytes() == b""


def test_invalid_file_is_not_uploaded(cloister: Command, client: openai.OpenAI) -> None:
    Path("bad.jsonl").write_bytes(line(1) + b"\n{\n" + line(1))
    ended = cloister("submit", "bad.jsonl")
    assert ended.code == 7
    assert "2\tinvalid_json_line\t\tThis line is not parseable" in ended.err
    assert "error: bad.jsonl has 2 errors, so nothing was uploaded." in ended.err
    assert client.files.list().data == []


@pytest.mark.usefixtures("reconciler")
def test_invalid_file_fails_the_batch_without_validation(cloister: Command) -> None:
    Path("bad.jsonl").write_bytes(line(1) + b"\n{\n")
    ended = cloister("submit", "bad.jsonl", "--no-validate", "--wait")
    assert ended.code == 3
    assert "2\tinvalid_json_line" in ended.err


def test_submit_reads_stdin(
    cloister: Command, requests: Path, client: openai.OpenAI, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(requests.read_bytes())))
    batch = client.batches.retrieve(cloister("submit", "-").out.strip())
    assert client.files.content(batch.input_file_id).content == requests.read_bytes()


@pytest.mark.parametrize(
    ("content", "code", "message"),
    [
        (b"", 7, "is empty. Write one JSON object per line"),
        (b'{"custom_id": "a", "url": "/v1/responses"}', 7, "has the url '/v1/responses'. A batch supports one of"),
        (None, 1, "is a directory: name a JSONL file"),
    ],
)
def test_unsuitable_file_is_reported(cloister: Command, content: bytes | None, code: int, message: str) -> None:
    path = Path("file")
    path.mkdir() if content is None else path.write_bytes(content)
    ended = cloister("submit", "file")
    assert (ended.code, ended.out) == (code, "")
    assert message in ended.err


def test_file_that_grows_during_the_upload_creates_no_batch(cloister: Command, client: openai.OpenAI) -> None:
    path = Path("growing.jsonl")
    path.write_bytes(b"\n".join(line(number) for number in range(40_000)))
    stopping = threading.Event()

    def grow() -> None:
        with path.open("ab") as file:
            while not stopping.wait(0.005):
                file.write(b"\n")
                file.flush()

    writer = threading.Thread(target=grow)
    writer.start()
    ended = cloister("submit", str(path), "--no-validate")
    stopping.set()
    writer.join()
    assert ended.code == 1
    assert "growing.jsonl changed during the upload" in ended.err
    assert (client.files.list().data, client.batches.list().data) == ([], [])


def test_status_lists_the_latest_batches_and_shows_one(cloister: Command, batch_id: str) -> None:
    listed = cloister("status").out.splitlines()
    assert listed[0].split("\t") == ["batch", "status", "done", "failed", "age", "model"]
    assert listed[1].split("\t")[:3] == [batch_id, "validating", "0/0"]
    assert f"  endpoint     {CHAT}" in cloister("status", batch_id).out
    assert cloister("status", batch_id, "--json").json["id"] == batch_id
    assert [batch["id"] for batch in cloister("status", "--json").json["data"]] == [batch_id]


def test_status_shows_why_a_batch_failed(cloister: Command, stack: Stack) -> None:
    Path("bad.jsonl").write_bytes(line(1, model="dem"))
    batch_id = cloister("submit", "bad.jsonl").out.strip()
    from service.reconciler.steps import advance

    advance(stack.backends, batch_id)
    assert "1\tmodel_not_found\tbody.model\tThe model does not exist. Did you mean 'demo'?" in (
        cloister("status", batch_id).out
    )


def test_watch_shows_every_state_and_ends_with_the_outcome(
    cloister: Command, batch_id: str, stack: Stack, database_url: str
) -> None:
    stack.work = works(stack)
    with looping(stack.backends, database_url):
        ended = cloister("watch", batch_id)
    assert ended.code == 0
    assert "completed  3 of 3 lines" in ended.err.splitlines()[-2]
    assert f"`cloister results {batch_id}`" in ended.err


def test_watch_prints_json_objects_with_the_batch_last(
    cloister: Command, batch_id: str, stack: Stack, database_url: str
) -> None:
    stack.work = works(stack)
    with looping(stack.backends, database_url):
        ended = cloister("watch", batch_id, "--json")
    *updates, batch = [json.loads(row) for row in ended.out.splitlines()]
    assert {update["type"] for update in updates} == {"progress"}
    assert (updates[-1]["status"], updates[-1]["completed"]) == ("completed", 3)
    assert (batch["object"], batch["status"], ended.err) == ("batch", "completed", "")


def test_event_stream_yields_updates_until_the_batch_ends(
    client: openai.OpenAI, batch_id: str, stack: Stack, database_url: str
) -> None:
    stack.work = works(stack)
    events = EventStream(client, batch_id)
    with looping(stack.backends, database_url):
        *_, last = events.updates()
    assert (last.status, last.completed, last.total) == ("completed", 3, 3)
    assert events.has_ended


def test_watch_polls_a_server_without_events(
    cloister: Command, batch_id: str, stack: Stack, database_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    stack.work = works(stack)
    with serving(stack, without_events) as plain, looping(stack.backends, database_url):
        monkeypatch.setenv("CLOISTER_BASE_URL", plain)
        ended = cloister("watch", batch_id)
    assert ended.code == 0
    assert "completed  3 of 3 lines" in ended.err


def away_for(requests: int) -> Callable[[Any], Any]:
    """Wrap a server so that it answers the first request for a batch, then some with 503."""
    numbers = itertools.count()

    def wrap(app: Any) -> Any:
        async def answer(scope: Any, receive: Any, send: Any) -> None:
            if scope["type"] == "http" and scope["path"].startswith("/v1/batches/") and 0 < next(numbers) <= requests:
                await send({"type": "http.response.start", "status": 503, "headers": [(b"retry-after-ms", b"1")]})
                await send({"type": "http.response.body"})
            else:
                await app(scope, receive, send)

        return answer

    return wrap


def test_watch_survives_an_outage(
    cloister: Command, batch_id: str, stack: Stack, database_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    stack.work = works(stack)
    with serving(stack, away_for(7)) as restarted, looping(stack.backends, database_url):
        monkeypatch.setenv("CLOISTER_BASE_URL", restarted)
        ended = cloister("watch", batch_id)
    assert (ended.code, ended.out) == (0, "")  # retries are not logged to stdout


def test_outage_before_a_wait_is_reported_at_once(
    cloister: Command, batch_id: str, stack: Stack, monkeypatch: pytest.MonkeyPatch
) -> None:
    with serving(stack, away_for(99)) as broken:
        monkeypatch.setenv("CLOISTER_BASE_URL", broken)
        cloister("status", batch_id)
        ended = cloister("watch", batch_id)
    assert ended.code == 8
    assert "HTTP 503" in ended.err


def test_results_go_to_stdout_or_to_files(cloister: Command, reconciler: Stack, requests: Path) -> None:
    reconciler.work = works(reconciler, failing=(3,))
    batch_id = cloister("submit", str(requests)).out.strip()
    assert cloister("watch", batch_id).code == 6
    ended = cloister("results", batch_id)
    assert [json.loads(row)["custom_id"] for row in ended.out.splitlines()] == ["id-1", "id-2"]
    assert (ended.code, ended.err) == (6, "1 of 3 lines failed: --errors PATH downloads them\n")
    ended = cloister("results", batch_id, "-o", "out.jsonl", "--errors", "err.jsonl", "--json")
    assert (custom_ids("out.jsonl"), custom_ids("err.jsonl")) == (["id-1", "id-2"], ["id-3"])
    assert [file["size_bytes"] for file in ended.json["files"]] == [
        Path(name).stat().st_size for name in ("out.jsonl", "err.jsonl")
    ]


def test_partial_results_of_a_running_batch(cloister: Command, batch_id: str, stack: Stack) -> None:
    stack.advance(batch_id)
    assert "is in_progress: `cloister watch" in cloister("results", batch_id).err
    job = stack.job()
    job.lease()
    job.commit(2, batch_id=batch_id)
    ended = cloister("results", batch_id, "--partial", "-o", "some.jsonl")
    assert ended.err.splitlines()[0].startswith("wrote some.jsonl")
    assert (ended.code, custom_ids("some.jsonl")) == (0, ["id-2"])
    assert f"{batch_id} is in_progress" in ended.err


@pytest.mark.parametrize("path", ["missing/out.jsonl", "."])
def test_results_that_cannot_be_written_leave_no_file(
    cloister: Command, reconciler: Stack, requests: Path, path: str
) -> None:
    batch_id = cloister("submit", str(requests)).out.strip()
    cloister("watch", batch_id)
    ended = cloister("results", batch_id, "-o", path)
    assert ended.code == 1
    assert ended.err.startswith(("error: cannot write missing/out.jsonl", "error: . is a directory"))
    assert [entry.name for entry in Path().iterdir()] == ["requests.jsonl"]
    assert reconciler.launcher.launched


def test_cancel_with_wait_waits_for_the_end(cloister: Command, batch_id: str, stack: Stack, database_url: str) -> None:
    with looping(stack.backends, database_url):
        ended = cloister("cancel", batch_id, "--wait", "--json")
    assert (ended.code, ended.json["status"]) == (0, "cancelled")
    assert cloister("watch", batch_id).code == 5


def test_batch_is_paused_and_resumed(cloister: Command, requests: Path) -> None:
    batch_id = cloister("submit", str(requests), "--priority", "7", "--json").json["id"]
    paused = cloister("pause", batch_id)
    assert (paused.code, paused.out) == (0, f"{batch_id} is paused\n")
    assert f"cloister resume {batch_id}" in paused.err
    shown = cloister("status", batch_id).out
    assert re.search(r"validating, paused \d+ s ago", shown)
    assert re.search(r"priority +7\n", shown)
    resumed = cloister("resume", batch_id, "--json").json
    assert resumed["x_cloister"]["paused_at"] is None
    assert cloister("resume", batch_id).out == f"{batch_id} is validating\n"
    assert cloister("pause", "batch_none").err.startswith("error: No batch found with id 'batch_none'.")


def test_cancel_of_a_completed_batch_prints_the_error_of_the_server(
    cloister: Command, reconciler: Stack, requests: Path
) -> None:
    batch_id = cloister("submit", str(requests), "--wait", "--json").json["id"]
    ended = cloister("cancel", batch_id)
    assert ended.code == 1
    assert ended.err.startswith("error: Cannot cancel a batch with status 'completed'. (HTTP 409")
    assert len(reconciler.launcher.launched) == 1


def test_unknown_batch_and_wrong_key_are_reported(cloister: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    ended = cloister("watch", "batch_none")
    assert (ended.code, ended.err.count("\n")) == (1, 1)
    assert "HTTP 404" in ended.err
    monkeypatch.setenv("CLOISTER_API_KEY", "sk-wrong")
    ended = cloister("status")
    assert ended.code == 1
    assert "The API key is that of CLOISTER_BASE_URL, CLOISTER_API_KEY" in ended.err
    assert "sk-wrong" not in ended.err


@pytest.fixture
def interruptible() -> Iterator[None]:
    """Restore SIGINT for child processes: a shell ignores it for background jobs, and so would they."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.slow
@pytest.mark.usefixtures("interruptible")
def test_ctrl_c_leaves_the_batch_running_and_shows_how_to_continue(
    batch_id: str, environment: dict[str, str], client: openai.OpenAI
) -> None:
    command = [sys.executable, "-m", "service.cli", "watch", batch_id]
    with subprocess.Popen(command, env=environment, stderr=subprocess.PIPE, text=True, bufsize=1) as process:
        assert process.stderr is not None
        assert "validating" in process.stderr.readline()
        process.send_signal(signal.SIGINT)
        err = process.stderr.read()
        assert process.wait(timeout=10) == 130
    assert f"error: interrupted. The batch continues: `cloister watch {batch_id}` shows its progress" in err
    assert "Traceback" not in err
    assert client.batches.retrieve(batch_id).status == "validating"
