"""Models that operators push, enable and disable while the stack runs: command line, API and reconciler."""

import dataclasses
import json
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psycopg
import pytest
from fastapi.testclient import TestClient
from typer.testing import CliRunner

from ray_job.contract.object_keys import model_prefix
from service import models_at_run_time
from service.api.app import create_app
from service.api_keys import create_api_key
from service.backends import Backends, Slots
from service.cli.app import app
from service.db import Pool, open_pool
from service.errors import CloisterError
from service.model_catalogue import parse_catalogue_file
from service.models_at_run_time import LiveCatalogue
from service.projects import ensure_default_project
from tests.integration.reconciler_harness import SUCCEEDED, Stack, line
from tests.model_directories import model_directory

Run = Callable[..., str]
ALLOWED: dict[str, Any] = {
    "models": [{"id": "demo", "source": "x"}],
    "models_at_run_time": {"allow": True, "accelerators": ["cpu", "a10g"]},
}


@pytest.fixture(autouse=True)
def _immediate(monkeypatch: pytest.MonkeyPatch) -> None:
    """Read the enabled models at each use."""
    monkeypatch.setattr(models_at_run_time, "REFRESH_INTERVAL_S", 0)


@pytest.fixture
def run(database_url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Run:
    """Run ``cloister models``, expect it to succeed, and return what it prints on stdout."""
    (tmp_path / "models.yaml").write_text(json.dumps(ALLOWED))
    monkeypatch.setenv("CLOISTER_DATABASE_URL", database_url)
    monkeypatch.setenv("CLOISTER_OBJECT_STORE", (tmp_path / "objects").as_uri())
    monkeypatch.setenv("CLOISTER_MODELS", str(tmp_path / "models.yaml"))

    def succeed(*arguments: str) -> str:
        result = CliRunner().invoke(app, ["models", *arguments], catch_exceptions=False)
        assert result.exit_code == 0, result.output
        return result.stdout

    return succeed


@pytest.fixture
def digest(run: Run, tmp_path: Path) -> str:
    """The digest of a pushed model, ``tiny``."""
    return run("push", str(model_directory(tmp_path / "tiny")), "--license", "Apache-2.0").strip()


@pytest.fixture
def live(stack: Stack) -> Stack:
    """A reconciler that offers the models that are enabled."""
    catalogue = LiveCatalogue(parse_catalogue_file(ALLOWED), stack.pool)
    stack.backends = dataclasses.replace(stack.backends, catalogue=catalogue, slots=Slots(default=2))
    return stack


@pytest.fixture
def http(pool: Pool, stack: Stack) -> Iterator[TestClient]:
    """The API of another process."""
    key = create_api_key(pool, project_id=ensure_default_project(pool).id, name="test")
    catalogue = LiveCatalogue(parse_catalogue_file(ALLOWED), pool)
    backends = Backends(pool=pool, store=stack.store, catalogue=catalogue)
    with TestClient(create_app(backends), headers={"authorization": f"Bearer {key}"}) as opened:
        yield opened


def offered(http: TestClient) -> list[str]:
    return [model["id"] for model in http.get("/v1/models").json()["data"]]


def test_pushed_model_is_listed_shown_verified_and_removed(run: Run, digest: str) -> None:
    assert f"tiny  {digest}  0.00 GiB  100 parameters  float16  Apache-2.0" in run("list")
    shown = run("show", "tiny")
    assert "architecture     LlamaForCausalLM" in shown
    assert "model.safetensors" in shown
    assert run("verify") == run("verify", digest) == f"{digest}  unchanged\n"
    assert run("rm", "tiny") == f"deleted {digest}, 4 objects\n"
    assert run("list") == ""


def test_repeated_push_sends_nothing_and_shows_its_progress_on_stderr(digest: str, tmp_path: Path) -> None:
    result = CliRunner().invoke(app, ["models", "push", str(tmp_path / "tiny"), "--license", "Apache-2.0"])
    assert result.stdout == f"{digest}\n"
    assert "sent 0 files; 3 were in the object store" in result.stderr


def test_verification_finds_a_changed_file(digest: str, tmp_path: Path) -> None:
    (tmp_path / "objects" / model_prefix(digest) / "config.json").write_text("{}")
    result = CliRunner().invoke(app, ["models", "verify"])
    assert isinstance(result.exception, CloisterError)
    assert "config.json has the SHA-256 44136fa355b3678a" in result.stdout


def test_enabled_model_is_offered_by_running_processes_until_it_is_disabled(
    run: Run, digest: str, http: TestClient
) -> None:
    assert offered(http) == ["demo"]
    run("enable", "tiny", "--digest", digest, "--accelerator", "cpu")
    assert offered(http) == ["demo", "tiny"]
    assert f"enabled  tiny  {digest}  cpu  {{}}" in run("list")
    run("disable", "tiny")
    assert offered(http) == ["demo"]
    assert http.get("/v1/models/tiny").status_code == 404


def test_batch_of_an_enabled_model_runs_with_its_digest(run: Run, digest: str, live: Stack) -> None:
    live.create(line(1, model="tiny"))
    live.advance()
    assert live.errors()[0]["code"] == "model_not_found"
    run("enable", "tiny", "--digest", digest, "--accelerator", "cpu", "--engine-arg", "max_model_len=512")
    live.started(line(1, model="tiny"), batch_id="batch_2")
    (launched,) = live.launcher.launched
    assert (launched.model.digest, launched.model.source) == (digest, f"/models/{digest.removeprefix('sha256:')}")
    assert launched.model.engine_args == {"max_model_len": 512}
    assert [job["model_digest"] for job in live.jobs()] == [digest]


def test_model_with_open_batches_is_changed_and_disabled_by_force_only(run: Run, digest: str, live: Stack) -> None:
    run("enable", "tiny", "--digest", digest, "--accelerator", "cpu")
    live.started(line(1, model="tiny"))
    for arguments in (("disable", "tiny"), ("enable", "tiny", "--digest", digest, "--accelerator", "a10g")):
        with pytest.raises(CloisterError, match=r"1 open batch\(es\) use the model 'tiny'.*--force"):
            run(*arguments)
    run("enable", "tiny", "--digest", digest, "--accelerator", "a10g", "--force")
    run("disable", "tiny", "--force")
    assert live.advance()["status"] == "in_progress"
    assert live.advance()["status"] == "failed"
    assert live.errors()[0]["code"] == "model_not_found"


def test_model_in_use_is_not_removed(run: Run, digest: str, live: Stack, tmp_path: Path) -> None:
    run("enable", "tiny", "--digest", digest, "--accelerator", "cpu")
    with pytest.raises(CloisterError, match="is in use by the model tiny: disable it"):
        run("rm", "tiny")
    job = live.started(line(1, model="tiny"))
    run("disable", "tiny", "--force")
    with pytest.raises(CloisterError, match=f"is in use by the job {job.id}"):
        run("rm", digest)
    live.advance()
    live.launcher.end(job.id, SUCCEEDED)
    live.advance_jobs()
    (tmp_path / "models.yaml").write_text(json.dumps({"models": [{"id": "pinned", "digest": digest}]}))
    with pytest.raises(CloisterError, match="is in use by the model pinned"):
        run("rm", digest)
    (tmp_path / "models.yaml").write_text(json.dumps(ALLOWED))
    run("rm", digest)
    assert live.advance()["status"] == "failed"


@pytest.mark.parametrize(
    ("file", "arguments", "problem"),
    [
        ({"models_at_run_time": {}}, (), "serves the models of its stack file only"),
        ({}, ("--accelerator", "l4"), "accelerators allows cpu, a10g, not 'l4'"),
        ({"models": [{"id": "tiny", "source": "y"}]}, (), "the stack file has a model 'tiny', whose name wins"),
        ({}, ("--digest", f"sha256:{'0' * 64}"), r"cannot be used: it has no manifest\.json"),
        ({}, ("--digest", "latest"), "digest: string should match pattern"),
        ({}, ("--engine-arg", "trust_remote_code=true"), "engine_args.trust_remote_code:"),
        ({}, ("--engine-arg", "model=other"), "engine_args.model: set source of the model instead"),
        ({}, ("--accelerator", "a10g", "--engine-arg", "gpu_memory_utilization=0.1"), "does not fit a10g: 0.0 GiB of"),
    ],
)
def test_model_that_the_stack_does_not_allow_is_refused(
    run: Run, digest: str, file: dict[str, Any], arguments: tuple[str, ...], problem: str
) -> None:
    Path(os.environ["CLOISTER_MODELS"]).write_text(json.dumps(ALLOWED | file))
    with pytest.raises(CloisterError, match=problem):
        run("enable", "tiny", "--digest", digest, "--accelerator", "cpu", *arguments)
    assert "enabled" not in run("list")


@pytest.mark.parametrize(
    "file",
    [
        {"models": [{"id": "demo", "source": "x"}, {"id": "tiny", "source": "own"}]},
        {"models_at_run_time": {"allow": False}},
        {"models_at_run_time": {"allow": True, "accelerators": ["a10g"]}},
    ],
)
def test_rows_count_only_as_far_as_the_stack_file_of_a_process_allows(
    run: Run, digest: str, pool: Pool, file: dict[str, Any]
) -> None:
    run("enable", "tiny", "--digest", digest, "--accelerator", "cpu")
    parsed = parse_catalogue_file(ALLOWED | file)
    assert dict(LiveCatalogue(parsed, pool)) == dict(parsed.models)


def test_last_models_count_while_the_database_is_unreachable(run: Run, digest: str, database_url: str) -> None:
    run("enable", "tiny", "--digest", digest, "--accelerator", "cpu")
    with open_pool(database_url) as opened:
        catalogue = LiveCatalogue(parse_catalogue_file(ALLOWED), opened)
        assert list(catalogue) == ["demo", "tiny"]
    assert list(catalogue) == ["demo", "tiny"]


def test_models_are_not_missing_before_the_database_was_reached(database_url: str) -> None:
    with open_pool(database_url) as closed:
        pass
    with pytest.raises(psycopg.OperationalError):
        "tiny" in LiveCatalogue(parse_catalogue_file(ALLOWED), closed)  # noqa: B015


def test_changes_are_in_the_audit_log(run: Run, digest: str) -> None:
    run("enable", "tiny", "--digest", digest, "--accelerator", "cpu", "--operator", "ada")
    run("enable", "tiny", "--digest", digest, "--accelerator", "cpu", "--operator", "ada")
    run("disable", "tiny", "--operator", "ada")
    run("rm", digest, "--operator", "ada")
    listed = CliRunner().invoke(app, ["audit", "list", "--json"], catch_exceptions=False).stdout
    entries = [json.loads(each) for each in listed.splitlines()]
    assert [(each["type"], each["operator"], each["object_id"]) for each in entries] == [
        ("model.enabled", "ada", "tiny"),
        ("model.disabled", "ada", "tiny"),
        ("model.deleted", "ada", digest),
    ]
    assert entries[0]["data"] == {"accelerator": "cpu", "digest": digest, "engine_args": {}}


@pytest.mark.parametrize(
    ("arguments", "problem"),
    [(("--name", "a\nb"), "printable characters"), (("--license", "<none>"), "is not an SPDX expression")],
)
@pytest.mark.usefixtures("run")
def test_invalid_option_of_a_push_is_reported(tmp_path: Path, arguments: tuple[str, ...], problem: str) -> None:
    result = CliRunner().invoke(app, ["models", "push", str(tmp_path), *arguments])
    assert result.exit_code == 2
    assert problem in result.output
