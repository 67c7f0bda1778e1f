import errno
import json
import threading
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import pytest

from ray_job.contract.lines import error_body, response_line
from ray_job.contract.object_keys import part_key, parts_prefix
from ray_job.contract.parts import PartError, PartRow, Usage, encode_part
from service.adapters.memory_object_store import MemoryObjectStore
from service.assembly import Assembled, PartRecord, assemble, committed_rows, read_headers
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
        store.put(part_key(BATCH, [row.line for row in rows]), [encode_part(BATCH, rows)])
    return store


def records(store: MemoryObjectStore) -> list[PartRecord]:
    return [PartRecord(key=key) for key in store.keys(parts_prefix(BATCH))]


def run(
    store: MemoryObjectStore,
    directory: Path,
    *,
    parts: Iterable[PartRecord] | None = None,
    size_bytes: int | None = None,
    **options: Any,
) -> Assembled:
    done = assemble(
        store,
        records(store) if parts is None else parts,
        batch_id=BATCH,
        output_key="output",
        error_key="error",
        workspace=Workspace(directory, size_bytes),
        **options,
    )
    assert done is not None
    return done


def ids(store: MemoryObjectStore, key: str) -> list[str]:
    return [json.loads(line)["custom_id"] for line in b"".join(store.read(key)).splitlines()]


def test_rows_are_written_in_input_order(tmp_path: Path) -> None:
    store = store_with([row(9), row(2)], [row(5, fails=True), row(1)], [row(3), row(4, fails=True)])
    done = run(store, tmp_path)
    assert ids(store, "output") == ["id-1", "id-2", "id-3", "id-9"]
    assert ids(store, "error") == ["id-4", "id-5"]
    assert (done.completed, done.failed, done.usage) == (4, 2, Usage(input_tokens=60, output_tokens=6))
    assert (done.found, done.damaged) == (6, [])


class LatentStore(MemoryObjectStore):
    """A store whose first parts wait for each other: reading one after the other would never end."""

    def __init__(self, together: int) -> None:
        super().__init__()
        self._missing = together
        self._together = threading.Event()

    def read(self, key: str, *, start: int = 0) -> Iterator[bytes]:
        self._missing -= 1
        if self._missing <= 0:
            self._together.set()
        assert self._together.wait(60)
        return super().read(key, start=start)


@pytest.mark.parametrize("reads", ["rows", "headers"])
def test_parts_are_opened_together(tmp_path: Path, reads: str) -> None:
    store = LatentStore(together=8)
    for line in range(1, 41):
        store.put(part_key(BATCH, [line]), [encode_part(BATCH, [row(line)])])
    if reads == "rows":
        assert run(store, tmp_path).completed == 40
    else:
        assert len(list(read_headers(store, store.keys(parts_prefix(BATCH)), BATCH))) == 40


def test_output_without_rows_is_not_written(tmp_path: Path) -> None:
    store = store_with([row(1, fails=True)])
    done = run(store, tmp_path)
    assert done.output is None
    assert list(store.keys("")) == [part_key(BATCH, [1]), "error"]


def test_results_without_room_are_refused_before_they_are_written(tmp_path: Path) -> None:
    store = store_with([row(1)], [row(2)])
    size = len(row(1).data) + 1
    with pytest.raises(OSError, match="raise workspace_gib of the stack") as refused:
        run(store, tmp_path, size_bytes=2 * size - 1)
    assert refused.value.errno == errno.ENOSPC
    assert run(store, tmp_path, size_bytes=2 * size).completed == 2


def test_room_is_shared_and_released(tmp_path: Path) -> None:
    workspace = Workspace(tmp_path, 10)
    with workspace.open() as (_, claim), workspace.open() as (_, claim_too):
        claim(6)
        with pytest.raises(OSError, match="10 bytes"):
            claim_too(5)
        claim_too(4)
    with workspace.open() as (_, claim):
        claim(10)


def test_line_in_two_parts_counts_once_and_is_reported(tmp_path: Path) -> None:
    store = store_with([row(1, text="first"), row(2)], [row(1, text="second")])
    done = run(store, tmp_path)
    assert (done.completed, done.found, done.usage.input_tokens) == (2, 2, 20)
    assert ids(store, "output") == ["id-1", "id-2"]
    (problem,) = done.damaged
    assert "has 1 lines that an earlier part has too" in problem


def test_refused_lines_of_a_part_are_left_out(tmp_path: Path) -> None:
    store = store_with([row(1, text="late"), row(2)], [row(1, text="first")])
    late, first = records(store)
    if late.key == part_key(BATCH, [1]):
        late, first = first, late
    done = run(store, tmp_path, parts=[PartRecord(key=late.key, refused_lines=[1]), first])
    assert (done.completed, done.damaged, done.usage.input_tokens) == (2, [], 20)
    assert b"first" in b"".join(store.read("output"))


def test_part_without_a_record_does_not_count(tmp_path: Path) -> None:
    store = store_with([row(1)], [row(2)])
    done = run(store, tmp_path, parts=[PartRecord(key=part_key(BATCH, [2]))])
    assert (done.found, ids(store, "output"), done.damaged) == (1, ["id-2"], [])


def test_part_that_does_not_exist_is_damaged(tmp_path: Path) -> None:
    store = store_with([row(1)], [row(2)], [row(3)])
    parts = records(store)
    store.delete(part_key(BATCH, [2]))
    done = run(store, tmp_path, parts=parts)
    assert ids(store, "output") == ["id-1", "id-3"]
    assert done.damaged == [f"part {part_key(BATCH, [2])} does not exist"]


def test_repeated_assembly_writes_the_same(tmp_path: Path) -> None:
    store = store_with([row(2), row(1, fails=True)])
    assert run(store, tmp_path) == run(store, tmp_path)


def test_lines_that_did_not_run_expire_in_input_order(tmp_path: Path) -> None:
    store = store_with([row(4, fails=True), row(1)])
    content = b"".join(b'{"custom_id":"id-%d"}\n' % n if n != 3 else b"\r\n" for n in range(1, 6))
    done = run(store, tmp_path, expire_lines_of=lambda: [content[:30], content[30:]])
    assert ids(store, "error") == ["id-2", "id-4", "id-5"]
    assert (done.completed, done.failed, done.expired, done.found) == (1, 3, 2, 2)
    expired = json.loads(b"".join(store.read("error")).splitlines()[0])
    assert (expired["response"], expired["error"]["code"]) == (None, "batch_expired")


def test_result_of_a_line_without_a_request_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(PartError, match="line 7, which is not a request"):
        run(store_with([row(7)]), tmp_path, expire_lines_of=lambda: [b'{"custom_id":"a"}\n'])


@pytest.mark.parametrize("cut", [-1, 40])
@pytest.mark.parametrize("line", [1, 2, 3])
def test_damaged_part_is_reported_and_the_others_are_written(tmp_path: Path, cut: int, line: int) -> None:
    store = store_with([row(1)], [row(2)], [row(3)])
    key = part_key(BATCH, [line])
    store.put(key, [b"".join(store.read(key))[:cut]])
    done = run(store, tmp_path)
    (problem,) = done.damaged
    assert key in problem
    assert (done.found, done.usage.input_tokens) == (2, 20)
    assert ids(store, "output") == [f"id-{number}" for number in (1, 2, 3) if number != line]


def test_rows_of_a_damaged_part_raise_an_error(tmp_path: Path) -> None:
    store = store_with([row(1)])
    key = next(store.keys("batches/"))
    store.put(key, [b"".join(store.read(key))[:-1]])
    with (tmp_path / "spool").open("w+b") as file, pytest.raises(PartError, match="is damaged: its SHA-256"):
        committed_rows(store, records(store), batch_id=BATCH, outcome="completed", file=file)


def test_part_of_another_batch_is_left_out(tmp_path: Path) -> None:
    store = MemoryObjectStore()
    store.put(f"{parts_prefix(BATCH)}x", [encode_part("batch_2", [row(1)])])
    done = run(store, tmp_path)
    assert (done.output, done.found) == (None, 0)
    assert "belongs to batch_2" in done.damaged[0]


def test_workspace_is_empty_afterwards(tmp_path: Path) -> None:
    run(store_with([row(1)]), tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_headers_that_cannot_be_read_are_left_out() -> None:
    store = store_with([row(1), row(2)], [row(3)])
    store.put(f"{parts_prefix(BATCH)}x", [b"{}\n"])
    headers = read_headers(store, store.keys(parts_prefix(BATCH)), BATCH)
    assert [(key, header.lines) for key, header in headers] == [
        (part_key(BATCH, [1, 2]), (1, 2)),
        (part_key(BATCH, [3]), (3,)),
    ]
