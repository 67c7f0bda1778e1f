"""Part objects: writing, reading and damage."""

import hashlib
import json

import pytest

from ray_job.contract.object_keys import part_key
from ray_job.contract.parts import PartError, PartRow, Usage, decode_header, encode_part


def row(line: int, data: bytes = b"{}") -> PartRow:
    return PartRow(line=line, outcome="completed", data=data, usage=Usage(input_tokens=line))


def header_line(part: bytes) -> bytes:
    return part[: part.index(b"\n") + 1]


def test_rows_are_found_at_the_offsets_of_the_header() -> None:
    part = encode_part("batch_1", [row(7, b'{"b":2}'), row(3, b'{"a":1}')])
    header = decode_header(header_line(part), "key")
    assert header.lines == (3, 7)
    found = [part[start : start + length] for start, length in zip(header.offsets(), header.lengths, strict=True)]
    assert found == [b'{"a":1}', b'{"b":2}']


def test_header_keeps_usage_and_outcome() -> None:
    failed = PartRow(
        line=1, outcome="failed", data=b"{}", usage=Usage(input_tokens=1, output_tokens=2, cached_tokens=3)
    )
    header = decode_header(header_line(encode_part("batch_1", [failed])), "key")
    assert header.outcomes == ("failed",)
    assert header.usage == (failed.usage,)


def test_duplicate_line_is_refused() -> None:
    with pytest.raises(PartError, match="holds a line twice"):
        encode_part("batch_1", [row(1), row(1)])


def test_part_key_depends_on_the_lines_and_not_on_their_order() -> None:
    assert part_key("batch_1", [3, 1, 2]) == part_key("batch_1", [1, 2, 3])
    assert part_key("batch_1", [1, 2, 3]) != part_key("batch_1", [1, 2, 4])


@pytest.mark.parametrize(
    ("line", "message"),
    [
        (b"not json\n", "no readable header"),
        (b'{"version":1}\n', "no readable header"),
        (b'{"version":9}\n', "has version 9"),
        (b'{"version":0}\n', "has version 0"),
        (b"[]\n", "no readable header"),
    ],
)
def test_damaged_header_is_reported(line: bytes, message: str) -> None:
    with pytest.raises(PartError, match=message):
        decode_header(line, "batches/b/parts/x.part")


def test_lists_of_different_length_are_reported() -> None:
    header = json.loads(header_line(encode_part("batch_1", [row(1)])))
    header["lengths"] = []
    with pytest.raises(PartError, match="differ in length"):
        decode_header(json.dumps(header).encode(), "key")


def test_damaged_header_is_reported_without_its_content() -> None:
    with pytest.raises(PartError) as caught:
        decode_header(b"secret \xff\n", "key")
    assert "secret" not in str(caught.value)


@pytest.mark.parametrize("name", ["lines", "lengths", "usage", "outcomes"])
def test_each_list_must_have_one_item_per_row(name: str) -> None:
    header = json.loads(header_line(encode_part("batch_1", [row(1), row(2)])))
    header[name] = header[name][:1]
    with pytest.raises(PartError, match="differ in length"):
        decode_header(json.dumps(header).encode(), "key")


def test_digest_and_size_describe_the_object() -> None:
    part = encode_part("batch_1", [row(1), row(2)])
    header = decode_header(header_line(part), "key")
    assert header.sha256 == hashlib.sha256(part[header.size_bytes :]).hexdigest()
    assert header.batch_id == "batch_1"


def test_usage_is_zero_by_default_and_adds_up() -> None:
    one = Usage(input_tokens=1, output_tokens=2, cached_tokens=3, reasoning_tokens=4)
    assert Usage() + one == one
    assert one + one == Usage(input_tokens=2, output_tokens=4, cached_tokens=6, reasoning_tokens=8)


def test_part_key_sorts_by_its_first_line() -> None:
    key = part_key("batch_1", [12, 3])
    assert key.startswith("batches/batch_1/parts/00000003-00002-")
    assert len(key) == len("batches/batch_1/parts/00000003-00002-0123456789abcdef.part")
