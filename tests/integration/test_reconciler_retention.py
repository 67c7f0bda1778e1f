"""Deletion by age, and its rows in the audit log."""

from collections.abc import Callable
from pathlib import Path
from threading import Event
from typing import Any

import psycopg
import pytest

from ray_job.contract.object_keys import file_key
from service.adapters.directory_object_store import DirectoryObjectStore
from service.db import Pool
from service.errors import ObjectStoreError
from service.reconciler.retention import sweep
from tests.integration.reconciler_harness import BATCH, Stack, line

INPUT = f"file-{BATCH}"
DELETED = "UPDATE files SET deleted_at = now(), deleted_by = 'key_7'"
EXPIRED = "UPDATE files SET expires_at = now() - interval '1 s'"


def sweep_once(stack: Stack) -> None:
    sweep(stack.backends, Event())


def files(stack: Stack) -> list[str]:
    return [row["id"] for row in stack.sql("SELECT id FROM files ORDER BY id")]


def audit(stack: Stack, type: str) -> list[dict[str, Any]]:
    return stack.sql("SELECT * FROM audit_log WHERE type = %s ORDER BY seq", type)


def complete(stack: Stack) -> dict[str, Any]:
    stack.started(line(1)).commit()
    # As if the leftovers of its job were deleted.
    stack.advance()
    stack.sql("UPDATE batches SET leftovers_due_at = NULL")
    return stack.batch()


@pytest.mark.parametrize("change", [DELETED, EXPIRED])
@pytest.mark.parametrize("status", ["validating", "in_progress", "finalizing", "cancelling"])
def test_file_of_an_open_batch_is_kept(stack: Stack, change: str, status: str) -> None:
    stack.create(line(1))
    stack.sql("UPDATE batches SET status = %s", status)
    stack.sql(change)
    sweep_once(stack)
    assert files(stack) == [INPUT]
    assert b"".join(stack.store.read(file_key(INPUT))) == line(1)


@pytest.mark.parametrize(
    ("change", "reason"), [(EXPIRED, "expired"), (DELETED, "deleted by key_7 while a batch read it")]
)
def test_file_is_deleted_after_its_batch_and_its_digest_is_audited(stack: Stack, change: str, reason: str) -> None:
    output = complete(stack)["output_file_id"]
    stack.sql("UPDATE files SET sha256 = 'abc'")
    stack.sql(f"{change} WHERE id = '{INPUT}'")
    sweep_once(stack)
    assert files(stack) == [output]
    assert list(stack.store.keys("files/")) == [file_key(output)]
    [row] = audit(stack, "file.deleted")
    assert (row["object_id"], row["actor"], row["data"]["reason"]) == (INPUT, "retention", reason)
    assert (row["sha256"], row["size_bytes"], row["project_id"]) == (b"abc", len(line(1)), "p")


@pytest.mark.parametrize("project", ["p", "q"])
@pytest.mark.parametrize("change", [DELETED, EXPIRED])
def test_image_is_kept_until_its_batch_has_ended(stack: Stack, change: str, project: str) -> None:
    stack.started(line(1))
    stack.sql("INSERT INTO projects (id, name) VALUES ('q', 'q')")
    stack.sql(
        "INSERT INTO files (id, project_id, purpose, filename, size_bytes, sha256)"
        " VALUES ('file-a', %s, 'vision', '', 1, '')",
        project,
    )
    stack.sql("UPDATE segments SET files = '{file-b,file-a}'")
    stack.sql(change)
    sweep_once(stack)
    assert ("file-a" in files(stack)) == (project == "p")
    stack.sql("UPDATE batches SET status = 'cancelled'")
    sweep_once(stack)
    assert files(stack) == []


def test_files_before_their_expiry_are_kept(stack: Stack) -> None:
    output = complete(stack)["output_file_id"]
    sweep_once(stack)
    assert sorted(files(stack)) == sorted([INPUT, output])


def test_batch_of_another_project_does_not_keep_a_file(stack: Stack) -> None:
    stack.create(line(1))
    stack.sql("INSERT INTO projects (id, name) VALUES ('q', 'q')")
    stack.sql("UPDATE batches SET project_id = 'q'")
    stack.sql(EXPIRED)
    sweep_once(stack)
    assert files(stack) == []


def test_file_locked_by_the_creation_of_a_batch_is_skipped(stack: Stack, database_url: str) -> None:
    stack.create(line(1))
    stack.sql("DELETE FROM batches")
    stack.sql(EXPIRED)
    with psycopg.connect(database_url) as creator:
        creator.execute("SELECT FROM files FOR KEY SHARE")
        sweep_once(stack)
        assert files(stack) == [INPUT]
    sweep_once(stack)
    assert files(stack) == []


class Refusing(DirectoryObjectStore):
    """Fails to delete, before or after the deletion, as often as the test sets."""

    refuses: Callable[[str], bool] = staticmethod(lambda _: False)
    deletes_first = False

    def delete(self, key: str) -> tuple[str, ...]:
        if self.deletes_first:
            super().delete(key)
        if self.refuses(key):
            raise ObjectStoreError("no")
        return super().delete(key)


@pytest.mark.parametrize("deletes_first", [False, True])
def test_file_that_the_store_fails_to_delete_is_deleted_by_the_next_sweep(
    pool: Pool, tmp_path: Path, *, deletes_first: bool
) -> None:
    store = Refusing(tmp_path / "objects")
    stack = Stack(pool, store, tmp_path)
    for number in (1, 2, 3):
        stack.create(line(1), batch_id=f"b{number}")
    stack.sql("DELETE FROM batches")
    stack.sql(EXPIRED)
    store.refuses, store.deletes_first = (lambda key: key.endswith("b2")), deletes_first
    sweep_once(stack)
    assert files(stack) == ["file-b2"]
    assert [row["object_id"] for row in audit(stack, "file.deleted")] == ["file-b1", "file-b3"]
    store.refuses = lambda _: False
    sweep_once(stack)
    assert (files(stack), list(store.keys("files/"))) == ([], [])


def test_one_sweep_deletes_many_files(stack: Stack) -> None:
    stack.sql("INSERT INTO projects (id, name) VALUES ('p', 'p')")
    stack.sql(
        "INSERT INTO files (id, project_id, purpose, filename, size_bytes, sha256, expires_at) "
        "SELECT 'file-' || n, 'p', 'batch', 'x', 1, '', now() - interval '1 s' FROM generate_series(1, 250) AS n"
    )
    sweep_once(stack)
    assert (files(stack), len(audit(stack, "file.deleted"))) == ([], 250)


def test_old_batch_is_deleted_with_its_events_and_its_files_at_their_expiry(stack: Stack) -> None:
    done = complete(stack)
    stack.sql("UPDATE batches SET completed_at = now() - interval '30 days'")
    sweep_once(stack)
    assert stack.sql("SELECT id FROM batches") == []
    assert stack.sql("SELECT id FROM batch_events") == []
    assert sorted(files(stack)) == sorted([INPUT, done["output_file_id"]])
    [row] = audit(stack, "batch.deleted")
    assert (row["object_id"], row["object_seq"], row["actor"]) == (BATCH, done["seq"], "retention")
    assert (row["data"]["status"], row["data"]["request_counts"]) == (
        "completed",
        {"total": 1, "completed": 1, "failed": 0},
    )
    assert stack.sql("SELECT batches FROM usage_totals")[0]["batches"] == 1


@pytest.mark.parametrize(
    "change",
    [
        "UPDATE batches SET completed_at = now() - interval '29 days'",
        "UPDATE batches SET parts_deleted_at = NULL",
    ],
)
def test_recent_batch_and_batch_with_parts_are_kept(stack: Stack, change: str) -> None:
    complete(stack)
    stack.sql("UPDATE batches SET completed_at = now() - interval '31 days'")
    stack.sql(change)
    sweep_once(stack)
    assert len(stack.sql("SELECT id FROM batches")) == 1


def test_retention_of_a_project_applies_to_its_batches_and_files(stack: Stack) -> None:
    stack.create(line(1))
    stack.sql("UPDATE projects SET retention_s = 60")
    stack.advance()
    stack.job().answer_all()
    output = stack.advance()["output_file_id"]
    file = stack.sql("SELECT expires_at - created_at AS kept FROM files WHERE id = %s", output)[0]
    assert file["kept"].total_seconds() == 60
    stack.sql("UPDATE batches SET completed_at = now() - interval '61 s', leftovers_due_at = NULL")
    sweep_once(stack)
    assert stack.sql("SELECT id FROM batches") == []


def test_sweep_recovers_from_an_error_between_store_and_database(stack: Stack) -> None:
    stack.create(line(1))
    stack.sql("DELETE FROM batches")
    stack.sql(EXPIRED)
    stack.store.delete(file_key(INPUT))  # as if killed before the row was deleted
    sweep_once(stack)
    assert (files(stack), len(audit(stack, "file.deleted"))) == ([], 1)
