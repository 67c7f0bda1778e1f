"""Metrics by project, model and accelerator, read from the database on a scrape.

The reconciler exports them and not the API: clients inside the cluster reach the API's port, and must not learn about
each other's use. Leader and standby report the same numbers: aggregate them with ``max``. The labels are ids of
projects, models that are or were in the catalogue, and accelerators of the catalogue.
"""

from collections.abc import Iterable, Mapping
from typing import Final

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector
from psycopg.rows import DictRow

from service.reconciler.backends import Backends
from service.scrapes import CACHED_FOR_S, ScrapedRows

_QUERIES: Final = {
    "usage_by_project": {},
    "work_by_model": {},
    "engines_by_model": {},
    "failures_by_model": {},
    "slots_by_accelerator": {},
    "audit_lag": {},
    "files_to_remove": {"failed": [], "limit": 1},
}
_USAGE: Final = (
    ("cloister_project_lines_total", "Lines with a result, by outcome.", "outcome",
     {"completed": "completed", "failed": "failed"}),
    ("cloister_project_tokens_total", "Tokens of lines with a result; cached is a share of input, reasoning of output.",
     "kind", {"input": "input_tokens", "cached": "cached_tokens", "output": "output_tokens",
              "reasoning": "reasoning_tokens"}),
    ("cloister_project_gpu_seconds_total", "GPUs multiplied by the seconds for which jobs held them.", None,
     {"": "gpu_seconds"}),
)  # fmt: skip
_OF_MODELS: Final = (
    ("cloister_waiting_batches", "Batches without a first lease.", "work_by_model", "waiting_batches"),
    ("cloister_open_segments", "Segments with lines that have no result.", "work_by_model", "segments"),
    ("cloister_batches_at_risk", "Batches that may miss their deadline.", "work_by_model", "batches_at_risk"),
    ("cloister_model_queue_age_seconds", "How long the batch that waits longest for its first lease has been due.",
     "work_by_model", "queue_age_s"),
    ("cloister_rows_per_second", "Committed rows per second, a mean of the last minute.", "work_by_model",
     "rows_per_s"),
    ("cloister_engines", "Engines that are ready.", "engines_by_model", "engines"),
    ("cloister_job_failures_in_a_row", "Jobs of a sharing domain that failed without a commit between them.",
     "failures_by_model", "failures"),
)  # fmt: skip


class StoredMetrics(Collector):
    """Metrics by project, model and accelerator.

    Args:
        backends: the database, the catalogue and the slots.
        cached_for_s: how long the numbers are reported again, in seconds.
    """

    def __init__(self, backends: Backends, *, cached_for_s: float = CACHED_FOR_S) -> None:
        self._models = tuple(backends.catalogue)
        slots = backends.slots
        names = {model.spec.accelerator for model in backends.catalogue.values()} | set(slots.by_accelerator)
        self._slots = {name: slots.by_accelerator.get(name, slots.default) for name in sorted(names)}
        self._rows = ScrapedRows(backends.pool, _QUERIES, cached_for_s=cached_for_s)
        self._highest: dict[tuple[str, ...], float] = {}

    def describe(self) -> Iterable[Metric]:
        """Return nothing, so that registering the collector needs no database."""
        return ()

    def collect(self) -> Iterable[Metric]:
        """Yield the metrics, at most a few seconds old; without the database none of them."""
        rows = self._rows.read()
        if rows is None:
            return
        yield from self._usage(rows["usage_by_project"])
        for name, text, query_name, column in _OF_MODELS:
            values = {row["model"]: row[column] or 0 for row in rows[query_name]}
            yield _gauges(name, text, "model", {model: values.get(model, 0) for model in self._models})
        by_accelerator = {row["accelerator"]: row for row in rows["slots_by_accelerator"]}
        for name, text, column in (
            ("cloister_job_slots_used", "Slots that jobs hold.", "slots_used"),
            ("cloister_job_queue_age_seconds", "Age of the oldest job that waits for its launch.", "queue_age_s"),
        ):
            values = {each: by_accelerator.get(each, {}).get(column) or 0 for each in self._slots}
            yield _gauges(name, text, "accelerator", values)
        yield _gauges("cloister_job_slots", "Jobs that may run at the same time.", "accelerator", self._slots)
        yield GaugeMetricFamily(
            "cloister_audit_lag_seconds",
            "Age of the oldest entry of the audit log that is not sealed.",
            rows["audit_lag"][0]["age_s"] or 0,
        )
        yield GaugeMetricFamily(
            "cloister_retention_lag_seconds",
            "How long the file that waits longest for its deletion has been due.",
            max((row["due_for_s"] for row in rows["files_to_remove"]), default=0),
        )

    def _usage(self, rows: Iterable[DictRow]) -> Iterable[Metric]:
        by_project = list(rows)
        for name, text, label, columns in _USAGE:
            counter = CounterMetricFamily(name, text, labels=["project_id", "model", *([label] if label else [])])
            for row in by_project:
                for value, column in columns.items():
                    # Counts of an open batch are corrected when it ends; Prometheus takes a fall for a restart.
                    key = (row["project_id"], row["model"], column)
                    self._highest[key] = max(self._highest.get(key, 0.0), row[column])
                    counter.add_metric([*key[:2], *([value] if label else [])], self._highest[key])
            yield counter


def _gauges(name: str, text: str, label: str, values: Mapping[str, float]) -> GaugeMetricFamily:
    family = GaugeMetricFamily(name, text, labels=[label])
    for value, number in values.items():
        family.add_metric([value], number)
    return family
