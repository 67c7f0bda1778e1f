"""Traces of batches: their spans, with ids that each process derives by itself.

The trace id of a batch is the first 16 bytes of the SHA-256 of the batch's id, and the id of its root span the next 8.
So processes pass no context on. The root span is exported last, at the end of the batch. The upload of a file has its
own trace, derived from the file's id in the same way, to which the batch links.

Attributes are ids that the service made, counts, states and names that the operator chose. They never hold content,
custom ids, file names or metadata.
"""

import hashlib
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Final, Literal, Protocol

DEFAULT_SEGMENTS: Final = 0.01

Attribute = Literal[
    "cloister.accelerator",
    "cloister.accepted",
    "cloister.batch.id",
    "cloister.completed",
    "cloister.epoch",
    "cloister.errors",
    "cloister.failed",
    "cloister.file.bytes",
    "cloister.file.id",
    "cloister.job.id",
    "cloister.lines",
    "cloister.project.id",
    "cloister.rows",
    "cloister.segment",
    "cloister.segments",
    "cloister.state",
    "cloister.tokens",
    "error.type",
    "gen_ai.request.model",
    "gen_ai.usage.input_tokens",
    "gen_ai.usage.output_tokens",
]
"""Names of attributes. Those with ``gen_ai`` are OpenTelemetry's.

Source: https://opentelemetry.io/docs/specs/semconv/registry/attributes/gen-ai/
"""
Attributes = Mapping[Attribute, str | int | bool]


@dataclass(frozen=True, slots=True, kw_only=True)
class Span:
    """A finished span.

    Attributes:
        name: what was done; one of a few fixed names.
        trace_id: 16 bytes as a number.
        span_id: 8 bytes as a number.
        parent_id: the span above; None for a root span.
        start: aware.
        end: aware; not before the start, which may be by the clock of another machine.
        attributes: see ``Attribute``.
        link: the id of a file or batch whose trace is related; empty for none.
        is_error: whether it failed.
    """

    name: str
    trace_id: int
    span_id: int
    parent_id: int | None
    start: datetime
    end: datetime
    attributes: Attributes
    link: str = ""
    is_error: bool = False


class SpanExporter(Protocol):
    """Destination of spans."""

    def export(self, span: Span) -> None:
        """Take a span. Does not block, and does not raise errors of the destination."""


def trace_id(subject: str) -> int:
    """Return the id of the trace of a batch or file."""
    return int.from_bytes(hashlib.sha256(subject.encode()).digest()[:16])


def span_id(subject: str) -> int:
    """Return the id of the root span of a batch or file, or of the span of anything else that has a name."""
    return int.from_bytes(hashlib.sha256(subject.encode()).digest()[16:24])


@dataclass(slots=True)
class Step:
    """A step that is being measured: add what becomes known to its attributes."""

    attributes: dict[Attribute, str | int | bool] = field(default_factory=dict)


class Traces:
    """The spans of one process.

    Args:
        exporter: their destination; None to record none.
        segments: the share of segments with spans, from 0 to 1. The first one of each batch always has them.
    """

    def __init__(self, exporter: SpanExporter | None = None, *, segments: float = DEFAULT_SEGMENTS) -> None:
        self._exporter = exporter
        self._segments = segments

    def samples(self, batch_id: str, segment: int) -> bool:
        """Return whether a segment has spans. Every process with the same settings decides the same."""
        if self._exporter is None:
            return False
        digest = hashlib.sha256(f"{batch_id}/{segment}".encode()).digest()
        return segment == 0 or int.from_bytes(digest[:8]) < self._segments * 2**64

    def root(
        self,
        subject: str,
        name: str,
        start: datetime,
        attributes: Attributes,
        *,
        end: datetime | None = None,
        is_error: bool = False,
    ) -> None:
        """Record the root span of a batch or file, which ends now by default."""
        if self._exporter is not None:
            span = Span(
                name=name,
                trace_id=trace_id(subject),
                span_id=span_id(subject),
                parent_id=None,
                start=start,
                end=max(start, end or datetime.now(UTC)),
                attributes=attributes,
                is_error=is_error,
            )
            self._exporter.export(span)

    def child(
        self,
        batch_id: str,
        name: str,
        start: datetime,
        attributes: Attributes,
        *,
        end: datetime | None = None,
        key: str = "",
        parent: str = "",
        link: str = "",
        is_error: bool = False,
    ) -> None:
        """Record a span of a batch, which ends now by default.

        Args:
            batch_id: the batch.
            name: the name of the span.
            start: aware.
            attributes: besides the batch's id.
            end: aware; None for now.
            key: what its id is derived from, so that other spans can name it as ``parent``; by default from its name
                and start.
            parent: the ``key`` of the span above; empty for the root span.
            link: the id of a file whose trace is related; empty for none.
            is_error: whether it failed.
        """
        if self._exporter is not None:
            span = Span(
                name=name,
                trace_id=trace_id(batch_id),
                span_id=span_id(key or f"{batch_id}/{parent}/{name}/{start.isoformat()}"),
                parent_id=span_id(parent or batch_id),
                start=start,
                end=max(start, end or datetime.now(UTC)),
                attributes={"cloister.batch.id": batch_id, **attributes},
                link=link,
                is_error=is_error,
            )
            self._exporter.export(span)

    @contextmanager
    def step(self, batch_id: str, name: str) -> Iterator[Step]:
        """Measure a step of a batch. If it fails, its span has the type of the error, and no message."""
        start, step = datetime.now(UTC), Step()
        try:
            yield step
        except Exception as error:
            step.attributes["error.type"] = type(error).__qualname__
            self.child(batch_id, name, start, step.attributes, is_error=True)
            raise
        self.child(batch_id, name, start, step.attributes)


OFF: Final = Traces()
"""Records no spans."""
