"""Lines of a byte stream with a limit of their length."""

import tracemalloc

import pytest

from ray_job.contract.input_lines import split_lines


@pytest.mark.parametrize("size", [1, 3, 8, 1000])
@pytest.mark.parametrize("ending", [b"\n", b"\r\n", b""])
def test_only_lines_above_the_limit_have_no_content(size: int, ending: bytes) -> None:
    data = b"\xef\xbb\xbf12345\r\n123456\n1234\n1234567890123\n12345" + ending
    chunks = [data[start : start + size] for start in range(0, len(data), size)]
    found = [tuple(line) for line in split_lines(chunks, max_line_bytes=5)]
    assert found == [(1, b"12345"), (2, None), (3, b"1234"), (4, None), (5, b"12345")]


def test_last_line_above_the_limit_has_no_content() -> None:
    assert [tuple(line) for line in split_lines([b"1\n", b"1234", b"5678", b"9012"], max_line_bytes=5)] == [
        (1, b"1"),
        (2, None),
    ]


def test_rest_of_a_long_line_is_skipped_without_holding_it() -> None:
    chunks = iter([b"x" * 100] * 1_000 + [b"\nnext\n"])
    tracemalloc.start()
    assert [tuple(line) for line in split_lines(chunks, max_line_bytes=5)] == [(1, None), (2, b"next")]
    assert tracemalloc.get_traced_memory()[1] < 50_000
    tracemalloc.stop()


def test_blank_lines_are_lines_of_white_space() -> None:
    assert [line.is_blank for line in split_lines([b" \t\r\n\nx\nlonger"], max_line_bytes=3)] == [
        True,
        True,
        False,
        False,
    ]


def test_byte_order_mark_is_removed_from_the_first_line_only() -> None:
    mark = b"\xef\xbb\xbf"
    chunks = [mark + b"1\n", mark + b"2\n"]
    assert [line.content for line in split_lines(chunks)] == [b"1", mark + b"2"]
