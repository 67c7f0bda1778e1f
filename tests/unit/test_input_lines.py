"""Input lines in execution order, read once in chunks of any size."""

import json

import pytest

from ray_job.contract.input_lines import split_lines
from ray_job.input_lines import InputLines


def line(system: str, number: int) -> bytes:
    return json.dumps({"n": number, "body": {"messages": [{"role": "system", "content": system}]}}).encode()


@pytest.mark.parametrize("size", [1, 2, 3, 7, 1000])
def test_lines_do_not_depend_on_chunk_boundaries(size: int) -> None:
    data = "\ufeffone\r\n\ntwo ü\nthree".encode()
    chunks = [data[start : start + size] for start in range(0, len(data), size)]
    assert [line.content for line in split_lines(chunks)] == [b"one", b"", "two ü".encode(), b"three"]


def test_line_numbers_are_physical_and_blank_or_committed_lines_are_skipped() -> None:
    data = b"\n".join([line("a", 1), b"", line("b", 3), line("c", 4)]) + b"\n"
    with InputLines([data], committed={3}) as lines:
        assert [[number for number, _ in block] for block in lines.blocks(10)] == [[1, 4]]
        assert len(lines) == 2


def test_lines_with_a_common_prefix_share_a_block() -> None:
    data = b"\n".join(line(system * 100, n) for n, system in enumerate("abab", start=1))
    with InputLines([data], committed=()) as lines:
        blocks = list(lines.blocks(2))
    assert [[number for number, _ in block] for block in blocks] == [[1, 3], [2, 4]]
    assert json.loads(blocks[0][1][1])["n"] == 3


def test_input_without_lines_has_no_blocks() -> None:
    with InputLines([b"\n\r\n"], committed=()) as lines:
        assert list(lines.blocks(4)) == []


def greedy(number: int, content: str) -> bytes:
    body = {"messages": [{"role": "user", "content": content}], "temperature": 0}
    return json.dumps({"custom_id": f"r{number}", "url": "/v1/chat/completions", "body": body}).encode()


def test_equal_deterministic_lines_share_an_answer() -> None:
    data = b"\n".join(greedy(n, content) for n, content in enumerate("abaab", start=1))
    with InputLines([data], committed=(), merge_equal=True) as lines:
        assert (len(lines), lines.total) == (2, 5)
        assert [(lines.read(position)[0], lines.twins(position)) for position in range(2)] == [
            (1, [(3, "r3"), (4, "r4")]),
            (2, [(5, "r5")]),
        ]


def test_equal_line_of_a_committed_line_runs_by_itself() -> None:
    data = b"\n".join(greedy(n, "a") for n in (1, 2, 3))
    with InputLines([data], committed={1}, merge_equal=True) as lines:
        assert (lines.read(0)[0], lines.twins(0)) == (2, [(3, "r3")])


def test_equal_lines_run_each_by_default() -> None:
    data = b"\n".join(greedy(n, "a") for n in (1, 2, 3))
    with InputLines([data], committed=()) as lines:
        assert len(lines) == lines.total == 3
