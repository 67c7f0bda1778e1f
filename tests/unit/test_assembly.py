import errno
import json
from pathlib import Path
from typing import Any

import pytest

from ray_job.contract.lines import error_body, response_line
from ray_job.contract.object_keys import part_key
from ray_job.contract.parts import PartRow, Usage, encode_part, part_id
from service.adapters.memory_object_store import MemoryObjectStore
from service.assembly import Assembled, AssemblyError, assemble, committed_lines, committed_rows
from service.workspace import Workspace

BATCH = "batch_1"


def row(line: int, *, fails: bool = False, text: str = "ok") -> PartRow:
    body = error_body(text, type="x", param=None, code=None) if fails else json.dumps({"text": text}).encode()
    data = response_line(BATCH, line, f"id-{line}", 400 if fails else 200, body)
    return PartRow(
        line=line, outcome="failed" if fails else "completed", data=data, usage=Usage(input_tokens=10, output_tokens=1)
    )


def store_with(*parts: list[PartRow]) -> MemoryObjectStore:
    store = MemoryObjectStore()
    for rows in parts:
        store.put(part_key(BATCH, part_id([row.line for row in rows])), [encode_part(BATCH, rows)])
    return store


def run(store: MemoryObjectStore, directory: Path, *, size_bytes: int | None = None, **options: Any) -> Assembled:
    workspace = Workspace(directory, size_bytes)
    return assemble(store, batch_id=BATCH, output_key="output", error_key="error", workspace=workspace, **options)


def ids(store: MemoryObjectStore, key: str) -> list[str]:
    return [json.loads(line)["custom_id"] for line in b"".join(store.read(key)).splitlines()]


def test_rows_come_out_in_input_order(tmp_path: Path) -> None:
    store = store_with([row(9), row(2)], [row(5, fails=True), row(1)], [row(3), row(4, fails=True)])
    done = run(store, tmp_path)
    assert ids(store, "output") == ["id-1", "id-2", "id-3", "id-9"]
    assert ids(store, "error") == ["id-4", "id-5"]
    assert (done.completed, done.failed, done.usage) == (4, 2, Usage(input_tokens=60, output_tokens=6))
    assert (done.found, done.damaged) == (6, [])


def test_an_output_without_rows_is_not_written(tmp_path: Path) -> None:
    store = store_with([row(1, fails=True)])
    done = run(store, tmp_path)
    assert done.output is None
    assert list(store.keys("")) == ["batches/batch_1/parts/" + part_id([1]), "error"]


def test_results_that_have_no_room_are_refused_before_they_are_written(tmp_path: Path) -> None:
    store = store_with([row(1)], [row(2)])
    size = len(row(1).data) + 1
    with pytest.raises(OSError, match="raise workspace_gib of the stack") as refused:
        run(store, tmp_path, size_bytes=2 * size - 1)
    assert refused.value.errno == errno.ENOSPC
    assert run(store, tmp_path, size_bytes=2 * size).completed == 2


def test_room_is_shared_and_given_back(tmp_path: Path) -> None:
    workspace = Workspace(tmp_path, 10)
    with workspace.open() as first, workspace.open() as second:
        first.claim(6)
        with pytest.raises(OSError, match="10 bytes"):
            second.claim(5)
        second.claim(4)
    with workspace.open() as last:
        last.claim(10)


def test_a_line_found_twice_counts_once(tmp_path: Path) -> None:
    store = store_with([row(1, text="first"), row(2)], [row(1, text="second")])
    done = run(store, tmp_path)
    assert (done.completed, done.found, done.usage.input_tokens) == (2, 2, 20)
    assert ids(store, "output") == ["id-1", "id-2"]


def test_twice_gives_the_same(tmp_path: Path) -> None:
    store = store_with([row(2), row(1, fails=True)])
    assert run(store, tmp_path) == run(store, tmp_path)


def test_lines_that_never_ran_expire_in_input_order(tmp_path: Path) -> None:
    store = store_with([row(4, fails=True), row(1)])
    content = b"".join(b'{"custom_id":"id-%d"}\n' % n if n != 3 else b"\r\n" for n in range(1, 6))
    done = run(store, tmp_path, expire_lines_of=[content[:30], content[30:]])
    assert ids(store, "error") == ["id-2", "id-4", "id-5"]
    assert (done.completed, done.failed, done.expired, done.found) == (1, 3, 2, 2)
    expired = json.loads(b"".join(store.read("error")).splitlines()[0])
    assert (expired["response"], expired["error"]["code"]) == (None, "batch_expired")


def test_a_result_for_a_line_that_is_no_request_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(AssemblyError, match="line 7, which is no request"):
        run(store_with([row(7)]), tmp_path, expire_lines_of=[b'{"custom_id":"a"}\n'])


@pytest.mark.parametrize("cut", [-1, 40])
@pytest.mark.parametrize("line", [1, 2, 3])
def test_a_damaged_part_is_named_and_the_others_are_written(tmp_path: Path, cut: int, line: int) -> None:
    store = store_with([row(1)], [row(2)], [row(3)])
    key = part_key(BATCH, part_id([line]))
    store.put(key, [b"".join(store.read(key))[:cut]])
    done = run(store, tmp_path)
    (problem,) = done.damaged
    assert key in problem
    assert (done.found, done.usage.input_tokens) == (2, 20)
    assert ids(store, "output") == [f"id-{number}" for number in (1, 2, 3) if number != line]


def test_the_rows_of_damaged_parts_are_none(tmp_path: Path) -> None:
    store = store_with([row(1)])
    key = next(store.keys("batches/"))
    store.put(key, [b"".join(store.read(key))[:-1]])
    with (tmp_path / "spool").open("w+b") as file, pytest.raises(AssemblyError, match="is damaged: its SHA-256"):
        committed_rows(store, batch_id=BATCH, outcome="completed", file=file)


def test_another_batchs_part_is_left_out(tmp_path: Path) -> None:
    store = MemoryObjectStore()
    store.put(part_key(BATCH, "x"), [encode_part("batch_2", [row(1)])])
    done = run(store, tmp_path)
    assert (done.output, done.found) == (None, 0)
    assert "belongs to batch_2" in done.damaged[0]


def test_nothing_stays_in_the_workspace(tmp_path: Path) -> None:
    run(store_with([row(1)]), tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_committed_lines_are_counted_once() -> None:
    assert committed_lines(store_with([row(1), row(2)], [row(2), row(3), row(4)]), BATCH) == 4
