"""Ids and sampling of traces."""

import hashlib
import subprocess
import sys
from datetime import UTC, datetime, timedelta

import pytest

from service.traces import OFF, Span, Traces, span_id, trace_id

BATCH = "batch_1"


class Spans(list[Span]):
    def export(self, span: Span) -> None:
        self.append(span)


def test_ids_are_derived_from_the_batch() -> None:
    digest = hashlib.sha256(b"batch_1").hexdigest()
    assert f"{trace_id(BATCH):032x}{span_id(BATCH):016x}" == digest[:48]


def test_spans_of_two_processes_are_in_one_trace_below_its_root() -> None:
    one, other, start = Spans(), Spans(), datetime.now(UTC)
    Traces(one).child(BATCH, "validate", start, {})
    Traces(other).root(BATCH, "batch", start, {})
    assert one[0].trace_id == other[0].trace_id
    assert (one[0].parent_id, other[0].parent_id) == (other[0].span_id, None)
    assert one[0].span_id != other[0].span_id


def test_span_whose_start_is_by_a_faster_clock_has_no_negative_length() -> None:
    spans, start = Spans(), datetime.now(UTC) + timedelta(minutes=1)
    Traces(spans).child(BATCH, "wait", start, {})
    assert spans[0].start == spans[0].end


def test_step_that_fails_has_the_type_of_its_error_only() -> None:
    spans = Spans()
    with pytest.raises(ValueError, match="prompt"), Traces(spans).step(BATCH, "plan"):
        raise ValueError("a prompt")
    assert (spans[0].is_error, spans[0].attributes["error.type"]) == (True, "ValueError")
    assert "prompt" not in repr(spans)


@pytest.mark.parametrize(("rate", "least", "most"), [(0.0, 1, 1), (0.01, 60, 140), (1.0, 10_000, 10_000)])
def test_share_of_segments_is_sampled_and_always_the_first(rate: float, least: int, most: int) -> None:
    one, other = Traces(Spans(), segments=rate), Traces(Spans(), segments=rate)
    sampled = [number for number in range(10_000) if one.samples(BATCH, number)]
    assert least <= len(sampled) <= most
    assert sampled[0] == 0
    assert sampled == [number for number in range(10_000) if other.samples(BATCH, number)]


def test_nothing_is_sampled_without_a_collector() -> None:
    assert not OFF.samples(BATCH, 0)


def test_opentelemetry_is_not_imported_without_a_collector() -> None:
    program = (
        "import sys, service.api.__main__, service.coordinator.__main__, service.reconciler.__main__\n"
        "sys.exit(any(name.split('.')[0] == 'opentelemetry' for name in sys.modules))"
    )
    assert subprocess.run([sys.executable, "-c", program], check=False).returncode == 0
