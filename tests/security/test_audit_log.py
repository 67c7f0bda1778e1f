"""The audit log: every action is in it, attackers cannot fill it, and whoever changes it is noticed."""

import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import httpx
import psycopg
import pytest

from service.api_keys import Scope, create_api_key, list_api_keys, revoke_api_key
from service.audit.chain import Head, Verification, seal_entries, verify
from service.cli.app import main
from service.db import Pool
from service.projects import Project, create_project
from service.reconciler.sealing import MAX_ENTRIES, record_refused_logins
from tests.conftest import as_owner

FILE_NAME = "secret-merger-with-globex.jsonl"
LINE = b'{"custom_id":"a"}\n'


def entries(pool: Pool, project: Project) -> list[dict[str, Any]]:
    with pool.connection() as connection:
        return connection.execute("SELECT * FROM audit_log WHERE project_id = %s ORDER BY seq", [project.id]).fetchall()


def uploaded(http: httpx.Client) -> str:
    answer = http.post("/v1/files", files={"file": (FILE_NAME, LINE)}, data={"purpose": "batch"})
    return str(answer.json()["id"])


def created(http: httpx.Client, file_id: str) -> str:
    body = {"input_file_id": file_id, "endpoint": "/v1/chat/completions", "completion_window": "24h"}
    return str(http.post("/v1/batches", json=body | {"metadata": {"team": FILE_NAME}}).json()["id"])


def test_each_action_of_a_client_is_recorded_with_key_address_and_request(
    http: httpx.Client, api_pool: Pool, project: Project
) -> None:
    before = len(entries(api_pool, project))
    file_id = uploaded(http)
    batch_id = created(http, file_id)
    answers = [
        http.get(f"/v1/files/{file_id}/content"),
        http.post(f"/v1/batches/{batch_id}/pause"),
        http.post(f"/v1/batches/{batch_id}/resume"),
        http.get(f"/v1/batches/{batch_id}/results"),
        http.delete(f"/v1/files/{file_id}"),
        http.post(f"/v1/batches/{batch_id}/cancel"),
    ]
    found = entries(api_pool, project)[before:]
    assert [(row["type"], row["object_id"]) for row in found] == [
        ("file.created", file_id),
        ("batch.created", batch_id),
        ("file.downloaded", file_id),
        ("batch.paused", batch_id),
        ("batch.resumed", batch_id),
        ("batch.results_downloaded", batch_id),
        ("file.deletion_requested", file_id),
        ("batch.cancelled", batch_id),
    ]
    [key] = list_api_keys(api_pool, project_id=project.id)
    assert {(row["actor"], row["client_address"]) for row in found} == {(key.id, "127.0.0.1")}
    assert [row["request_id"] for row in found[2:]] == [answer.headers["x-request-id"] for answer in answers]
    assert FILE_NAME not in str(found)


def test_repeated_action_that_changes_nothing_is_not_recorded(
    http: httpx.Client, api_pool: Pool, project: Project
) -> None:
    batch_id = created(http, uploaded(http))
    for change in ("resume", "pause", "pause", "cancel", "cancel"):
        http.post(f"/v1/batches/{batch_id}/{change}")
    types = [row["type"] for row in entries(api_pool, project) if row["object_id"] == batch_id]
    assert types == ["batch.created", "batch.paused", "batch.cancelled"]


def test_unknown_file_id_of_a_batch_is_not_recorded(http: httpx.Client, api_pool: Pool, project: Project) -> None:
    created(http, "my prompt")
    assert "my prompt" not in str(entries(api_pool, project))


def refused(pool: Pool) -> list[dict[str, Any]]:
    """Let a few minutes pass, and return the entries of refused logins."""
    with pool.connection() as connection:
        connection.execute("UPDATE refused_logins SET minute = minute - interval '5 minutes'")
    record_refused_logins(pool)
    with pool.connection() as connection:
        return connection.execute("SELECT * FROM audit_log WHERE type = 'login.failed' ORDER BY seq").fetchall()


def test_refused_logins_of_a_minute_are_one_entry_for_each_reason(
    base_url: str, api_pool: Pool, project: Project, admin_key: str
) -> None:
    before = len(refused(api_pool))
    [admin] = list_api_keys(api_pool, project_id=project.id)
    revoked_key = create_api_key(api_pool, project_id=project.id, name="old", scopes=[Scope.READ])
    [_, revoked] = list_api_keys(api_pool, project_id=project.id)
    revoke_api_key(api_pool, revoked.id)
    for key, count in (("sk-cloister-guess", 7), (revoked_key, 3), (admin_key, 2)):
        for _ in range(count):
            httpx.get(f"{base_url}/v1/files", headers={"authorization": f"Bearer {key}"})
    found = refused(api_pool)[before:]
    assert {
        (row["data"]["error_code"], row["data"]["count"], row["object_id"], row["project_id"]) for row in found
    } == {
        ("unknown_key", 7, "unknown", None),
        ("revoked_key", 3, revoked.id, project.id),
        ("missing_scope", 2, admin.id, project.id),
    }
    assert {row["client_address"] for row in found} == {"127.0.0.1"}
    assert "guess" not in str(found)


def test_refused_logins_from_very_many_addresses_do_not_fill_the_log(pool: Pool) -> None:
    with pool.connection() as connection:
        connection.execute(
            "INSERT INTO refused_logins SELECT date_trunc('minute', now()), '10.0.0.' || n, 'unknown_key', '', NULL, n "
            "FROM generate_series(1, 5000) AS n"
        )
    found = refused(pool)
    assert len(found) == MAX_ENTRIES + 1
    assert sum(row["data"]["count"] for row in found) == 5_000 * 5_001 / 2
    assert found[-1]["data"]["error_code"] == "other_addresses"


@pytest.fixture
def sealed(pool: Pool) -> Pool:
    """Five sealed entries."""
    for number in range(5):
        create_project(pool, f"p{number}")
    assert seal_entries(pool) == 5
    return pool


def tamper(pool: Pool, *statements: str) -> None:
    """Change the log as a superuser who disables its triggers."""
    with psycopg.connect(as_owner(pool)) as superuser:
        superuser.execute("SET LOCAL session_replication_role = replica")
        for statement in statements:
            superuser.execute(statement)


def checked(pool: Pool, head: Head | None = None) -> Verification:
    assert seal_entries(pool) == 0
    return verify(pool, expected=head)


def test_untouched_log_is_intact(sealed: Pool) -> None:
    found = checked(sealed)
    assert (found.entries, found.unsealed, found.problem) == (5, 0, "")
    assert found.head is not None
    create_project(sealed, "later")
    assert verify(sealed, expected=found.head).unsealed == 1
    seal_entries(sealed)
    assert checked(sealed, Head.parse(str(found.head))).problem == ""


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        ("UPDATE audit_log SET operator = 'someone else' WHERE seq = 3", "the entry 3 (project.created"),
        ('UPDATE audit_log SET data = data || \'{"name": "x"}\' WHERE seq = 3', "the entry 3 (project.created"),
        ("UPDATE audit_log SET at = at - interval '1 us' WHERE seq = 3", "the entry 3 (project.created"),
        ("UPDATE audit_seals SET sha256 = sha256(sha256) WHERE seq = 3", "the entry 3 (project.created"),
        ("DELETE FROM audit_log WHERE seq = 3", "the entry 3 was deleted"),
        ("DELETE FROM audit_seals WHERE seq = 3", "1 seals before the entry 4 are missing"),
    ],
)
def test_changed_entry_is_found_although_the_trigger_was_disabled(sealed: Pool, change: str, problem: str) -> None:
    tamper(sealed, change)
    assert verify(sealed).problem.startswith(problem)


def test_entry_that_is_inserted_with_an_old_number_is_sealed_last(sealed: Pool) -> None:
    insertion = (
        "INSERT INTO audit_log (seq, project_id, actor, type, object_id) OVERRIDING SYSTEM VALUE "
        "VALUES (0, 'p', 'operator', 'project.created', 'p')"
    )
    with pytest.raises(psycopg.errors.InsufficientPrivilege), sealed.connection() as connection:
        connection.execute(insertion)
    tamper(sealed, insertion)
    assert seal_entries(sealed) == 1
    head = checked(sealed).head
    assert head is not None
    assert head.seq == 0


@pytest.mark.parametrize("is_rewritten", [False, True])
def test_truncated_or_rewritten_log_lacks_the_head_that_an_auditor_kept(sealed: Pool, *, is_rewritten: bool) -> None:
    head = checked(sealed).head
    if is_rewritten:
        tamper(sealed, "UPDATE audit_log SET operator = 'someone else' WHERE seq = 3", "DELETE FROM audit_seals")
        seal_entries(sealed)
    else:
        tamper(sealed, "DELETE FROM audit_log WHERE seq = 5", "DELETE FROM audit_seals WHERE seq = 5")
    assert checked(sealed).problem == ""
    assert checked(sealed, head).problem == f"the head {head} is not in the chain: the log was truncated or rewritten"


def test_verify_ends_with_an_error_if_the_log_is_broken(
    sealed: Pool, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("CLOISTER_DATABASE_URL", as_owner(sealed))
    with pytest.raises(SystemExit) as ended:
        main(["audit", "verify"])
    assert ended.value.code == 0
    printed = capsys.readouterr().out
    assert printed.startswith("5 entries are unchanged; head 5:")
    tamper(sealed, "UPDATE audit_log SET operator = 'someone else' WHERE seq = 2")
    with pytest.raises(SystemExit) as ended:
        main(["audit", "verify", "--head", printed.split()[-1]])
    assert ended.value.code == 1
    assert "broken after 1 good entries: the entry 2" in capsys.readouterr().err


@contextmanager
def uncommitted(pool: Pool) -> Iterator[None]:
    """Add an entry in a transaction that commits when the context ends."""
    with pool.connection() as connection:
        connection.execute(
            "INSERT INTO audit_log (project_id, actor, type, object_id) VALUES ('p', 'operator', 'late', 'p')"
        )
        yield


def test_entry_that_commits_late_is_sealed_after_those_that_overtook_it(pool: Pool) -> None:
    with uncommitted(pool):
        create_project(pool, "overtakes")
        assert seal_entries(pool) == 1
    assert seal_entries(pool) == 1
    found = checked(pool)
    assert (found.entries, found.unsealed, found.problem) == (2, 0, "")


def test_very_late_entry_is_found_by_a_search_of_the_whole_log(pool: Pool) -> None:
    with uncommitted(pool):
        with pool.connection() as connection:
            connection.execute(
                "INSERT INTO audit_log (project_id, actor, type, object_id) "
                "SELECT 'p', 'operator', 'early', 'p' FROM generate_series(1, 10500)"
            )
        while seal_entries(pool):
            pass
    assert seal_entries(pool) == 0
    assert seal_entries(pool, whole_log=True) == 1
    assert checked(pool).problem == ""


def test_services_add_entries_while_two_reconcilers_seal(pool: Pool) -> None:
    over = threading.Event()

    def seal() -> None:
        while not over.is_set():
            seal_entries(pool)

    with ThreadPoolExecutor(6) as executor:
        sealing = [executor.submit(seal) for _ in range(2)]
        list(executor.map(lambda number: create_project(pool, f"p{number}"), range(100)))
        over.set()
        for thread in sealing:
            thread.result()
    seal_entries(pool)
    found = checked(pool)
    assert (found.entries, found.problem) == (100, "")
