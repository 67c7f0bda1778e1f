"""Part objects: what is written is read back, and damage is told."""

import json

import pytest

from ray_job.contract.parts import PartError, PartRow, Usage, decode_header, encode_part, part_id


def row(line: int, data: bytes = b"{}") -> PartRow:
    return PartRow(line=line, outcome="completed", data=data, usage=Usage(input_tokens=line))


def header_line(part: bytes) -> bytes:
    return part[: part.index(b"\n") + 1]


def test_rows_are_found_by_the_offsets_of_the_header() -> None:
    part = encode_part("batch_1", [row(7, b'{"b":2}'), row(3, b'{"a":1}')])
    header = decode_header(header_line(part), "key")
    assert header.lines == (3, 7)
    found = [part[start : start + length] for start, length in zip(header.offsets(), header.lengths, strict=True)]
    assert found == [b'{"a":1}', b'{"b":2}']


def test_usage_and_outcome_survive_the_header() -> None:
    failed = PartRow(
        line=1, outcome="failed", data=b"{}", usage=Usage(input_tokens=1, output_tokens=2, cached_tokens=3)
    )
    header = decode_header(header_line(encode_part("batch_1", [failed])), "key")
    assert header.outcomes == ("failed",)
    assert header.usage == (failed.usage,)


def test_a_line_twice_in_one_part_is_refused() -> None:
    with pytest.raises(PartError, match="holds a line twice"):
        encode_part("batch_1", [row(1), row(1)])


def test_the_same_lines_give_the_same_key_in_any_order() -> None:
    assert part_id([3, 1, 2]) == part_id([1, 2, 3])
    assert part_id([1, 2, 3]) != part_id([1, 2, 4])


@pytest.mark.parametrize(
    ("line", "message"),
    [
        (b"not json\n", "no readable header"),
        (b'{"version":1}\n', "no readable header"),
        (b'{"version":9}\n', "has version 9"),
        (b"[]\n", "no readable header"),
    ],
)
def test_a_damaged_header_names_the_object(line: bytes, message: str) -> None:
    with pytest.raises(PartError, match=message):
        decode_header(line, "batches/b/parts/x.part")


def test_lists_of_different_length_are_damage() -> None:
    header = json.loads(header_line(encode_part("batch_1", [row(1)])))
    header["lengths"] = []
    with pytest.raises(PartError, match="differ in length"):
        decode_header(json.dumps(header).encode(), "key")
