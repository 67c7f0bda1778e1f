"""``GET /metrics``, in Prometheus' text format. No label holds an id or a value that a client chose.

``RequestMiddleware`` counts requests; this module reads the metrics of the stack.
"""

from collections.abc import Iterable
from typing import Final

from fastapi import APIRouter, Request
from fastapi.responses import Response
from prometheus_client import CONTENT_TYPE_LATEST, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from service.api.openapi import PUBLIC, described
from service.api.routes.health import Readiness
from service.db import Pool
from service.scrapes import CACHED_FOR_S, ScrapedRows
from service.transitions import BatchStatus

router = APIRouter(tags=["Operation"], responses=PUBLIC)

_COUNTERS: Final = (
    ("cloister_lines_total", "Lines with a result, by outcome.", "outcome",
     {"completed": "completed", "failed": "failed"}),
    ("cloister_tokens_total", "Tokens of lines with a result; cached is a share of input, reasoning of output.", "kind",
     {"input": "input_tokens", "cached": "cached_tokens", "output": "output_tokens", "reasoning": "reasoning_tokens"}),
    ("cloister_jobs_launched_total", "Ray jobs that were launched.", None, {"": "jobs_launched"}),
    ("cloister_gpu_seconds_total", "GPUs multiplied by the seconds for which jobs held them.", None,
     {"": "gpu_seconds"}),
)  # fmt: skip
JOB_STATES: Final = ("queued", "working", "warm", "draining")
_GAUGES: Final = (
    ("cloister_warm_engines", "Engines of jobs without work.", "warm_engines"),
    ("cloister_lease_age_seconds", "The age of the oldest lease.", "lease_age_s"),
    ("cloister_segment_failures", "How often segments that are not done were given back.", "segment_failures"),
    (
        "cloister_turn_spread_tokens",
        "By how many tokens the projects with work differ that share a job, at most.",
        "turn_spread",
    ),
)


class StackCollector(Collector):
    """Metrics of the whole stack, read from the database on a scrape."""

    def __init__(self, pool: Pool, *, cached_for_s: float = CACHED_FOR_S) -> None:
        self._rows = ScrapedRows(pool, {"stack_totals": {}, "job_totals": {}}, cached_for_s=cached_for_s)
        self._highest: dict[str, float] = {}

    def describe(self) -> Iterable[Metric]:
        """Return nothing, so that registering the collector needs no database."""
        return ()

    def collect(self) -> Iterable[Metric]:
        """Yield the metrics, at most a few seconds old. Without the database, yield only that it is down."""
        rows = self._rows.read()
        yield GaugeMetricFamily(
            "cloister_database_up", "Whether the database answered the last scrape.", float(rows is not None)
        )
        if rows is None:
            return
        totals = rows["stack_totals"][0] | rows["job_totals"][0]
        batches = GaugeMetricFamily("cloister_batches", "Batches by state.", labels=["status"])
        for status in BatchStatus:
            batches.add_metric([status.value], (totals["batches"] or {}).get(status.value, 0))
        yield batches
        for name, text, label, columns in _COUNTERS:
            counter = CounterMetricFamily(name, text, labels=[label] if label else [])
            for value, column in columns.items():
                # A retried job can report less than the one before; Prometheus takes a fall for a restart.
                self._highest[column] = max(self._highest.get(column, 0.0), totals[column])
                counter.add_metric([value] if label else [], self._highest[column])
            yield counter
        jobs = GaugeMetricFamily("cloister_jobs", "Jobs that are queued or hold a slot, by state.", labels=["state"])
        for state in JOB_STATES:
            jobs.add_metric([state], (totals["jobs"] or {}).get(state, 0))
        yield jobs
        for name, text, column in _GAUGES:
            yield GaugeMetricFamily(name, text, totals[column])
        yield GaugeMetricFamily(
            "cloister_queue_age_seconds",
            "How long the batch that waits longest for its job has been due.",
            totals["queue_age_s"] or 0,
        )
        yield GaugeMetricFamily(
            "cloister_reconcile_lag_seconds",
            "Seconds since a reconciler last looked at all open batches.",
            totals["heartbeat_age_s"],
        )


class ReadinessCollector(Collector):
    """The checks of /readyz, run on a scrape."""

    def __init__(self, readiness: Readiness) -> None:
        self._readiness = readiness

    def describe(self) -> Iterable[Metric]:
        """Return nothing, so that registering the collector runs no check."""
        return ()

    def collect(self) -> Iterable[Metric]:
        """Yield a metric with a sample for each check."""
        checks = GaugeMetricFamily("cloister_check_ok", "Whether a check of /readyz passes.", labels=["check"])
        for name, check in self._readiness.checks().items():
            checks.add_metric([name], float(check.status == "ok"))
        yield checks


@router.get(
    "/metrics",
    operation_id="metrics",
    summary="Prometheus metrics",
    description="Metrics of this process and, from the database, of the whole stack. They need no API key and name no "
    "project.\n\nEvery replica reports the same numbers for the stack: use their `max`, not their `sum`.",
    response_class=Response,
    responses=described(
        description="Prometheus' text format. No label holds an id.",
        content={"text/plain": {"schema": {"type": "string"}}},
    ),
)
def read_metrics(request: Request) -> Response:
    """Return the metrics of this process and of the stack."""
    return Response(generate_latest(request.app.state.metrics), media_type=CONTENT_TYPE_LATEST)
