"""`cloister doctor` as a client of the API: the real one, on real Postgres."""

import _thread
import dataclasses
import json
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import openai
import pytest
import structlog

from ray_job.contract.job_spec import JobSpec, ModelSpec
from ray_job.contract.lines import response_line
from ray_job.contract.object_keys import part_key
from ray_job.contract.parts import PartRow, Usage, encode_part, part_id
from service.api_keys import create_api_key
from service.cli.doctor.api import Trial, api_findings
from service.cli.doctor.findings import Result
from service.local.client_env import Client, write_client_env
from service.model_catalogue import Catalogue, CatalogueModel
from service.ports import JobStatus
from service.projects import create_project
from tests.integration.doctor.told import Doctor, answering
from tests.integration.reconciler_harness import SUCCEEDED, Stack, commit, eventually, looping
from tests.integration.test_cli_batches import serving


def works(stack: Stack, *, fails: bool = False) -> Callable[[JobSpec], JobStatus]:
    def work(spec: JobSpec) -> JobStatus:
        body = b'{"error": {"message": "the engine said no"}}' if fails else b'{"object": "chat.completion"}'
        row = PartRow(
            line=1,
            outcome="failed" if fails else "completed",
            data=response_line(spec.batch_id, 1, "doctor", 400 if fails else 200, body),
            usage=Usage(),
        )
        stack.store.put(part_key(spec.batch_id, part_id([1])), [encode_part(spec.batch_id, [row])])
        return SUCCEEDED

    return work


@pytest.fixture
def server(stack: Stack, doctor: Doctor, monkeypatch: pytest.MonkeyPatch) -> Iterator[openai.OpenAI]:
    """A running API whose address and key are in the environment."""
    del doctor
    with serving(stack) as base_url:
        key = create_api_key(stack.pool, project_id=create_project(stack.pool, "doctor").id, name="doctor")
        monkeypatch.setenv("CLOISTER_BASE_URL", base_url)
        monkeypatch.setenv("CLOISTER_API_KEY", key)
        with openai.OpenAI(base_url=f"{base_url}/v1", api_key=key) as client:
            yield client


def test_a_batch_of_one_line_goes_to_each_model_and_leaves_no_file(
    doctor: Doctor, stack: Stack, database_url: str, server: openai.OpenAI
) -> None:
    stack.work = works(stack)
    with looping(stack.context, database_url), structlog.testing.capture_logs() as logs:
        told = doctor("--time-limit", "1m")
    assert told.code == 0, told.out
    assert told["readiness"].endswith("/readyz: database, schema, object_store, reconciler")
    assert "completed in" in told["batch of one line, model demo"]
    assert list(server.files.list()) == []
    assert "Say yes." not in json.dumps(logs, default=str)


def test_an_output_without_the_line_is_told(
    doctor: Doctor, stack: Stack, database_url: str, server: openai.OpenAI
) -> None:
    def answer_another(spec: JobSpec) -> JobStatus:
        commit(stack.store, spec.batch_id, 1)  # under the name of another line
        return SUCCEEDED

    stack.work = answer_another
    with looping(stack.context, database_url):
        assert "its output has not the line" in doctor()["batch of one line, model demo"]
    assert list(server.files.list()) == []


@pytest.mark.usefixtures("server")
def test_a_model_gets_a_line_for_an_endpoint_that_it_offers(doctor: Doctor, stack: Stack, database_url: str) -> None:
    stack.work = works(stack)
    model = CatalogueModel(spec=ModelSpec(id="demo", source="x"), endpoints=("/v1/embeddings",))
    context = dataclasses.replace(stack.context, catalogue=Catalogue(models={"demo": model}))
    with looping(context, database_url):
        assert doctor()["batch of one line, model demo"].endswith("by /v1/embeddings")


def test_a_line_that_failed_is_told_with_the_reason(
    doctor: Doctor, stack: Stack, database_url: str, server: openai.OpenAI
) -> None:
    stack.work = works(stack, fails=True)
    with looping(stack.context, database_url):
        told = doctor()
    assert told.code == 1
    assert "the engine said no" in told["batch of one line, model demo"]
    assert list(server.files.list()) == []


def test_a_batch_that_does_not_end_in_time_is_cancelled(
    stack: Stack, database_url: str, server: openai.OpenAI, tmp_path: Path
) -> None:
    trial = Trial(data_dir=tmp_path, models=(), has_batches=True, limit_s=1, quiet=True)
    with looping(stack.context, database_url):
        *_, found = api_findings(trial)
    assert found.result == Result.FAILED
    assert "and is cancelled" in found.message
    (batch,) = server.batches.list()
    assert batch.status == "cancelled"
    assert list(server.files.list()) == []


def test_without_a_reconciler_readiness_says_so(doctor: Doctor, server: openai.OpenAI) -> None:
    del server
    told = doctor("--no-batch")
    assert told.code == 1
    assert "See that a reconciler runs." in told["readiness"]
    assert told["batch of one line, model demo"] == "not_checked: --no-batch is given"


def test_a_model_that_is_not_there_is_told(doctor: Doctor, server: openai.OpenAI) -> None:
    del server
    told = doctor("--model", "large")
    assert told["batch of one line, model large"] == "failed: the server has no such model. It has: demo"


def test_a_key_that_is_refused_is_told(doctor: Doctor, server: openai.OpenAI, monkeypatch: pytest.MonkeyPatch) -> None:
    del server
    monkeypatch.setenv("CLOISTER_API_KEY", "sk-cloister-not-to-be-told")
    told = doctor()
    assert "The API key is that of CLOISTER_BASE_URL" in told["models"]
    assert "not-to-be-told" not in told.out


def test_ctrl_c_cancels_the_batch_and_starts_no_other(doctor: Doctor, server: openai.OpenAI) -> None:
    def interrupt() -> None:
        eventually(lambda: bool(list(server.batches.list())))
        _thread.interrupt_main()

    thread = threading.Thread(target=interrupt)
    thread.start()
    told = doctor("--only", "api", "--model", "demo", "--model", "demo")  # without a reconciler: no batch ever ends
    thread.join()
    (batch,) = server.batches.list()
    assert (told.code, batch.status) == (130, "cancelling")
    assert f"cancelling {batch.id}; Ctrl-C leaves it, and its file {batch.input_file_id}" in told.err
    assert f"the batch {batch.id} may still run, and the file {batch.input_file_id} is left" in told.err


MODELS = {"object": "list", "data": [{"id": "m", "object": "model", "created": 1, "owned_by": "somebody"}]}


@pytest.mark.parametrize(
    ("answer", "told_of"),
    [(MODELS, "is no cloister"), ("<html>Log in</html>", "answers with a page, not with models: is a login between")],
)
def test_a_server_that_is_none_of_ours_gets_no_batch(
    doctor: Doctor, monkeypatch: pytest.MonkeyPatch, answer: object, told_of: str
) -> None:
    verbs: set[str] = set()

    def serve(verb: str, _path: str) -> tuple[int, object]:
        verbs.add(verb)
        return 200, answer

    with answering(serve) as url:
        monkeypatch.setenv("OPENAI_BASE_URL", f"{url}/v1")
        monkeypatch.setenv("OPENAI_API_KEY", "sk-not-to-be-told")
        told = doctor()
    assert told_of in told["models"]
    assert told.results["batches"] == "not_checked"
    assert verbs == {"GET"}
    assert "not-to-be-told" not in told.out


@pytest.mark.parametrize("port", ["abc", "70000"])
def test_a_url_that_is_none_is_told(doctor: Doctor, monkeypatch: pytest.MonkeyPatch, port: str) -> None:
    monkeypatch.setenv("CLOISTER_BASE_URL", f"http://batch.acme.example:{port}/v1")
    monkeypatch.setenv("CLOISTER_API_KEY", "sk-x")
    assert "of CLOISTER_BASE_URL is none: it must look like" in doctor()["API"]


def test_with_a_cluster_named_no_server_of_this_machine_is_tried(doctor: Doctor) -> None:
    Path("cloister-data").mkdir()
    write_client_env(Path("cloister-data/client.env"), Client(base_url="http://127.0.0.1:9/v1", api_key="local"))
    assert "127.0.0.1:9" in doctor("--only", "api")["readiness"]
    told = doctor("--only", "api", "--context", "factory")
    assert told.results == {"API": "not_checked"}
    assert "set CLOISTER_BASE_URL and CLOISTER_API_KEY" in told["API"]
