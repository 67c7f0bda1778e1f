"""Commands for the operator of a stack, on a real database."""

import json
import os
import pwd
import re
import socket
from collections.abc import Callable
from pathlib import Path

import pytest
from cryptography.fernet import Fernet
from typer.testing import CliRunner, Result

from service.api_keys import Scope, authenticate
from service.cli.app import app
from service.db import Pool
from service.errors import CloisterError

Run = Callable[..., str]


@pytest.fixture
def run(database_url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Run:
    """Run ``cloister``, expect it to succeed, and return its output."""
    monkeypatch.setenv("CLOISTER_DATABASE_URL", database_url)
    keys = tmp_path / "encryption-keys"
    keys.write_bytes(Fernet.generate_key())
    keys.chmod(0o600)
    monkeypatch.setenv("CLOISTER_ENCRYPTION_KEYS_FILE", str(keys))
    monkeypatch.setenv("COLUMNS", "200")  # wide enough for every line

    def succeed(*arguments: str) -> str:
        result = CliRunner().invoke(app, arguments, catch_exceptions=False)
        assert result.exit_code == 0, result.output
        return result.output

    return succeed


def refused(*arguments: str) -> Result:
    result = CliRunner().invoke(app, arguments)
    assert result.exit_code == 2
    return result


def test_key_is_shown_once_and_has_its_scopes(run: Run, pool: Pool) -> None:
    run("projects", "create", "research")
    key = run("keys", "create", "ci", "--project", "research", "--scope", "read", "--scope", "admin").strip()
    access = authenticate(pool, key)
    assert access is not None
    assert (access.project.name, access.scopes) == ("research", {Scope.READ, Scope.ADMIN})
    listed = run("keys", "list")
    assert key not in listed
    assert f"…{key[-4:]}" in listed
    assert "research  read,admin  valid  used " in listed
    assert "  default" not in listed


def test_key_reads_and_submits_in_the_default_project_by_default(run: Run, pool: Pool) -> None:
    access = authenticate(pool, run("keys", "create", "mine").strip())
    assert access is not None
    assert (access.project.name, access.scopes) == ("default", {Scope.READ, Scope.SUBMIT})


def test_list_of_keys_shows_their_states(run: Run, pool: Pool) -> None:
    run("projects", "create", "old")
    run("keys", "create", "a", "--project", "old")
    run("keys", "create", "b", "--expires-in", "30d")
    run("keys", "create", "c", "--expires-in", "1m")
    run("keys", "create", "d")
    run("projects", "archive", "old")
    with pool.connection() as connection:
        connection.execute("UPDATE api_keys SET expires_at = now() WHERE name = 'c'")
    key_id = run("keys", "list").splitlines()[-1].split()[0]
    assert run("keys", "revoke", key_id) == f"revoked {key_id}\n"
    states = [
        re.findall(r"(project archived|valid until|expired|revoked)", line) for line in run("keys", "list").splitlines()
    ]
    assert states == [["project archived"], ["valid until"], ["expired"], ["revoked"]]
    assert len(run("keys", "list", "--project", "old").splitlines()) == 1


def test_list_of_keys_shows_use_and_the_end_of_the_maximum_lifetime(
    run: Run, pool: Pool, monkeypatch: pytest.MonkeyPatch
) -> None:
    authenticate(pool, run("keys", "create", "used").strip())
    run("keys", "create", "idle")
    used, idle = run("keys", "list").splitlines()
    assert "  valid  used 20" in used
    assert "  valid  never used  idle" in idle
    monkeypatch.setenv("CLOISTER_MAX_KEY_DAYS", "90")
    assert "  valid until 20" in run("keys", "list").splitlines()[0]


def test_project_is_listed_with_its_limits_and_use(run: Run, pool: Pool) -> None:
    project_id = run(
        "projects", "create", "research", "--max-enqueued-requests", "5000", "--retention-days", "7"
    ).strip()
    values = {"id": project_id}
    with pool.connection() as connection:
        connection.execute(
            "INSERT INTO files (id, project_id, purpose, filename, size_bytes, sha256)"
            " VALUES ('file-1', %(id)s, 'batch', 'a', 4000, '')",
            values,
        )
        connection.execute(
            "INSERT INTO batches (id, project_id, endpoint, input_file_id, completion_window, request_sha256,"
            " expires_at, enqueued_requests, enqueued_tokens)"
            " VALUES ('batch_1', %(id)s, '/v1/completions', 'file-1', '24h', '', now(), 1200, 1000)",
            values,
        )
    listed = re.sub(" +", " ", run("projects", "list"))
    assert f"research {project_id} since" in listed
    for line in (
        "batches in progress 1 of no limit",
        "enqueued requests 1,200 of 5,000",
        "enqueued tokens 1,000 of no limit",
        "stored bytes 4,000 of no limit",
        "retention 7 days",
    ):
        assert f" {line}\n" in listed


def test_limits_are_changed_and_removed(run: Run) -> None:
    run("projects", "create", "a", "--max-stored-bytes", "100", "--max-enqueued-tokens", "7", "--retention-days", "3")
    run("projects", "set", "a", "--max-stored-bytes", "200", "--retention-days", "none")
    listed = run("projects", "list")
    assert "0 of 200" in listed
    assert "0 of 7" in listed
    assert "default of the stack" in listed
    run("projects", "set", "a", "--max-stored-bytes", "none")
    assert "0 of 200" not in run("projects", "list")


@pytest.mark.parametrize(
    ("arguments", "hint"),
    [
        (("projects", "set", "default"), "at least one limit"),
        (("projects", "create", "x", "--max-stored-bytes", "-1"), "nor none"),
        (("projects", "create", "x", "--max-batches-in-progress", "2147483648"), "nor none"),
        (("projects", "create", "x", "--retention-days", "0"), "from 1 to 3650"),
        (("keys", "create", "x", "--expires-in", "soon"), "30d"),
        (("keys", "create", "x", "--scope", "all"), "submit"),
        (("audit", "--since", "yesterday"), "30d"),
    ],
)
@pytest.mark.usefixtures("run")
def test_invalid_argument_is_reported(arguments: tuple[str, ...], hint: str) -> None:
    assert hint in refused(*arguments).output


@pytest.mark.parametrize(
    "arguments",
    [
        ("keys", "create", "x", "--project", "none"),
        ("keys", "revoke", "key_none"),
        ("projects", "archive", "none"),
        ("projects", "create", "default"),
        ("keys", "list", "--project", "none"),
        ("audit", "--project", "none"),
    ],
)
def test_missing_and_duplicate_objects_are_reported(run: Run, arguments: tuple[str, ...]) -> None:
    run("keys", "create", "x")
    with pytest.raises(CloisterError, match=r"there is no (project|key)|already exists"):
        run(*arguments)


@pytest.mark.parametrize("name", ["", " ", "a\nb", "n" * 101, "proj_x"])
def test_invalid_project_name_is_refused(run: Run, name: str) -> None:
    with pytest.raises(CloisterError, match="is not a valid project name"):
        run("projects", "create", name)


def test_archived_project_gets_no_keys_and_the_default_project_cannot_be_archived(run: Run) -> None:
    run("projects", "create", "a")
    assert run("projects", "archive", "a") == run("projects", "archive", "a") == "archived a\n"
    with pytest.raises(CloisterError, match="archived"):
        run("keys", "create", "x", "--project", "a")
    run("keys", "create", "x")
    with pytest.raises(CloisterError, match="cannot be archived"):
        run("projects", "archive", "default")


def test_unreachable_database_is_reported(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CLOISTER_DATABASE_URL", "postgresql://nobody@127.0.0.1:9/none?connect_timeout=1")
    with pytest.raises(CloisterError, match="CLOISTER_DATABASE_URL names does not answer"):
        run("projects", "list")


def test_audit_log_has_every_change(run: Run) -> None:
    run("projects", "create", "a", "--max-stored-bytes", "100")
    key = run("keys", "create", "k", "--project", "a").strip()
    key_id = run("keys", "list").split()[0]
    run("keys", "revoke", key_id)
    run("projects", "set", "a", "--max-stored-bytes", "none")
    run("projects", "archive", "a")
    records = [json.loads(line) for line in run("audit", "--json").splitlines()]
    assert [record["type"] for record in records] == [
        "project.created", "api_key.created", "api_key.deleted", "project.updated", "project.archived"
    ]  # fmt: skip
    assert {record["actor"] for record in records} == {"operator"}
    assert [record["data"] for record in records[::3]] == [
        {"name": "a", "max_stored_bytes": 100}, {"max_stored_bytes": None}
    ]  # fmt: skip
    assert key not in run("audit")


def test_audit_log_names_the_operator(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    run("projects", "create", "a", "--operator", "ada")
    monkeypatch.setenv("CLOISTER_OPERATOR", "grace")
    run("keys", "create", "k", "--project", "a")
    run("webhooks", "create", "https://hooks.example/", "--project", "a")
    monkeypatch.delenv("CLOISTER_OPERATOR")
    run("projects", "archive", "a")
    records = [json.loads(line) for line in run("audit", "list", "--json").splitlines()]
    user = pwd.getpwuid(os.geteuid()).pw_name
    assert [record["operator"] for record in records] == ["ada", "grace", "grace", f"{user}@{socket.gethostname()}"]
    assert {record["actor"] for record in records} == {"operator"}
    assert "a  operator ada  project.created" in run("audit")


def test_audit_log_is_filtered_by_project_and_time(run: Run, pool: Pool) -> None:
    run("projects", "create", "a")
    run("projects", "create", "b")
    with pool.connection() as connection:
        connection.execute(
            "INSERT INTO audit_log (at, project_id, actor, type, object_id, object_seq, size_bytes, sha256)"
            " VALUES ('2020-01-01', 'proj_gone', 'retention', 'file.deleted', 'file-1', 1, 5, '\\x00ff')"
        )
    assert len(run("audit").splitlines()) == 3
    assert len(run("audit", "--project", "b").splitlines()) == 1
    assert (
        len(run("audit", "--since", "1d").splitlines()) == len(run("audit", "--since", "2020-01-02").splitlines()) == 2
    )
    (line,) = [line for line in run("audit").splitlines() if "file-1" in line]
    assert "proj_gone  retention  file.deleted  file-1  5 bytes, SHA-256 00ff" in line


@pytest.mark.usefixtures("run")
def test_operator_cannot_forge_a_line_of_the_log() -> None:
    assert "printable characters" in refused("projects", "create", "a", "--operator", "ada\n2026-01-01").output


def test_options_of_the_audit_log_belong_to_its_command() -> None:
    assert "give the options after" in refused("audit", "--data-dir", "elsewhere", "verify").output
