"""Acceptance of batches with their plans, on real Postgres."""

import dataclasses
from pathlib import Path
from typing import Any

import psycopg
import pytest

from ray_job.contract.job_spec import ModelSpec, Sharing
from ray_job.contract.object_keys import file_key, part_key, plan_key
from ray_job.contract.plans import PlanRow, decode_rows
from service.db import Pool
from service.errors import ObjectNotFoundError
from service.model_catalogue import CatalogueModel
from service.reconciler.finishing import finish
from service.reconciler.planning import plan_again
from service.reconciler.steps import validate
from service.workspace import Workspace
from tests.integration.reconciler_harness import BATCH, Meddling, Stack, line
from tests.integration.recorded_work import batch, write_part


def planned(stack: Stack) -> list[PlanRow]:
    """The rows of the batch's segments."""
    plan = b"".join(stack.store.read(plan_key(BATCH)))
    segments = stack.sql("SELECT * FROM segments WHERE batch_id = %s ORDER BY number", BATCH)
    return [row for each in segments for row in decode_rows(plan[each["start_byte"] : each["end_byte"]])]


def has_plan(stack: Stack) -> bool:
    return list(stack.store.keys(plan_key(BATCH))) != []


def earlier_version(stack: Stack, *lines: bytes) -> None:
    """Create a batch as an earlier version has accepted it."""
    stack.create(*lines)
    stack.sql("UPDATE batches SET status = 'in_progress', model = 'demo', total = %s, attempt = 2", len(lines))


def test_accepted_batch_has_a_plan_and_segments(stack: Stack) -> None:
    stack.create(*map(line, (1, 2, 3)))
    validate(stack.backends, batch(stack))
    row = stack.batch()
    assert (row["status"], row["model"], row["total"]) == ("in_progress", "demo", 3)
    assert (row["domain"], row["segments_left"], row["attempt"], row["launch_after"]) == ("p", 1, 0, None)
    assert planned(stack) == [PlanRow(line=number, raw=line(number)) for number in (1, 2, 3)]
    [segment] = stack.sql("SELECT * FROM segments")
    assert (segment["number"], segment["rows"], segment["epoch"], segment["is_done"]) == (0, 3, 0, False)
    assert segment["tokens"] == 3 * (len(line(1)) // 4 + 256)
    assert [event["type"] for event in stack.sql("SELECT type FROM batch_events")] == ["batch.in_progress"]


@pytest.mark.parametrize(("sharing", "domain"), [("stack", "stack"), ("project", "p"), ("batch", BATCH)])
def test_domain_and_turn_of_an_accepted_batch_are_known(stack: Stack, sharing: Sharing, domain: str) -> None:
    model = CatalogueModel(spec=ModelSpec(id="demo", source="x", sharing=sharing))
    backends = dataclasses.replace(stack.backends, catalogue={"demo": model})
    stack.create(line(1))
    validate(backends, batch(stack))
    stack.sql("UPDATE turns SET finish = 5")
    stack.sql("UPDATE batches SET status = 'validating'")
    stack.sql("DELETE FROM segments")
    validate(backends, batch(stack))
    assert stack.batch()["domain"] == domain
    assert stack.sql("SELECT model, domain FROM domains") == [{"model": "demo", "domain": domain}]
    assert stack.sql("SELECT domain, project_id, finish FROM turns") == [
        {"domain": domain, "project_id": "p", "finish": 5}
    ]


def test_coordinators_are_notified_of_accepted_batches(stack: Stack, database_url: str) -> None:
    stack.create(line(1))
    with psycopg.connect(database_url, autocommit=True) as listening:
        listening.execute("LISTEN work")
        validate(stack.backends, batch(stack))
        payloads = {each.payload for each in listening.notifies(timeout=10, stop_after=1)}
    assert payloads == {"demo\np"}


@pytest.mark.parametrize("engine", ["direct", "http"])
def test_equal_lines_share_a_row_in_the_direct_engine_only(stack: Stack, engine: Any) -> None:
    model = CatalogueModel(spec=ModelSpec(id="demo", source="x", engine=engine))
    stack.create(*(line(number).replace(b'"messages"', b'"temperature":0,"messages"') for number in (1, 2)))
    validate(dataclasses.replace(stack.backends, catalogue={"demo": model}), batch(stack))
    assert [row.twins for row in planned(stack)] == ([((2, "id-2"),)] if engine == "direct" else [(), ()])


def test_plan_of_a_batch_that_is_cancelled_meanwhile_is_deleted(pool: Pool, tmp_path: Path) -> None:
    store = Meddling(tmp_path / "objects")
    stack = Stack(pool, store, tmp_path)
    stack.create(line(1))
    store.when, store.meddle = ("put", "batches"), stack.cancel
    validate(stack.backends, batch(stack))
    assert (stack.batch()["status"], stack.batch()["domain"], has_plan(stack)) == ("cancelling", None, False)
    assert stack.sql("SELECT * FROM segments") == []


def test_plan_of_a_batch_that_another_process_accepted_is_kept(stack: Stack) -> None:
    stack.create(line(1))
    stale = batch(stack)
    validate(stack.backends, stale)
    validate(stack.backends, stale)
    assert [row.line for row in planned(stack)] == [1]
    assert stack.batch()["segments_left"] == 1


def test_refused_batch_has_no_plan(stack: Stack) -> None:
    stack.create(line(1), b"{")
    validate(stack.backends, batch(stack))
    assert (stack.batch()["status"], has_plan(stack)) == ("failed", False)


def test_batch_without_room_for_its_plan_waits(stack: Stack, tmp_path: Path) -> None:
    stack.create(line(1))
    with pytest.raises(OSError, match="raise workspace_gib"):
        validate(dataclasses.replace(stack.backends, workspace=Workspace(tmp_path, 10)), batch(stack))
    assert stack.batch()["status"] == "validating"
    [event] = stack.sql("SELECT type, data FROM batch_events")
    assert event["type"] == "batch.waiting"
    assert event["data"]["reason"].startswith("the batch cannot be planned now and will be retried: the batches")


def test_batch_of_an_earlier_version_is_planned_without_its_results(stack: Stack) -> None:
    earlier_version(stack, *map(line, range(1, 6)))
    write_part(stack.store, BATCH, 1, 2)
    write_part(stack.store, BATCH, 2, 3)
    write_part(stack.store, BATCH, 5, fails=True)
    stack.store.put(f"batches/{BATCH}/parts/damaged", [b"{}\n"])
    plan_again(stack.backends, batch(stack))
    row = stack.batch()
    assert (row["completed"], row["failed"], row["input_tokens"], row["output_tokens"]) == (3, 1, 40, 8)
    assert (row["domain"], row["segments_left"]) == ("p", 1)
    assert [row.line for row in planned(stack)] == [4]
    parts = {part["key"]: part for part in stack.sql("SELECT * FROM parts")}
    assert parts[part_key(BATCH, [2, 3])]["refused_lines"] == [2]
    assert [part["refused_lines"] for part in parts.values()].count([]) == 2
    assert all((part["job_id"], part["accepted"]) == (None, [True]) for part in parts.values())
    assert len(stack.sql("SELECT * FROM turns")) == 1


def test_batch_of_an_earlier_version_with_all_results_needs_no_plan(stack: Stack) -> None:
    earlier_version(stack, line(1), line(2))
    write_part(stack.store, BATCH, 1, 2)
    plan_again(stack.backends, batch(stack))
    assert (stack.batch()["segments_left"], has_plan(stack)) == (0, False)
    stack.sql("UPDATE batches SET status = 'finalizing', finalizing_at = now()")
    finish(stack.backends, batch(stack))
    row = stack.batch()
    assert (row["status"], row["completed"]) == ("completed", 2)
    assert [each["custom_id"] for each in stack.file(row["output_file_id"])] == ["id-1", "id-2"]


def test_batch_that_is_cancelled_while_it_is_planned_again_is_unchanged(pool: Pool, tmp_path: Path) -> None:
    store = Meddling(tmp_path / "objects")
    stack = Stack(pool, store, tmp_path)
    earlier_version(stack, line(1))
    store.when, store.meddle = ("put", "batches"), stack.cancel
    plan_again(stack.backends, batch(stack))
    assert (stack.batch()["domain"], has_plan(stack), stack.sql("SELECT * FROM segments")) == (None, False, [])


def test_batch_is_planned_again_although_its_model_is_no_longer_offered(stack: Stack) -> None:
    earlier_version(stack, line(1))
    plan_again(dataclasses.replace(stack.backends, catalogue={}), batch(stack))
    assert (stack.batch()["domain"], stack.batch()["segments_left"]) == ("p", 1)


def test_batch_without_its_input_file_cannot_be_planned_again(stack: Stack) -> None:
    earlier_version(stack, line(1))
    stack.store.delete(file_key(f"file-{BATCH}"))
    with pytest.raises(ObjectNotFoundError):
        plan_again(stack.backends, batch(stack))
    assert stack.batch()["domain"] is None
