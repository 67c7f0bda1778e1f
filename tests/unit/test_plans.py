"""Rows of plans, and bitmaps of rows."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ray_job.contract.plans import PlanError, PlanRow, bitmap, bitmap_rows, bitmap_value, decode_rows

ROW = PlanRow(line=17, raw=b'{"custom_id":"confidential"}', twins=((19, "id-19"), (23, "\u00fc")))

plan_rows = st.builds(
    PlanRow,
    line=st.integers(1, 2**53),
    raw=st.binary(max_size=50),
    twins=st.lists(st.tuples(st.integers(1, 2**53), st.text()), max_size=3).map(tuple),
)


@given(st.lists(plan_rows, max_size=5))
def test_rows_are_read_as_they_were_written(rows: list[PlanRow]) -> None:
    assert list(decode_rows(b"".join(row.encode() for row in rows))) == rows


def test_row_is_a_header_and_the_line_of_the_input() -> None:
    row = PlanRow(line=1, raw=b"{}", twins=((2, "b"),))
    assert row.encode() == b'{"line":1,"length":2,"twins":[[2,"b"]]}\n{}\n'


def test_empty_plan_has_no_rows() -> None:
    assert list(decode_rows(b"")) == []


@given(st.integers(1, len(ROW.encode()) - 1))
def test_truncated_plan_is_refused_without_quoting_it(length: int) -> None:
    with pytest.raises(PlanError) as refused:
        list(decode_rows(ROW.encode() + ROW.encode()[:length]))
    assert "confidential" not in str(refused.value)
    assert refused.value.__cause__ is None


@pytest.mark.parametrize(
    "data",
    [
        b"confidential\n",
        b"confidential",
        b"[]\n\n",
        b"null\n\n",
        b'{"line":1,"length":1}\nx\n',
        b'{"line":"confidential","length":1,"twins":[]}\nx\n',
        b'{"line":1,"length":1,"twins":[[1]]}\nx\n',
        b'{"line":1,"length":1,"twins":7}\nx\n',
        b'{"line":1,"length":2,"twins":[]}\nx\n',
        b'{"line":1,"length":0,"twins":[]}\nx\n',
        b'{"line":1,"length":-3,"twins":[]}\nx\n',
        b'{"line":1,"length":-36,"twins":[]}\nx\n',
        b'{"line":1,"length":1e400,"twins":[]}\nx\n',
        b'\xff{"line":1,"length":1,"twins":[]}\nx\n',
        b"[" * 200_000 + b"\n",
    ],
    ids=range(15),
)
def test_unreadable_plan_is_refused_without_quoting_it(data: bytes) -> None:
    with pytest.raises(PlanError) as refused:
        for _ in zip(range(10), decode_rows(data), strict=False):
            pass
    assert "confidential" not in str(refused.value)


def test_rows_before_the_unreadable_one_are_read() -> None:
    rows = decode_rows(ROW.encode() + b"x\n")
    assert next(rows) == ROW
    with pytest.raises(PlanError, match=f"at byte {len(ROW.encode())} "):
        next(rows)


@pytest.mark.parametrize(
    ("rows", "text"), [([], "0"), ([0], "1"), ([0, 2], "5"), ([64], "1" + "0" * 16), ([3, 3], "8")]
)
def test_bitmap_has_a_bit_for_each_row(rows: list[int], text: str) -> None:
    assert bitmap(rows) == text


@given(st.sets(st.integers(0, 5_000)))
def test_bitmap_is_read_as_it_was_written(rows: set[int]) -> None:
    assert bitmap_rows(bitmap(rows)) == rows
    assert bitmap_value(bitmap(rows)).bit_count() == len(rows)


def test_empty_bitmap_has_no_rows() -> None:
    assert (bitmap_value(""), bitmap_rows("")) == (0, set())


@pytest.mark.parametrize("text", ["0x1", "-1", "+1", " 1", "1\n", "1_0", "F", "g", "\u0661"])
def test_other_characters_are_no_bitmap(text: str) -> None:
    with pytest.raises(ValueError, match="hexadecimal") as refused:
        bitmap_value(text)
    assert text not in str(refused.value)
