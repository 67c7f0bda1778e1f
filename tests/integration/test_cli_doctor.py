"""``cloister doctor`` inside a stack and through its API: real Postgres, a real S3 server, the real API."""

import dataclasses
import json
import os
import socket
import threading
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import openai
import psycopg
import pytest
import structlog
from moto.server import ThreadedMotoServer

from ray_job.contract.job_spec import JobSpec, ModelSpec
from ray_job.contract.lines import response_line
from ray_job.contract.object_keys import part_key
from ray_job.contract.parts import PartRow, Usage, encode_part, part_id
from service.adapters.directory_object_store import DirectoryObjectStore
from service.adapters.s3_object_store import S3ObjectStore, open_s3_client
from service.api_keys import create_api_key
from service.cli import main
from service.cli.doctor.api import Trial, api_findings
from service.cli.doctor.findings import Result
from service.cli.doctor.network import Way, way_to
from service.cli.doctor.object_store import SIZE_BYTES
from service.db import Pool
from service.model_catalogue import Catalogue, CatalogueModel
from service.ports import JobStatus
from service.projects import create_project
from service.settings import parse_object_store_url
from tests.contract.kubernetes_stand_in import kubeconfig as stand_in_kubeconfig
from tests.contract.kubernetes_stand_in import kubernetes_stand_in
from tests.integration.reconciler_harness import SUCCEEDED, Stack, commit, looping
from tests.integration.test_cli_batches import serving

Doctor = Callable[..., "Told"]
ROLE = "doctor_job"


class Told:
    """What the doctor told, and how it ended."""

    def __init__(self, code: int, out: str) -> None:
        self.code, self.out = code, out
        self.records: list[dict[str, str]] = [json.loads(line) for line in out.splitlines()]

    def __getitem__(self, check: str) -> str:
        return "\n".join(f"{each['result']}: {each['message']}" for each in self.records if each["check"] == check)

    @property
    def results(self) -> dict[str, str]:
        return {each["check"]: each["result"] for each in self.records}


@pytest.fixture
def doctor(capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Doctor:
    """Runs the command in this process, in an empty directory and without a setting."""
    for name in [*os.environ]:
        if name.startswith(("CLOISTER_", "OPENAI_", "KUBERNETES_", "AWS_")):
            monkeypatch.delenv(name)
    shell = tmp_path / "shell"
    shell.mkdir()
    monkeypatch.chdir(shell)

    def run(*arguments: str) -> Told:
        with pytest.raises(SystemExit) as ended:
            main(["doctor", *arguments, "--json"])
        return Told(int(ended.value.code or 0), capsys.readouterr().out)

    return run


@pytest.fixture
def job_role(database_url: str) -> Iterator[str]:
    with psycopg.connect(database_url, autocommit=True) as connection:
        connection.execute(f"CREATE ROLE {ROLE} LOGIN")
        connection.execute(f"GRANT EXECUTE ON FUNCTION report_progress TO {ROLE}")
        yield ROLE
        connection.execute(f"DROP OWNED BY {ROLE}")
        connection.execute(f"DROP ROLE {ROLE}")


@pytest.fixture
def settings(
    doctor: Doctor, job_role: str, database_url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Callable[..., None]:
    """Those of a stack on this machine; call it to change some."""
    del doctor
    (tmp_path / "models.yaml").write_text("models: [{id: demo, source: /models/demo}]")

    def change(**changed: str) -> None:
        for name, value in changed.items():
            monkeypatch.setenv(f"CLOISTER_{name}", value)

    job_database_url = database_url.replace("postgresql://postgres:@", f"postgresql://{job_role}@")
    change(
        DATABASE_URL=database_url,
        JOB_DATABASE_URL=job_database_url,
        OBJECT_STORE=(tmp_path / "objects").as_uri(),
        MODELS=str(tmp_path / "models.yaml"),
    )
    return change


@pytest.fixture
def s3(monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    server = ThreadedMotoServer("127.0.0.1", 0, verbose=False)
    server.start()
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "test")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "not-to-be-told")
    host, port = server.get_host_and_port()
    yield f"http://{host}:{port}"
    server.stop()


@pytest.mark.usefixtures("settings")
def test_a_stack_that_is_right_has_no_failure(doctor: Doctor, tmp_path: Path) -> None:
    told = doctor()
    assert told.code == 0, told.out
    assert told.results == {
        "cluster": "not_checked",
        "database": "ok",
        "migrations": "ok",
        "database role of jobs": "ok",
        "object store": "ok",
        "models": "ok",
        "launcher": "not_checked",
        "network policies": "not_checked",
        "API": "not_checked",
    }
    assert "PostgreSQL" in told["database"]
    assert list(DirectoryObjectStore(tmp_path / "objects").keys("")) == []


def test_nothing_to_look_at_is_no_success(doctor: Doctor) -> None:
    told = doctor()
    assert told.code == 1
    assert set(told.results.values()) == {"not_checked"}


def test_settings_that_are_wrong_are_all_told(doctor: Doctor, settings: Callable[..., None]) -> None:
    settings(DATABASE_URL="", MAX_RUNNING_JOBS="many")
    told = doctor()
    assert told.code == 1
    assert "CLOISTER_DATABASE_URL is not set" in told["settings"]
    assert "CLOISTER_MAX_RUNNING_JOBS" in told["settings"]


def test_a_database_that_refuses_is_told_by_its_setting_and_without_the_password(
    doctor: Doctor, settings: Callable[..., None], database_url: str
) -> None:
    settings(DATABASE_URL=database_url.replace("postgres:@", "nobody:not-to-be-told@"))
    told = doctor()
    assert told["database"].startswith("failed: CLOISTER_DATABASE_URL: ")
    assert 'role "nobody" does not exist' in told["database"]
    assert "not-to-be-told" not in told.out
    assert told.results["object store"] == "ok"


def test_a_database_that_is_not_there_is_told(doctor: Doctor, settings: Callable[..., None]) -> None:
    settings(DATABASE_URL="postgresql://cloister@127.0.0.1:9/none")
    assert "Connection refused" in doctor()["database"]


@pytest.mark.usefixtures("settings")
def test_a_migration_that_has_not_run_is_told(doctor: Doctor, pool: Pool) -> None:
    with pool.connection() as connection:
        connection.execute("DELETE FROM migrations WHERE name LIKE '0002%'")
    assert doctor()["migrations"].startswith("failed: these have not run: 0002_")
    with pool.connection() as connection:
        connection.execute("DROP TABLE migrations")
    assert "0001_initial" in doctor()["migrations"]


@pytest.mark.usefixtures("settings")
@pytest.mark.parametrize(
    ("statement", "excess"),
    [
        ("GRANT SELECT ON batches TO doctor_job", "table batches"),
        ("GRANT UPDATE (name) ON projects TO doctor_job", "table projects"),
        ("GRANT SELECT ON files TO PUBLIC", "table files"),
        ("GRANT CREATE ON SCHEMA public TO doctor_job", "CREATE in the schema public"),
        ("ALTER ROLE doctor_job CREATEDB", "the role is a CREATEDB"),
        ("GRANT pg_monitor TO doctor_job", "member of pg_monitor"),
    ],
)
def test_a_job_role_that_may_do_more_is_told(doctor: Doctor, pool: Pool, statement: str, excess: str) -> None:
    with pool.connection() as connection:
        connection.execute(statement)
    assert f"failed: doctor_job may do more than report progress: {excess}" in doctor()["database role of jobs"]


@pytest.mark.usefixtures("settings")
def test_a_job_role_that_cannot_report_is_told(doctor: Doctor, pool: Pool) -> None:
    with pool.connection() as connection:
        connection.execute("REVOKE EXECUTE ON FUNCTION report_progress FROM doctor_job")
    assert "may not execute report_progress" in doctor()["database role of jobs"]


def test_an_s3_store_is_tried_in_parts_and_left_empty(doctor: Doctor, settings: Callable[..., None], s3: str) -> None:
    location = parse_object_store_url(f"s3://bucket/a/b?endpoint_url={s3}&region=us-east-1")
    client = open_s3_client(location)
    client.create_bucket(Bucket="bucket")
    settings(OBJECT_STORE=f"s3://bucket/a/b?endpoint_url={s3}&region=us-east-1")
    assert doctor()["object store"] == (
        f"ok: s3://bucket/a/b at {s3}: an object of {SIZE_BYTES >> 20} MiB written, listed, read and deleted"
    )
    assert list(S3ObjectStore(location, client).keys("")) == []
    client.close()


def test_a_bucket_that_is_missing_is_told(doctor: Doctor, settings: Callable[..., None], s3: str) -> None:
    settings(OBJECT_STORE=f"s3://nowhere/a?endpoint_url={s3}&region=us-east-1")
    told = doctor()
    assert told["object store"].startswith(f"failed: CLOISTER_OBJECT_STORE, s3://nowhere/a at {s3}: ")
    assert "there is no such bucket" in told["object store"]
    assert "not-to-be-told" not in told.out


@pytest.mark.usefixtures("s3")
def test_a_store_that_does_not_answer_is_told(doctor: Doctor, settings: Callable[..., None]) -> None:
    settings(OBJECT_STORE="s3://bucket/a?endpoint_url=http://127.0.0.1:9&region=us-east-1")
    assert "a network policy lets this pod reach it" in doctor()["object store"]


def test_a_name_that_leads_nowhere_is_told(doctor: Doctor, settings: Callable[..., None]) -> None:
    settings(DATABASE_URL="postgresql://cloister@database.invalid/cloister?connect_timeout=2")
    assert doctor()["DNS"].startswith("failed: database.invalid (CLOISTER_DATABASE_URL): ")


def test_rights_that_cannot_even_be_asked_for_are_not_checked(
    doctor: Doctor, settings: Callable[..., None], tmp_path: Path
) -> None:
    (tmp_path / "templates").mkdir()
    with kubernetes_stand_in("b81c") as server:
        (tmp_path / "kubeconfig").write_text(stand_in_kubeconfig(server, "b81c"))
        server.cluster.refusals["create"] = (403, "no")
        settings(
            LAUNCHER="kuberay",
            KUBERNETES_NAMESPACE="jobs",
            RAY_JOB_TEMPLATES=str(tmp_path / "templates"),
            KUBECONFIG=str(tmp_path / "kubeconfig"),
        )
        told = doctor("--only", "pod")
    assert told.results["launcher"] == "not_checked"


def test_a_ray_that_does_not_answer_is_told(doctor: Doctor, settings: Callable[..., None]) -> None:
    settings(LAUNCHER="ray_jobs", RAY_ADDRESS="http://127.0.0.1:9")
    assert doctor()["launcher"].startswith("failed: CLOISTER_RAY_ADDRESS: ")


def test_ways_are_told_apart() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        assert way_to("127.0.0.1", port) == Way.OPEN
    assert way_to("127.0.0.1", port) == Way.REFUSED
    assert way_to("api.invalid", port) == Way.NO_NAME


def test_a_service_that_no_policy_shuts_is_told(
    doctor: Doctor, settings: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    settings(LOG_LEVEL="info")
    with socket.create_server(("127.0.0.1", 0)) as server:
        monkeypatch.setenv("KUBERNETES_SERVICE_HOST", "127.0.0.1")
        monkeypatch.setenv("KUBERNETES_SERVICE_PORT", str(server.getsockname()[1]))
        assert "network policies are not enforced" in doctor()["network policies"]


# Through the API


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


class Somebody(BaseHTTPRequestHandler):
    """Another server with OpenAI's API."""

    def do_GET(self) -> None:
        body = b'{"object": "list", "data": [{"id": "m", "object": "model", "created": 1, "owned_by": "somebody"}]}'
        self.send_response(200)
        self.send_header("content-type", "application/json")
        self.send_header("content-length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: Any) -> None:
        pass


def test_a_server_that_is_none_of_ours_gets_no_batch(doctor: Doctor, monkeypatch: pytest.MonkeyPatch) -> None:
    with ThreadingHTTPServer(("127.0.0.1", 0), Somebody) as other:
        thread = threading.Thread(target=other.serve_forever, args=(0.05,))
        thread.start()
        monkeypatch.setenv("OPENAI_BASE_URL", f"http://127.0.0.1:{other.server_address[1]}/v1")
        monkeypatch.setenv("OPENAI_API_KEY", "sk-not-to-be-told")
        told = doctor()  # a request that is not a GET would end in 501
        other.shutdown()
        thread.join()
    assert "is no cloister" in told["models"]
    assert told.results["batches"] == "not_checked"
    assert "not-to-be-told" not in told.out


# By kubectl

KUBECTL = """#!/bin/sh
echo "$@" >>"{directory}/calls"
cat "{directory}/answer"
cat "{directory}/error" >&2
"""


@pytest.fixture
def kubectl(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The directory of a kubectl that notes how it is called and answers what a file says."""
    program = tmp_path / "kubectl"
    program.write_text(KUBECTL.format(directory=tmp_path))
    program.chmod(0o755)
    for name in ("answer", "error"):
        (tmp_path / name).touch()
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    return tmp_path


def test_in_the_pods_the_doctor_is_run_by_kubectl(doctor: Doctor, kubectl: Path) -> None:
    record = {"from": "in a pod of the stack", "check": "database", "result": "failed", "message": "gone"}
    (kubectl / "answer").write_text(json.dumps(record) + "\n")
    told = doctor("--only", "pod", "--context", "factory", "--namespace", "cloister-acme-prod")
    assert [(each["from"], each["message"]) for each in told.records] == [
        ("in a pod of reconciler", "gone"), ("in a pod of api", "gone")
    ]  # fmt: skip
    assert (kubectl / "calls").read_text().splitlines() == [
        f"--context factory --namespace cloister-acme-prod exec deploy/{name} --container {name} -- "
        "cloister doctor --only pod --json"
        for name in ("reconciler", "api")
    ]


def test_a_pod_that_kubectl_cannot_enter_is_told_with_its_reason(doctor: Doctor, kubectl: Path) -> None:
    (kubectl / "error").write_text("error: unable to upgrade connection: Forbidden")
    told = doctor("--only", "pod", "--context", "factory", "--namespace", "cloister-acme-prod")
    assert "unable to upgrade connection: Forbidden" in told["doctor in the pod"]


def test_without_kubectl_the_command_is_told(doctor: Doctor, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "/nowhere")
    told = doctor("--only", "pod", "--context", "factory", "--namespace", "cloister-acme-prod")
    assert "kubectl --context factory --namespace cloister-acme-prod exec deploy/api" in told["stack"]


@pytest.mark.usefixtures("kubectl")
def test_a_context_that_is_not_there_is_told_with_those_that_are(doctor: Doctor, tmp_path: Path) -> None:
    with kubernetes_stand_in("b81c") as server:
        (tmp_path / "kubeconfig").write_text(stand_in_kubeconfig(server, "b81c"))
        told = doctor("--kubeconfig", str(tmp_path / "kubeconfig"), "--context", "nope", "--only", "cluster")
    assert told["kubeconfig"].endswith("it has no context 'nope'. It has: stand-in")
    assert "there is no such file" in doctor("--kubeconfig", "/nowhere", "--only", "cluster")["kubeconfig"]


def test_a_cluster_that_does_not_answer_is_told_once(doctor: Doctor, tmp_path: Path) -> None:
    with kubernetes_stand_in("b81c") as server:
        (tmp_path / "kubeconfig").write_text(stand_in_kubeconfig(server, "b81c"))
    told = doctor("--kubeconfig", str(tmp_path / "kubeconfig"), "--only", "cluster")
    assert told.results == {"Kubernetes": "failed", "everything else in the cluster": "not_checked"}
    assert "Connection refused" in told["Kubernetes"]
