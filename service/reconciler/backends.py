"""The backends and measurements that every step of the reconciler works with."""

import time
from dataclasses import dataclass, field
from threading import Event

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

from service import backends
from service.ports import Launcher


@dataclass(slots=True)
class Metrics:
    """Measurements of one reconciler, which only its process can take. Those of the database are in ``stored_metrics``.

    Attributes:
        registry: the registry of all others; its own, so that a process can run several reconcilers.
        beat_at: when the loop last ran, in monotonic seconds. Not for Prometheus, but for ``/healthz``.
    """

    registry: CollectorRegistry = field(default_factory=CollectorRegistry)
    beat_at: float = field(default_factory=time.monotonic)
    leading: Gauge = field(init=False)
    pass_duration_s: Histogram = field(init=False)
    step_failures: Counter = field(init=False)
    launches: Counter = field(init=False)
    job_failures: Counter = field(init=False)
    deliveries: Counter = field(init=False)
    removals: Counter = field(init=False)

    def __post_init__(self) -> None:
        registry = self.registry
        self.leading = Gauge(
            "cloister_reconciler_leading", "1 if this process leads, 0 if it waits for another", registry=registry
        )
        self.pass_duration_s = Histogram(
            "cloister_reconciler_pass_duration_seconds",
            "Time from selecting the batches that need a step to handing the last of them to a worker",
            buckets=(0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10),
            registry=registry,
        )
        self.step_failures = Counter(
            "cloister_reconciler_step_failures",
            "Steps of a batch that failed and will be retried, by error class",
            ["kind"],
            registry=registry,
        )
        self.launches = Counter("cloister_job_launches", "Jobs that the launcher accepted", registry=registry)
        self.job_failures = Counter(
            "cloister_job_failures", "Jobs that failed, by model and reason", ["model", "reason"], registry=registry
        )
        self.deliveries = Counter(
            "cloister_webhook_deliveries", "Attempts to deliver a webhook, by outcome", ["outcome"], registry=registry
        )
        self.removals = Counter(
            "cloister_retention_removals",
            "Files, batches, projects, orphans and unfinished uploads that were deleted in the background",
            ["object"],
            registry=registry,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Backends(backends.Backends):
    """The shared backends with the launcher and the measurements of a reconciler.

    Attributes:
        launcher: runs jobs.
        coordinator_url: where jobs lease segments.
        first_pause_s: the pause after the first failure of a step; doubles with each further failure, up to 30 s.
        metrics: measurements of this process.
        tokens: of jobs whose launch failed, by the job's id: the launcher may have the job nevertheless.
        stopping: set to stop the process; the current steps finish, no further one starts.
    """

    launcher: Launcher
    coordinator_url: str
    first_pause_s: float = 1.0
    metrics: Metrics = field(default_factory=Metrics)
    tokens: dict[str, str] = field(default_factory=dict)
    stopping: Event = field(default_factory=Event)
