"""Deleted content is gone, and each deletion has a signed receipt."""

import contextlib
import hashlib
import itertools
import json
import os
import secrets
from datetime import UTC, datetime
from pathlib import Path
from threading import Event
from typing import Any, LiteralString

import httpx
import openai
import psycopg
import pytest

from ray_job.contract.object_keys import batch_prefix, file_key, new_part_key, plan_key
from service.adapters.directory_object_store import DirectoryObjectStore
from service.adapters.memory_object_store import MemoryObjectStore
from service.api_keys import create_api_key
from service.audit.chain import newest_head, seal_entries
from service.audit.log import OPERATOR
from service.backends import Backends
from service.cli.app import main
from service.compose import open_backends
from service.db import Pool
from service.errors import ObjectStoreError, SettingsError
from service.projects import Project, create_project, erase_project, erasure_progress, find_project
from service.receipts import Receipt, ReceiptError, read_key, verify
from service.reconciler import orphans
from service.reconciler.orphans import search
from service.reconciler.records import load_batch
from service.reconciler.retention import sweep
from service.settings import read_settings
from service.signing import public_pem
from service.webhooks import EventType, create_endpoint
from tests.conftest import as_owner
from tests.integration.reconciler_harness import BATCH, KEYS, SUCCEEDED, Stack, line

SECRET = "violet-otter"
DAY_S = 24 * 3600


def age(stack: Stack, *keys: str, hours: int = 25) -> None:
    """Let objects of a directory be old."""
    then = datetime.now(UTC).timestamp() - hours * 3600
    for key in keys:
        os.utime(Path(stack.store.location().root) / key, (then, then))


def search_now(stack: Stack, **options: Any) -> None:
    stack.sql("UPDATE orphan_search SET due_at = now()")
    search(stack.backends, Event(), **options)


def keys(stack: Stack) -> list[str]:
    return [key for key in stack.store.keys("") if not key.startswith("stacks/")]


def receipts(pool: Pool) -> list[Receipt]:
    with pool.connection() as connection:
        rows = connection.execute("SELECT envelope FROM receipts ORDER BY seq").fetchall()
    return [Receipt.from_envelope(row["envelope"]) for row in rows]


# Orphans


def test_objects_that_belong_to_nothing_are_deleted_once_they_are_old(stack: Stack) -> None:
    lost = [
        "files/file-died",
        "batches/batch_gone/plan",
        "batches/batch_gone/parts/job_1-0123456789abcdef.part",
        "jobs/job_gone/prompt_rules.json",
        "doctor/0a",
    ]
    kept = ["models/weights.bin", "prompt_rules/0a.json", "backups/files/base.tar", "files/file-new"]
    for key in (*lost, *kept):
        stack.store.put(key, [SECRET.encode()])
    age(stack, *lost, *kept[:-1])
    search_now(stack)
    assert keys(stack) == sorted(kept)
    assert stack.backends.metrics.removals.labels(object="orphan")._value.get() == len(lost)
    found = [receipt.deletion for receipt in receipts(stack.pool)]
    assert [(each.kind, each.actor, each.object_id) for each in found] == [
        ("orphan", "retention", key) for key in sorted(lost)
    ]
    assert {(each.size_bytes, each.sha256) for each in found} == {
        (len(SECRET), hashlib.sha256(SECRET.encode()).hexdigest())
    }


@pytest.mark.parametrize("status", ["validating", "in_progress", "finalizing", "cancelling"])
def test_objects_of_an_open_batch_are_kept_at_any_age(stack: Stack, status: str) -> None:
    job = stack.started(line(1), line(2))
    job.commit(0)
    stack.store.put(new_part_key(BATCH, job.id), [b"not committed yet"])
    stack.sql("UPDATE batches SET status = %s", status)
    before = keys(stack)
    age(stack, *before, hours=1_000)
    search_now(stack)
    assert keys(stack) == before


def test_result_file_without_its_row_is_kept_until_the_batch_has_ended(stack: Stack) -> None:
    stack.started(line(1)).commit()
    batch = load_batch(stack.pool, BATCH)
    assert batch is not None
    stack.sql("UPDATE batches SET status = 'finalizing'")
    result = file_key(batch.result_file_id("output"))
    stack.store.put(result, [b"as if the assembly were interrupted"])
    age(stack, result)
    search_now(stack)
    assert result in keys(stack)


def test_report_on_prompts_is_kept_as_long_as_it_may_be_read(stack: Stack) -> None:
    job = stack.started(line(1))
    report = f"jobs/{job.id}/prompt_rules.json"
    stack.store.put(report, [b"{}"])
    job.commit()
    stack.sql("UPDATE jobs SET gone_at = now(), ended_at = now()")
    age(stack, report)
    search_now(stack)
    assert report in keys(stack)
    stack.sql("DELETE FROM batches")
    search_now(stack)
    assert report not in keys(stack)


def test_parts_that_a_job_writes_after_its_batch_is_gone_are_deleted(stack: Stack) -> None:
    job = stack.started(line(1))
    late = new_part_key(BATCH, job.id)
    job.commit()
    stack.advance()
    stack.store.put(late, [b"late"])
    age(stack, late)
    search_now(stack)
    assert late in keys(stack)  # the leftovers of the batch are deleted after an hour, all together
    stack.sql("UPDATE batches SET leftovers_due_at = NULL")
    search_now(stack)
    assert late not in keys(stack)
    assert receipts(stack.pool)[-1].deletion.project_id == "p"


def test_upload_in_progress_is_kept(stack: Stack) -> None:
    """The object is there, its row is not. The search runs at every point of the upload."""

    def chunks() -> Any:
        for chunk in (b"a", b"b"):
            search_now(stack)
            yield chunk

    stack.store.put(file_key("file-new"), chunks())
    search_now(stack)
    assert keys(stack) == ["files/file-new"]
    stack.sql("INSERT INTO projects (id, name) VALUES ('p', 'p')")
    stack.sql(
        "INSERT INTO files (id, project_id, purpose, filename, size_bytes, sha256) "
        "VALUES ('file-new', 'p', 'batch', 'x', 2, '')"
    )
    age(stack, "files/file-new", hours=1_000)
    search_now(stack)
    assert keys(stack) == ["files/file-new"]


def test_interrupted_search_goes_on_after_its_last_key(stack: Stack, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(orphans, "_PAGE", 2)
    lost = [f"{prefix}{number}/x" for prefix in ("batches/", "files/") for number in range(3)]
    for key in lost:
        stack.store.put(key, [b"x"])
    age(stack, *lost)
    left = []
    for _ in range(4):
        search_now(stack, pages=1)
        left.append(len(keys(stack)))
    assert left == [4, 2, 0, 0]
    row = stack.sql("SELECT last_key, due_at > now() + interval '5 h' AS rests FROM orphan_search")[0]
    assert row == {"last_key": "", "rests": True}


def test_orphan_that_the_store_keeps_does_not_stop_the_search(pool: Pool, tmp_path: Path) -> None:
    class Holding(DirectoryObjectStore):
        def delete(self, key: str) -> tuple[str, ...]:
            if key == "files/a":
                raise ObjectStoreError("a legal hold")
            return super().delete(key)

    stack = Stack(pool, Holding(tmp_path / "objects"), tmp_path)
    for key in ("files/a", "files/b"):
        stack.store.put(key, [b"x"])
    age(stack, "files/a", "files/b")
    search_now(stack)
    assert keys(stack) == ["files/a"]
    assert [receipt.deletion.object_id for receipt in receipts(pool)] == ["files/b"]


def test_orphan_whose_deletion_crashed_gets_its_receipt(pool: Pool, tmp_path: Path) -> None:
    class Crash(BaseException):
        pass

    class Dying(DirectoryObjectStore):
        def delete(self, key: str) -> tuple[str, ...]:
            super().delete(key)
            raise Crash

    stack = Stack(pool, Dying(tmp_path / "objects"), tmp_path)
    stack.store.put("files/a", [SECRET.encode()])
    age(stack, "files/a")
    with pytest.raises(Crash):
        search_now(stack)
    assert (keys(stack), receipts(pool)) == ([], [])
    search_now(Stack(pool, DirectoryObjectStore(tmp_path / "objects"), tmp_path))
    [receipt] = receipts(pool)
    assert receipt.deletion.sha256 == hashlib.sha256(SECRET.encode()).hexdigest()


@pytest.mark.parametrize("is_first", [True, False])
def test_stack_with_another_database_does_not_lose_its_objects(stack: Stack, *, is_first: bool) -> None:
    stack.store.put("files/a", [b"of the other database"])
    age(stack, "files/a")
    if not is_first:
        search(stack.backends, Event())  # the first day of this one
    stack.store.put("stacks/0a", [])
    for _ in range(2):
        search_now(stack)
    assert keys(stack) == ["files/a"]
    assert stack.sql("SELECT due_at > now() + interval '5 h' AS rests FROM orphan_search") == [{"rests": True}]
    stack.store.delete("stacks/0a")
    search_now(stack)
    assert keys(stack) == []


def test_mark_of_a_database_is_renewed_with_the_head_of_its_audit_log(stack: Stack) -> None:
    search_now(stack)
    [mark] = stack.store.keys("stacks/")
    stack.sql("INSERT INTO audit_log (actor, type, object_id) VALUES ('operator', 'key.created', 'k')")
    seal_entries(stack.pool)
    search_now(stack)
    assert b"".join(stack.store.read(mark)) == b""
    age(stack, mark, hours=2)
    search_now(stack)
    with stack.pool.connection() as connection:
        assert b"".join(stack.store.read(mark)) == str(newest_head(connection)).encode()


def test_restored_database_does_not_delete_objects_of_the_lost_time(stack: Stack) -> None:
    search_now(stack)
    [mark] = stack.store.keys("stacks/")
    stack.store.put(mark, [f"7:{'0' * 64}".encode()])  # the head of entries that the restored database lacks
    stack.store.put("files/a", [b"of the lost time"])
    age(stack, "files/a")
    for _ in range(2):
        search_now(stack)
    assert keys(stack) == ["files/a"]
    stack.store.delete(mark)
    search_now(stack)
    assert keys(stack) == []


def test_new_database_deletes_no_objects_on_its_first_day(stack: Stack) -> None:
    stack.store.put("files/a", [b"x"])
    age(stack, "files/a")
    search(stack.backends, Event())
    assert keys(stack) == ["files/a"]


# Receipts


@pytest.fixture
def admin(base_url: str, admin_key: str) -> httpx.Client:
    return httpx.Client(base_url=base_url, headers={"authorization": f"Bearer {admin_key}"})


def test_client_gets_a_receipt_of_its_deletion(
    client: openai.OpenAI, admin: httpx.Client, api_pool: Pool, store: MemoryObjectStore
) -> None:
    file = client.files.create(file=("secret-name.jsonl", SECRET.encode()), purpose="user_data")
    client.files.delete(file.id)
    assert list(store.keys("files/")) == []
    answer = admin.get("/v1/deletion_receipts", params={"object_id": file.id})
    [receipt] = answer.json()["data"]
    deletion = receipt["deletion"]
    assert (deletion["kind"], deletion["object_id"], deletion["reason"]) == ("file", file.id, "api")
    assert (deletion["size_bytes"], deletion["versions"]) == (len(SECRET), [])
    assert deletion["sha256"] == hashlib.sha256(SECRET.encode()).hexdigest()
    with api_pool.connection() as connection:
        row = connection.execute("SELECT id FROM api_keys WHERE id = %s", [deletion["actor"]]).fetchone()
    assert row is not None
    assert "secret-name" not in answer.text
    assert admin.get(f"/v1/deletion_receipts/{receipt['id']}").json() == receipt
    admin.close()


def test_receipts_of_other_projects_do_not_exist(
    client: openai.OpenAI, admin: httpx.Client, api_pool: Pool, base_url: str, http: httpx.Client
) -> None:
    file = client.files.create(file=("a.jsonl", b"{}"), purpose="user_data")
    client.files.delete(file.id)
    [receipt] = admin.get("/v1/deletion_receipts").json()["data"]
    stranger = create_project(api_pool, secrets.token_hex(4))
    key = create_api_key(api_pool, project_id=stranger.id, name="x", scopes=["admin"])  # type: ignore[list-item]
    headers = {"authorization": f"Bearer {key}"}
    assert httpx.get(f"{base_url}/v1/deletion_receipts/{receipt['id']}", headers=headers).status_code == 404
    assert httpx.get(f"{base_url}/v1/deletion_receipts", headers=headers).json()["data"] == []
    after = {"after": receipt["id"]}
    assert httpx.get(f"{base_url}/v1/deletion_receipts", headers=headers, params=after).status_code == 400
    assert http.get("/v1/deletion_receipts").status_code == 403  # the scope admin is missing
    admin.close()


def test_retention_writes_receipts_of_files_and_batches(stack: Stack) -> None:
    stack.started(line(1)).commit()
    stack.advance()
    stack.sql("UPDATE batches SET leftovers_due_at = NULL, completed_at = now() - interval '40 days'")
    stack.sql("UPDATE files SET expires_at = now(), sha256 = '\\xab'")
    stack.sql("UPDATE files SET deleted_at = now(), deleted_by = 'key_7' WHERE purpose = 'batch'")
    sweep(stack.backends, Event())
    found = {(each.deletion.kind, each.deletion.actor): each.deletion for each in receipts(stack.pool)}
    assert found.keys() == {("file", "key_7"), ("file", "retention"), ("batch", "retention")}
    assert found["file", "key_7"].sha256 == "ab"
    assert found["batch", "retention"].object_id == BATCH


@pytest.mark.parametrize(
    "statement", ["UPDATE receipts SET object_id = 'x'", "DELETE FROM receipts", "TRUNCATE receipts"]
)
def test_receipts_cannot_be_changed_or_removed(stack: Stack, statement: LiteralString) -> None:
    with pytest.raises(psycopg.errors.InsufficientPrivilege):
        stack.sql(statement)
    with (
        psycopg.connect(as_owner(stack.pool)) as owner,
        pytest.raises(psycopg.Error, match="receipts can only be added"),
    ):
        owner.execute(statement)


@pytest.fixture
def signed(stack: Stack) -> tuple[dict[str, Any], str]:
    """A receipt in JSON, and the public key."""
    stack.store.put("files/a", [b"x"])
    age(stack, "files/a")
    search_now(stack)
    return json.loads(receipts(stack.pool)[0].model_dump_json()), public_pem(stack.backends.receipt_key)


def test_receipt_is_verified_with_the_public_key_only(signed: tuple[dict[str, Any], str]) -> None:
    receipt, public_key = signed
    assert verify(json.dumps(receipt), public_key).object_id == "files/a"


@pytest.mark.parametrize(
    "change",
    [
        {"id": "receipt_0"},
        {"deletion": {"sha256": "00"}},
        {"deletion": {"deleted_at": 1}},
        {"deletion": {"actor": "operator"}},
        {"envelope": {"payload": "e30="}},
        {"envelope": {"payloadType": "text/plain"}},
        {"envelope": {"signatures": []}},
        {"comment": "added"},
    ],
)
def test_changed_receipt_is_refused(signed: tuple[dict[str, Any], str], change: dict[str, Any]) -> None:
    receipt, public_key = signed
    for name, value in change.items():
        receipt[name] = receipt[name] | value if isinstance(value, dict) else value
    with pytest.raises(ReceiptError):
        verify(json.dumps(receipt), public_key)


def test_receipt_signed_with_another_key_is_refused(signed: tuple[dict[str, Any], str], pool: Pool) -> None:
    other = Backends(pool=pool, store=MemoryObjectStore()).receipt_key
    with pytest.raises(ReceiptError, match="another key"):
        verify(json.dumps(signed[0]), public_pem(other))


def test_operator_reads_receipts_and_everyone_verifies_them(
    signed: tuple[dict[str, Any], str],
    database_url: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    receipt, _ = signed
    monkeypatch.setenv("CLOISTER_DATABASE_URL", database_url)

    def run(*arguments: str) -> tuple[int, str]:
        with pytest.raises(SystemExit) as ended:
            main(arguments)
        output = capsys.readouterr()
        return int(ended.value.code or 0), output.out + output.err

    assert receipt["id"] in run("receipts", "list")[1]
    file, public_key = tmp_path / "receipt.json", tmp_path / "key.pem"
    file.write_text(run("receipts", "get", receipt["id"])[1])
    public_key.write_text(signed[1])
    monkeypatch.delenv("CLOISTER_DATABASE_URL")
    status, output = run("verify-receipt", str(file), "--public-key", str(public_key))
    assert status == 0
    assert "files/a" in output
    file.write_text(file.read_text().replace("files/a", "files/b"))
    status, output = run("verify-receipt", str(file), "--public-key", str(public_key))
    assert status == 1
    assert "was changed" in output


def test_service_without_a_key_for_receipts_refuses_to_start(tmp_path: Path) -> None:
    models = tmp_path / "models.yaml"
    models.write_text("models: [{id: a, source: x}]")
    environment = {
        "CLOISTER_DATABASE_URL": "postgresql://127.0.0.1:9/x",
        "CLOISTER_OBJECT_STORE": f"file://{tmp_path}/objects",
        "CLOISTER_MODELS": str(models),
    }
    with (
        pytest.raises(SettingsError, match=r"CLOISTER_RECEIPT_KEY_FILE is not set.*openssl rand"),
        open_backends(read_settings(environment), "api"),
    ):
        pass


@pytest.mark.parametrize(
    ("text", "mode", "problem"),
    [("ab" * 32, 0o644, "chmod 600"), ("ab" * 31, 0o600, "64 hexadecimal digits"), ("é" * 32, 0o600, "64 hex")],
)
def test_unsafe_key_for_receipts_is_refused(tmp_path: Path, text: str, mode: int, problem: str) -> None:
    path = tmp_path / "key"
    path.write_text(text)
    path.chmod(mode)
    with pytest.raises(SettingsError, match=problem) as refused:
        read_key(path)
    assert text not in str(refused.value)


# Erasure of projects


def mentions(stack: Stack, *texts: str) -> set[str]:
    """Return the tables, and the objects of the store, in which one of the texts appears."""
    tables = stack.sql("SELECT tablename FROM pg_tables WHERE schemaname = 'public'")
    found = set[str]()
    for table in (row["tablename"] for row in tables):
        rows = stack.sql(f"SELECT t::text AS text FROM {table} AS t")  # noqa: S608 - names of our own tables
        found |= {table for row in rows if any(text in row["text"] for text in texts)}
    for key in keys(stack):
        content = b"".join(stack.store.read(key))
        found |= {key for text in texts if text.encode() in content or text in key}
    return found


def prepared(stack: Stack) -> Project:
    """Create a project with work in every state that leaves something behind, and another project."""
    project = create_project(stack.pool, "research")
    create_api_key(stack.pool, project_id=project.id, name=SECRET)
    events = [EventType("batch.completed")]
    url = f"https://{SECRET}.example"
    create_endpoint(stack.pool, KEYS, project_id=project.id, url=url, events=events, name="x", actor=OPERATOR)
    stack.started(line(1), batch_id="batch_done", project=project.id).commit(
        batch_id="batch_done", body=f'{{"{SECRET}":1}}'.encode()
    )
    stack.advance("batch_done")
    job = stack.started(line(1), line(2), batch_id="batch_open", project=project.id)
    job.commit(1, batch_id="batch_open", body=f'{{"{SECRET}":1}}'.encode())
    stack.store.put(new_part_key("batch_open", job.id), [SECRET.encode()])
    stack.sql("UPDATE batches SET metadata = jsonb_build_object('a', %s::text), idempotency_key = id", SECRET)
    stack.sql("INSERT INTO refused_creations VALUES (%s, 'x', now())", project.id)
    stack.started(line(1), batch_id="batch_other", project="other")
    assert mentions(stack, project.id, SECRET) > {"files", "batches", "jobs", "turns", "webhook_endpoints", "api_keys"}
    return project


def erase_once(stack: Stack) -> None:
    """Let the reconciler take its next steps, as if an hour had passed."""
    sweep(stack.backends, Event())
    for row in stack.sql("SELECT id FROM batches WHERE parts_deleted_at IS NULL"):
        stack.advance(row["id"])
    stack.sql("UPDATE batches SET leftovers_due_at = now() WHERE leftovers_due_at IS NOT NULL")
    for row in stack.sql("SELECT id FROM jobs WHERE draining_at IS NOT NULL AND ended_at IS NULL"):
        assert stack.job(row["id"]).end()
        stack.launcher.end(row["id"], SUCCEEDED)
    stack.advance_jobs()


def test_erased_project_leaves_only_the_audit_log_and_receipts(stack: Stack) -> None:
    project = prepared(stack)
    completed = sum(row["completed"] for row in stack.sql("SELECT completed FROM usage_totals"))
    other = {key for key in keys(stack) if "other" in key}
    assert erase_project(stack.pool, project)
    assert not erase_project(stack.pool, project)
    for _ in range(6):
        erase_once(stack)
    assert erasure_progress(stack.pool, project) is None
    traces = mentions(stack, project.id, SECRET, "batch_done", "batch_open")
    assert traces == {"audit_log", "receipts"}
    assert set(keys(stack)) == other
    assert stack.batch("batch_other")["status"] == "in_progress"
    assert sum(row["completed"] for row in stack.sql("SELECT completed FROM usage_totals")) >= completed
    kinds = [receipt.deletion.kind for receipt in receipts(stack.pool)]
    assert (kinds.count("batch"), kinds[-1]) == (2, "project")
    assert kinds.count("file") >= 3
    assert {receipt.deletion.actor for receipt in receipts(stack.pool)} == {"operator"}
    create_project(stack.pool, "research")


def test_erasure_goes_on_after_a_crash_at_any_call_of_the_store(pool: Pool, tmp_path: Path) -> None:
    class Crash(BaseException):
        pass

    class Dying(DirectoryObjectStore):
        calls = itertools.count()
        crashes = 0
        is_armed = False

        def delete(self, key: str) -> tuple[str, ...]:
            deleted = super().delete(key)
            if self.is_armed and next(self.calls) % 2:
                self.crashes += 1
                raise Crash
            return deleted

    store = Dying(tmp_path / "objects")
    stack = Stack(pool, store, tmp_path)
    project = prepared(stack)
    store.is_armed = True
    erase_project(pool, project)
    for _ in range(20):
        with contextlib.suppress(Crash):
            erase_once(stack)
    assert store.crashes > 3
    assert erasure_progress(pool, project) is None
    assert mentions(stack, project.id, SECRET) == {"audit_log", "receipts"}


def test_keys_of_a_project_are_refused_once_its_erasure_began(
    client: openai.OpenAI, api_pool: Pool, project: Project
) -> None:
    erase_project(api_pool, project)
    with pytest.raises(openai.AuthenticationError):
        client.files.list()
    assert find_project(api_pool, project.id).name == project.id


def test_erasure_is_confirmed_and_followed_on_the_command_line(
    stack: Stack, database_url: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("CLOISTER_DATABASE_URL", database_url)
    project = create_project(stack.pool, "research")

    def run(*arguments: str) -> str:
        with contextlib.suppress(SystemExit):
            main(["projects", "delete", *arguments])
        output = capsys.readouterr()
        return output.out + output.err

    assert "--erase" in run("research")
    assert find_project(stack.pool, "research") == project
    assert f"erasing {project.id}" in run("research", "--erase", "--no-wait")
    sweep(stack.backends, Event())
    assert "there is no project" in run(project.id, "--erase")


def test_plan_of_an_erased_batch_is_deleted_after_the_urls_of_its_job(stack: Stack) -> None:
    project = prepared(stack)
    erase_project(stack.pool, project)
    sweep(stack.backends, Event())
    stack.advance("batch_open")
    stack.store.put(plan_key("batch_open"), [b"written by a job that does not know"])
    sweep(stack.backends, Event())
    left = erasure_progress(stack.pool, project)
    assert left is not None
    assert left.urls_expire_at is not None
    stack.sql("UPDATE batches SET leftovers_due_at = now() WHERE leftovers_due_at IS NOT NULL")
    sweep(stack.backends, Event())
    assert list(stack.store.keys(batch_prefix("batch_open"))) == []
