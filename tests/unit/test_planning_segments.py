"""Plans: every line once, in the order of execution, cut into segments."""

import itertools
import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ray_job.contract.input_lines import line_blocks
from ray_job.contract.object_keys import plan_key
from ray_job.contract.plans import PlanRow, decode_rows
from service.adapters.directory_object_store import DirectoryObjectStore
from service.adapters.memory_object_store import MemoryObjectStore
from service.errors import ObjectStoreError
from service.planning import PlanBuilder, Segment
from service.planning.plan import MOST_TWINS, SEGMENT_BYTES, SEGMENT_TOKENS
from service.reconciler.retrying_store import RetryingStore
from service.workspace import Workspace

BATCH = "batch_1"


def line(number: int, content: str, **body: Any) -> bytes:
    body = {"messages": [{"role": "user", "content": content}], **body}
    return json.dumps({"custom_id": f"r{number}", "url": "/v1/chat/completions", "body": body}).encode()


def plan(
    lines: Sequence[bytes], workspace: Path, *, skipped: Sequence[int] = (), merge_equal: bool = True
) -> list[tuple[Segment, list[PlanRow]]]:
    """Return the segments of the plan of these lines, each with its rows as a job reads them."""
    store = MemoryObjectStore()
    with PlanBuilder(Workspace(workspace), set(skipped)) as builder:
        builder.add(1, lines)
        segments = builder.write(store, BATCH, merge_equal=merge_equal)
    data = b"".join(store.read(plan_key(BATCH))) if segments else b""
    ends = [0, *(segment.end_byte for segment in segments)]
    assert [segment.start_byte for segment in segments] == ends[:-1]
    assert ends[-1] == len(data)
    assert [segment.number for segment in segments] == list(range(len(segments)))
    return [(segment, list(decode_rows(data[segment.start_byte : segment.end_byte]))) for segment in segments]


def rows(planned: list[tuple[Segment, list[PlanRow]]]) -> list[PlanRow]:
    return [row for _, rows in planned for row in rows]


groups = st.lists(
    st.tuples(
        st.integers(1, 12),  # lines
        st.sampled_from([300, 2_000, 9_000]),  # characters that they share
        st.sampled_from([None, 10, 3_000, 20_000, 100_000]),  # max_tokens
        st.booleans(),  # deterministic
    ),
    max_size=12,
)


@given(groups=groups, seed=st.randoms(use_true_random=False), merge_equal=st.booleans())
@settings(max_examples=60, deadline=None)
def test_segments_hold_every_line_once_and_groups_stay_together(
    groups: list[tuple[int, int, int | None, bool]],
    seed: Any,
    merge_equal: bool,
    tmp_path_factory: pytest.TempPathFactory,
) -> None:
    made: list[tuple[int, str, dict[str, Any]]] = []
    for group, (count, size, limit, is_deterministic) in enumerate(groups):
        fields: dict[str, Any] = {} if limit is None else {"max_tokens": limit}
        if is_deterministic:
            fields["temperature"] = 0
        made += [(group, f"{group} " * size + str(number // 2), fields) for number in range(count)]
    seed.shuffle(made)
    lines = [line(number, content, **fields) for number, (_, content, fields) in enumerate(made, start=1)]
    planned = plan(lines, tmp_path_factory.getbasetemp(), merge_equal=merge_equal)
    seen = [number for row in rows(planned) for number in (row.line, *(twin for twin, _ in row.twins))]
    assert sorted(seen) == list(range(1, len(lines) + 1))
    assert all(row.raw == lines[row.line - 1] for row in rows(planned))
    assert all(custom_id == f"r{number}" for row in rows(planned) for number, custom_id in row.twins)
    tokens = {row.line: planned_tokens(row) for row in rows(planned)}
    for segment, content in planned:
        assert segment.rows == len(content) > 0
        assert segment.tokens == sum(tokens[row.line] for row in content)
        assert segment.rows == 1 or segment.tokens <= SEGMENT_TOKENS
        assert segment.rows == 1 or segment.end_byte - segment.start_byte <= SEGMENT_BYTES
    for group, same in itertools.groupby(rows(planned), key=lambda row: made[row.line - 1][0]):
        run = list(same)
        expected = [row for row in rows(planned) if made[row.line - 1][0] == group]
        assert run == expected
        homes = {segment.number for segment, content in planned for row in content if row in run}
        if sum(tokens[row.line] for row in run) <= SEGMENT_TOKENS:
            assert len(homes) == 1


def planned_tokens(row: PlanRow) -> int:
    limit: int = json.loads(row.raw)["body"].get("max_tokens", 256)
    return len(row.raw) // 4 + limit


@pytest.mark.parametrize("size", [1, 7, 1_000])
def test_plan_does_not_depend_on_chunks(size: int, tmp_path: Path) -> None:
    data = b"\xef\xbb\xbf" + line(1, "a") + b"\r\n \n" + line(3, "b")
    with PlanBuilder(Workspace(tmp_path)) as builder:
        for first, block in line_blocks(data[start : start + size] for start in range(0, len(data), size)):
            builder.add(first, block)
        store = MemoryObjectStore()
        builder.write(store, BATCH, merge_equal=True)
    planned = list(decode_rows(b"".join(store.read(plan_key(BATCH)))))
    assert planned == [PlanRow(line=1, raw=line(1, "a")), PlanRow(line=3, raw=line(3, "b"))]


def test_equal_deterministic_lines_are_one_row(tmp_path: Path) -> None:
    lines = [line(n, content, temperature=0) for n, content in enumerate("abaab", start=1)]
    planned = rows(plan(lines, tmp_path))
    assert [(row.line, row.twins) for row in planned] == [(1, ((3, "r3"), (4, "r4"))), (2, ((5, "r5"),))]
    assert len(rows(plan(lines, tmp_path, merge_equal=False))) == 5


def test_row_has_a_limited_number_of_twins(tmp_path: Path) -> None:
    lines = [line(n, "a", temperature=0) for n in range(1, 2 * MOST_TWINS + 4)]
    planned = sorted((row.line, len(row.twins)) for row in rows(plan(lines, tmp_path)))
    assert planned == [(1, MOST_TWINS), (MOST_TWINS + 2, MOST_TWINS), (2 * MOST_TWINS + 3, 0)]


def test_lines_that_are_done_are_skipped(tmp_path: Path) -> None:
    lines = [line(n, "a", temperature=0) for n in (1, 2, 3)]
    (row,) = rows(plan(lines, tmp_path, skipped=[1]))
    assert (row.line, row.twins) == (2, ((3, "r3"),))
    assert plan(lines, tmp_path, skipped=[1, 2, 3]) == []


def test_segment_names_its_files_once_and_counts_them_as_data_urls(tmp_path: Path) -> None:
    small, large = ("file-small", 3_000), ("file-large", 300_000)
    files = {1: [small, small], 3: [("file-other", 1), small], 4: [large]}
    with PlanBuilder(Workspace(tmp_path), skipped={2}) as builder:
        builder.add(1, [line(number, str(number)) for number in range(1, 5)], files)
        segments = builder.write(MemoryObjectStore(), BATCH, merge_equal=True)
    one, many = sorted(segments, key=lambda segment: segment.rows)
    assert (one.rows, one.files) == (1, ("file-large",))
    assert one.media_bytes >= 400_000
    assert one.tokens > SEGMENT_TOKENS
    assert (many.rows, many.files) == (2, ("file-small", "file-other"))
    assert 12_000 < many.media_bytes < 12_200


def test_row_larger_than_a_segment_is_one_by_itself(tmp_path: Path) -> None:
    lines = [line(1, "a"), line(2, "b" * (SEGMENT_BYTES + 1)), line(3, "c"), line(4, "d", max_tokens=SEGMENT_TOKENS)]
    planned = plan(lines, tmp_path)
    assert [[row.line for row in rows] for _, rows in planned] == [[2], [4], [1, 3]]


def test_group_larger_than_a_segment_is_cut_inside(tmp_path: Path) -> None:
    lines = [line(n, "shared " * 100 + str(n), max_tokens=20_000) for n in range(1, 9)]
    planned = plan(lines, tmp_path)
    assert [segment.rows for segment, _ in planned] == [3, 3, 2]


def test_group_that_would_be_cut_begins_a_segment(tmp_path: Path) -> None:
    lines = [line(n, f"{group} " * 200 + str(n), max_tokens=10_000) for n, group in enumerate("aaaabbbb", start=1)]
    planned = plan(lines, tmp_path)
    assert [[row.line for row in rows] for _, rows in planned] == [[1, 2, 3, 4], [5, 6, 7, 8]]


class Interrupted(MemoryObjectStore):
    """Fails in the middle of the first write."""

    is_first = True

    def put(self, key: str, chunks: Any) -> Any:
        if self.is_first:
            self.is_first = False
            next(iter(chunks))
            raise ObjectStoreError("the connection was lost")
        return super().put(key, chunks)


def test_retried_write_has_the_same_plan(tmp_path: Path) -> None:
    lines = [line(n, f"{n} " * 2_000, max_tokens=30_000) for n in range(1, 200)]

    def written(store: Any) -> tuple[list[Segment], bytes]:
        with PlanBuilder(Workspace(tmp_path)) as builder:
            builder.add(1, lines)
            segments = builder.write(RetryingStore(store), BATCH, merge_equal=True)
        return segments, b"".join(store.read(plan_key(BATCH)))

    assert written(Interrupted()) == written(MemoryObjectStore())


def test_workspace_without_room_refuses_lines_and_is_empty_afterwards(tmp_path: Path) -> None:
    workspace = Workspace(tmp_path, 10)
    with pytest.raises(OSError, match="planned or assembled"), PlanBuilder(workspace) as builder:
        builder.add(1, [b"x" * 11])
    with PlanBuilder(workspace) as builder:
        builder.add(1, [b"x" * 10])
    assert list(tmp_path.iterdir()) == []


@pytest.mark.slow
def test_plan_of_50_000_lines_takes_less_than_3_s_of_cpu(tmp_path: Path) -> None:
    import time

    def blocks() -> Iterator[list[bytes]]:
        for start in range(0, 50_000, 1_000):
            yield [line(n, f"{n % 50} " * 200 + str(n) * 60, temperature=n % 2) for n in range(start, start + 1_000)]

    took_s = 0.0
    store = DirectoryObjectStore(tmp_path / "objects")
    with PlanBuilder(Workspace(tmp_path)) as builder:
        for index, block in enumerate(blocks()):
            began_s = time.process_time()
            builder.add(1 + 1_000 * index, block)
            took_s += time.process_time() - began_s
        began_s = time.process_time()
        segments = builder.write(store, BATCH, merge_equal=True)
        took_s += time.process_time() - began_s
    assert sum(segment.rows for segment in segments) == 50_000
    assert took_s < 3
