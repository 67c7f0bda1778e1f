"""`cloister doctor` as a client of a real API on a real Postgres."""

import _thread
import dataclasses
import json
import signal
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import openai
import pytest
import structlog

from ray_job.contract.job_spec import JobSpec, ModelSpec
from service.api_keys import create_api_key
from service.doctor.api import check_api
from service.doctor.findings import Result
from service.local.client_env import Client, write_client_env
from service.model_catalogue import CatalogueModel
from service.ports import JobStatus
from service.projects import create_project
from tests.integration.doctor.doctor_run import Doctor, http_server
from tests.integration.reconciler_harness import Stack, eventually, looping
from tests.integration.test_cli_batches import serving


def works(stack: Stack, *, fails: bool = False, custom_id: str = "") -> Callable[[JobSpec], JobStatus]:
    def work(spec: JobSpec) -> JobStatus:
        body = b'{"error": {"message": "the engine refused"}}' if fails else b'{"object": "chat.completion"}'
        job = stack.job(spec.job_id)
        for batch_id in {lease.batch_id for lease in job.lease().leases}:
            job.commit(batch_id=batch_id, fails=fails, custom_id=custom_id, body=body)
        return job.serve()

    return work


@pytest.fixture
def server(stack: Stack, doctor: Doctor, monkeypatch: pytest.MonkeyPatch) -> Iterator[openai.OpenAI]:
    """Run an API, and set its address and a key in the environment."""
    del doctor
    with serving(stack) as base_url:
        key = create_api_key(stack.pool, project_id=create_project(stack.pool, "doctor").id, name="doctor")
        monkeypatch.setenv("CLOISTER_BASE_URL", base_url)
        monkeypatch.setenv("CLOISTER_API_KEY", key)
        with openai.OpenAI(base_url=f"{base_url}/v1", api_key=key) as client:
            yield client


def test_each_model_gets_a_batch_of_one_line_and_no_file_is_left(
    doctor: Doctor, stack: Stack, database_url: str, server: openai.OpenAI
) -> None:
    stack.work = works(stack)
    with looping(stack.backends, database_url), structlog.testing.capture_logs() as logs:
        run = doctor("--time-limit", "1m")
    assert run.code == 0, run.out
    assert run["readiness"].endswith("/readyz: database, schema, object_store, reconciler")
    assert "completed in" in run["batch of one line, model demo"]
    assert list(server.files.list()) == []
    assert "Say yes." not in json.dumps(logs, default=str)


def test_output_without_the_line_is_a_failure(
    doctor: Doctor, stack: Stack, database_url: str, server: openai.OpenAI
) -> None:
    stack.work = works(stack, custom_id="another")
    with looping(stack.backends, database_url):
        assert "its output lacks the line" in doctor()["batch of one line, model demo"]
    assert list(server.files.list()) == []


@pytest.mark.usefixtures("server")
def test_line_uses_an_endpoint_that_the_model_offers(doctor: Doctor, stack: Stack, database_url: str) -> None:
    stack.work = works(stack)
    model = CatalogueModel(spec=ModelSpec(id="demo", source="x"), endpoints=("/v1/embeddings",))
    context = dataclasses.replace(stack.backends, catalogue={"demo": model})
    with looping(context, database_url):
        assert doctor()["batch of one line, model demo"].endswith("with /v1/embeddings")


def test_failed_line_is_reported_with_its_reason(
    doctor: Doctor, stack: Stack, database_url: str, server: openai.OpenAI
) -> None:
    stack.work = works(stack, fails=True)
    with looping(stack.backends, database_url):
        run = doctor()
    assert run.code == 1
    assert "the engine refused" in run["batch of one line, model demo"]
    assert list(server.files.list()) == []


def test_batch_is_cancelled_at_the_time_limit(
    stack: Stack, database_url: str, server: openai.OpenAI, tmp_path: Path
) -> None:
    with looping(stack.backends, database_url):
        *_, found = check_api(tmp_path, models=(), with_batches=True, time_limit_s=1, quiet=True)
    assert found.result == Result.FAILED
    assert "and was cancelled" in found.message
    (batch,) = server.batches.list()
    assert batch.status == "cancelled"
    assert list(server.files.list()) == []


def test_readiness_fails_without_a_reconciler(doctor: Doctor, server: openai.OpenAI) -> None:
    del server
    run = doctor("--no-batch")
    assert run.code == 1
    assert "Check that a reconciler runs." in run["readiness"]
    assert run["batch of one line, model demo"] == "not_checked: --no-batch is given"


@pytest.mark.parametrize(
    ("status", "body", "expected"),
    [
        (200, {"checks": {"database": {"status": "ok"}}}, "ok: {url}: database"),
        (
            200,
            {"checks": {"reconciler": {"status": "degraded", "message": "None leads."}}},
            "failed: {url}: reconciler: ",
        ),
        (
            503,
            {"error": {}, "checks": {"schema": {"status": "failed", "message": "Old."}}},
            "failed: {url}: schema: Old.",
        ),
        (404, {"error": {"message": "no"}}, "not_checked: {url} answers 404 without checks"),
        (200, {"checks": None}, "not_checked: {url} answers 200 without checks"),
        (502, "<html>Bad Gateway</html>", "failed: {url} answers 502"),
    ],
)
def test_readiness_follows_the_checks_of_the_server(
    doctor: Doctor, monkeypatch: pytest.MonkeyPatch, status: int, body: object, expected: str
) -> None:
    with http_server(lambda _, path: (status, body) if path == "/readyz" else (404, {})) as url:
        monkeypatch.setenv("CLOISTER_BASE_URL", url)
        monkeypatch.setenv("CLOISTER_API_KEY", "sk-x")
        assert doctor("--only", "api")["readiness"].startswith(expected.format(url=f"{url}/readyz"))


def test_unknown_model_is_a_failure(doctor: Doctor, server: openai.OpenAI) -> None:
    del server
    run = doctor("--model", "large")
    assert run["batch of one line, model large"] == "failed: the server has no such model. It has: demo"


def test_refused_key_is_reported_without_its_value(
    doctor: Doctor, server: openai.OpenAI, monkeypatch: pytest.MonkeyPatch
) -> None:
    del server
    monkeypatch.setenv("CLOISTER_API_KEY", "sk-cloister-secret-value")
    run = doctor()
    assert "The API key is that of CLOISTER_BASE_URL" in run["models"]
    assert "secret-value" not in run.out


@pytest.fixture
def _ctrl_c() -> Iterator[None]:
    # A shell that starts tests in the background lets them ignore Ctrl-C.
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.slow
@pytest.mark.usefixtures("_ctrl_c")
def test_ctrl_c_cancels_the_batch_and_starts_no_other(doctor: Doctor, server: openai.OpenAI) -> None:
    def interrupt() -> None:
        eventually(lambda: bool(list(server.batches.list())))
        _thread.interrupt_main()

    thread = threading.Thread(target=interrupt)
    thread.start()
    run = doctor("--only", "api", "--model", "demo", "--model", "demo")  # no batch ends without a reconciler
    thread.join()
    (batch,) = server.batches.list()
    assert (run.code, batch.status) == (130, "cancelling")
    assert f"cancelling {batch.id}; Ctrl-C leaves it and its file {batch.input_file_id} on the server" in run.err
    assert f"the batch {batch.id} may still run, and the file {batch.input_file_id} is left" in run.err


MODELS = {"object": "list", "data": [{"id": "m", "object": "model", "created": 1, "owned_by": "somebody"}]}


@pytest.mark.parametrize(
    ("answer", "expected"),
    [(MODELS, "is not a cloister"), ("<html>Log in</html>", "answers with a web page: is there a login page")],
)
def test_other_servers_get_no_batch(
    doctor: Doctor, monkeypatch: pytest.MonkeyPatch, answer: object, expected: str
) -> None:
    verbs: set[str] = set()

    def serve(verb: str, _path: str) -> tuple[int, object]:
        verbs.add(verb)
        return 200, answer

    with http_server(serve) as url:
        monkeypatch.setenv("OPENAI_BASE_URL", f"{url}/v1")
        monkeypatch.setenv("OPENAI_API_KEY", "sk-secret-value")
        run = doctor()
    assert expected in run["models"]
    assert run.results["batches"] == "not_checked"
    assert verbs == {"GET"}
    assert "secret-value" not in run.out


@pytest.mark.parametrize("port", ["abc", "70000"])
def test_invalid_url_is_reported(doctor: Doctor, monkeypatch: pytest.MonkeyPatch, port: str) -> None:
    monkeypatch.setenv("CLOISTER_BASE_URL", f"http://batch.acme.example:{port}/v1")
    monkeypatch.setenv("CLOISTER_API_KEY", "sk-x")
    assert "of CLOISTER_BASE_URL, CLOISTER_API_KEY is invalid: it must look like" in doctor()["API"]


def test_local_server_is_ignored_if_a_cluster_is_named(doctor: Doctor) -> None:
    Path("cloister-data").mkdir()
    write_client_env(Path("cloister-data/client.env"), Client(base_url="http://127.0.0.1:9/v1", api_key="local"))
    assert "127.0.0.1:9" in doctor("--only", "api")["readiness"]
    run = doctor("--only", "api", "--context", "factory")
    assert run.results == {"API": "not_checked"}
    assert "set CLOISTER_BASE_URL and CLOISTER_API_KEY" in run["API"]
