"""``GET /metrics``, in Prometheus' text format. No label holds an id, and none comes from what a client sends."""

import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from threading import Lock
from typing import Any, Final

import psycopg
import structlog
from fastapi import APIRouter, Request
from fastapi.responses import Response
from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from service.api.watching import Watching
from service.db import Pool, query
from service.transitions import BatchStatus

_log = structlog.get_logger(__name__)

router = APIRouter()

# Scrapes by several Prometheus servers, or by hand, cost the database one query in this time.
CACHED_FOR_S: Final = 5.0
_METHODS: Final = frozenset({"GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS"})
_DURATION_BUCKETS_S: Final = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 300)

_COUNTERS: Final = (
    ("cloister_lines_total", "Lines with a result, by outcome.", "outcome",
     {"completed": "completed", "failed": "failed"}),
    ("cloister_tokens_total", "Tokens of lines with a result; cached is a part of input, reasoning of output.", "kind",
     {"input": "input_tokens", "cached": "cached_tokens", "output": "output_tokens", "reasoning": "reasoning_tokens"}),
    ("cloister_jobs_launched_total", "Ray jobs that were launched.", None, {"": "jobs_launched"}),
    ("cloister_gpu_seconds_total", "GPUs times the seconds that jobs held them.", None, {"": "gpu_seconds"}),
)  # fmt: skip
_GAUGES: Final = (
    ("cloister_queue_age_seconds", "How long the batch that waits longest for its job has been due.", "queue_age_s"),
    ("cloister_reconcile_lag_seconds", "Since a reconciler last looked at all open batches.", "heartbeat_age_s"),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class FinishedRequest:
    """What is measured of a request. ``route`` is the template of its path, None if no route has it."""

    method: str
    route: str | None
    status: int
    duration_s: float
    bytes_in: int
    bytes_out: int


class StackCollector(Collector):
    """Numbers from the database, asked for when somebody scrapes."""

    def __init__(self, pool: Pool, *, cached_for_s: float = CACHED_FOR_S) -> None:
        self._pool = pool
        self._cached_for_s = cached_for_s
        self._lock = Lock()
        self._asked_at = float("-inf")
        self._row: Mapping[str, Any] | None = None
        self._highest: dict[str, float] = {}

    def describe(self) -> Iterable[Metric]:
        """Nothing: the registry need not ask the database to know the names."""
        return ()

    def collect(self) -> Iterable[Metric]:
        """The numbers now, or those of some seconds ago. Without the database, only that it is down."""
        row = self._totals()
        yield GaugeMetricFamily(
            "cloister_database_up", "Whether the database answered the last scrape.", float(row is not None)
        )
        if row is None:
            return
        batches = GaugeMetricFamily("cloister_batches", "Batches by state.", labels=["status"])
        for status in BatchStatus:
            batches.add_metric([status.value], (row["batches"] or {}).get(status.value, 0))
        yield batches
        for name, text, label, columns in _COUNTERS:
            counter = CounterMetricFamily(name, text, labels=[label] if label else [])
            for value, column in columns.items():
                counter.add_metric([value] if label else [], self._never_falling(column, row[column]))
            yield counter
        for name, text, column in _GAUGES:
            yield GaugeMetricFamily(name, text, 0 if row[column] is None and column == "queue_age_s" else row[column])

    def _never_falling(self, name: str, value: float) -> float:
        """A job that runs again may report less than the one before it; a counter that falls looks like a restart."""
        self._highest[name] = max(self._highest.get(name, 0.0), value)
        return self._highest[name]

    def _totals(self) -> Mapping[str, Any] | None:
        with self._lock:
            if time.monotonic() - self._asked_at >= self._cached_for_s:
                try:
                    with self._pool.connection(timeout=2) as connection:
                        self._row = connection.execute(query("stack_totals")).fetchone()
                except psycopg.Error as error:
                    _log.warning("metrics.database_unreachable", error=type(error).__name__)
                    self._row = None
                self._asked_at = time.monotonic()
            return self._row


class Metrics:
    """The measures of one application."""

    def __init__(self, pool: Pool, watching: Watching) -> None:
        self.registry = CollectorRegistry()
        self.uploads_in_flight = Gauge(
            "cloister_uploads_in_flight", "Uploads that are being received or stored.", registry=self.registry
        )
        watchers = Gauge("cloister_event_watchers", "Event streams that are open.", registry=self.registry)
        watchers.set_function(lambda: watching.watchers)
        self._requests = Counter(
            "cloister_http_requests_total", "Requests that were answered.", ("method", "route", "status"),
            registry=self.registry,
        )  # fmt: skip
        self._durations = Histogram(
            "cloister_http_request_duration_seconds", "From a request's first byte to its answer's last.",
            ("method", "route"), buckets=_DURATION_BUCKETS_S, registry=self.registry,
        )  # fmt: skip
        self._bytes_in = Counter(
            "cloister_http_request_bytes_total", "Bytes of request bodies.", ("route",), registry=self.registry
        )
        self._bytes_out = Counter(
            "cloister_http_response_bytes_total", "Bytes of answers' bodies.", ("route",), registry=self.registry
        )
        self.registry.register(StackCollector(pool))

    def observe(self, request: FinishedRequest) -> None:
        """Counts a request. Methods and paths that are not known share one label, so that clients cannot make any."""
        method = request.method if request.method in _METHODS else "other"
        route = request.route or "unknown"
        self._requests.labels(method, route, str(request.status)).inc()
        self._durations.labels(method, route).observe(request.duration_s)
        self._bytes_in.labels(route).inc(request.bytes_in)
        self._bytes_out.labels(route).inc(request.bytes_out)


@router.get("/metrics")
def read_metrics(request: Request) -> Response:
    """Measures of this process, and of the stack as the database knows it. They need no API key and name nobody.

    Every replica gives the same numbers of the stack: take their ``max``, not their ``sum``.
    """
    metrics: Metrics = request.app.state.metrics
    return Response(generate_latest(metrics.registry), media_type=CONTENT_TYPE_LATEST)
