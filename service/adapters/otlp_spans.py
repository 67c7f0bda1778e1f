"""Sends spans to an OpenTelemetry collector: OTLP over HTTP, by OpenTelemetry's SDK.

The SDK sends from its own thread. A collector that is slow or away costs spans, and nothing else.
"""

import logging
import os
import socket
from collections.abc import Sequence
from datetime import datetime
from threading import Lock
from types import TracebackType
from typing import Final, Self

import requests
import structlog
from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider, export
from opentelemetry.sdk.trace.id_generator import IdGenerator
from opentelemetry.sdk.trace.sampling import ALWAYS_ON
from opentelemetry.trace import Link, NonRecordingSpan, SpanContext, StatusCode, TraceFlags, set_span_in_context
from prometheus_client import Counter

from service.traces import Span, span_id, trace_id

_log = structlog.get_logger(__name__)

_SDK_LOGGER: Final = logging.getLogger("opentelemetry")
MAX_WAITING: Final = 2_048
"""Spans that wait to be sent; further ones are dropped."""


class OtlpSpans:
    """Sends spans until it is closed. Use it as a context manager.

    Args:
        endpoint: the collector, e.g. ``http://collector:4318``; ``/v1/traces`` is appended.
        process: the name of the process, e.g. ``api``.
        dropped: counts the spans that no collector got.
        timeout_s: the longest time for which a request is tried.
        interval_s: the longest time for which a span waits for others.
    """

    def __init__(
        self, endpoint: str, *, process: str, dropped: Counter, timeout_s: float = 5.0, interval_s: float = 5.0
    ) -> None:
        # One line of this module reports an outage; the SDK would log each attempt.
        self._reasons = _Reasons(logging.WARNING)
        _SDK_LOGGER.addHandler(self._reasons)
        _SDK_LOGGER.propagate = False
        session = requests.Session()
        # No proxy and no password of the environment: the collector is in the same network.
        session.trust_env = False
        self._ids = _GivenIds()
        self._lock = Lock()
        self._sender = _Sender(
            OTLPSpanExporter(
                f"{endpoint.rstrip('/')}/v1/traces",
                timeout=timeout_s,
                session=session,
                certificate_file=os.environ.get("SSL_CERT_FILE"),  # as for other connections; else certifi's
            ),
            endpoint=endpoint,
            dropped=dropped,
            reasons=self._reasons,
        )
        names = {"service.namespace": "cloister", "service.name": process, "service.instance.id": socket.gethostname()}
        self._provider = TracerProvider(
            sampler=ALWAYS_ON, resource=Resource.create(names), id_generator=self._ids, shutdown_on_exit=False
        )
        self._provider.add_span_processor(
            export.BatchSpanProcessor(
                self._sender,
                max_queue_size=MAX_WAITING,
                max_export_batch_size=MAX_WAITING // 4,
                schedule_delay_millis=interval_s * 1000,
            )
        )
        self._tracer = self._provider.get_tracer("cloister")

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        """Send what waits. A collector that is away delays this by some seconds at most."""
        self._sender.is_closing = True
        self._provider.shutdown()
        _SDK_LOGGER.removeHandler(self._reasons)
        _SDK_LOGGER.propagate = True

    def export(self, span: Span) -> None:
        """See ``service.traces.SpanExporter``."""
        if not self._sender.takes():
            return
        context = None
        if span.parent_id is not None:
            context = set_span_in_context(NonRecordingSpan(_context(span.trace_id, span.parent_id)))
        links = [Link(_context(trace_id(span.link), span_id(span.link)))] if span.link else []
        with self._lock:
            self._ids.trace_id, self._ids.span_id = span.trace_id, span.span_id
            started = self._tracer.start_span(
                span.name,
                context,
                attributes={str(name): value for name, value in span.attributes.items()},
                links=links,
                start_time=_nanoseconds(span.start),
            )
        if span.is_error:
            started.set_status(StatusCode.ERROR)
        started.end(_nanoseconds(span.end))


class _GivenIds(IdGenerator):
    """Ids for the next span of the SDK, which otherwise draws them."""

    trace_id = span_id = 0

    def generate_trace_id(self) -> int:
        return self.trace_id

    def generate_span_id(self) -> int:
        return self.span_id


class _Reasons(logging.Handler):
    """The first message of the SDK about a request, which states why it failed."""

    text = ""

    def emit(self, record: logging.LogRecord) -> None:
        self.text = self.text or record.getMessage()


class _Sender(export.SpanExporter):
    """Counts the spans that wait for an exporter and those that are lost, and logs when an outage begins and ends."""

    def __init__(self, exporter: OTLPSpanExporter, *, endpoint: str, dropped: Counter, reasons: _Reasons) -> None:
        self._exporter = exporter
        self._endpoint = endpoint
        self._dropped = dropped
        self._reasons = reasons
        self._waiting = 0
        self._lost = 0  # in this outage
        self._lock = Lock()
        self.is_closing = False

    def takes(self) -> bool:
        """Return whether there is room for one more span, and count it as waiting or as lost."""
        with self._lock:
            if self._waiting < MAX_WAITING:
                self._waiting += 1
                return True
        self._lose(1, "more spans than can be sent")
        return False

    def export(self, spans: Sequence[ReadableSpan]) -> export.SpanExportResult:
        result = export.SpanExportResult.FAILURE
        # A process that stops waits for one failed attempt at most.
        if not (self.is_closing and self._lost):
            self._reasons.text = ""
            result = self._exporter.export(spans)
        with self._lock:
            self._waiting -= len(spans)
        if result is not export.SpanExportResult.SUCCESS:
            self._lose(len(spans), self._reasons.text)
        elif self._lost:
            _log.info("traces.sent_again", endpoint=self._endpoint, lost_spans=self._lost)
            self._lost = 0
        return result

    def shutdown(self) -> None:
        self._exporter.shutdown()  # type: ignore[no-untyped-call]

    def _lose(self, spans: int, reason: str) -> None:
        self._dropped.inc(spans)
        with self._lock:
            is_first, self._lost = not self._lost, self._lost + spans
        if is_first:
            remedy = "check the collector; batches are not affected"
            _log.warning("traces.lost", endpoint=self._endpoint, reason=reason, remedy=remedy)


def _context(trace: int, span: int) -> SpanContext:
    return SpanContext(trace, span, is_remote=True, trace_flags=TraceFlags(TraceFlags.SAMPLED))


def _nanoseconds(time: datetime) -> int:
    return int(time.timestamp() * 1_000_000) * 1_000
