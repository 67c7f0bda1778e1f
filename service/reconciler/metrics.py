"""What the reconciler counts and measures, for Prometheus.

Batches, lines, tokens and ages are counted in the database and told by the API; here stands only what one process
alone knows.
"""

from dataclasses import dataclass, field

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram


@dataclass(slots=True)
class Metrics:
    """The metrics of one reconciler, in a registry of their own: several may live in one process."""

    registry: CollectorRegistry = field(default_factory=CollectorRegistry)
    leading: Gauge = field(init=False)
    pass_duration_s: Histogram = field(init=False)
    step_failures: Counter = field(init=False)
    launches: Counter = field(init=False)
    deliveries: Counter = field(init=False)
    removals: Counter = field(init=False)

    def __post_init__(self) -> None:
        registry = self.registry
        self.leading = Gauge(
            "cloister_reconciler_leading", "1 while this process leads, 0 while it waits for another", registry=registry
        )
        self.pass_duration_s = Histogram(
            "cloister_reconciler_pass_duration_seconds",
            "From the choice of the batches that need a step until the last of them has a worker",
            buckets=(0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10),
            registry=registry,
        )
        self.step_failures = Counter(
            "cloister_reconciler_step_failures",
            "Steps of a batch that failed and are tried again",
            ["kind"],
            registry=registry,
        )
        self.launches = Counter("cloister_job_launches", "Jobs that the launcher took", registry=registry)
        self.deliveries = Counter(
            "cloister_webhook_deliveries", "Attempts to deliver a webhook", ["outcome"], registry=registry
        )
        self.removals = Counter(
            "cloister_retention_removals", "Files and batches that were deleted by age", ["object"], registry=registry
        )
