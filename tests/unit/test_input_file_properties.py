"""Properties of validation for arbitrary bytes: it never raises, its counts agree, and chunks do not matter."""

import itertools
import json
import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import orjson
from hypothesis import given, settings
from hypothesis import strategies as st

from ray_job.contract.input_lines import split_lines
from ray_job.contract.job_spec import ModelSpec
from service.input_file import MAX_LISTED_ERRORS, InputFacts, read_input_file
from service.model_catalogue import CatalogueModel, ModelLimits

CHAT, EMBEDDINGS = "/v1/chat/completions", "/v1/embeddings"
MODELS = {
    "demo": CatalogueModel(
        spec=ModelSpec(id="demo", source="x"),
        endpoints=(CHAT, EMBEDDINGS),
        limits=ModelLimits(max_line_bytes=400, max_requests=20),
    ),
    "plain": CatalogueModel(spec=ModelSpec(id="plain", source="x", engine="processor")),
}

anything = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=12),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=6), inner, max_size=3),
    max_leaves=8,
)
bodies = st.fixed_dictionaries(
    {},
    optional={
        "model": st.sampled_from(["demo", "demo", "demo", "plain", "none"]) | anything,
        "messages": st.just([{"role": "user", "content": "hi"}]) | anything,
        "input": anything,
        "stream": st.booleans(),
        "n": anything,
    },
)
requests = st.fixed_dictionaries(
    {},
    optional={
        "custom_id": st.text(max_size=3) | anything,
        "method": st.just("POST") | anything,
        "url": st.sampled_from([CHAT, CHAT, EMBEDDINGS]) | anything,
        "body": bodies | anything,
    },
)
good_requests = st.builds(
    lambda custom_id: {
        "custom_id": custom_id,
        "method": "POST",
        "url": CHAT,
        "body": {"model": "demo", "messages": [{"role": "user", "content": "hi"}]},
    },
    st.text(min_size=1, max_size=2),
)
lines = st.one_of(
    st.binary(max_size=40),
    (requests | good_requests).map(lambda request: json.dumps(request, ensure_ascii=False).encode(errors="replace")),
    st.just(b"x" * 500),
)
breaks = st.sampled_from([b"\n", b"\n", b"\r\n", b"\n\n", b"\r"])
contents = st.one_of(
    st.binary(max_size=200),
    st.lists(st.tuples(lines, breaks), max_size=30).map(
        lambda pairs: b"".join(part for pair in pairs for part in pair)
    ),
    st.binary(max_size=3).map(lambda start: b"\xef\xbb\xbf" + start),
)


def read(chunks: list[bytes], endpoint: str = CHAT) -> InputFacts:
    return read_input_file(chunks, endpoint=endpoint, models=MODELS)


def cut(content: bytes, positions: list[int]) -> list[bytes]:
    places = sorted({min(position, len(content)) for position in positions} | {0, len(content)})
    return [content[start:end] for start, end in itertools.pairwise(places)]


@settings(max_examples=600, deadline=None)
@given(content=contents, endpoint=st.sampled_from([CHAT, EMBEDDINGS, "/v1/completions"]))
def test_no_input_raises_and_counts_agree(content: bytes, endpoint: str) -> None:
    facts = read([content], endpoint)
    assert facts.error_count >= len(facts.errors)
    assert len(facts.errors) == min(facts.error_count, MAX_LISTED_ERRORS)
    assert facts.total <= content.count(b"\n") + 1
    numbers = [error.line for error in facts.errors if error.line is not None]
    assert numbers == sorted(numbers)
    assert all(error.message and "\0" not in error.message + (error.param or "") for error in facts.errors)


@settings(max_examples=300, deadline=None)
@given(content=contents, positions=st.lists(st.integers(0, 400), max_size=12))
def test_chunk_boundaries_change_nothing(content: bytes, positions: list[int]) -> None:
    chunks = cut(content, positions)
    assert b"".join(chunks) == content
    assert read(chunks) == read([content])
    for most in (None, 20):
        assert list(split_lines(chunks, max_line_bytes=most)) == list(split_lines([content], max_line_bytes=most))


@settings(max_examples=200, deadline=None)
@given(content=contents)
def test_accepted_file_is_readable_by_the_job(content: bytes) -> None:
    facts = read([content])
    if facts.error_count:
        return
    parsed = [json.loads(line.content or b"") for line in split_lines([content]) if not line.is_blank]
    assert len({request["custom_id"] for request in parsed}) == facts.total
    assert all(request["url"] == CHAT and isinstance(request["body"], dict) for request in parsed)


@settings(max_examples=200, deadline=None)
@given(requests_=st.lists(good_requests | requests, min_size=2, max_size=8))
def test_line_errors_do_not_depend_on_earlier_lines(requests_: list[dict[str, Any]]) -> None:
    """The first line always gets the full check; later lines can pass the short one."""
    first = {"custom_id": "first", "method": "POST", "url": CHAT, "body": {"model": "demo", "messages": [1]}}
    for request in requests_:
        line = json.dumps(request, ensure_ascii=False).encode(errors="replace")
        alone, after = read([line]), read([json.dumps(first).encode() + b"\n" + line])
        known = {"model_mismatch", "duplicate_custom_id"}
        messages = [error.message for error in after.errors if error.code not in known]
        assert messages == [error.message for error in alone.errors if error.line is not None]


def write_file(path: Path, lines: int, content: str) -> None:
    body = {"model": "demo", "messages": [{"role": "user", "content": content}], "max_tokens": 64}
    with path.open("w") as file:
        for number in range(lines):
            request = {"custom_id": f"request-{number}", "method": "POST", "url": CHAT, "body": body}
            file.write(json.dumps(request) + "\n")


def cpu_seconds(work: Callable[[], None]) -> float:
    """Return the best of three runs, because other load only adds time."""
    runs = []
    for _ in range(3):
        start = time.process_time()
        work()
        runs.append(time.process_time() - start)
    return min(runs)


def test_validation_keeps_at_least_a_third_of_the_parsing_speed(tmp_path: Path) -> None:
    path = tmp_path / "input.jsonl"
    write_file(path, 5_000, "What ends a loop before its condition is false? " * 80)
    models = {"demo": CatalogueModel(spec=ModelSpec(id="demo", source="x"))}

    def bare() -> None:
        with path.open("rb") as file:
            for line in file:
                orjson.loads(line)

    def chunks() -> Iterator[bytes]:
        with path.open("rb") as file:
            while chunk := os.read(file.fileno(), 1 << 20):
                yield chunk

    def validate() -> None:
        assert read_input_file(chunks(), endpoint=CHAT, models=models).error_count == 0

    assert cpu_seconds(bare) / cpu_seconds(validate) >= 0.35
