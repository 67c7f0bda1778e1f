"""Reading the input object once, in any chunks, and giving its open lines in execution order."""

import json

import pytest

from ray_job.contract.input_lines import split_lines
from ray_job.input_lines import InputLines


def line(system: str, number: int) -> bytes:
    return json.dumps({"n": number, "body": {"messages": [{"role": "system", "content": system}]}}).encode()


@pytest.mark.parametrize("size", [1, 2, 3, 7, 1000])
def test_lines_are_the_same_whatever_the_chunks(size: int) -> None:
    data = "\ufeffone\r\n\ntwo ü\nthree".encode()
    chunks = [data[start : start + size] for start in range(0, len(data), size)]
    assert [line.content for line in split_lines(chunks)] == [b"one", b"", "two ü".encode(), b"three"]


def test_line_numbers_are_physical_and_blank_or_committed_lines_are_left_out() -> None:
    data = b"\n".join([line("a", 1), b"", line("b", 3), line("c", 4)]) + b"\n"
    with InputLines([data], committed={3}) as lines:
        assert [[number for number, _ in block] for block in lines.blocks(10)] == [[1, 4]]
        assert len(lines) == 2


def test_lines_with_one_prefix_come_in_one_block() -> None:
    data = b"\n".join(line(system, n) for n, system in enumerate("abab", start=1))
    with InputLines([data], committed=()) as lines:
        blocks = list(lines.blocks(2))
    assert [[number for number, _ in block] for block in blocks] == [[1, 3], [2, 4]]
    assert json.loads(blocks[0][1][1])["n"] == 3


def test_an_input_without_lines_has_no_blocks() -> None:
    with InputLines([b"\n\r\n"], committed=()) as lines:
        assert list(lines.blocks(4)) == []
